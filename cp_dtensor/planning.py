"""Decides how a call's work is spread: as a ring, by heads, by both, or as a ring of rings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.distributed as dist

from cp_dtensor.decisions import RingDecision, TwoLevelDecision, UlyssesDecision
from cp_dtensor.division import CallShape, Division
from cp_dtensor.head_division import HeadDivision, divide_heads
from cp_dtensor.layouts import Layout, Span
from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.local_attention.policy import with_wide_gradients
from cp_dtensor.masks import Mask
from cp_dtensor.plan import Plan, ring_plan
from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.alltoall import AllToAll
from cp_dtensor.rotation.base import Rotation, RotationMethod
from cp_dtensor.rotation.head_exchange import CollectiveHeads
from cp_dtensor.rotation.head_exchange_symm_mem import obstacle_to_shared_memory, shared_memory_heads
from cp_dtensor.rotation.heads import HeadRows
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.tensors import on_device
from cp_dtensor.tiling import Masking
from cp_dtensor.two_axes import OuterDivision, UnitedDivision, inner_divisions


@dataclass(frozen=True)
class CallRequest:
    """A call before it is decided how its work is spread; the same on every rank."""

    division: Division
    """Over all ranks of the sequence."""
    mask: Mask
    problem: Problem
    batch_size: int
    itemsize: int
    """Bytes of an element."""
    device: torch.device
    backend: LocalAttention
    rotation: RotationMethod
    """How K/V travel in rings."""
    masking: Masking = Masking.BY_SHAPE

    @property
    def shape(self) -> CallShape:
        """The facts that plans and costs depend on."""
        problem = self.problem
        return CallShape(
            division=self.division,
            mask=self.mask,
            batch_size=self.batch_size,
            q_heads=problem.q_heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            v_head_dim=problem.v_head_dim,
            itemsize=self.itemsize,
            masking=self.masking,
        )


@dataclass(frozen=True)
class HeadStaging:
    """How finely Ulysses cuts the work by heads, so that exchanges hide under computation."""

    flops_per_stage: float = 0.3e12
    """Operations of a rank that a stage should have at least (half a millisecond on an H200): launches cost time."""
    more_unhidden: float = 3.0
    """Times as many where attention does not hide exchanges (measured on 4 H200s, no ring around them: docs/log.md)."""
    most: int = 4

    def stages(self, shape: CallShape, world_size: int, publishes: bool) -> int:
        """As many as are worthwhile and divide a rank's query heads."""
        groups = shape.division.groups()
        least = self.flops_per_stage * (1.0 if hides_exchanges(shape, publishes) else self.more_unhidden)
        worthwhile = int(shape.flops(groups) / groups[0].world_size / least)
        heads = max(shape.q_heads // world_size, 1)
        return next(count for count in range(max(1, min(self.most, worthwhile)), 0, -1) if heads % count == 0)


def hides_exchanges(shape: CallShape, publishes: bool) -> bool:
    """Whether exchanges of heads hide under attention.

    What ranks publish in shared memory is copied within a GPU, by a kernel, which those that mask by row leave no
    multiprocessor to, and cuDNN's causal ones do towards their end (measured on H200s).
    """
    return shape.masking is Masking.BY_SHAPE or not publishes


DEFAULT_HEAD_STAGING = HeadStaging()
OUTER_ROTATION = AllToAll(transfers_ahead=1)
"""Of rings of rings: every hop travels under a whole inner ring."""
_WIDE_GRADIENTS_FROM = 4
"""Ranks. With fewer the own tiles are so much of the work that their slower kernel would cost 10% of backward."""


def decide_ring(request: CallRequest, group: dist.ProcessGroup | None, rank: int) -> RingDecision:
    """A ring of the ranks that the request divides the sequence over. `group` is None where K/V need not travel."""
    return _ring(request.shape, request, group, rank)


def decide_ulysses(request: CallRequest, ranks: SequenceRanks) -> UlyssesDecision:
    """By heads over the inner axis, as a ring over the outer one; by heads alone if there is only one axis."""
    axis, ring = (ranks.outer, None) if ranks.inner is None else (ranks.inner, ranks.outer)
    rank, ring_rank = axis.rank(), 0 if ring is None else ring.rank()
    shape = request.shape
    with on_device(request.device):
        obstacle = obstacle_to_shared_memory(shape, axis, request.device)
    # Not in a hybrid, whose ring has ranks of other groups in it, which may share no memory but need the same stages.
    stage_count = DEFAULT_HEAD_STAGING.stages(shape, axis.size(), publishes=ring is None and obstacle is None)
    heads = divide_heads(shape.q_heads, shape.kv_heads, axis.size(), stage_count)
    united = UnitedDivision(request.division, axis.size())
    united_shape = replace(shape, division=united)
    stages = exchange_stages(heads, united, ring_rank)
    return UlyssesDecision(
        heads=heads,
        stages=stages,
        inner=tuple(
            _ring(with_heads(united_shape, heads, heads.units(rank, stage)), request, ring, ring_rank)
            for stage in range(heads.stages)
        ),
        exchange=shared_memory_heads(shape, stages) if obstacle is None else CollectiveHeads(),
        overlaps_stages=ring is None and heads.stages > 1,
        state_dtype=request.problem.state_dtype,
    )


@lru_cache(maxsize=4096)  # one object for equal ones: what is kept on devices is looked up by identity
def exchange_stages(
    heads: HeadDivision, united: UnitedDivision, ring_rank: int
) -> tuple[tuple[HeadRows, HeadRows], ...]:
    """For each stage what the ranks have: of queries, and of keys and values."""
    query_rows, key_rows = united.query_rows(ring_rank), united.key_rows(ring_rank)
    by_stage = [tuple(heads.units(rank, stage) for rank in range(heads.world_size)) for stage in range(heads.stages)]
    return tuple(
        (HeadRows(query_rows, tuple(map(heads.query_heads, units))), HeadRows(key_rows, units, heads.copies))
        for units in by_stage
    )


def decide_two_level(request: CallRequest, ranks: SequenceRanks) -> TwoLevelDecision:
    """A ring over the outer axis of rings over the inner one."""
    assert ranks.inner is not None
    shape, inner_size = request.shape, ranks.inner_size
    outer_rank, inner_rank = ranks.outer.rank(), ranks.inner.rank()
    # Direct hops between ranks of the same place. All heads at once: each hop is a whole inner ring.
    division = OuterDivision(request.division, inner_size, inner_rank)
    plan = ring_plan(replace(shape, division=division).tiling, outer_rank, shape.kv_heads)
    backend = request.backend
    outer = RingDecision(plan, shape, OUTER_ROTATION, backend, backend, request.problem.state_dtype)
    inner: list[RingDecision | None] = []
    for within in inner_divisions(request.division, plan, inner_size):
        inner_shape = replace(shape, division=within)
        if _has_tiles(inner_shape):
            inner.append(_ring(inner_shape, request, ranks.inner, inner_rank))
        else:
            inner.append(None)
    return TwoLevelDecision(outer, tuple(inner))


def _ring(shape: CallShape, request: CallRequest, group: dist.ProcessGroup | None, rank: int) -> RingDecision:
    with on_device(request.device):
        alone = group is None or group.size() == 1
        rotation = AllGather() if group is None or alone else request.rotation.for_call(shape, group, request.device)
    own = None
    if group is not None and group.size() >= _WIDE_GRADIENTS_FROM and rotation.keeps_own_gradients_wide:
        own = with_wide_gradients(request.backend, request.problem)
    plan, state_dtype = _plan(rotation, shape, rank), request.problem.state_dtype
    return RingDecision(plan, shape, rotation, request.backend, own or request.backend, state_dtype)


def with_heads(shape: CallShape, heads: HeadDivision, units: Span) -> CallShape:
    """The shape of attention with some units of heads."""
    first, last = heads.query_heads(units)
    return replace(shape, q_heads=last - first, kv_heads=units[1] - units[0])


@lru_cache(maxsize=4096)
def _has_tiles(shape: CallShape) -> bool:
    """Whether any rank's queries see any rank's keys; alike on each."""
    tiling = shape.tiling
    ranks = range(tiling.world_size)
    return any(tiling.tiles_against(rank, source) for rank in ranks for source in ranks)


@lru_cache(maxsize=256)
def _plan(rotation: Rotation, shape: CallShape, rank: int) -> Plan:
    return rotation.plan(shape, rank)


def describe_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, staircase: bool, by_row: bool = False
) -> Problem:
    """The facts about a call that decide its backend."""
    return Problem(
        device_type=q.device.type,
        capability=_capability(q.device) if q.is_cuda else None,
        dtype=q.dtype,
        head_dim=q.size(3),
        v_head_dim=v.size(3),
        q_heads=q.size(1),
        kv_heads=k.size(1),
        staircase=staircase,
        by_row=by_row,
    )


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=1024)
def has_stairs(layout: Layout, seq_len: int, world_size: int) -> bool:
    """Whether any rank's causal tiles may need more than a triangle; asked of all ranks' rows, so alike on each."""
    return any(
        not segment.is_contiguous and segment.block > 1
        for rank in range(world_size)
        for segment in layout.segments(seq_len, rank, world_size)
    )
