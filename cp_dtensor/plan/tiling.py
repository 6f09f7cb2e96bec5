"""Schedules: which tiles of the attention matrix a rank computes, and from whose keys and values.

Pure functions from layouts and masks to tuples of frozen `Tile`s. Forward, backward, the pictures in the docs and the
tests read the same schedule. The law that the tests hold it to: over all ranks, tiles cover every allowed
(query, key) pair exactly once, and nothing else.
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
    """For one batch group: the query segments and the key/value segments of every rank of the axis."""

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
    """What a layout says of one call.

    Args:
        layout: the layout of queries and of keys and values.
        q_len: global number of queries.
        kv_len: global number of keys.
        batch_size: rows of the batch.
        world_size: number of ranks of the axis.
    """

    def by_rank(length: int, group: int) -> tuple[tuple[Segment, ...], ...]:
        return tuple(layout.segments(length, rank, world_size, group) for rank in range(world_size))

    return tuple(
        GroupSegments(batch, by_rank(q_len, group), by_rank(kv_len, group))
        for group, batch in enumerate(layout.batch_groups(batch_size))
    )


@dataclass(frozen=True)
class GatheredRows:
    """Where rows of all ranks lie in a buffer, without gaps.

    Shards are cut into parts: their segments, or pieces of these. Parts stand in the order of their positions, so
    whatever a layout does, a causal prefix is one range of rows. (Stripes interleave and cannot: they stand rank after
    rank.)
    """

    lengths: tuple[tuple[int, ...], ...]
    """`lengths[rank][part]`: rows of the part-th part of that rank's shard."""
    starts: tuple[tuple[int, ...], ...]
    """`starts[rank][part]`: its first row in the buffer; -1 if it is not there."""

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
        """(rank, part) of all that have rows in the buffer, as they stand there."""
        filled = [(rank, part) for rank, row in enumerate(self.lengths) for part, length in enumerate(row) if length]
        filled = [(rank, part) for rank, part in filled if self.starts[rank][part] >= 0]
        return sorted(filled, key=lambda place: self.starts[place[0]][place[1]])

    @cached_property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return max(map(sum, self.lengths))

    def span(self, rank: int, part: int) -> Span:
        """Rows of the buffer that hold `rank`'s part."""
        start = self.starts[rank][part]
        return start, start + self.lengths[rank][part]

    def local_span(self, rank: int, part: int) -> Span:
        """The same rows, counted in `rank`'s own shard."""
        start = sum(self.lengths[rank][:part])
        return start, start + self.lengths[rank][part]


def tiles_against(groups: Iterable[GroupSegments], rank: int, source: int, mask: Mask) -> tuple[Tile, ...]:
    """Tiles of `rank`'s queries against the shard of `source`, whose rows they count."""
    return tuple(
        replace(tile, source=source, batch=group.batch)
        for group in groups
        for tile in joined(_tiles_between(group.q_by_rank[rank], group.kv_by_rank[source], mask))
    )


def gathered_tiles(groups: Sequence[GroupSegments], rank: int, mask: Mask) -> tuple[Tile, ...]:
    """Tiles of `rank`'s queries against all other ranks' keys, counting rows of the gathered buffer.

    Neighbours are joined, so head-tail causal takes two large tiles (and the triangle of the own shard) whatever the
    number of ranks. `source` is None.
    """
    rows = gathered_rows(groups)
    tiles: list[Tile] = []
    for group in groups:
        tiles += joined(
            [
                replace(tile, batch=group.batch, kv=_to_buffer_rows(tile.kv, source, rows))
                for source in range(rows.world_size)
                if source != rank
                for tile in _tiles_between(group.q_by_rank[rank], group.kv_by_rank[source], mask)
            ]
        )
    return tuple(tiles)


def recv_parts(groups: Iterable[GroupSegments], rank: int, source: int, mask: Mask) -> tuple[int, ...]:
    """The parts of `source`'s shard of which `rank`'s queries see anything: only these need to travel.

    Under head-tail causal a rank wants the tails of later ranks only.
    """
    return tuple(
        sorted(
            {
                part
                for group in groups
                for part, kv in enumerate(group.kv_by_rank[source])
                if _tiles_between(group.q_by_rank[rank], (kv,), mask)
            }
        )
    )


def gathered_rows(groups: Sequence[GroupSegments]) -> GatheredRows:
    """The buffer that `gathered_tiles` speaks of. All batch groups have the same lengths."""
    return rows_in_order(groups[0].kv_by_rank)


def rows_in_order(by_rank: Sequence[Sequence[Segment]]) -> GatheredRows:
    """A buffer of the rows of all ranks, segments in the order of their positions."""
    lengths = tuple(tuple(segment.length for segment in segments) for segments in by_rank)
    places = [(rank, part) for rank, segments in enumerate(by_rank) for part in range(len(segments))]
    places.sort(key=lambda place: by_rank[place[0]][place[1]].start)
    starts = [list(row) for row in lengths]
    row = 0
    for rank, part in places:
        starts[rank][part] = row
        row += lengths[rank][part]
    return GatheredRows(lengths, tuple(map(tuple, starts)))


