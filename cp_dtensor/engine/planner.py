"""Decides how a call's work is spread: as a ring, by heads, by both, or as a ring of rings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import on_device
from cp_dtensor.attention.backends.base import AttentionBackend, Problem
from cp_dtensor.attention.backends.select import (
    Allowed,
    allowed_backends,
    choose_backend,
    is_deterministic,
    with_wide_gradients,
)
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.collective import OUTER_TRANSPORT, AllGather
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import CollectiveHeads, HeadExchange, HeadRows
from cp_dtensor.comm.head_exchange_symm_mem import obstacle_to_shared_memory, shared_memory_heads
from cp_dtensor.comm.select import hardware_of
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.engine.autograd import AttentionCall
from cp_dtensor.engine.config import Splitting
from cp_dtensor.engine.cost_model import Axis, estimates, fastest
from cp_dtensor.engine.nested_ring import NestedRingCall
from cp_dtensor.engine.ring import RingCall
from cp_dtensor.engine.ulysses import UlyssesCall
from cp_dtensor.plan.head_partition import (
    DEFAULT_HEAD_STAGING,
    HeadPartition,
    partition_heads,
    with_heads,
)
from cp_dtensor.plan.partition import (
    CallShape,
    LayoutPartition,
    MergedPartition,
    OuterPartition,
    Partition,
    inner_partitions,
)
from cp_dtensor.plan.plan import Plan, ring_plan
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Full, Mask, as_plain, is_plain

# What has been decided of a call: everything but its process groups and its scale. Values, so that they can be
# looked up: a cache by group may not hold the group, and scales are too many.


class Decision(ABC):
    """How a call's work is spread over ranks."""

    @abstractmethod
    def call(self, ranks: SequenceRanks | None, scale: float) -> AttentionCall:
        """The call on the ranks that share the sequence; None if this one is alone."""


@dataclass(frozen=True)
class RingDecision(Decision):
    """A ring over the outer axis; or a rank that is alone, with nothing to send."""

    plan: Plan
    shape: CallShape
    """What the plan was made for."""
    transport: KVTransport
    backend: AttentionBackend
    own_backward: AttentionBackend
    """What computes the gradients of this rank's own keys' tiles."""
    state_dtype: torch.dtype

    def call(self, ranks: SequenceRanks | None, scale: float) -> RingCall:
        ring = ranks.outer if ranks is not None and self.plan.world_size > 1 else None
        return RingCall(self.plan, ring, self.transport, self.backend, self.own_backward, scale, self.state_dtype)


@dataclass(frozen=True)
class UlyssesDecision(Decision):
    """Ulysses over the inner axis around a ring over the outer one; or over the only axis there is."""

    heads: HeadPartition
    stages: tuple[tuple[HeadRows, HeadRows], ...]
    """What the ranks have of each stage's heads: of queries, and of keys and values."""
    inner: tuple[RingDecision, ...]
    """One for each stage."""
    exchange: HeadExchange
    overlaps_stages: bool
    state_dtype: torch.dtype

    def call(self, ranks: SequenceRanks | None, scale: float) -> UlyssesCall:
        assert ranks is not None
        group, ring = (ranks.outer, None) if ranks.inner is None else (ranks.inner, SequenceRanks(ranks.outer))
        inner = tuple(decision.call(ring, scale) for decision in self.inner)
        return UlyssesCall(group, self.heads, self.stages, inner, self.exchange, self.overlaps_stages, self.state_dtype)


@dataclass(frozen=True)
class NestedRingDecision(Decision):
    """A ring over the outer axis whose every step is a ring over the inner one."""

    outer: RingDecision
    inner: tuple[RingDecision | None, ...]
    """One for each step of the outer ring, None where there is nothing to compute."""

    def call(self, ranks: SequenceRanks | None, scale: float) -> NestedRingCall:
        assert ranks is not None
        assert ranks.inner is not None
        within = SequenceRanks(ranks.inner)
        inner = tuple(None if decision is None else decision.call(within, scale) for decision in self.inner)
        return NestedRingCall(self.outer.call(ranks, scale), inner)


