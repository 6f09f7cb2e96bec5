"""Refusals of methods that do not fit the mesh: by every entry point, on all ranks, before any collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank, recorded_collectives
from support.method_checks import RING_ULYSSES, ULYSSES_RING, place
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    ContextParallel,
    HeadTail,
    PrefixLM,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
    ring_attention,
    ulysses_attention,
)
from cp_dtensor.comm.groups import sequence_ranks

RANKS = 4
MOVING = {"AllToAllBase", "AllToAll", "AllGather", "ReduceScatter"}
Names = tuple[str, ...] | None


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)


def tensor(**options: Any) -> torch.Tensor:
    return torch.ones(1, 4, 2, 8, **options)


def as_function(mesh: Any, method: str) -> None:
    context_parallel_attention(tensor(), tensor(), tensor(), mesh=mesh, method=method, seq_len=2 * RANKS)


def as_context(mesh: Any, method: str) -> None:
    with context_parallel(mesh, buffers=[torch.arange(8)], buffer_seq_dims=[0], method=method):
        F.scaled_dot_product_attention(tensor(), tensor(), tensor())


def as_module(mesh: Any, method: str) -> None:
    parallelize_module(Attention(), mesh, ContextParallel(method=method, seq_len=2 * RANKS))(tensor())


ENTRIES: dict[str, Callable[[Any, str], None]] = {"function": as_function, "context": as_context, "module": as_module}
each_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def check_refused(shape: tuple[int, ...], names: Names, message: str, body: Callable[[DeviceMesh], object]) -> None:
    """`body(mesh)` raises one and the same ValueError on every rank, and no rank starts a collective."""

    def on_mesh(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh_is_made.append(len(collectives))  # which may take collectives of its own
        dist.barrier()
        body(mesh)

    mesh_is_made: list[int] = []
    with recorded_collectives() as collectives, pytest.raises(ValueError, match=message) as caught:
        run_ranks(torch.Size(shape).numel(), on_mesh)  # raises the ranks' own error if all have the same
    assert type(caught.value) is ValueError
    assert not {collective.kind for collective in collectives[max(mesh_is_made) :]} & MOVING


@each_entry
def test_hybrid_needs_two_axes(entry: Callable[[Any, str], None]) -> None:
    message = r'method "hybrid" expects a mesh of two dims, got one axis of 4 ranks: make one with init_device_mesh'
    check_refused((RANKS,), ("cp",), message, lambda mesh: entry(mesh, "hybrid"))
    check_refused((RANKS,), ("cp",), message, lambda mesh: entry(dist.group.WORLD, "hybrid"))


@each_entry
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
def test_ulysses_takes_one_axis(names: Names, shape: tuple[int, int], entry: Callable[[Any, str], None]) -> None:
    outer, inner = shape if names == RING_ULYSSES else shape[::-1]
    message = f'method "ulysses" expects a mesh of one dim, got two axes of {outer} x {inner} ranks: .* use "hybrid"'
    check_refused(shape, names, message, lambda mesh: entry(mesh, "ulysses"))


def test_ulysses_attention_takes_one_axis_as_well() -> None:
    message = 'method "ulysses" expects a mesh of one dim, got two axes of 2 x 2'
    q = tensor()
    check_refused((2, 2), RING_ULYSSES, message, lambda mesh: ulysses_attention(q, q, q, mesh=mesh, seq_len=8))


def test_the_module_form_refuses_an_unknown_method_before_there_is_a_mesh() -> None:
    with pytest.raises(ValueError, match="unknown method: got 'ulises'"):
        ContextParallel(method="ulises")


MESH_ENTRIES: dict[str, Callable[[Any], object]] = {
    **{f"{name}, {method}": lambda mesh, entry=entry, method=method: entry(mesh, method)
       for name, entry in ENTRIES.items() for method in ("auto", "ring", "hybrid", "ulysses")},
    "ring_attention": lambda mesh: ring_attention(tensor(), tensor(), tensor(), mesh=mesh, seq_len=8),
    "shard": lambda mesh: context_parallel_shard(mesh, [torch.arange(8)], [0]),
    "unshard": lambda mesh: context_parallel_unshard(mesh, [torch.arange(2)], [0]),
    "positions": lambda mesh: local_positions(mesh, 8),
}  # fmt: skip


@pytest.mark.parametrize("entry", MESH_ENTRIES.values(), ids=MESH_ENTRIES)
def test_axes_that_may_not_be_the_sequences_are_refused_with_a_hint(entry: Callable[[Any], object]) -> None:
    for names, shape, hint in (
        (("dp", "cp"), (2, 2), r"names \('dp', 'cp'\), shape \(2, 2\)\)\. Pass those axes of it, such as mesh\['cp'\]"),
        (("split_dp", "cp"), (2, 2), r"Pass those axes of it, such as mesh\['cp'\]"),
        (("cp", "sparse"), (2, 2), r"Pass those axes of it, such as mesh\['cp'\]"),
        (("ring", "tp"), (1, 2), r"Pass those axes of it, such as mesh\['ring'\]"),
        (None, (2, 2), r"names None.*such as init_device_mesh\(\.\.\., mesh_dim_names=\.\.\.\) and mesh\['cp'\]"),
        (("dp", "ring", "ulysses"), (1, 2, 2), r"shape \(1, 2, 2\)\)\. Pass .* such as mesh\['ring', 'ulysses'\]"),
    ):
        message = rf"expected a mesh of one dim.*such as \('ring', 'ulysses'\) or \('cp_node', 'cp_gpu'\); got.*{hint}"
        check_refused(shape, names, message, entry)


@pytest.mark.parametrize("entry", MESH_ENTRIES.values(), ids=MESH_ENTRIES)
def test_two_inner_axes_are_refused(entry: Callable[[Any], object]) -> None:
    message = r"at most one axis whose name begins with \"ulysses\".*got names \('ulysses', 'ulysses_low'\)"
    check_refused((2, 2), ("ulysses", "ulysses_low"), message, entry)


@pytest.mark.parametrize(
    ("names", "inner"),
    [
        (("cp_node", "cp_gpu"), 1), (("cp0", "cp1"), 1), (("context-a", "context-b"), 1), (("sequence", "seq2"), 1),
        (("sp", "context_parallel"), 1), (("ulysses_low", "sp"), 0), (("ulysses2", "ring"), 0),
    ],
)  # fmt: skip
def test_names_of_two_axes_that_are_taken(names: tuple[str, str], inner: int) -> None:
    def body(rank: int) -> None:
        ranks = sequence_ranks(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        row, column = divmod(rank, 2)
        assert ranks.rank == (rank if inner == 1 else 2 * column + row)

    run_ranks(4, body)


def test_two_axes_of_a_larger_mesh_are_taken() -> None:
    """What the hint for three axes comes to."""
    problem = Problem(8, 8, q_heads=2, kv_heads=2)
    whole = problem.draw(0)
    expected = reference(problem, *whole)[0]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "ring", "ulysses"))
        q, k, v = (shard(each, HeadTail(), rank % 4, 4) for each in whole[:3])
        out = context_parallel_attention(q, k, v, mesh=mesh["ring", "ulysses"], method="hybrid")
        torch.testing.assert_close(out, shard(expected, HeadTail(), rank % 4, 4), rtol=1e-10, atol=1e-10)

    run_ranks(8, body)


# What rank 1 does otherwise than the others, and what the message says of it. More: tests/api/test_bad_input.py.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "ring"}, "method: rank {place} says 'ring', the others 'hybrid'"),
    "mask": ({"mask": PrefixLM(4)}, "mask: rank {place} says 'PrefixLM(length=4)', the others 'Full()'"),
    "attn_mask": (
        {"attn_mask": torch.zeros(2, 8)},
        "attn_mask: rank {place} says 'float32 (B, 1, :, 8)', the others 'none'",
    ),
}


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
@pytest.mark.parametrize("mode", [{}, {"seq_len": 8, "debug": True}], ids=["first call", "debug"])
@pytest.mark.parametrize(("odd", "message"), ODD.values(), ids=ODD)
def test_ranks_that_disagree_are_told_alike_who_says_what(
    odd: dict[str, Any], message: str, mode: dict[str, Any], names: tuple[str, str]
) -> None:
    """On every rank of both axes, also on those that share no axis with the odd one."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        q = tensor()
        context_parallel_attention(q, q, q, mesh=mesh, **{"method": "hybrid", **(odd if rank == 1 else {}), **mode})

    with recorded_collectives(of_first_calls=True) as collectives:
        errors = errors_by_rank(RANKS, body)
    of_odd = message.format(place=place([0, 1], names, (2, 2)))
    for error in errors:
        assert type(error) is ValueError
        assert f"the ranks of the context-parallel axis disagree about {of_odd}" in str(error)
    moved = [collective.kind for collective in collectives if collective.kind in MOVING]
    # Over each axis hashes, then the sizes of readable facts and these; nothing after it.
    assert moved == ["AllGather"] * 2 * 3 * RANKS


