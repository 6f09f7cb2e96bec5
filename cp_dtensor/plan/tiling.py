"""Tiling: the tiles that each rank computes, and the K/V rows that it receives for them.

Pure functions from layouts and masks to frozen `Tile`s. Over all ranks, tiles cover every allowed (query, key) pair
exactly once and no other; the tests hold every tiling to this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, Tile, TileMask, joined
from cp_dtensor.spec.layouts import Layout, Segment, Span
from cp_dtensor.spec.masks import Causal, Full, Mask


@dataclass(frozen=True)
class GroupSegments:
    """Query segments and key/value segments of every rank of an axis, for one batch group."""

    batch: Span
    q_by_rank: tuple[tuple[Segment, ...], ...]
    kv_by_rank: tuple[tuple[Segment, ...], ...]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.kv_by_rank)


def group_segments(
    layout: Layout, q_len: int, kv_len: int, batch_size: int, world_size: int
) -> tuple[GroupSegments, ...]:
    """Returns the segments of all ranks for global lengths of queries and keys, by batch groups of a layout."""

    def by_rank(length: int, group: int) -> tuple[tuple[Segment, ...], ...]:
        return tuple(layout.segments(length, rank, world_size, group) for rank in range(world_size))

    return tuple(
        GroupSegments(batch, by_rank(q_len, group), by_rank(kv_len, group))
        for group, batch in enumerate(layout.batch_groups(batch_size))
    )


@dataclass(frozen=True)
class GatheredRows:
    """Places of all ranks' rows in a gathered buffer without gaps.

    Shards are cut into parts: their segments, or pieces of segments. Parts are in the order of their positions, so a
    causal prefix is one range of rows in any layout but stripes, which interleave.
    """

    lengths: tuple[tuple[int, ...], ...]
    """`lengths[rank][part]`: rows of a part of that rank's shard."""
    starts: tuple[tuple[int, ...], ...]
    """`starts[rank][part]`: first row of the part in the buffer; -1 if it is not there."""

    @staticmethod
    def of(lengths: tuple[tuple[int, ...], ...], places: Iterable[tuple[int, int]]) -> GatheredRows:
        """Returns a buffer of the parts at `places`, (rank, part) each, in this order."""
        starts = [[-1] * len(parts) for parts in lengths]
        row = 0
        for rank, part in places:
            starts[rank][part] = row
            row += lengths[rank][part]
        return GatheredRows(lengths, tuple(map(tuple, starts)))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """Rows of the buffer."""
        return sum(self.lengths[rank][part] for rank, part in self.places)

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """(rank, part) of all parts with rows in the buffer, in their order there."""
        parts = [(rank, part) for rank, row in enumerate(self.lengths) for part, length in enumerate(row) if length]
        filled = [(rank, part) for rank, part in parts if self.starts[rank][part] >= 0]
        return sorted(filled, key=lambda place: self.starts[place[0]][place[1]])

    @cached_property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return max(map(sum, self.lengths))

    def span(self, rank: int, part: int) -> Span:
        """Returns the rows of a part in the buffer."""
        start = self.starts[rank][part]
        return start, start + self.lengths[rank][part]

    def local_span(self, rank: int, part: int) -> Span:
        """Returns the rows of a part in its rank's own shard."""
        start = sum(self.lengths[rank][:part])
        return start, start + self.lengths[rank][part]


def rows_in_order(by_rank: Sequence[Sequence[Segment]]) -> GatheredRows:
    """Returns a buffer of the rows of all ranks, with segments in the order of their positions."""
    lengths = tuple(tuple(segment.length for segment in segments) for segments in by_rank)
    places = [(rank, part) for rank, segments in enumerate(by_rank) for part in range(len(segments))]
    return GatheredRows.of(lengths, sorted(places, key=lambda place: by_rank[place[0]][place[1]].start))


def _tiles_between(q: tuple[Segment, ...], kv: tuple[Segment, ...], mask: Mask) -> list[Tile]:
    """Returns tiles between the local rows of two shards; the caller sets `source` and `batch`."""
    filled = [segment for segment in q if segment.length]
    if mask == Causal() and q == kv and all(one.last < other.start for one, other in pairwise(filled)):
        length = sum(segment.length for segment in q)  # positions ascend: the whole shard is one triangle
        return [Tile(None, (0, 0), (0, length), (0, length), CAUSAL_TILE)] if length else []
    tiles = []
    q_row = 0
    for q_segment in q:
        kv_row = 0
        for kv_segment in kv:
            for q_span, kv_span, tile_mask in _segment_tiles(q_segment, kv_segment, mask):
                if q_span[0] < q_span[1] and kv_span[0] < kv_span[1]:
                    tiles.append(Tile(None, (0, 0), _shift(q_span, q_row), _shift(kv_span, kv_row), tile_mask))
            kv_row += kv_segment.length
        q_row += q_segment.length
    return tiles


