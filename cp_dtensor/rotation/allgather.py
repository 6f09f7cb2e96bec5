"""The all-gather rotation: every other rank's K/V at once, so that a few large attention calls do the work.

Staged by groups of heads: a stage is computed while the next one travels. Memory: two stages of all ranks' K/V, in
backward two stages of gradients and one of contributions as well, each about `stage_bytes` or `grad_stage_bytes`, or
one head's, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_dtensor.division import BACKWARD_FLOPS, CallShape
from cp_dtensor.plan import Plan, Stages, gathered_plan
from cp_dtensor.rotation.exchange import ExchangedRotation
from cp_dtensor.schedule import gathered_rows


@dataclass(frozen=True)
class Staging:
    """How finely to cut the work by heads, by the size of all ranks' K/V together; alike on every rank."""

    stage_bytes: int = 64 << 20
    """K/V of a stage in forward: little enough to hide under the local tile."""
    grad_stage_bytes: int = 32 << 20
    """K/V of a stage in backward, where the gradients of the last stage are not hidden."""
    grad_local_bytes: int = 128 << 20
    """K/V of all ranks for each cut of the local tile in backward, of which kernels keep several copies in float32."""
    flops_per_stage: float = 0.6e12
    """Operations of a rank that a stage should have at least (a millisecond on an H200): launches cost host time."""

    def plan(self, shape: CallShape, rank: int) -> Plan:
        """The steps of a call on one rank, everybody else's K/V at once."""
        return gathered_plan(shape.division.groups(), rank, shape.mask, shape.kv_heads, *self.stages(shape))

    def stages(self, shape: CallShape) -> tuple[Stages, Stages]:
        """Of forward and of backward."""
        groups = shape.division.groups()
        total = gathered_rows(groups).total * shape.head_bytes * shape.kv_heads
        worthwhile = shape.flops(groups) / groups[0].world_size / self.flops_per_stage

        def count(limit: int, most: float) -> int:
            return max(1, min(shape.kv_heads, -(-total // limit), int(most)))

        local = min(4, count(self.grad_local_bytes, BACKWARD_FLOPS * worthwhile))
        remote = count(self.grad_stage_bytes, BACKWARD_FLOPS * worthwhile)
        return Stages(1, count(self.stage_bytes, worthwhile)), Stages(local, max(local, remote))


DEFAULT_STAGING = Staging()


@dataclass(frozen=True)
class AllGather(ExchangedRotation):
    """Gather K/V by groups of heads, and bring dK/dV home likewise."""

    staging: Staging = DEFAULT_STAGING

    @property
    def name(self) -> str:
        return "allgather"

    def plan(self, shape: CallShape, rank: int) -> Plan:
        return self.staging.plan(shape, rank)
