"""Which heads each rank of a Ulysses axis attends with, after every rank has got all rows of them. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from cp_dtensor.plan.partition import (
    CallSpec,
)
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Span, share


@dataclass(frozen=True)
class HeadPartition:
    """Heads in units of one key/value head and the query heads that read it there.

    A key/value head that several ranks need is copied: it is `copies` units, each with a part of its query heads.
    Ranks take consecutive units, and work on them in consecutive stages.

    >>> division = partition_heads(q_heads=8, kv_heads=2, world_size=4)
    >>> division.copies, [division.units(rank) for rank in range(4)]
    (2, [(0, 1), (1, 2), (2, 3), (3, 4)])
    >>> [division.query_heads(division.units(rank)) for rank in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 8)]
    """

    q_heads: int
    kv_heads: int
    world_size: int
    copies: int
    stages: int

    @property
    def unit_count(self) -> int:
        """Units of all ranks."""
        return self.kv_heads * self.copies

    def units(self, rank: int, stage: int | None = None) -> Span:
        """The units of a rank, or those of one stage; ranks and stages differ by at most one unit."""
        span = share((0, self.unit_count), rank, self.world_size)
        return span if stage is None else share(span, stage, self.stages)

    def query_heads(self, units: Span) -> Span:
        """The query heads of some units."""
        per_unit = self.q_heads // max(self.unit_count, 1)
        return units[0] * per_unit, units[1] * per_unit


@lru_cache(maxsize=4096)
def partition_heads(q_heads: int, kv_heads: int, world_size: int, stages: int = 1) -> HeadPartition:
    """The division that loads the busiest rank least, with the fewest copies of key/value heads.

    Heads that do not divide by the ranks leave some ranks with fewer heads, or none.

    Args:
        q_heads: query heads, a multiple of `kv_heads`.
        kv_heads: key/value heads.
        world_size: ranks of the axis.
        stages: how many stages there should be, if every rank has so many units (made by copies where it must be).
    """
    if kv_heads == 0:  # as uneven shards of heads over another axis may leave it
        return HeadPartition(q_heads, kv_heads, world_size, copies=1, stages=1)
    group = q_heads // kv_heads
    divisors = [copies for copies in range(1, group + 1) if group % copies == 0]

    def busiest(copies: int) -> int:
        return -(-kv_heads * copies // world_size) * (group // copies)

    least = min(map(busiest, divisors))
    balanced = [copies for copies in divisors if busiest(copies) == least]

    def units_of_each(copies: int) -> int:
        return kv_heads * copies // world_size

    copies = next((copies for copies in balanced if units_of_each(copies) >= stages), balanced[-1])
    if units_of_each(copies) < stages:
        stages = max(1, units_of_each(copies))
        copies = next((copies for copies in balanced if units_of_each(copies) >= stages), balanced[0])
    return HeadPartition(q_heads, kv_heads, world_size, copies, stages)


@dataclass(frozen=True)
class HeadStaging:
    """How finely Ulysses cuts the work by heads, so that exchanges hide under computation."""

    flops_per_stage: float = 0.3e12
    """Operations of a rank that a stage should have at least (half a millisecond on an H200): launches cost time."""
    more_unhidden: float = 3.0
    """Times as many where attention does not hide exchanges (measured on 4 H200s, no ring around them: docs/log.md)."""
    most: int = 4

    def stages(self, shape: CallSpec, world_size: int, publishes: bool) -> int:
        """As many as are worthwhile and divide a rank's query heads."""
        groups = shape.partition.groups()
        least = self.flops_per_stage * (1.0 if hides_exchanges(shape, publishes) else self.more_unhidden)
        worthwhile = int(shape.flops(groups) / groups[0].world_size / least)
        heads = max(shape.q_heads // world_size, 1)
        return next(count for count in range(max(1, min(self.most, worthwhile)), 0, -1) if heads % count == 0)


def hides_exchanges(shape: CallSpec, publishes: bool) -> bool:
    """Whether exchanges of heads hide under attention.

    What ranks publish in shared memory is copied within a GPU, by a kernel, which those that mask by row leave no
    multiprocessor to, and cuDNN's causal ones do towards their end (measured on H200s).
    """
    return shape.masking is Masking.BY_SHAPE or not publishes


DEFAULT_HEAD_STAGING = HeadStaging()


def with_heads(shape: CallSpec, heads: HeadPartition, units: Span) -> CallSpec:
    """The shape of attention with some units of heads."""
    first, last = heads.query_heads(units)
    return replace(shape, q_heads=last - first, kv_heads=units[1] - units[0])
