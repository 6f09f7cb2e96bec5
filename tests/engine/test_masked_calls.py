"""Every mask, bias, layout, length and method: out, lse and all gradients equal dense attention."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import errors_by_rank, rows_in_place
from support.masked_checks import WAYS, MaskedCase, check_masked, masked_cases
from support.masked_problems import MaskedProblem
from support.method_checks import RING_ULYSSES, ULYSSES_RING
from support.problems import assert_close, shard
from support.ranks import run_ranks
from support.shared_memory import shared_memory
from support.staging import fine

from cp_dtensor import (
    Causal,
    Full,
    HeadTail,
    Layout,
    MirroredBatch,
    PerDocument,
    SlidingWindow,
    Striped,
    context_parallel_attention,
)
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.comm.collective import AllGather, AllToAll, Staging
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import head_stages

few = settings(max_examples=examples(4), deadline=None)
CP = ("cp",)
RANKS = [
    ((1,), CP), ((2,), CP), ((3,), CP), ((4,), CP), ((7,), CP),
    ((2, 2), RING_ULYSSES), ((3, 2), ULYSSES_RING), ((2, 3), ("cp_node", "cp_gpu")),
]  # fmt: skip
each_world = pytest.mark.parametrize(("shape", "names"), RANKS, ids=str)
few_worlds = pytest.mark.parametrize(("shape", "names"), [RANKS[2], RANKS[3], *RANKS[5:]], ids=str)


@each_world
def test_at_once(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    @few
    @given(st.lists(masked_cases(len(shape)), min_size=6, max_size=6))
    def check(cases: list[MaskedCase]) -> None:
        check_masked(cases, shape, names)

    check()


@few_worlds
def test_in_stages_of_heads(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """However little work a stage has; rows are packed, or travel straight between their places, as on GPUs."""
    limits = st.tuples(*[st.sampled_from([1, 400, 2000])] * 3)

    @few
    @given(st.lists(masked_cases(len(shape)), min_size=6, max_size=6), st.integers(2, 4), limits, st.booleans())
    def check(cases: list[MaskedCase], stages: int, limits: tuple[int, ...], in_place: bool) -> None:
        rings = AllToAll(shard_bytes=limits[0], grad_shard_bytes=limits[1], flops_per_hop=1e-3)
        staged = partial(head_stages, flops_per_stage=1e-3, most=stages)
        with (
            mock.patch.dict(ROTATE_METHODS, allgather=AllGather(fine(*limits)), alltoall=rings),
            mock.patch.object(planner, "head_stages", staged),
            mock.patch.object(planner, "OUTER_TRANSPORT", replace(rings, grad_shard_bytes=limits[0])),
            rows_in_place() if in_place else nullcontext(),
        ):
            check_masked(cases, shape, names)

    check()


@few_worlds
def test_through_shared_memory(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    """As on GPUs of one host."""
    methods = [dict(way) for way in WAYS[len(shape)] if way["method"] != "auto"]
    by_memory = st.sampled_from([tuple({**way, "rotate_method": "symm_mem"}.items()) for way in methods])

    @few
    @given(st.lists(st.tuples(masked_cases(len(shape)), by_memory), min_size=6, max_size=6), st.booleans())
    def check(cases: list[tuple[MaskedCase, Any]], by_head: bool) -> None:
        staging = fine(1, 1) if by_head else Staging()
        with mock.patch.dict(ROTATE_METHODS, symm_mem=SymmetricMemory(staging)), shared_memory() as machine:
            check_masked([replace(case, options=options) for case, options in cases], shape, names)
        copies.append(machine.copies)

    copies: list[int] = []
    check()
    assert any(copies)


def causal(q_len: int, kv_len: int, heads: tuple[int, int] = (4, 2), batch: int = 1) -> MaskedProblem:
    return MaskedProblem(q_len, kv_len, Full(), batch, *heads, is_causal=True)


# Ends of stripes that some ranks have and others do not; more ranks than tokens or heads; copies of key heads.
EDGES: list[tuple[MaskedProblem, Layout, tuple[int, ...], tuple[str, ...], str]] = [
    (causal(13, 2), Striped(3), (2, 2), RING_ULYSSES, "ring"),
    (causal(2, 13), Striped(3), (2, 2), ULYSSES_RING, "hybrid"),
    (causal(5, 5), Striped(1), (2, 2), RING_ULYSSES, "hybrid"),
    (causal(1, 30), HeadTail(), (4,), CP, "ring"),
    (causal(26, 26, (6, 2), batch=2), HeadTail(), (4,), CP, "ulysses"),
    (causal(26, 26, (8, 2), batch=2), MirroredBatch(), (4,), CP, "ulysses"),
    (causal(53, 53, (12, 4), batch=3), HeadTail(), (2, 3), RING_ULYSSES, "hybrid"),
    (MaskedProblem(29, 29, Full(), 2, 10, 5, scale=-0.3, sinks=True), HeadTail(), (2, 2), RING_ULYSSES, "hybrid"),
    # By row: by shape every pair of pieces would be a tile.
    (MaskedProblem(120, 120, Causal()), PerDocument(range(0, 121, 3)), (3,), CP, "ring"),
    (MaskedProblem(120, 120, Full()), PerDocument(range(0, 121, 3)), (3,), CP, "ulysses"),
]


@pytest.mark.parametrize(("problem", "layout", "shape", "names", "method"), EDGES)
def test_at_the_edges(
    problem: MaskedProblem, layout: Layout, shape: tuple[int, ...], names: tuple[str, ...], method: str
) -> None:
    options = [(("method", method), ("rotate_method", transport)) for transport in ("allgather", "alltoall")]
    check_masked([MaskedCase(problem, layout, each, 1) for each in options], shape, names)


def test_delta_is_computed_once_for_all_tiles_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rings, however many tiles there are: each rank's backward reads out and its gradient once."""
    computed: list[tuple[int, ...]] = []

    def counted(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        computed.append(tuple(out.shape))
        return attention_delta(grad_out, out)

    for module in ("engine.ring", "attention.masked"):
        monkeypatch.setattr(f"cp_dtensor.{module}.attention_delta", counted)
    problem = MaskedProblem(24, 24, SlidingWindow(17, 0))
    for rotate_method in ("alltoall", "allgather"):
        computed.clear()
        options = (("method", "ring"), ("rotate_method", rotate_method))
        check_masked([MaskedCase(problem, HeadTail(), options, 1)], (3,))
        assert len(computed) == 3  # one on each rank
        assert {shape[2] for shape in computed} == {8}


def test_key_masks_where_batch_rows_are_divided_differently_and_a_rank_has_one_query() -> None:
    """Its mask looks alike with and without query rows; the others show which it is."""
    case = MaskedProblem(5, 5, Causal(), batch=2, bias="boolean h")
    whole = case.draw(3)
    expected = case.reference(*whole)[0]

    def body(rank: int, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (shard(tensor, MirroredBatch(), rank, 3) for tensor in whole[:3])
        return context_parallel_attention(
            q, k, v, mesh=dist.group.WORLD, layout=MirroredBatch(), is_causal=True, attn_mask=mask, seq_len=5
        )

    for rank, out in enumerate(run_ranks(3, lambda rank: body(rank, whole[4]))):
        assert_close(out, shard(expected, MirroredBatch(), rank, 3))

    rows = [2, 2, 1]
    errors = errors_by_rank(3, lambda rank: body(rank, whole[4].expand(-1, -1, rows[rank], -1)))
    assert {type(error) for error in errors} == {ValueError}
    assert all("needs all 2 batch rows" in str(error) for error in errors)
