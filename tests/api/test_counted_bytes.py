"""Bytes of `explain` are those that the busiest rank receives in collectives, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import received_bytes, rows_in_place
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import (
    Balanced,
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    PerDocument,
    SlidingWindow,
    Striped,
    context_parallel_attention,
    context_parallel_mla,
    explain,
    explain_recurrence,
    explain_sparse,
    gated_delta_rule,
    indexed_attention,
    indexer_loss,
    kda,
    linear_attention,
    mamba2,
    select_keys,
)
from cp_dtensor.api.explain import Explanation
from cp_dtensor.comm.groups import sequence_ranks

TOKENS, BATCH = 61, 2
EDGES = (0, 5, 9, 30, 33, 61)
DOCUMENTS = Documents(EDGES, within=Causal())
MASKS: dict[str, Mask] = {
    "causal": Causal(), "full": Full(), "window": SlidingWindow(9, 0), "documents": DOCUMENTS,
    "by row": Batched([DOCUMENTS, SlidingWindow(4, 3)]),
    "sinks": Causal() & (SlidingWindow(7, 0) | Documents([0, 4, TOKENS])),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[Mask], Layout]] = {
    **{type(each).__name__: lambda mask, each=each: each
       for each in (HeadTail(), Contiguous(), Striped(3), MirroredBatch(), PerDocument(EDGES))},
    "Balanced": lambda mask: Balanced(mask, TOKENS),
}  # fmt: skip
ONE, TWO, OTHER, THREE = (4,), (2, 3), (3, 2), (2, 3, 4)
"""Meshes. Axes have different sizes, by which `received_bytes` tells them apart."""
Sizes = tuple[int, ...]
Call = Callable[[DeviceMesh, int], Explanation]


def mesh_of(sizes: Sizes) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("ring_pod", "ring", "ulysses")[-len(sizes) :])


def assert_exact(sizes: Sizes, method: str, call: Call) -> None:
    """Compares the bytes that `call` receives with those that it returns as the explanation of this method."""
    ranks = math.prod(sizes)
    with received_bytes() as received:
        found = run_ranks(ranks, lambda rank: call(mesh_of(sizes), rank))
    assert len({each.methods[method].axis_bytes for each in found}) == 1
    counted = [max(received.get((rank, size), 0) for rank in range(ranks)) for size in sizes]
    assert all(counted), "all cases exchange rows over every axis"
    assert [*found[0].methods[method].axis_bytes] == counted


def attention(
    mask: str, layout: str, method: str, heads: tuple[int, int] = (4, 2), lengths: tuple[int, int] = (TOKENS,) * 2,
    **options: Any,
) -> Call:  # fmt: skip
    divided = LAYOUTS[layout](MASKS[mask])

    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        local = [divided.local_length(length, rank, dist.get_world_size()) for length in lengths]
        q, k, v = (
            torch.randn(BATCH, count, rows, dim, requires_grad=True)
            for count, rows, dim in ((heads[0], local[0], 6), (heads[1], local[1], 6), (heads[1], local[1], 3))
        )
        of_mask: Any = {"mask": MASKS[mask], "layout": divided, "mesh": mesh, "seq_len": lengths, **options}
        context_parallel_attention(q, k, v, method=method, enable_gqa=True, **of_mask).sum().backward()
        return explain(
            q_heads=heads[0], kv_heads=heads[1], head_dim=6, v_head_dim=3, batch_size=BATCH, dtype=torch.float32,
            quiet=True, **of_mask,
        )  # fmt: skip

    call.__name__ = f"{mask}, {layout}, {heads}, {lengths}, {options}"
    return call


def latents(mask: str, method: str) -> Call:
    layout = HeadTail()

    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        rows = layout.local_length(TOKENS, rank, dist.get_world_size())
        shapes = (BATCH, 6, rows, 5), (BATCH, rows, 7), (BATCH, rows, 2), (6 * (3 + 4), 7)
        q, latent, rotary, up = (torch.randn(*shape, requires_grad=True) for shape in shapes)
        of_mask: Any = {"mask": MASKS[mask], "layout": layout, "mesh": mesh, "seq_len": TOKENS}
        context_parallel_mla(q, latent, rotary, up=up, method=method, **of_mask).sum().backward()
        return explain(
            q_heads=6, head_dim=5, v_head_dim=4, latent_dims=(7, 2), batch_size=BATCH, dtype=torch.float32,
            quiet=True, **of_mask,
        )  # fmt: skip

    call.__name__ = f"latents, {mask}"
    return call


METHODS: tuple[tuple[Sizes, str], ...] = ((ONE, "ring"), (ONE, "ulysses"), (TWO, "hybrid"), (TWO, "ring"))
CALLS: list[tuple[Sizes, str, Call]] = [
    *((ONE, "ring", attention(mask, layout, "ring", rotate_method=transport))
      for mask, layout, transport in product(MASKS, LAYOUTS, ("allgather", "alltoall"))
      if transport == "alltoall" or mask in ("documents", "by row")),
    # Heads that divide by the ranks, replicated ones, uneven ones, and fewer heads than ranks.
    *((ONE, "ulysses", attention("documents", layout, "ulysses", heads))
      for layout in ("HeadTail", "Balanced") for heads in ((4, 4), (4, 2), (4, 1), (6, 3), (2, 2))),
    *((sizes, method, attention(mask, layout, method, (6, 3)))
      for sizes, method, mask in product((TWO, OTHER), ("hybrid", "ring"), ("window", "by row"))
      for layout in ("HeadTail", "Striped", "MirroredBatch")),
    *((*where, attention(mask, "HeadTail", where[1], lengths=(40, 61)))
      for where in METHODS for mask in ("causal", "full")),
    *((*where, latents(mask, where[1])) for where in METHODS for mask in ("causal", "documents")),
    *((THREE, method, attention(mask, layout, method, (6, 3)))
      for method in ("hybrid", "ring") for mask, layout in (("window", "HeadTail"), ("by row", "Balanced"))),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "method", "call"), CALLS)
def test_attention(sizes: Sizes, method: str, call: Call) -> None:
    assert_exact(sizes, method, call)


def test_a_ring_that_moves_rows_in_place() -> None:
    with rows_in_place():
        assert_exact(ONE, "ring", attention("documents", "HeadTail", "ring", rotate_method="allgather"))


# Recurrent layers


def recurrence(
    layer: str, method: str, layout: str = "HeadTail", edges: tuple[int, ...] | None = None, batch: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Call:  # fmt: skip
    divided = LAYOUTS[layout](DOCUMENTS)

    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        rows = divided.local_length(TOKENS, rank, dist.get_world_size())

        def of(*shape: int) -> torch.Tensor:
            return torch.randn(batch, rows, *shape, dtype=dtype, requires_grad=True)

        q, k, v, beta = of(2, 3), of(2, 3), of(4, 5), of(4)
        g = (-torch.rand(batch, rows, 4, *[3] * (layer == "kda"))).requires_grad_()
        options: dict[str, Any] = {"layout": divided, "mesh": mesh, "cu_seqlens": edges, "seq_len": TOKENS}
        given = {**options, "method": method}
        if layer == "mamba2":
            out = mamba2(v, of(4).sigmoid(), (-torch.rand(4)).requires_grad_(), k, q, **given)
        elif layer == "linear_attention":
            out = linear_attention(q, k, v, g, **given)
        else:
            out = (kda if layer == "kda" else gated_delta_rule)(q, k, v, g, beta, **given)
        out.sum().backward()
        return explain_recurrence(
            heads=4, key_heads=2, key_dim=3, value_dim=5, layer=layer, batch_size=batch, dtype=dtype, quiet=True,
            **options,
        )  # fmt: skip

    call.__name__ = f"{layer}, {layout}, {edges}"
    return call


LAYERS: list[tuple[Sizes, str, Call]] = [
    *((ONE, method, recurrence("gated_delta_rule", method, layout, edges, BATCH))
      for method, layout, edges in product(("scan", "heads", "relayout"), LAYOUTS, (None, EDGES, (3, 20, 40)))
      # `explain_recurrence` leaves out a relayout of one run a rank
      if layout != "PerDocument" and (method != "relayout" or layout not in ("Contiguous", "MirroredBatch"))),
    *((ONE, method, recurrence(layer, method))
      for method in ("scan", "heads", "relayout") for layer in ("kda", "linear_attention", "mamba2")),
    *((sizes, method, recurrence("gated_delta_rule", method, edges=EDGES))
      for sizes in (TWO, OTHER, THREE) for method in ("scan", "relayout")),
    (ONE, "scan", recurrence("linear_attention", "scan", dtype=torch.float64)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "method", "call"), LAYERS)
def test_layers(sizes: Sizes, method: str, call: Call) -> None:
    assert_exact(sizes, method, call)


# Sparse attention


def sparse(function: str, layout: str, dtype: torch.dtype = torch.float32) -> Call:
    divided = LAYOUTS[layout](DOCUMENTS)

    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        rows = divided.local_length(TOKENS, rank, dist.get_world_size())
        place: dict[str, Any] = {"layout": divided, "mesh": mesh, "seq_len": TOKENS}

        def of(*shape: int) -> torch.Tensor:
            return torch.randn(BATCH, *shape, dtype=dtype, requires_grad=True)

        index, latent, rotary = (of(rows, 2, 5), of(rows, 5), of(rows, 2)), of(rows, 7), of(rows, 2)
        indices = torch.zeros(BATCH, rows, 1, dtype=torch.int32)
        if function == "select_keys":
            select_keys(*index, topk=2, **place)
        elif function == "indexed_attention":
            q, up = of(3, rows, 6), torch.randn(3 * (4 + 2), 7, dtype=dtype)
            indexed_attention(q, latent, rotary, up=up, indices=indices, **place).sum().backward()
        else:
            keys = torch.cat((latent, rotary), 2).unsqueeze(1)
            indexer_loss(*index, of(3, rows, 9), keys, scale=1.0, indices=indices, **place).sum().backward()
        return explain_sparse(row_dim=9, index_dim=5, batch_size=BATCH, dtype=dtype, quiet=True, **place)

    call.__name__ = f"{layout}, {dtype}"
    return call


SPARSE: list[tuple[Sizes, str, Call]] = [
    *((sizes, name, sparse(name, layout))
      for sizes in (ONE, TWO, OTHER) for name in ("select_keys", "indexed_attention", "indexer_loss")
      for layout in ("HeadTail", "Balanced", "MirroredBatch")),
    *((ONE, "indexed_attention", sparse("indexed_attention", "HeadTail", dtype))
      for dtype in (torch.bfloat16, torch.float64)),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "function", "call"), SPARSE)
def test_sparse(sizes: Sizes, function: str, call: Call) -> None:
    assert_exact(sizes, function, call)


def test_the_table_of_sparse_attention() -> None:
    """DeepSeek-V3.2: 128 index values and 576 of latents a token, of 3 / 4 of the tokens, and gradients in float32."""
    options: dict[str, Any] = {"seq_len": 65536, "hardware": "H200", "quiet": True}
    found = run_ranks(4, lambda rank: explain_sparse(mesh_of(ONE), **options))[0]
    others = 3 * 65536 // 4
    expected = {"select_keys": 2 * 128, "indexed_attention": 6 * 576, "indexer_loss": 2 * (128 + 576) + 4 * 128}
    assert {name: each.outer_bytes for name, each in found.methods.items()} == {
        name: others * each for name, each in expected.items()
    }
    attention = found.methods["indexed_attention"]
    assert attention.memory == 65536 * 6 * 576 + 2 * others * 4 * 576
    assert attention.backward == pytest.approx(20e-6 + others * 4 * 576 / 330e9, rel=0.01)
    assert "chosen by" not in str(found)
    assert "indexed_attention  0.192 ms" in str(found)


@pytest.mark.parametrize(("sizes", "names"), [(TWO, ("ring", "ulysses")), (OTHER, ("ulysses", "ring"))])
def test_rows_cross_the_outer_axis_once(sizes: Sizes, names: tuple[str, str]) -> None:
    """What is gathered, or summed, over all ranks: once for each rank of a node, not for each pair of ranks."""
    outer, inner = (sizes[names.index(name)] for name in ("ring", "ulysses"))

    def body(rank: int) -> None:
        ranks = sequence_ranks(init_device_mesh("cpu", sizes, mesh_dim_names=names))
        here, count = ranks.rank, ranks.size
        gathered = ranks.gather(torch.tensor([[here, -here]]))
        assert gathered.tolist() == [[[each, -each]] for each in range(count)]
        blocks = torch.arange(count)[:, None, None] * 10.0 + here * torch.ones(1, 2)
        assert ranks.reduce_scatter(blocks).tolist() == [[here * 10 * count + sum(range(count))] * 2]

    with received_bytes() as received:
        run_ranks(outer * inner, body)
    rows = 16 + 8  # two integers, two floats
    for rank in range(outer * inner):
        assert received[rank, outer] == (outer - 1) * rows
        assert received[rank, inner] == (inner - 1) * outer * rows