@dataclass(frozen=True)
class CallRequest:
    """A call before it is decided how its work is spread; the same on every rank."""

    partition: Partition
    """Over all ranks of the sequence."""
    mask: Mask
    problem: Problem
    batch_size: int
    itemsize: int
    """Bytes of an element."""
    device: torch.device
    backend: AttentionBackend
    transport: TransportMethod
    """How K/V travel in rings."""
    masking: Masking = Masking.BY_SHAPE

    @property
    def shape(self) -> CallShape:
        """The facts that plans and costs depend on."""
        problem = self.problem
        return CallShape(
            partition=self.partition,
            mask=self.mask,
            batch_size=self.batch_size,
            q_heads=problem.q_heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            v_head_dim=problem.v_head_dim,
            itemsize=self.itemsize,
            masking=self.masking,
        )


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
    heads = partition_heads(shape.q_heads, shape.kv_heads, axis.size(), stage_count)
    merged = MergedPartition(request.partition, axis.size())
    united_shape = replace(shape, partition=merged)
    stages = exchange_stages(heads, merged, ring_rank)
    return UlyssesDecision(
        heads=heads,
        stages=stages,
        inner=tuple(
            _ring(with_heads(united_shape, heads, heads.kv_groups(rank, stage)), request, ring, ring_rank)
            for stage in range(heads.stages)
        ),
        exchange=shared_memory_heads(shape, stages) if obstacle is None else CollectiveHeads(),
        overlaps_stages=ring is None and heads.stages > 1,
        state_dtype=request.problem.state_dtype,
    )


@lru_cache(maxsize=4096)  # one object for equal ones: what is kept on devices is looked up by identity
def exchange_stages(
    heads: HeadPartition, merged: MergedPartition, ring_rank: int
) -> tuple[tuple[HeadRows, HeadRows], ...]:
    """For each stage what the ranks have: of queries, and of keys and values."""
    query_rows, key_rows = merged.query_rows(ring_rank), merged.key_rows(ring_rank)
    by_stage = [
        tuple(heads.kv_groups(rank, stage) for rank in range(heads.world_size)) for stage in range(heads.stages)
    ]
    return tuple(
        (HeadRows(query_rows, tuple(map(heads.query_heads, units))), HeadRows(key_rows, units, heads.replication))
        for units in by_stage
    )


def decide_nested_ring(request: CallRequest, ranks: SequenceRanks) -> NestedRingDecision:
    """A ring over the outer axis of rings over the inner one."""
    assert ranks.inner is not None
    shape, inner_size = request.shape, ranks.inner_size
    outer_rank, inner_rank = ranks.outer.rank(), ranks.inner.rank()
    # Direct hops between ranks of the same place. All heads at once: each hop is a whole inner ring.
    partition = OuterPartition(request.partition, inner_size, inner_rank)
    plan = ring_plan(replace(shape, partition=partition).tiling, outer_rank, shape.kv_heads)
    backend = request.backend
    outer = RingDecision(plan, shape, OUTER_TRANSPORT, backend, backend, request.problem.state_dtype)
    inner: list[RingDecision | None] = []
    for within in inner_partitions(request.partition, plan, inner_size):
        inner_shape = replace(shape, partition=within)
        if _has_tiles(inner_shape):
            inner.append(_ring(inner_shape, request, ranks.inner, inner_rank))
        else:
            inner.append(None)
    return NestedRingDecision(outer, tuple(inner))


def _ring(shape: CallShape, request: CallRequest, group: dist.ProcessGroup | None, rank: int) -> RingDecision:
    with on_device(request.device):
        alone = group is None or group.size() == 1
        transport = AllGather() if group is None or alone else request.transport.for_call(shape, group, request.device)
    own = None
    if group is not None and group.size() >= _WIDE_GRADIENTS_FROM and transport.keeps_own_gradients_wide:
        own = with_wide_gradients(request.backend, request.problem)
    plan, state_dtype = _plan(transport, shape, rank), request.problem.state_dtype
    return RingDecision(plan, shape, transport, request.backend, own or request.backend, state_dtype)


