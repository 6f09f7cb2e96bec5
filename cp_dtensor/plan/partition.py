"""Partitions of a sequence over one or two mesh axes. Integers only.

The whole partition is over all ranks, rank = outer rank * inner size + inner rank. Ulysses inside of a ring and nested
rings use partitions of single axes, which derive from the whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cp_dtensor.plan.interval_tiling import tiling_of
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiling import GatheredRows, GroupSegments, Masking, Tiling, group_segments, rows_in_order
from cp_dtensor.spec.layouts import CachedHash, Layout, Segment
from cp_dtensor.spec.load_balance import workload_of, workload_of_segments
from cp_dtensor.spec.masks import Full, Mask, is_plain

BACKWARD_FLOPS = 2.5
"""FLOPs of backward over FLOPs of forward: five matrix products instead of two."""


class Partition(ABC):
    """Positions of all ranks' queries and keys. A frozen value that is quick to hash."""

    @abstractmethod
    def groups(self) -> tuple[GroupSegments, ...]:
        """Returns the segments of every rank, by batch groups."""

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of the whole sequence, to which masks refer; these ranks may have only a part of it."""


class SequencePartition(Partition):
    """A partition of a whole sequence over all its ranks. Subclasses are dataclasses with these fields."""

    q_len: int
    kv_len: int
    batch_size: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.kv_len

    def resized(self, q_len: int, kv_len: int, batch_size: int) -> SequencePartition:
        """The partition of other lengths and another batch size by the same rule."""
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

    def groups(self) -> tuple[GroupSegments, ...]:
        return group_segments(self.layout, self.q_len, self.kv_len, self.batch_size, self.world_size)


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

    __hash__ = CachedHash.__hash__

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
        """Operations of forward, all ranks together; masked pairs do not count."""
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
        pairs = [0] * len(groups[0].q_by_rank)
        for group in groups:
            rows = 1 if self.mask.batch_size else group.batch[1] - group.batch[0]
            workloads = workload_of(self.mask, q_len, group.batch)
            for rank, workload in enumerate(workload_of_segments(group.q_by_rank, workloads)):
                pairs[rank] += rows * workload
        return pairs.index(max(pairs))

    @property
    def kv_dims(self) -> tuple[int, int]:
        """Dims of the two tensors that travel: keys and values, or latents and rotary keys."""
        return self.latent_dims or (self.head_dim, self.v_head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of what travels of one token and key/value head, all batch rows."""
        return self.batch_size * sum(self.kv_dims) * self.itemsize

    def __str__(self) -> str:
        heads = f"{self.q_heads}:{self.kv_heads} heads of {self.head_dim}"
        values = "" if self.head_dim == self.v_head_dim else f" (values of {self.v_head_dim})"
        latents = "" if self.latent_dims is None else f" from latents of {' + '.join(map(str, self.latent_dims))}"
        return f"{self.dtype} on {self.device_type}, {heads}{values}{latents}"


Segments = tuple[Segment, ...]


@dataclass(frozen=True)
class AxisPartition(Partition):
    """Partition over one of two axes, derived from the whole partition."""

    whole: Partition
    inner_size: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.whole.lengths

    def _block(self, by_rank: tuple[Segments, ...], outer_rank: int) -> tuple[Segments, ...]:
        """Returns the segments of the inner axis of an outer rank."""
        return by_rank[outer_rank * self.inner_size : (outer_rank + 1) * self.inner_size]


