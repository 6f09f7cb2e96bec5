"""Partition of heads over the ranks of a Ulysses axis, and in stages. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Span, share


@dataclass(frozen=True)
class HeadPartition:
    """KV-head groups of each rank: a group is one key/value head and query heads that read it.

    A key/value head that several ranks need is replicated: it is in `replication` groups, each with a part of its query
    heads. Ranks take consecutive groups, and compute them in consecutive stages.

    >>> heads = partition_heads(q_heads=8, kv_heads=2, world_size=4)
    >>> heads.replication, [heads.kv_groups(rank) for rank in range(4)]
    (2, [(0, 1), (1, 2), (2, 3), (3, 4)])
    >>> [heads.query_heads(heads.kv_groups(rank)) for rank in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 8)]
    """

    q_heads: int
    kv_heads: int
    world_size: int
    replication: int
    stages: int

    @property
    def kv_group_count(self) -> int:
        """Number of groups of all ranks."""
        return self.kv_heads * self.replication

    def kv_groups(self, rank: int, stage: int | None = None) -> Span:
        """Returns the groups of a rank, or of one of its stages; ranks and stages differ by at most one group."""
        span = share((0, self.kv_group_count), rank, self.world_size)
        return span if stage is None else share(span, stage, self.stages)

    def query_heads(self, kv_groups: Span) -> Span:
        """Returns the query heads of some groups."""
        count = max(self.kv_group_count, 1)
        return -(-self.q_heads * kv_groups[0] // count), -(-self.q_heads * kv_groups[1] // count)


@lru_cache(maxsize=4096)
def partition_heads(q_heads: int, kv_heads: int, world_size: int, stages: int = 1) -> HeadPartition:
    """Returns the partition with the fewest query heads on the busiest rank, and then the least replication.

    If heads do not divide by the ranks, some ranks have fewer heads or none.

    Args:
        q_heads: query heads, a multiple of `kv_heads`.
        kv_heads: key/value heads.
        world_size: ranks of the axis.
        stages: number of stages to aim for; K/V heads are replicated if ranks have fewer groups, and there are fewer
            stages if that is not possible.
    """
    if kv_heads == 0:  # possible where heads are sharded unevenly over another axis
        return HeadPartition(q_heads, kv_heads, world_size, replication=1, stages=1)
    ratio = q_heads // kv_heads
    divisors = [times for times in range(1, ratio + 1) if ratio % times == 0]

    def busiest(times: int) -> int:
        return -(-kv_heads * times // world_size) * (ratio // times)

    least = min(map(busiest, divisors))
    balanced = [times for times in divisors if busiest(times) == least]

    stages = max(1, min(stages, kv_heads * balanced[-1] // world_size))
    replication = next((times for times in balanced if kv_heads * times // world_size >= stages), balanced[0])
    return HeadPartition(q_heads, kv_heads, world_size, replication, stages)


def partition_call(shape: CallSpec, world_size: int, stages: int) -> HeadPartition:
    """Returns `partition_heads` of a call. Of latents, each rank gets one copy, in one stage, for all of its heads."""
    if shape.latent_dims is None:
        return partition_heads(shape.q_heads, shape.kv_heads, world_size, stages)
    return HeadPartition(shape.q_heads, 1, world_size, replication=min(world_size, shape.q_heads), stages=1)


@dataclass(frozen=True)
class HeadStaging:
    """Number of stages of Ulysses, so that exchanges of heads overlap computation."""

    flops_per_stage: float = 0.3e12
    """Least FLOPs of a rank in a stage (half a millisecond on an H200), since launches cost time."""
    more_unhidden: float = 3.0
    """Multiplier of `flops_per_stage` if exchanges do not overlap attention (measured on 4 H200s, docs/log.md)."""
    most: int = 4

    def stages(self, shape: CallSpec, world_size: int, publishes: bool) -> int:
        """Returns the number of stages that are worthwhile and divide a rank's query heads."""
        groups = shape.partition.groups()
        least = self.flops_per_stage * (1.0 if hides_exchanges(shape, publishes) else self.more_unhidden)
        worthwhile = int(shape.flops(groups) / groups[0].world_size / least)
        heads = max(shape.q_heads // world_size, 1)
        return next(count for count in range(max(1, min(self.most, worthwhile)), 0, -1) if heads % count == 0)


def hides_exchanges(shape: CallSpec, publishes: bool) -> bool:
    """True if exchanges of heads overlap attention.

    Ranks write to symmetric buffers (`publishes`) by a kernel that copies within a GPU. Interval-masked kernels leave
    it no multiprocessors; cuDNN's causal kernels do towards their end (measured on H200s).
    """
    return shape.masking is Masking.BY_SHAPE or not publishes


DEFAULT_HEAD_STAGING = HeadStaging()


def with_heads(shape: CallSpec, heads: HeadPartition, kv_groups: Span) -> CallSpec:
    """Returns the shape of attention with some KV-head groups only."""
    first, last = heads.query_heads(kv_groups)
    return replace(shape, q_heads=last - first, kv_heads=kv_groups[1] - kv_groups[0])
