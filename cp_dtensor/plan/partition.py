"""Partitions of a sequence and of heads over one or more mesh axes. Integers only.

The whole partition is over all ranks, rank = outer rank * inner size + inner rank. Ulysses inside of a ring and nested
rings use partitions of single axes, which derive from the whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

from cp_dtensor.plan.plan import TilePlan, ring_plan
from cp_dtensor.plan.tiling import GatheredRows, GroupSegments, Masking, Tiling, rows_in_order, tiling_of
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import CachedHash, Layout, Segment, Span, chunk
from cp_dtensor.spec.masks import Full, Mask, is_plain, workload_by_rank

BACKWARD_FLOPS = 2.5
"""FLOPs of backward over FLOPs of forward: five matrix products instead of two."""


class Partition(ABC):
    """Positions of all ranks' queries and keys. A frozen value that is quick to hash."""

    def groups(self) -> tuple[GroupSegments, ...]:
        """Return the segments of every rank, by batch groups."""
        return _groups_of(self)

    @abstractmethod
    def find_groups(self) -> tuple[GroupSegments, ...]:
        """Compute `groups`, which are cached: each step of a nested ring asks for those of the whole partition."""

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of the whole sequence, to which masks refer; these ranks may have only a part of it."""


@lru_cached
def _groups_of(partition: Partition) -> tuple[GroupSegments, ...]:
    return partition.find_groups()


class SequencePartition(Partition):
    """A partition of a whole sequence over all its ranks. Subclasses are dataclasses with these fields."""

    q_len: int
    kv_len: int
    batch_size: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.kv_len

    def resized(self, q_len: int, kv_len: int, batch_size: int) -> SequencePartition:
        """Return the partition of other lengths and another batch size by the same rule."""
        resized: SequencePartition = replace(self, q_len=q_len, kv_len=kv_len, batch_size=batch_size)  # type: ignore[type-var]
        return resized


@dataclass(frozen=True)
class LayoutPartition(SequencePartition):
    """Queries and keys divided by a layout."""

    layout: Layout
    q_len: int
    kv_len: int
    batch_size: int
    world_size: int

    def find_groups(self) -> tuple[GroupSegments, ...]:
        def by_rank(length: int, group: int) -> tuple[tuple[Segment, ...], ...]:
            return tuple(self.layout.segments(length, rank, self.world_size, group) for rank in range(self.world_size))

        return tuple(
            GroupSegments(batch, by_rank(self.q_len, group), by_rank(self.kv_len, group))
            for group, batch in enumerate(self.layout.batch_groups(self.batch_size))
        )


_ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class CallSpec(CachedHash):
    """One attention call, or its part on one axis or with some heads: all that its plan and kernels depend on.

    Plans are cached by this value. Equal on every rank but for the index of the device.
    """

    partition: Partition
    mask: Mask
    batch_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    """torch's name, such as "bfloat16"."""
    masking: Masking = Masking.BY_SHAPE
    device: str = "cpu"
    """torch's name, such as "cuda:0"."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability; None on other devices."""
    latent_dims: tuple[int, int] | None = None
    """Dims of a compressed latent and a rotary key, if these travel in place of K/V: `kv_heads` is 1 then."""
    deterministic: bool = False
    """True if gradients must be the same bits in every run."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZES.get(self.dtype, 1)

    @property
    def device_type(self) -> str:
        """The device without its index."""
        return self.device.partition(":")[0]

    @property
    def tiling(self) -> Tiling:
        """The tiles of each rank."""
        return tiling_of(self.partition.groups(), self.mask, self.masking, self.partition.lengths)

    def flops(self, groups: Sequence[GroupSegments]) -> float:
        """Return the FLOPs of forward, all ranks together; masked pairs do not count."""
        q_len, kv_len = (
            sum(segment.length for segments in by_rank for segment in segments)
            for by_rank in (groups[0].q_by_rank, groups[0].kv_by_rank)
        )
        pairs = float(self.mask.pairs(*self.partition.lengths))
        if (q_len, kv_len) != self.partition.lengths:  # a part of the sequence: assumed to be like the rest
            pairs *= q_len * kv_len / max(self.partition.lengths[0] * self.partition.lengths[1], 1)
        return 2.0 * self.batch_size * self.q_heads * pairs * (self.head_dim + self.v_head_dim)

    @property
    def busiest_rank(self) -> int | None:
        """The rank with the most attended pairs; None for cross attention, and for stripes, where counting is slow."""
        groups, (q_len, kv_len) = self.partition.groups(), self.partition.lengths
        segments = (segment for group in groups for by_rank in group.q_by_rank for segment in by_rank)
        if q_len != kv_len or not all(segment.is_contiguous for segment in segments):
            return None
        pairs = workload_by_rank([(group.batch, group.q_by_rank) for group in groups], self.mask, q_len)
        return pairs.index(max(pairs))

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Dims of the two tensors that travel: keys and values, or latents and rotary keys."""
        return self.latent_dims or (self.head_dim, self.v_head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of what travels of one token and key/value head, all batch rows."""
        return self.batch_size * sum(self.kv_dims) * self.itemsize

    @property
    def dims(self) -> str:
        """Head dims as text, "128"; "192/128" if those of values differ."""
        return f"{self.head_dim}" if self.head_dim == self.v_head_dim else f"{self.head_dim}/{self.v_head_dim}"

    def __str__(self) -> str:
        latents = "" if self.latent_dims is None else f" from latents of {' + '.join(map(str, self.latent_dims))}"
        return f"{self.dtype} on {self.device_type}, {self.q_heads}:{self.kv_heads} heads of {self.dims}{latents}"


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class AxisPartition(Partition):
    """Partition over the outer axes or the inner ones, derived from the whole partition."""

    whole: Partition
    inner_size: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.whole.lengths

    def _block(self, by_rank: tuple[Segments, ...], outer_rank: int) -> tuple[Segments, ...]:
        """Return the segments of the inner axis of an outer rank."""
        return by_rank[outer_rank * self.inner_size : (outer_rank + 1) * self.inner_size]


@dataclass(frozen=True)
class MergedPartition(AxisPartition):
    """Partition over the outer axis where each inner axis has exchanged heads for rows (Ulysses inside of a ring)."""

    def find_groups(self) -> tuple[GroupSegments, ...]:
        whole = self.whole.groups()
        shards = [segments for group in whole for segments in (*group.q_by_rank, *group.kv_by_rank)]
        unbroken = all(segment.is_contiguous for segments in shards for segment in segments)
        queries = self._merged([group.q_by_rank for group in whole], unbroken)
        keys = self._merged([group.kv_by_rank for group in whole], unbroken)
        return tuple(map(GroupSegments, (group.batch for group in whole), queries, keys))

    def rows(self, outer_rank: int) -> tuple[GatheredRows, GatheredRows]:
        """Return the places of the inner ranks' queries, and of their K/V, among their merged rows."""
        whole = self.whole.groups()[0]
        queries, keys = (self._block(by_rank, outer_rank) for by_rank in (whole.q_by_rank, whole.kv_by_rank))
        return rows_in_order(queries), rows_in_order(keys)

    def _merged(self, of_groups: list[tuple[Segments, ...]], unbroken: bool) -> list[tuple[Segments, ...]]:
        """Return every outer rank's segments for each batch group, in the order of the first group's positions.

        Segments are joined only if all are unbroken, since causal tiles need stripes of equal periods.
        """
        merged = []  # by outer rank, then by segment, then by batch group
        for outer_rank in range(len(of_groups[0]) // self.inner_size):
            blocks = [self._block(by_rank, outer_rank) for by_rank in of_groups]
            segments = [[block[i][part] for block in blocks] for i, part in rows_in_order(blocks[0]).places]
            merged.append(_joined(segments) if unbroken else segments)
        most = max(map(len, merged))  # as many on every rank
        nothing = [by_rank[0][0]._replace(length=0) for by_rank in of_groups]
        padded = [segments + [nothing] * (most - len(segments)) for segments in merged]
        return [
            tuple(tuple(of_group[index] for of_group in segments) for segments in padded)
            for index in range(len(of_groups))
        ]


@dataclass(frozen=True)
class OuterPartition(AxisPartition):
    """Partition over the outer axis of a nested ring, for ranks of equal inner rank.

    K/V go to the rank of each inner axis that has the same inner rank; the queries are those of the whole inner axis.
    The whole partition is that of all ranks, or the `InnerPartition` of a ring further out.
    """

    inner_rank: int

    def find_groups(self) -> tuple[GroupSegments, ...]:
        found = []
        for group in self.whole.groups():
            outer_ranks = range(len(group.q_by_rank) // self.inner_size)
            queries = tuple(tuple(chain.from_iterable(self._block(group.q_by_rank, outer))) for outer in outer_ranks)
            found.append(GroupSegments(group.batch, queries, group.kv_by_rank[self.inner_rank :: self.inner_size]))
        return tuple(found)


@dataclass(frozen=True)
class InnerPartition(AxisPartition):
    """Partition over an inner axis of a nested ring: its own queries, and the K/V of outer rank `source`."""

    outer_rank: int
    source: int

    def find_groups(self) -> tuple[GroupSegments, ...]:
        mine, source = self.outer_rank, self.source
        return tuple(
            GroupSegments(group.batch, self._block(group.q_by_rank, mine), self._block(group.kv_by_rank, source))
            for group in self.whole.groups()
        )


def nested_rings(
    spec: CallSpec, outer_rank: int, inner_size: int, inner_rank: int, head_groups: Span
) -> tuple[TilePlan, dict[Span, CallSpec]]:
    """Return the plan of a nested ring over the outer axis, and its inner rings by hop and number of key heads.

    `head_groups`: groups of heads of forward and of backward.
    """
    # Direct hops between ranks with the same inner rank.
    outer = replace(spec, partition=OuterPartition(spec.partition, inner_size, inner_rank))
    plan, rings = ring_plan(outer.tiling, outer_rank, spec.kv_heads, *head_groups), dict[Span, CallSpec]()
    for step in (*plan.forward, *plan.backward):
        heads = step.heads[1] - step.heads[0]
        if (step.hop, heads) not in rings:
            source = (outer_rank - step.hop) % plan.world_size
            partition = InnerPartition(spec.partition, inner_size, outer_rank, source)
            q_heads = spec.q_heads // max(spec.kv_heads, 1) * heads
            rings[step.hop, heads] = replace(spec, partition=partition, kv_heads=heads, q_heads=q_heads)
    return plan, rings


def _joined(segments: list[list[Segment]]) -> list[list[Segment]]:
    """Join adjacent segments that together are an unbroken range in every batch group."""
    joined: list[list[Segment]] = []
    for here in segments:
        pairs = list(zip(joined[-1], here, strict=True)) if joined else []
        if pairs and all(before.start + before.length == segment.start for before, segment in pairs):
            joined[-1] = [Segment.contiguous(before.start, segment.start + segment.length) for before, segment in pairs]
        else:
            joined.append(here)
    return joined


_MOST_SHAPED_SEGMENTS = 16
"""Most segments of a shard whose tiles are masked by shape: each pair of segments is a tile."""


def masking_of(
    partition: SequencePartition, mask: Mask, has_bias: bool = False, changes_weights: bool = False,
    deterministic: bool = False,
) -> Masking:  # fmt: skip
    """Return the masking of tiles: by shape, which is fastest, where possible; alike on every rank.

    `changes_weights`: True for dropout and capped logits, which only our own kernels compute.
    """
    if has_bias:
        return Masking.INTERVALS_UNBROKEN
    if changes_weights:
        return Masking.INTERVALS_IN_RUNS
    # Few of torch's kernels on GPUs are deterministic, and those are slower than ours.
    if deterministic or not is_plain(mask, *partition.lengths):
        return Masking.INTERVALS
    group = partition.groups()[0]
    shards = (*group.q_by_rank, *group.kv_by_rank)
    # Causal tiles between stripes of several tokens are neither rectangles nor triangles.
    has_stripes = any(not each.is_contiguous and each.block > 1 for segments in shards for each in segments)
    is_simple = max(map(len, shards)) <= _MOST_SHAPED_SEGMENTS and (mask == Full() or not has_stripes)
    return Masking.BY_SHAPE if is_simple else Masking.INTERVALS


# Heads


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
        """Return the groups of a rank, or of one of its stages; ranks and stages differ by at most one group."""
        span = chunk((0, self.kv_group_count), self.world_size, rank)
        return span if stage is None else chunk(span, self.stages, stage)

    def query_heads(self, kv_groups: Span) -> Span:
        """Return the query heads of some groups."""
        count = max(self.kv_group_count, 1)
        return -(-self.q_heads * kv_groups[0] // count), -(-self.q_heads * kv_groups[1] // count)


@lru_cache(maxsize=4096)
def partition_heads(q_heads: int, kv_heads: int, world_size: int, stages: int = 1) -> HeadPartition:
    """Return the partition with the fewest query heads on the busiest rank, and then the least replication.

    If heads do not divide by the ranks, some ranks have fewer heads or none. Every rank that has a group has one in
    each stage; if there are too many `stages` for that, there are fewer.
    """
    if kv_heads == 0:  # possible where heads are sharded unevenly over another axis
        return HeadPartition(q_heads, kv_heads, world_size, replication=1, stages=1)
    ratio = q_heads // kv_heads

    def busiest(times: int) -> int:
        return -(-kv_heads * times // world_size) * (ratio // times)

    replication = min((times for times in range(1, ratio + 1) if ratio % times == 0), key=busiest)
    stages = max(1, min(stages, kv_heads * replication // world_size))
    return HeadPartition(q_heads, kv_heads, world_size, replication, stages)


def partition_call(spec: CallSpec, world_size: int, stages: int) -> HeadPartition:
    """Return `partition_heads` of a call. Of latents, each rank gets one copy, in one stage, for all of its heads."""
    if spec.latent_dims is None:
        return partition_heads(spec.q_heads, spec.kv_heads, world_size, stages)
    return HeadPartition(spec.q_heads, 1, world_size, replication=min(world_size, spec.q_heads), stages=1)


_MORE_UNHIDDEN = 2.0
"""Multiplier of `flops_per_stage` if exchanges do not overlap attention. 4 H200s: 0.3e12 is too little, and 1.2e12 too
much for one length (docs/decisions.md#twice-as-much-work-where-nothing-is-hidden)."""


def head_stages(
    spec: CallSpec, world_size: int, publishes: bool, *, flops_per_stage: float = 0.4e12, most: int = 4
) -> int:
    """Return the number of stages of Ulysses that are worthwhile and divide a rank's KV-head groups.

    Exchanges of heads overlap the computation of other stages. Launches cost time, so a stage has at least
    `flops_per_stage` FLOPs of a rank in forward, 0.7 ms on an H200 (docs/decisions.md#a-stage-has-a-least-of-work). It
    has whole groups, whose parts would each need their K/V (docs/decisions.md#a-stage-of-ulysses-has-whole-groups).
    """
    groups = spec.partition.groups()
    least = flops_per_stage * (1.0 if hides_exchanges(spec, publishes) else _MORE_UNHIDDEN)
    worthwhile = int(spec.flops(groups) / groups[0].world_size / least)
    of_rank = max(partition_heads(spec.q_heads, spec.kv_heads, world_size).kv_group_count // world_size, 1)
    return next(count for count in range(max(1, min(most, worthwhile)), 0, -1) if of_rank % count == 0)


def hides_exchanges(spec: CallSpec, publishes: bool) -> bool:
    """Return whether exchanges of heads overlap attention.

    Ranks write to symmetric buffers (`publishes`) by a kernel that copies within a GPU. Interval-masked kernels leave
    it no multiprocessors; cuDNN's causal kernels do towards their end (measured on H200s).
    """
    return spec.masking is Masking.BY_SHAPE or not publishes


def with_heads(spec: CallSpec, heads: HeadPartition, kv_groups: Span) -> CallSpec:
    """Return the shape of attention with some KV-head groups only."""
    first, last = heads.query_heads(kv_groups)
    return replace(spec, q_heads=last - first, kv_heads=kv_groups[1] - kv_groups[0])
