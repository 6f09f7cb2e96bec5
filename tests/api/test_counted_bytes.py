"""Bytes of `explain` are those that the busiest rank receives in collectives, forward and backward."""

from collections.abc import Callable
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
    gated_delta_rule,
    halo,
    kda,
    linear_attention,
    mamba2,
    relayout,
    shift,
)
from cp_dtensor.api.explain import Explanation
from cp_dtensor.layers.rows import Halo, Relayout, RowMap, SequenceLayout, Shift, rows_over_axes

TOKENS, BATCH = 61, 2
EDGES = (0, 5, 9, 30, 33, 61)
DOCUMENTS = Documents(EDGES, within=Causal())
MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "full": Full(),
    "window": SlidingWindow(9, 0),
    "documents": DOCUMENTS,
    "by row": Batched([DOCUMENTS, SlidingWindow(4, 3)]),
    "sinks": Causal() & (SlidingWindow(7, 0) | Documents([0, 4, TOKENS])),
}
LAYOUTS: dict[str, Callable[[Mask], Layout]] = {
    "HeadTail": lambda mask: HeadTail(),
    "Contiguous": lambda mask: Contiguous(),
    "Striped": lambda mask: Striped(1),
    "Striped(3)": lambda mask: Striped(3),
    "MirroredBatch": lambda mask: MirroredBatch(),
    "Balanced": lambda mask: Balanced(mask, TOKENS),
    "PerDocument": lambda mask: PerDocument(EDGES),
}
ONE, TWO, OTHER = (4,), (2, 3), (3, 2)
"""Meshes. Axes have different sizes, by which `received_bytes` tells them apart."""
each_mask = pytest.mark.parametrize("mask", MASKS)
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("ring", "ulysses")[-len(sizes) :])


def assert_exact(sizes: tuple[int, ...], method: str, call: Callable[[DeviceMesh, int], Explanation]) -> None:
    """Compares the bytes that `call` receives with those that it returns as the explanation of this method."""
    ranks = 1
    for size in sizes:
        ranks *= size

    def body(rank: int) -> Explanation:
        return call(mesh_of(sizes), rank)

    with received_bytes() as received:
        found = run_ranks(ranks, body)
    assert len({(each.methods[method].outer_bytes, each.methods[method].inner_bytes) for each in found}) == 1
    estimate = found[0].methods[method]
    counted = [max(received.get((rank, size), 0) for rank in range(ranks)) for size in sizes]
    assert all(counted), "all cases exchange rows over every axis"
    if len(sizes) == 1:
        assert estimate.outer_bytes + estimate.inner_bytes == counted[0]
    else:
        assert [estimate.outer_bytes, estimate.inner_bytes] == counted


def attention(
    mask: Mask, layout: Layout, method: str, heads: tuple[int, int] = (4, 2), lengths: tuple[int, int] = (TOKENS,) * 2,
    **options: Any,
) -> Callable[[DeviceMesh, int], Explanation]:  # fmt: skip
    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        local = [layout.local_length(length, rank, dist.get_world_size()) for length in lengths]
        q, k, v = (
            torch.randn(BATCH, count, rows, dim, requires_grad=True)
            for count, rows, dim in ((heads[0], local[0], 6), (heads[1], local[1], 6), (heads[1], local[1], 3))
        )
        of_mask = {"mask": mask, "layout": layout, "mesh": mesh, **options}
        out = context_parallel_attention(
            q, k, v, method=method.split()[-1], seq_len=lengths, enable_gqa=True, **of_mask
        )
        out.sum().backward()  # type: ignore[union-attr]
        return explain(
            seq_len=lengths, q_heads=heads[0], kv_heads=heads[1], head_dim=6, v_head_dim=3, batch_size=BATCH,
            dtype=torch.float32, quiet=True, **of_mask,
        )  # fmt: skip

    return call


@each_layout
@each_mask
def test_a_ring(mask: str, layout: str) -> None:
    shown = MASKS[mask]
    for transport in ("allgather", "alltoall"):
        assert_exact(ONE, "ring", attention(shown, LAYOUTS[layout](shown), "ring", rotate_method=transport))


def test_a_ring_that_moves_rows_in_place() -> None:
    with rows_in_place():
        assert_exact(ONE, "ring", attention(DOCUMENTS, HeadTail(), "ring", rotate_method="allgather"))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("layout", ["HeadTail", "Balanced"])
def test_ulysses(layout: str, heads: tuple[int, int]) -> None:
    """Heads that divide by the ranks, replicated ones, uneven ones, and fewer heads than ranks."""
    assert_exact(ONE, "ulysses", attention(DOCUMENTS, LAYOUTS[layout](DOCUMENTS), "ulysses", heads))


@each_mask
@pytest.mark.parametrize("layout", ["HeadTail", "Contiguous", "Striped", "MirroredBatch", "Balanced"])
@pytest.mark.parametrize("method", ["hybrid", "ring"])
def test_two_axes(method: str, layout: str, mask: str) -> None:
    shown = MASKS[mask]
    for sizes in (TWO, OTHER):
        assert_exact(sizes, method, attention(shown, LAYOUTS[layout](shown), method, (6, 3)))


@pytest.mark.parametrize(
    ("sizes", "method"), [(ONE, "ring"), (ONE, "ulysses"), (TWO, "hybrid"), (TWO, "ring")], ids=str
)
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_other_lengths_of_keys(mask: str, sizes: tuple[int, ...], method: str) -> None:
    assert_exact(sizes, method, attention(MASKS[mask], HeadTail(), method, lengths=(40, 61)))


