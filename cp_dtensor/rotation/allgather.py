"""The all-gather rotation: every other rank's K/V at once, so that a few large attention calls do the work.

Staged by groups of heads: a stage is computed while the next one travels. Memory: two stages of all ranks' K/V, in
backward two stages of gradients and one of contributions as well, each about `stage_bytes` or `grad_stage_bytes`, or
as many heads as it takes to fill a GPU, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

from cp_dtensor.division import BACKWARD_FLOPS, CallShape
from cp_dtensor.plan import Plan, Stages, gathered_plan
from cp_dtensor.rotation.exchange import ExchangedRotation
from cp_dtensor.tiling import Masking


@dataclass(frozen=True)
class Staging:
    """How finely to cut the work by heads, by the size of all ranks' K/V together; alike on every rank."""

    stage_bytes: int = 64 << 20
    """K/V of a stage in forward: little enough to hide under the local tile."""
    grad_stage_bytes: int = 32 << 20
    """K/V of a stage in backward, where the gradients of the last stage are not hidden."""
    grad_local_bytes: int = 128 << 20
    """K/V of all ranks for each cut of the local tile in backward, of which kernels keep several copies in float32."""
    flops_per_stage: float = 0.3e12
    """Operations of a rank that a stage should have at least (half a millisecond on an H200): launches cost time."""
    grad_flops_per_stage: float = 0.6e12
    """The same in backward, whose launches cost about twice as much."""
    queries_per_stage: int = 1 << 15
    """Query rows of a stage, all heads together, that fill a GPU: about two waves of blocks of 128 on an H200."""
    keys_per_stage_by_row: int = 1 << 18
    """Key rows of a stage of tiles that mask by row: sixteen waves, since their blocks have work of all sizes."""

    def plan(self, shape: CallShape, rank: int) -> Plan:
        """The steps of a call on one rank, everybody else's K/V at once."""
        return gathered_plan(shape.tiling, rank, shape.kv_heads, *self.stages(shape))

    def stages(self, shape: CallShape) -> tuple[Stages, Stages]:
        """Of forward and of backward."""
        tiling = shape.tiling
        groups, world_size, gathered = tiling.groups, tiling.world_size, tiling.most_rows()
        queries = sum(segment.length for segments in groups[0].q_by_rank for segment in segments)
        total = gathered * shape.head_bytes * shape.kv_heads
        flops = shape.flops(groups) / world_size
        filling = queries // world_size * shape.batch_size * shape.q_heads // self.queries_per_stage
        if shape.masking is not Masking.BY_SHAPE:
            filling = min(filling, gathered * shape.batch_size * shape.kv_heads // self.keys_per_stage_by_row)

        def count(limit: int, worthwhile: float) -> int:
            most = max(1, min(shape.kv_heads, -(-total // limit), int(worthwhile), filling))
            # Stages of equal size fill a GPU equally well.
            return next((few for few in range(most, most // 2, -1) if shape.kv_heads % few == 0), most)

        worthwhile = BACKWARD_FLOPS * flops / self.grad_flops_per_stage
        local = min(4, count(self.grad_local_bytes, worthwhile))
        remote = count(self.grad_stage_bytes, worthwhile)
        return Stages(1, count(self.stage_bytes, flops / self.flops_per_stage)), Stages(local, max(local, remote))


DEFAULT_STAGING = Staging()


@dataclass(frozen=True)
class AllGather(ExchangedRotation):
    """Gather K/V by groups of heads, and bring dK/dV home likewise."""

    staging: Staging = DEFAULT_STAGING

    @property
    def name(self) -> str:
        return "allgather"

    @property
    def transfers_ahead(self) -> int:
        return 1  # one is as large as all hops of a ring

    @property
    def keeps_own_gradients_wide(self) -> bool:
        return True  # it is the most exact of the rotations, and symm_mem is the fastest

    def plan(self, shape: CallShape, rank: int) -> Plan:
        return self.staging.plan(shape, rank)
