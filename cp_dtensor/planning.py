"""Decides a call: from how the sequence is sharded and what is asked to a `RingCall`. Plans are cached by value."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape, Division
from cp_dtensor.layouts import Layout
from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.masks import Mask
from cp_dtensor.plan import Plan
from cp_dtensor.ring import RingCall
from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.base import Rotation, RotationMethod


def plan_call(
    division: Division,
    mask: Mask,
    group: dist.ProcessGroup | None,
    rank: int,
    method: RotationMethod,
    backend: LocalAttention,
    scale: float,
    problem: Problem,
    q: torch.Tensor,
) -> RingCall:
    """Decides one call on local queries `q` and their like. `group` is None where K/V need not travel."""
    shape = CallShape(
        division, mask, q.size(0), problem.q_heads, problem.kv_heads, problem.head_dim, problem.v_head_dim, q.itemsize
    )
    rotation = AllGather() if group is None else method.for_call(shape, group, q.device)
    return RingCall(_plan(rotation, shape, rank), group, rotation, backend, scale, problem.state_dtype)


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