@dataclass(frozen=True)
class MergedPartition(AxisPartition):
    """Partition over the outer axis where each inner axis has exchanged heads for rows (Ulysses inside of a ring)."""

    def groups(self) -> tuple[GroupSegments, ...]:
        whole = self.whole.groups()
        unbroken = all(
            segment.is_contiguous
            for group in whole
            for segments in (*group.q_by_rank, *group.kv_by_rank)
            for segment in segments
        )
        queries = self._merged([group.q_by_rank for group in whole], unbroken)
        keys = self._merged([group.kv_by_rank for group in whole], unbroken)
        return tuple(map(GroupSegments, (group.batch for group in whole), queries, keys))

    def query_rows(self, outer_rank: int) -> GatheredRows:
        """Returns the places of the inner ranks' queries among their merged rows."""
        return rows_in_order(self._block(self.whole.groups()[0].q_by_rank, outer_rank))

    def key_rows(self, outer_rank: int) -> GatheredRows:
        """Returns the places of the inner ranks' K/V among their merged rows."""
        return rows_in_order(self._block(self.whole.groups()[0].kv_by_rank, outer_rank))

    def _merged(self, of_groups: list[tuple[Segments, ...]], unbroken: bool) -> list[tuple[Segments, ...]]:
        """Returns every outer rank's segments for each batch group, in the order of the first group's positions.

        Segments are joined only if all are unbroken, since causal tiles need stripes of equal periods.
        """
        merged = []  # by outer rank, then by segment, then by batch group
        for outer_rank in range(len(of_groups[0]) // self.inner_size):
            blocks = [self._block(by_rank, outer_rank) for by_rank in of_groups]
            segments = [[block[i][part] for block in blocks] for i, part in rows_in_order(blocks[0]).places]
            merged.append(_joined(segments) if unbroken else segments)
        most = max(map(len, merged))  # as many on every rank
        nothing = [replace(by_rank[0][0], length=0) for by_rank in of_groups]
        padded = [segments + [nothing] * (most - len(segments)) for segments in merged]
        return [
            tuple(tuple(of_group[index] for of_group in segments) for segments in padded)
            for index in range(len(of_groups))
        ]


@dataclass(frozen=True)
class OuterPartition(AxisPartition):
    """Partition over the outer axis of a nested ring, for ranks of equal inner rank.

    K/V go to the rank of each inner axis that has the same inner rank; the queries are those of the whole inner axis.
    """

    inner_rank: int

    def groups(self) -> tuple[GroupSegments, ...]:
        def queries(by_rank: tuple[Segments, ...]) -> tuple[Segments, ...]:
            outer_ranks = range(len(by_rank) // self.inner_size)
            return tuple(tuple(chain.from_iterable(self._block(by_rank, outer))) for outer in outer_ranks)

        return tuple(
            GroupSegments(group.batch, queries(group.q_by_rank), group.kv_by_rank[self.inner_rank :: self.inner_size])
            for group in self.whole.groups()
        )


@dataclass(frozen=True)
class InnerPartition(AxisPartition):
    """Partition over an inner axis of a nested ring: its own queries, and the K/V of outer rank `source`."""

    outer_rank: int
    source: int

    def groups(self) -> tuple[GroupSegments, ...]:
        return tuple(
            GroupSegments(
                group.batch, self._block(group.q_by_rank, self.outer_rank), self._block(group.kv_by_rank, self.source)
            )
            for group in self.whole.groups()
        )


def inner_partitions(whole: Partition, plan: TilePlan, inner_size: int) -> list[InnerPartition]:
    """Returns the partition of the inner ring in each step of the outer one, whose plan is `plan`."""
    hops = [0 if step.transfer is None or step.transfer.hop is None else step.transfer.hop for step in plan.forward]
    return [InnerPartition(whole, inner_size, plan.rank, (plan.rank - hop) % plan.world_size) for hop in hops]


def _joined(segments: list[list[Segment]]) -> list[list[Segment]]:
    """Joins adjacent segments that together are an unbroken range in every batch group."""
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
    partition: SequencePartition, mask: Mask, has_bias: bool = False, has_dropout: bool = False,
    deterministic: bool = False,
) -> Masking:  # fmt: skip
    """Returns the masking of tiles: by shape, which is fastest, where possible; alike on every rank.

    Args:
        deterministic: the result of `is_deterministic`.
    """
    if has_bias:
        return Masking.INTERVALS_UNBROKEN
    if has_dropout:
        return Masking.INTERVALS_IN_RUNS
    # Few of torch's kernels on GPUs are deterministic, and those are slower than ours.
    if deterministic or not is_plain(mask, *partition.lengths):
        return Masking.INTERVALS
    return Masking.BY_SHAPE if _has_simple_tiles(partition, mask == Full()) else Masking.INTERVALS


def _has_simple_tiles(partition: Partition, is_full: bool) -> bool:
    """True if few rectangles and triangles cover a plain mask.

    Causal tiles between stripes of several tokens are neither.
    """
    group = partition.groups()[0]
    shards = (*group.q_by_rank, *group.kv_by_rank)
    has_stripes = any(not each.is_contiguous and each.block > 1 for segments in shards for each in segments)
    return max(map(len, shards)) <= _MOST_SHAPED_SEGMENTS and (is_full or not has_stripes)
