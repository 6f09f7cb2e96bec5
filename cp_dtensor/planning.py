"""Decides a call: from how the sequence is sharded and what is asked to a `RingCall`. Plans are cached by value."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape, Division, LayoutDivision
from cp_dtensor.layouts import Layout
from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.local_attention.policy import allowed_backends, choose_backend
from cp_dtensor.masks import Mask
from cp_dtensor.plan import Plan
from cp_dtensor.ring import RingCall
from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.base import Rotation, RotationMethod
from cp_dtensor.tensors import on_device_of


class _Decisions:
    """What has been decided for each group: looking it up is all that a call of a known shape costs."""

    def __init__(self) -> None:
        self._by_group: WeakKeyDictionary[dist.ProcessGroup, dict[object, Decision]] = WeakKeyDictionary()

    def of(self, group: dist.ProcessGroup) -> dict[object, Decision]:
        decisions = self._by_group.get(group)
        if decisions is None or len(decisions) > _MOST_DECISIONS:  # lengths that change at every call
            decisions = self._by_group[group] = {}
        return decisions


class Decision(NamedTuple):
    """A `RingCall` but for its group and scale, which a cache by group may not hold or has too many of."""

    plan: Plan
    rotation: Rotation
    backend: LocalAttention
    state_dtype: torch.dtype

    def call(self, group: dist.ProcessGroup | None, scale: float) -> RingCall:
        """The call in a group; a rank that is alone has nothing to send."""
        ring = group if self.plan.world_size > 1 else None
        return RingCall(self.plan, ring, self.rotation, self.backend, scale, self.state_dtype)


_MOST_DECISIONS = 4096
_decisions = _Decisions()


def decide_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    lengths: tuple[int, int],
    is_causal: bool,
    scale: float,
    method: RotationMethod,
    group: dist.ProcessGroup,
) -> RingCall:
    """The call on checked local shards of (queries, keys) that have these global lengths."""
    allowed = allowed_backends()
    decisions = _decisions.of(group)
    key = (q.shape, k.shape, v.shape, q.dtype, q.device, layout, lengths, bool(is_causal), method, allowed)
    found = decisions.get(key)
    if found is None:
        world_size = group.size()
        problem = describe_problem(q, k, v, staircase=is_causal and has_stairs(layout, lengths[1], world_size))
        division = LayoutDivision(layout, *lengths, q.size(0), world_size)
        mask = Mask.CAUSAL if is_causal else Mask.FULL
        ring = group if world_size > 1 else None
        backend = choose_backend(problem, allowed)
        found = decisions[key] = decide(division, mask, ring, group.rank(), method, backend, problem, q)
    return found.call(group, scale)


def decide(
    division: Division,
    mask: Mask,
    group: dist.ProcessGroup | None,
    rank: int,
    method: RotationMethod,
    backend: LocalAttention,
    problem: Problem,
    q: torch.Tensor,
) -> Decision:
    """Decides on local queries `q` and their like. `group` is None where K/V need not travel."""
    shape = CallShape(
        division, mask, q.size(0), problem.q_heads, problem.kv_heads, problem.head_dim, problem.v_head_dim, q.itemsize
    )
    with on_device_of(q):
        rotation = AllGather() if group is None else method.for_call(shape, group, q.device)
    return Decision(_plan(rotation, shape, rank), rotation, backend, problem.state_dtype)


@lru_cache(maxsize=4096)
def _plan(rotation: Rotation, shape: CallShape, rank: int) -> Plan:
    return rotation.plan(shape, rank)


def describe_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, staircase: bool) -> Problem:
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
