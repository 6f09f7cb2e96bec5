"""Refusals of meshes, methods, masks and of calls that differ between ranks: alike on all ranks, without side effects.

`tests/matrix/test_refusals.py` has arguments that are bad by themselves, at every front.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank, recorded_collectives
from support.masked_checks import place
from support.method_checks import RING_ULYSSES, ULYSSES_RING
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from support.settings_state import PatchedTorch, thread_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Batched,
    Causal,
    ContextParallel,
    Documents,
    Full,
    HeadTail,
    MirroredBatch,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
    ring_attention,
)
from cp_dtensor.comm.groups import sequence_ranks

LENGTH = 24
MOVING = {"AllToAllBase", "AllToAll", "AllGather", "ReduceScatter"}
Names = tuple[str, ...] | None
Options = dict[str, Any]


def tensor() -> torch.Tensor:
    return torch.ones(2, 4, LENGTH // dist.get_world_size(), 8)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, **options)


def in_call(mesh: Any, **options: Any) -> torch.Tensor:
    out = context_parallel_attention(*[tensor()] * 3, mesh=mesh, **{"seq_len": LENGTH, **options})
    assert isinstance(out, torch.Tensor)
    return out


def in_call_without_lengths(mesh: Any, **options: Any) -> None:
    in_call(mesh, **options, seq_len=None)


def in_context(mesh: Any, method: str = "auto", mask: Any = None, **of_sdpa: Any) -> None:
    with context_parallel(mesh, seq_len=LENGTH, method=method, mask=mask):
        Attention()(tensor(), **of_sdpa)


def in_module(mesh: Any, method: str = "auto", mask: Any = None, **of_sdpa: Any) -> None:
    style = ContextParallel(method=method, mask=mask, seq_len=LENGTH)
    parallelize_module(Attention(), mesh, style)(tensor(), **of_sdpa)


ENTRIES: dict[str, Callable[..., object]] = {
    "call": in_call, "call without lengths": in_call_without_lengths, "context": in_context, "module": in_module,
}  # fmt: skip
each_entry = pytest.mark.parametrize("entry", ENTRIES)


def check_refused(shape: tuple[int, ...], names: Names, message: str, body: Callable[[Any], object]) -> None:
    """`body(mesh)` raises one and the same ValueError on every rank before any collective, and torch is as before."""

    def on_mesh(_rank: int) -> None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        mesh_is_made.append(len(collectives))  # which may take collectives of its own
        dist.barrier()
        body(mesh)

    def state() -> object:
        return PatchedTorch.now(), thread_state(), torch.get_rng_state().tolist()

    mesh_is_made: list[int] = []
    before = state()
    with recorded_collectives() as collectives, pytest.raises(ValueError, match=message) as caught:
        run_ranks(torch.Size(shape).numel(), on_mesh)  # raises the ranks' own error if all have the same
    assert type(caught.value) is ValueError
    assert not {collective.kind for collective in collectives[max(mesh_is_made) :]} & MOVING
    assert state() == before


# Methods and meshes

TWO_AXES = 'method "ulysses" expects a mesh of one dim, got axes of {} x {} ranks: .* use "hybrid"'
METHODS: dict[str, tuple[tuple[int, ...], Names, str, str]] = {
    "hybrid over one axis": (
        (4,), ("cp",), "hybrid",
        r'method "hybrid" expects a mesh of two or three dims, got one axis of 4 ranks: make one with init_device_mesh',
    ),
    "ulysses over two axes": ((2, 2), RING_ULYSSES, "ulysses", TWO_AXES.format(2, 2)),
    "ulysses over an inner axis": ((1, 4), RING_ULYSSES, "ulysses", TWO_AXES.format(1, 4)),
    "ulysses over an outer axis": ((1, 4), ULYSSES_RING, "ulysses", TWO_AXES.format(4, 1)),
}  # fmt: skip


@each_entry
@pytest.mark.parametrize(("shape", "names", "method", "message"), METHODS.values(), ids=METHODS)
def test_methods_that_do_not_fit_the_mesh(
    shape: tuple[int, ...], names: Names, method: str, message: str, entry: str
) -> None:
    check_refused(shape, names, message, lambda mesh: ENTRIES[entry](mesh, method=method))


MESH_ENTRIES: dict[str, Callable[[Any], object]] = {
    **ENTRIES,
    "ring_attention": lambda mesh: ring_attention(tensor(), tensor(), tensor(), mesh=mesh, seq_len=LENGTH),
    "shard": lambda mesh: context_parallel_shard(mesh, [torch.arange(8)], [0]),
    "unshard": lambda mesh: context_parallel_unshard(mesh, [torch.arange(2)], [0]),
    "positions": lambda mesh: local_positions(mesh, 8),
}
AXES = r"expected a mesh of one dim.*such as \('ring', 'ulysses'\) or \('cp_pod', 'cp_node', 'cp_gpu'\); got.*"
MESHES: list[tuple[Names, tuple[int, ...], str]] = [
    (("dp", "cp"), (2, 2), AXES + r"names \('dp', 'cp'\), shape \(2, 2\)\)\. Pass those axes of it, .* mesh\['cp'\]"),
    (("split_dp", "cp"), (2, 2), AXES + r"Pass those axes of it, such as mesh\['cp'\]"),
    (("cp", "sparse"), (2, 2), AXES + r"Pass those axes of it, such as mesh\['cp'\]"),
    (("ring", "tp"), (1, 2), AXES + r"Pass those axes of it, such as mesh\['ring'\]"),
    (None, (2, 2), AXES + r"names None.*such as init_device_mesh\(\.\.\., mesh_dim_names=\.\.\.\) and mesh\['cp'\]"),
    (("dp", "ring", "ulysses"), (1, 2, 2), AXES + r"shape \(1, 2, 2\)\)\. Pass .* such as mesh\['ring', 'ulysses'\]"),
    (
        ("cp_pod", "cp_rack", "cp_node", "cp_gpu"), (1, 1, 2, 2),
        AXES + r"4 dims.*such as mesh\['cp_rack', 'cp_node', 'cp_gpu'\]",
    ),
    (
        ("ulysses", "ulysses_low"), (2, 2),
        r"at most one axis whose name begins with \"ulysses\".*got names \('ulysses', 'ulysses_low'\)",
    ),
]  # fmt: skip


@pytest.mark.parametrize("entry", MESH_ENTRIES)
def test_axes_that_may_not_be_the_sequences_are_refused_with_a_hint(entry: str) -> None:
    for names, shape, message in MESHES:
        check_refused(shape, names, message, MESH_ENTRIES[entry])


@pytest.mark.parametrize(
    ("names", "inner"),
    [
        (("cp_node", "cp_gpu"), 1), (("cp0", "cp1"), 1), (("context-a", "context-b"), 1), (("sequence", "seq2"), 1),
        (("sp", "context_parallel"), 1), (("ulysses_low", "sp"), 0), (("ulysses2", "ring"), 0),
    ],
)  # fmt: skip
def test_names_of_two_axes_that_are_taken(names: tuple[str, str], inner: int) -> None:
    """Also of a larger mesh, as the hint for three axes says."""

    def body(rank: int) -> None:
        row, column = divmod(rank % 4, 2)
        for shape, more in (((2, 2), ()), ((1, 2, 2), ("dp",))):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=(*more, *names))
            assert sequence_ranks(mesh[names]).rank == (rank if inner == 1 else 2 * column + row)

    run_ranks(4, body)


# Masks, on 3 ranks of 8 tokens; more messages: tests/spec/test_masks.py

COLUMNS = (
    r"expected attn_mask to have this rank's query rows \(8, in layout order\) and the 24 keys of the whole sequence"
)
THREE_ROWS = Batched([Full(), Causal(), Full()])
MASKS: dict[str, tuple[Options, str]] = {
    "keys of this rank": ({"attn_mask": torch.ones(8, 8)}, rf"{COLUMNS}.*got \(1, 1, 8, 8\).*context_parallel_shard"),
    "one key too many": ({"attn_mask": torch.ones(2, 1, 1, 25).bool()}, rf"{COLUMNS}.*got \(2, 1, 1, 25\)"),
    "padding of this rank": (
        {"attn_mask": torch.ones(2, 1, 1, 8).bool()}, rf"{COLUMNS}.*the same for all queries is passed whole"
    ),
    "a mask for three rows": ({"mask": THREE_ROWS}, "of 3 batch rows, got a batch of 2"),
    "documents beyond the end": (
        {"mask": Documents([0, 7, 25], within=Causal())},
        r"documents of a mask end at 25 \(queries\) and 25 \(keys\), expected at most .*, 24 and 24",
    ),
    "ids for positions": ({"mask": Documents([0] * 9 + [1] * 8 + [2] * 7)}, r"24 numbers .* for 24 .* a document id"),
    "ids of this rank's tokens": ({"mask": Documents.from_ids([0, 0, 1, 1, 1, 2, 2, 2])}, "ids of 8 tokens, .* the 24"),
}  # fmt: skip


@each_entry
@pytest.mark.parametrize(("options", "message"), MASKS.values(), ids=MASKS)
def test_masks_that_do_not_fit_the_length(options: Options, message: str, entry: str) -> None:
    check_refused((3,), ("cp",), message, lambda mesh: ENTRIES[entry](mesh, **options))


def test_layouts_that_differ_between_batch_rows_need_a_mask_for_each() -> None:
    """But not one that is the same for all queries, so for those of all batch rows."""
    message = r"MirroredBatch\(\) gives .* so an attn_mask with query rows needs all 2 batch rows; got \(1, 4, 8, 24\)"
    options = {"layout": MirroredBatch(), "attn_mask": torch.zeros(4, 8, LENGTH)}
    for entry in (in_call, in_call_without_lengths):
        check_refused((3,), ("cp",), message, lambda mesh, entry=entry: entry(mesh, **options))  # type: ignore[misc]
    for shape in ((4, 1, LENGTH), (2, 1, 8, LENGTH)):
        taken = {**options, "attn_mask": torch.zeros(shape)}
        run_ranks(3, lambda _, taken=taken: in_call(dist.group.WORLD, **taken))  # type: ignore[misc]


# Calls that differ between ranks. Rank 1 does otherwise than the others; PLACE is its place in the sequence.

MODES: dict[str, Options] = {"first call": {"seq_len": None}, "debug": {"debug": True}}
ODD: dict[str, tuple[Options, str, set[str]]] = {
    "method": ({"method": "ring"}, "method: rank PLACE says 'ring', the others 'hybrid'", {*MODES}),
    "no sinks": ({"sinks": None}, r"sinks: rank PLACE says 'none', the others 'float32 \(4,\)", {*MODES}),
    "frozen sinks": (
        {"sinks": torch.zeros(4)}, "sinks requires_grad: rank PLACE says False, the others True", {*MODES}
    ),
    "values of sinks": (
        {"sinks": torch.ones(4, requires_grad=True)}, r"sinks: rank PLACE says 'float32 \(4,\) \w{8}', the others",
        {"debug"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
@pytest.mark.parametrize(("odd", "mode"), [(odd, mode) for odd in ODD for mode in MODES if mode in ODD[odd][2]])
def test_ranks_that_disagree_are_told_alike_who_says_what(odd: str, mode: str, names: tuple[str, str]) -> None:
    """On every rank of both axes, also on those that share no axis with the odd one."""
    usual = {"method": "hybrid", "sinks": torch.zeros(4, requires_grad=True)}
    different, message, _ = ODD[odd]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        in_call(mesh, **{**usual, **(different if rank == 1 else {}), **MODES[mode]})

    with recorded_collectives(of_first_calls=True) as collectives:
        errors = errors_by_rank(4, body)
    assert len({(type(error), str(error)) for error in errors}) == 1
    assert type(errors[0]) is ValueError
    of_odd = message.replace("PLACE", str(place([0, 1], names, (2, 2))))
    assert re.search(f"the ranks of the context-parallel axis disagree about {of_odd}", str(errors[0])), errors[0]
    moved = [collective.kind for collective in collectives if collective.kind in MOVING]
    # Over each axis hashes, then the sizes of readable facts and these; nothing after it.
    assert moved == ["AllGather"] * 2 * 3 * 4


@pytest.mark.parametrize("method", ["hybrid", "ring"])
def test_unequal_shards_of_no_declared_length_are_refused_on_every_rank(method: str) -> None:
    def body(rank: int) -> None:
        q = torch.ones(1, 2, 5 if rank == 3 else 2, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=RING_ULYSSES)
        context_parallel_attention(q, q, q, mesh=mesh, method=method)

    (text,) = {str(error) for error in errors_by_rank(4, body)}
    assert "rank 3 says (20, 20), the others (8, 8)" in text


WHERE_THEY_TRAVEL: dict[str, tuple[Callable[[int], Options], str]] = {
    "lse": (lambda rank: {"return_lse": rank == 1}, r"disagree about returns_lse: rank 1 says True, the others False$"),
    "lse, debug": (
        lambda rank: {"return_lse": rank == 1, "debug": True}, r"returns_lse: rank 1 says True, the others False$"
    ),
    "rows of an attn_mask": (
        lambda rank: {"attn_mask": torch.zeros(1 if rank == 1 else 8, LENGTH), "seq_len": None},
        r"disagree about attn_mask_has_rows: rank 1 says False, the others True$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WHERE_THEY_TRAVEL.values(), ids=WHERE_THEY_TRAVEL)
def test_what_only_some_ranks_have_is_refused_where_it_travels(options: Any, message: str) -> None:
    def body(rank: int, method: str) -> None:
        context_parallel_attention(
            *[tensor()] * 3, mesh=dist.group.WORLD, method=method, **{"seq_len": LENGTH, **options(rank)}
        )

    run_ranks(3, body, "ring")
    with pytest.raises(ValueError, match=message):
        run_ranks(3, body, "ulysses")


# What a failed call leaves


@pytest.mark.parametrize("method", ["hybrid", "ring"])
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
        q, k, v = (shard(each, HeadTail(), rank, 4) for each in whole[:3])

        def fail() -> None:
            assert torch.equal(tokens, shard(torch.arange(8), HeadTail(), rank, 4, 0))
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
            assert_close(sdpa(q, k, v), shard(expected, HeadTail(), rank, 4))

    run_ranks(4, body)