def _tiles_between(q: tuple[Segment, ...], kv: tuple[Segment, ...], mask: Mask) -> list[Tile]:
    """Tiles between the local rows of two shards, with `source` and `batch` left for the caller."""
    if mask == Causal() and q == kv and _in_order(q):  # the whole shard is one triangle
        length = sum(segment.length for segment in q)
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


def _in_order(segments: tuple[Segment, ...]) -> bool:
    """Whether local order is the order of positions."""
    return all(one.last < other.start for one, other in pairwise(segment for segment in segments if segment.length))


def _segment_tiles(q: Segment, kv: Segment, mask: Mask) -> Iterator[tuple[Span, Span, TileMask]]:
    """Rectangles and triangles that cover what `q` may see of `kv`, in rows of the two segments. May yield empties."""
    if mask == Full():
        yield (0, q.length), (0, kv.length), FULL_TILE
    elif q.is_contiguous and kv.is_contiguous:
        yield from _contiguous_causal(q, kv)
    else:
        yield from _striped_causal(q, kv)


def _contiguous_causal(q: Segment, kv: Segment) -> Iterator[tuple[Span, Span, TileMask]]:
    # Rows before the diagonal reaches kv see nothing. Then `before` keys lie below the diagonal's first row (a
    # rectangle), the diagonal runs (a triangle), and rows past the end of kv see all of it (a rectangle).
    first = min(max(kv.start - q.start, 0), q.length)
    before = min(max(q.start - kv.start, 0), kv.length)
    diagonal = min(q.length - first, kv.length - before)
    yield (first, first + diagonal), (0, before), FULL_TILE
    yield (first, first + diagonal), (before, before + diagonal), CAUSAL_TILE
    yield (first + diagonal, q.length), (0, kv.length), FULL_TILE


def _striped_causal(q: Segment, kv: Segment) -> Iterator[tuple[Span, Span, TileMask]]:
    if not q.block == kv.block == 1 or q.period != kv.period:
        raise NotImplementedError(f"causal tiles by shape need stripes of one token and of equal periods: {q} and {kv}")
    # Row i sees column j iff j - i <= (q.start - kv.start) // period: a diagonal, as without stripes.
    ahead = -((q.start - kv.start) // q.period)
    yield from _contiguous_causal(Segment.contiguous(0, q.length), Segment.contiguous(ahead, ahead + kv.length))


def _shift(span: Span, offset: int) -> Span:
    return (span[0] + offset, span[1] + offset)


def _to_buffer_rows(kv: Span, source: int, rows: GatheredRows) -> Span:
    """Rows of `source`'s shard as rows of the gathered buffer. A tile never crosses parts."""
    for part in range(len(rows.lengths[source])):
        start, stop = rows.local_span(source, part)
        if start <= kv[0] < stop:
            return _shift(kv, rows.starts[source][part] - start)
    raise AssertionError(f"rows {kv} lie outside of the shard of rank {source}")


# Which tiles a rank computes, and which keys travel for them: of plain masks by shape, of others by row. A tiling
# is of all ranks of an axis, and the same on each.

RUN = 16
"""Positions: a run of so many that begins at a multiple of it holds whole groups of those that share random numbers."""


class Masking(Enum):
    """How tiles are masked."""

    BY_SHAPE = "by shape"
    """Rectangles and triangles, of which every backend has fast kernels. For plain masks."""
    INTERVALS = "by row"
    """Every row sees an interval of columns. For any mask."""
    INTERVALS_IN_RUNS = "by row, in runs of positions"
    """Likewise, and where shards are in runs of `RUN` positions, so are tiles: dropout is faster."""
    INTERVALS_UNBROKEN = "by row, of unbroken columns"
    """Likewise, and the columns of a tile have neighbouring positions, so that a bias can be cut."""


class Tiling(ABC):
    """Tiles, and transfers of what they read."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[GroupSegments]:
        """What all ranks have."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @abstractmethod
    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        """Tiles of `rank`'s queries against the shard of `source` (its own too), whose rows they count."""

    @abstractmethod
    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        """Tiles of `rank`'s queries against all other ranks' keys, counting rows of `gathered_rows`."""

    @abstractmethod
    def gathered_rows(self, rank: int) -> GatheredRows:
        """The buffer of `rank` that `gathered_tiles` speaks of. Lengths of parts are the same for all ranks."""

    @abstractmethod
    def wanted(self, rank: int, source: int) -> tuple[int, ...]:
        """The parts of `source`'s shard of which `rank`'s queries see anything: only these travel. None of its own."""

    def most_rows(self) -> int:
        """Rows of the longest of all ranks' buffers."""
        return max(self.gathered_rows(rank).total for rank in range(self.world_size))


@dataclass(frozen=True)
class ShapeTiling(Tiling):
    """Rectangles and triangles; parts are segments. Every rank's buffer has room for all keys."""

    _groups: tuple[GroupSegments, ...]
    mask: Mask

    @property
    def groups(self) -> Sequence[GroupSegments]:
        return self._groups

    @property
    def world_size(self) -> int:
        return self._groups[0].world_size

    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        return tiles_against(self._groups, rank, source, self.mask)

    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        return gathered_tiles(self._groups, rank, self.mask)

    def gathered_rows(self, rank: int) -> GatheredRows:
        return gathered_rows(self._groups)

    def wanted(self, rank: int, source: int) -> tuple[int, ...]:
        return recv_parts(self._groups, rank, source, self.mask) if rank != source else ()