@lru_cache(maxsize=4096)
def _has_tiles(shape: CallShape) -> bool:
    """Whether any rank's queries see any rank's keys; alike on each."""
    tiling = shape.tiling
    ranks = range(tiling.world_size)
    return any(tiling.tiles_against(rank, source) for rank in ranks for source in ranks)


@lru_cache(maxsize=256)
def _plan(transport: KVTransport, shape: CallShape, rank: int) -> Plan:
    return transport.plan(shape, rank)


def describe_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by_row: bool = False) -> Problem:
    """The facts about a call that decide its backend."""
    return Problem(
        device_type=q.device.type,
        capability=_capability(q.device) if q.is_cuda else None,
        dtype=q.dtype,
        head_dim=q.size(3),
        v_head_dim=v.size(3),
        q_heads=q.size(1),
        kv_heads=k.size(1),
        by_row=by_row,
    )


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


# From shards and settings to a call: which way of splitting the work, looked up where it has been decided before.


def decide_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splitting: Splitting,
    lengths: tuple[int, int],
    mask: Mask,
    modifiers: Modifiers,
    scale: float,
    ranks: SequenceRanks,
    allowed: Allowed | None = None,
) -> AttentionCall:
    """The call on checked local shards of (queries, keys) that have these global lengths.

    `allowed` are the backends that may be used, None for those that are allowed at this moment.
    """
    allowed = allowed or allowed_backends()
    return decision_on(q, k, v, splitting, lengths, mask, modifiers, ranks, allowed).call(ranks, scale)


def decision_on(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    splitting: Splitting,
    lengths: tuple[int, int],
    mask: Mask,
    modifiers: Modifiers,
    ranks: SequenceRanks,
    allowed: Allowed,
) -> Decision:
    """What `decide_call` decides, remembered."""
    inner = None if ranks.inner is None else _torch.name_of_group(ranks.inner)
    # All that masking depends on is here too, so that a known call need not find out how it is masked.
    asks = (modifiers.bias is None, modifiers.dropout_p > 0, allowed, ranks.rank, ranks.size, inner)
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, splitting, lengths, mask, asks)

    def make() -> Decision:
        deterministic = is_deterministic(q, allowed, splitting.deterministic)
        masking = masking_of(mask, modifiers, lengths, deterministic, splitting.layout, ranks.size)
        by_row = masking is not Masking.BY_SHAPE
        problem = describe_problem(q, k, v, by_row)
        request = CallRequest(
            partition=LayoutPartition(splitting.layout, *lengths, q.size(0), ranks.size),
            mask=mask if by_row else as_plain(mask),
            problem=problem,
            batch_size=q.size(0),
            itemsize=q.element_size(),
            device=q.device,
            backend=choose_backend(problem, allowed),
            transport=splitting.transport,
            masking=masking,
        )
        return decide(request, splitting.method, ranks)

    return remembered(ranks.outer, key, make)


_MOST_SHAPED_SEGMENTS = 16
"""Of a shard: every pair of segments is a tile by shape, and a call by row has few tiles whatever they are."""


def masking_of(
    mask: Mask,
    modifiers: Modifiers,
    lengths: tuple[int, int],
    deterministic: bool,
    layout: Layout | None = None,
    world_size: int = 1,
) -> Masking:
    """How tiles are masked: by shape, which is fastest, where nothing forbids it.

    `layout` None: every rank has one range of positions. `deterministic` is what `is_deterministic` says.
    """
    if modifiers.bias is not None:
        return Masking.INTERVALS_UNBROKEN
    if modifiers.dropout_p:
        return Masking.INTERVALS_IN_RUNS
    # Of torch's kernels on GPUs few are deterministic, and those are slower than ours.
    if deterministic or not is_plain(mask, *lengths):
        return Masking.INTERVALS
    if layout is None or _has_simple_tiles(layout, max(lengths), world_size, mask == Full()):
        return Masking.BY_SHAPE
    return Masking.INTERVALS