@pytest.mark.parametrize(
    ("sizes", "method"), [(ONE, "ring"), (ONE, "ulysses"), (TWO, "hybrid"), (TWO, "ring")], ids=str
)
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_latents(mask: str, sizes: tuple[int, ...], method: str) -> None:
    layout = HeadTail()

    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        rows = layout.local_length(TOKENS, rank, dist.get_world_size())
        q, latent, rotary, up = (
            torch.randn(*shape, requires_grad=True)
            for shape in ((BATCH, 6, rows, 5), (BATCH, rows, 7), (BATCH, rows, 2), (6 * (3 + 4), 7))
        )
        of_mask: dict[str, Any] = {"mask": MASKS[mask], "layout": layout, "mesh": mesh}
        out = context_parallel_mla(q, latent, rotary, up=up, method=method, seq_len=TOKENS, **of_mask)
        out.sum().backward()  # type: ignore[union-attr]
        return explain(
            seq_len=TOKENS, q_heads=6, head_dim=5, v_head_dim=4, latent_dims=(7, 2), batch_size=BATCH,
            dtype=torch.float32, quiet=True, **of_mask,
        )  # fmt: skip

    assert_exact(sizes, method, call)


# Recurrent layers

LAYERS = ("gated_delta_rule", "kda", "linear_attention", "mamba2")


def recurrence(
    layer: str, method: str, layout: Layout, edges: tuple[int, ...] | None, batch: int, dtype: torch.dtype
) -> Callable[[DeviceMesh, int], Explanation]:
    def call(mesh: DeviceMesh, rank: int) -> Explanation:
        rows = layout.local_length(TOKENS, rank, dist.get_world_size())

        def of(*shape: int) -> torch.Tensor:
            return torch.randn(batch, rows, *shape, dtype=dtype, requires_grad=True)

        q, k, v, beta = of(2, 3), of(2, 3), of(4, 5), of(4)
        g = (-torch.rand(batch, rows, 4, *[3] * (layer == "kda"))).requires_grad_()
        options: dict[str, Any] = {"layout": layout, "mesh": mesh, "cu_seqlens": edges}
        given = {**options, "seq_len": TOKENS, "method": method}
        if layer == "mamba2":
            a = (-torch.rand(4)).requires_grad_()
            out = mamba2(v, of(4).sigmoid(), a, k, q, **given)
        elif layer == "linear_attention":
            out = linear_attention(q, k, v, g, **given)
        else:
            out = (kda if layer == "kda" else gated_delta_rule)(q, k, v, g, beta, **given)
        out.sum().backward()  # type: ignore[union-attr]
        return explain_recurrence(
            seq_len=TOKENS, heads=4, key_heads=2, key_dim=3, value_dim=5, layer=layer, batch_size=batch, dtype=dtype,
            quiet=True, **options,
        )  # fmt: skip

    return call


@pytest.mark.parametrize("layout", ["HeadTail", "Contiguous", "Striped(3)", "MirroredBatch", "Balanced"])
@pytest.mark.parametrize("edges", [None, EDGES, (3, 20, 40)], ids=str)
@pytest.mark.parametrize("method", ["scan", "heads", "relayout"])
def test_a_recurrent_layer(method: str, edges: tuple[int, ...] | None, layout: str) -> None:
    divided = LAYOUTS[layout](DOCUMENTS)
    if method == "relayout" and layout in ("Contiguous", "MirroredBatch"):
        pytest.skip("one run a rank: explain_recurrence leaves the method out")
    call = recurrence("gated_delta_rule", method, divided, edges, BATCH, torch.float32)
    assert_exact(ONE, method, call)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("method", ["scan", "heads", "relayout"])
def test_every_layer(method: str, layer: str) -> None:
    assert_exact(ONE, method, recurrence(layer, method, HeadTail(), None, 1, torch.float32))


@pytest.mark.parametrize("method", ["scan", "relayout"])
@pytest.mark.parametrize("sizes", [TWO, OTHER], ids=str)
def test_a_recurrent_layer_over_two_axes(sizes: tuple[int, ...], method: str) -> None:
    assert_exact(sizes, method, recurrence("gated_delta_rule", method, HeadTail(), EDGES, 1, torch.float32))


def test_states_in_double_precision() -> None:
    assert_exact(ONE, "scan", recurrence("linear_attention", "scan", HeadTail(), None, 1, torch.float64))


# Rows


@pytest.mark.parametrize(
    "layout", [HeadTail(), Striped(3), Balanced(DOCUMENTS, TOKENS)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize("sizes", [ONE, TWO], ids=str)
@pytest.mark.parametrize("row_map", [Halo(3), Shift(-2), Relayout(Contiguous())], ids=lambda x: type(x).__name__)
def test_moved_rows(row_map: RowMap, sizes: tuple[int, ...], layout: Layout) -> None:
    """`explain_recurrence` counts rows by `rows_over_axes`, which has those of every row map."""
    ranks = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    edges = () if isinstance(row_map, Relayout) else EDGES

    def body(rank: int) -> None:
        x = torch.randn(layout.local_length(TOKENS, rank, ranks), 5, requires_grad=True)
        options: dict[str, Any] = {"mesh": mesh_of(sizes), "dim": 0, "seq_len": TOKENS}
        if isinstance(row_map, Relayout):
            out = relayout(x, layout, row_map.target, **options)
        elif isinstance(row_map, Shift):
            out = shift(x, row_map.by, layout=layout, cu_seqlens=edges, **options)
        else:
            out = halo(x, 3, layout=layout, cu_seqlens=edges, **options)
        out.sum().backward()

    with received_bytes() as received:
        run_ranks(ranks, body)
    assert received
    over_axes = rows_over_axes(row_map, SequenceLayout(layout, TOKENS, ranks, 0, edges), (*sizes, 1)[1])
    for rank, expected in enumerate(over_axes):
        for size, rows in zip(sizes, expected, strict=False):
            assert received.get((rank, size), 0) == rows * 5 * 4
