"""`rotate_method="auto"`: the rotation that the cost model finds fastest for a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape
from cp_dtensor.plan import Plan
from cp_dtensor.rotation import workspace as workspaces
from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.alltoall import AllToAll
from cp_dtensor.rotation.base import Rotation, RotationMethod
from cp_dtensor.rotation.cost import Hardware, nearly_fastest, predicted_seconds
from cp_dtensor.rotation.links import Links, links_of
from cp_dtensor.rotation.symm_mem import SymmetricMemory
from cp_dtensor.tiling import Masking

# By the major compute capability.
_FLOPS = {8: 190e12, 9: 620e12, 10: 1200e12}
"""Operations per second of attention in bfloat16, forward."""
_MEMORY_SPEED = {8: 1.7e12, 9: 3.5e12, 10: 6e12}
"""Bytes per second, read or written."""


@dataclass(frozen=True)
class Auto(RotationMethod):
    """Symmetric memory where the ranks share it, otherwise all-gather or all-to-all, by predicted time.

    On CPUs all-gather: a cost model of a GPU says nothing there.
    """

    @property
    def name(self) -> str:
        return "auto"

    def for_call(self, shape: CallShape, group: dist.ProcessGroup, device: torch.device) -> Rotation:
        if device.type != "cuda":
            return AllGather()
        shares_memory = workspaces.why_unshared(group, device) is None
        return choose(shape, group.size(), hardware_of(group, device, shape.itemsize), shares_memory)


def hardware_of(group: dist.ProcessGroup, device: torch.device, itemsize: int) -> Hardware:
    """What the ranks of a group compute and communicate with. The first call for a group is a collective."""
    return _hardware(itemsize, links_of(group, device))


@lru_cache(maxsize=4096)
def choose(shape: CallShape, world_size: int, hardware: Hardware, shares_memory: bool) -> Rotation:
    """Symmetric memory if ranks share it, else the rotation of (nearly) the least predicted time on the slowest rank.

    Of forward and backward together.
    """
    if shares_memory:  # never predicted to be slower than all-gather: predicting takes as long as planning the call
        return SymmetricMemory()
    rotations: list[Rotation] = [AllGather(), AllToAll()]  # the first, if equal: larger tiles
    seconds = [slowest_seconds(rotation, shape, world_size, hardware, backward=True) for rotation in rotations]
    return nearly_fastest(rotations, seconds)


def slowest_seconds(
    rotation: Rotation, shape: CallShape, world_size: int, hardware: Hardware, *, backward: bool
) -> float:
    """Predicted time of forward (with `backward`: and backward) on the slowest rank."""
    plans = plans_of_some_ranks(rotation, shape, world_size)
    passes = (False, True) if backward else (False,)
    return max(
        sum(predicted_seconds(plan, shape, hardware, each, rotation.slows_compute) for each in passes) for plan in plans
    )


@lru_cache(maxsize=64)
def plans_of_some_ranks(rotation: Rotation, shape: CallShape, world_size: int) -> tuple[Plan, ...]:
    """The plans from which the slowest rank's time is predicted; every rank asks about the same ones."""
    # The first and the last rank have the most and the least to receive. What masks by shape is alike on the others.
    busiest = None if shape.masking is Masking.BY_SHAPE else shape.busiest_rank
    between = world_size // 2 if busiest is None else busiest
    return tuple(rotation.plan(shape, rank) for rank in sorted({0, between, world_size - 1}))


@lru_cache(maxsize=64)
def _hardware(itemsize: int, links: Links) -> Hardware:
    generation = min(max(links.capability, min(_FLOPS)), max(_FLOPS))
    flops = _FLOPS[generation] * (1.0 if itemsize <= 2 else 0.05)
    return Hardware(flops, _MEMORY_SPEED[generation], links.multiprocessors, links.speed)