@lru_cache(maxsize=1024)
def _has_simple_tiles(layout: Layout, seq_len: int, world_size: int, is_full: bool) -> bool:
    """True if few rectangles and triangles cover a plain mask; the same on every rank.

    Causal tiles between stripes of several tokens are neither.
    """
    shards = [layout.segments(seq_len, rank, world_size) for rank in range(world_size)]
    has_stripes = any(not each.is_contiguous and each.block > 1 for segments in shards for each in segments)
    return len(shards[0]) <= _MOST_SHAPED_SEGMENTS and (is_full or not has_stripes)


def decide(request: CallRequest, method: str, ranks: SequenceRanks) -> Decision:
    """The decision for a method that fits the ranks; "auto" takes the one that is predicted to be fastest."""
    if ranks.size == 1:
        return decide_ring(request, None, 0)
    if method == "auto" and request.masking is Masking.INTERVALS_UNBROKEN:
        method = "ring"  # by heads, the rows of a bias would have to travel
    if method == "auto":
        method = _predicted_fastest(request, ranks)
    if method == "ring":
        one_axis = ranks.inner is None
        return decide_ring(request, ranks.outer, ranks.rank) if one_axis else decide_nested_ring(request, ranks)
    return decide_ulysses(request, ranks)


def _predicted_fastest(request: CallRequest, ranks: SequenceRanks) -> str:
    if request.device.type != "cuda":  # of which the cost model knows nothing
        return "ring" if ranks.inner is None else "hybrid"
    with on_device(request.device):
        outer, inner = axes_of(ranks, request.device, request.itemsize)
    return fastest(estimates(request.shape, outer, inner, request.transport))


_MOST_DECISIONS = 1024
"""Of a group: beyond, lengths change at every call, and looking back is of no use."""
_decisions: WeakKeyDictionary[dist.ProcessGroup, dict[object, Decision]] = WeakKeyDictionary()


def remembered(group: dist.ProcessGroup, key: object, make: Callable[[], Decision]) -> Decision:
    """What has been decided for `key`, a value that says all that the decision depends on.

    Looking it up is all that a call of a known shape costs.
    """
    of_group = _decisions.get(group)
    if of_group is None or len(of_group) > _MOST_DECISIONS:
        of_group = _decisions[group] = {}
    found = of_group.get(key)
    if found is None:
        found = of_group[key] = make()
    return found


# What all ranks of two axes have in common: by the outer group, then by the inner one's name.
_axes: WeakKeyDictionary[dist.ProcessGroup, dict[str, tuple[Axis, Axis]]] = WeakKeyDictionary()


def axes_of(ranks: SequenceRanks, device: torch.device, itemsize: int) -> tuple[Axis, Axis | None]:
    """The outer and the inner axis as the weakest ranks have them, alike on all. At first a collective."""
    if ranks.inner is None:
        return _axis_of(ranks.outer, device, itemsize), None
    known = _axes.setdefault(ranks.outer, {})
    name = f"{_torch.name_of_group(ranks.inner)} {itemsize}"
    if name not in known:
        outer, inner = (_axis_of(group, device, itemsize) for group in (ranks.outer, ranks.inner))
        # Other ranks have other groups, which have measured something else.
        mine = [value for axis in (outer, inner) for value in (axis.hardware.link_speed, float(axis.shares_memory))]
        weakest = ranks.gather(torch.tensor(mine, dtype=torch.float64, device=device)).amin(0).tolist()
        known[name] = (
            Axis(outer.size, replace(outer.hardware, link_speed=weakest[0]), bool(weakest[1])),
            Axis(inner.size, replace(inner.hardware, link_speed=weakest[2]), bool(weakest[3])),
        )
    return known[name]


def _axis_of(group: dist.ProcessGroup, device: torch.device, itemsize: int) -> Axis:
    return Axis(group.size(), hardware_of(group, device, itemsize), p2p_obstacle(group, device) is None)