@pytest.mark.parametrize("method", ["hybrid", "ring"])
def test_unequal_shards_of_no_declared_length_are_refused_on_every_rank(method: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=RING_ULYSSES)
        q = torch.ones(1, 2, 5 if rank == 3 else 2, 4)
        context_parallel_attention(q, q, q, mesh=mesh, method=method)

    (text,) = {str(error) for error in errors_by_rank(RANKS, body)}
    assert "rank 3 says (20, 20), the others (8, 8)" in text


@pytest.mark.parametrize("method", ["hybrid", "ring", "auto"])
@pytest.mark.parametrize("fails", ["mask", "dropout", "lengths", "body"])
def test_a_call_that_fails_leaves_buffers_and_torch_as_they_were(fails: str, method: str) -> None:
    problem = Problem(8, 8, q_heads=4, kv_heads=4)
    whole = problem.draw(0)
    expected = reference(problem, *whole)[0]
    sdpa = F.scaled_dot_product_attention
    alone = sdpa(*whole[:3])
    odd = {
        "mask": {"attn_mask": torch.ones(2, 2, dtype=torch.bool)}, "dropout": {"dropout_p": 1.5},
    }.get(fails, {})  # fmt: skip

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=RING_ULYSSES)
        tokens, labels = torch.arange(8), torch.arange(8.0).view(1, 8)
        context = context_parallel(
            mesh, buffers=[tokens, labels], buffer_seq_dims=[0, 1], method=method, debug=fails == "lengths"
        )
        q, k, v = (shard(each, HeadTail(), rank, RANKS) for each in whole[:3])

        def fail() -> None:
            assert torch.equal(tokens, shard(torch.arange(8), HeadTail(), rank, RANKS, 0))
            if fails == "body":
                raise KeyError
            shorter = slice(1 + rank % 2 if fails == "lengths" else 2)
            sdpa(q, k[:, :, shorter], v[:, :, shorter], **odd)

        with pytest.raises(KeyError if fails == "body" else ValueError), context:
            fail()
        assert torch.equal(tokens, torch.arange(8))
        assert torch.equal(labels, torch.arange(8.0).view(1, 8))
        dist.barrier()
        assert F.scaled_dot_product_attention is sdpa
        assert torch.equal(sdpa(*whole[:3]), alone)
        dist.barrier()
        with context:
            out = sdpa(q, k, v)
        torch.testing.assert_close(out, shard(expected, HeadTail(), rank, RANKS), rtol=1e-10, atol=1e-10)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("mode", [{}, {"seq_len": 24, "debug": True}], ids=["first call", "debug"])
def test_lse_on_some_ranks_only_is_refused_where_it_travels(mode: dict[str, Any]) -> None:
    def body(rank: int, method: str) -> Any:
        shards = {name: torch.ones(2, 4, 8, 16) for name in "qkv"}
        return context_parallel_attention(
            **shards, mesh=dist.group.WORLD, method=method, return_lse=rank == 1, **mode
        )  # fmt: skip

    run_ranks(3, body, "ring")
    with pytest.raises(ValueError, match=r"disagree about returns_lse: rank 1 says True, the others False$"):
        run_ranks(3, body, "ulysses")


def test_an_attn_mask_with_rows_on_some_ranks_only_is_refused_where_rows_travel() -> None:
    def body(rank: int, method: str) -> Any:
        mask = torch.zeros(1 if rank == 1 else 2, 6)
        return context_parallel_attention(*[tensor()] * 3, mesh=dist.group.WORLD, method=method, attn_mask=mask)

    run_ranks(3, body, "ring")
    with pytest.raises(ValueError, match=r"disagree about attn_mask_has_rows: rank 1 says False, the others True$"):
        run_ranks(3, body, "ulysses")