def _segment_tiles(q: Segment, kv: Segment, mask: Mask) -> Iterator[tuple[Span, Span, TileMask]]:
    """Yields rectangles and triangles between two segments, in rows of these; some may be empty."""
    if mask == Full():
        yield (0, q.length), (0, kv.length), FULL_TILE
        return
    if not (q.is_contiguous and kv.is_contiguous):
        if not q.block == kv.block == 1 or q.period != kv.period:
            raise NotImplementedError(
                f"causal tiles by shape need stripes of one token and of equal periods: {q} and {kv}"
            )
        # Row i sees column j iff j - i <= (q.start - kv.start) // period: a diagonal, as without stripes.
        ahead = -((q.start - kv.start) // q.period)
        q, kv = Segment.contiguous(0, q.length), Segment.contiguous(ahead, ahead + kv.length)
    # Rows before the first key of kv see nothing. The next rows see the `before` keys left of the diagonal (a
    # rectangle) and a triangle. Rows behind the last key of kv see all keys (a rectangle).
    first = min(max(kv.start - q.start, 0), q.length)
    before = min(max(q.start - kv.start, 0), kv.length)
    diagonal = min(q.length - first, kv.length - before)
    yield (first, first + diagonal), (0, before), FULL_TILE
    yield (first, first + diagonal), (before, before + diagonal), CAUSAL_TILE
    yield (first + diagonal, q.length), (0, kv.length), FULL_TILE


def _shift(span: Span, offset: int) -> Span:
    return (span[0] + offset, span[1] + offset)


def _to_buffer_rows(kv: Span, source: int, rows: GatheredRows) -> Span:
    """Returns rows of `source`'s shard as rows of the gathered buffer. A tile is within one part."""
    for part in range(len(rows.lengths[source])):
        start, stop = rows.local_span(source, part)
        if start <= kv[0] < stop:
            return _shift(kv, rows.starts[source][part] - start)
    raise AssertionError(f"rows {kv} lie outside of the shard of rank {source}")


# Tilings

RUN = 16
"""Positions that begin at a multiple of this number and share a draw of dropout's random numbers."""


class Masking(Enum):
    """The masking of tiles: by their shape, or by intervals."""

    BY_SHAPE = "by shape"
    """Rectangles and triangles, for which every backend has fast kernels. For plain masks."""
    INTERVALS = "by row"
    """Every row sees an interval of columns. For any mask."""
    INTERVALS_IN_RUNS = "by row, in runs of positions"
    """Intervals; tiles begin at multiples of `RUN` positions if shards do, which makes dropout faster."""
    INTERVALS_UNBROKEN = "by row, of unbroken columns"
    """Intervals; the columns of a tile have adjacent positions, so that a slice of a bias belongs to them."""


class Tiling(ABC):
    """Tiles of all ranks of an axis, and the K/V rows that they read; the same on every rank."""

    groups: tuple[GroupSegments, ...]
    """Segments of all ranks, by batch groups."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.groups[0].world_size

    @abstractmethod
    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        """Returns tiles of `rank`'s queries against the shard of `source` (maybe its own), in rows of that shard."""

    @abstractmethod
    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        """Returns tiles of `rank`'s queries against all other ranks' keys, in rows of `gathered_rows`."""

    @abstractmethod
    def gathered_rows(self, rank: int) -> GatheredRows:
        """Returns the gathered buffer of `rank`. Lengths of parts are the same for all ranks."""

    @abstractmethod
    def recv_parts(self, rank: int, source: int) -> tuple[int, ...]:
        """Returns the parts of `source`'s shard that `rank`'s queries attend to; no parts of its own shard."""

    def most_rows(self) -> int:
        """Returns the rows of the longest of all ranks' gathered buffers."""
        return max(self.gathered_rows(rank).total for rank in range(self.world_size))


@dataclass(frozen=True)
class ShapeTiling(Tiling):
    """Rectangles and triangles of a plain mask; parts are segments. Gathered buffers have the rows of all ranks."""

    groups: tuple[GroupSegments, ...]
    mask: Mask

    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        return tuple(
            replace(tile, source=source, batch=group.batch)
            for group in self.groups
            for tile in joined(_tiles_between(group.q_by_rank[rank], group.kv_by_rank[source], self.mask))
        )

    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        """See `Tiling`. Causal attention in a head-tail layout takes two tiles with any number of ranks."""
        rows = self.gathered_rows(rank)
        by_group = (
            [
                replace(tile, batch=group.batch, kv=_to_buffer_rows(tile.kv, source, rows))
                for source in range(self.world_size)
                if source != rank
                for tile in _tiles_between(group.q_by_rank[rank], group.kv_by_rank[source], self.mask)
            ]
            for group in self.groups
        )
        return tuple(tile for tiles in by_group for tile in joined(tiles))

    def gathered_rows(self, rank: int) -> GatheredRows:
        return rows_in_order(self.groups[0].kv_by_rank)

    def recv_parts(self, rank: int, source: int) -> tuple[int, ...]:
        if rank == source:
            return ()
        return tuple(
            part
            for part in range(len(self.groups[0].kv_by_rank[source]))
            if any(
                _tiles_between(group.q_by_rank[rank], (group.kv_by_rank[source][part],), self.mask)
                for group in self.groups
            )
        )
