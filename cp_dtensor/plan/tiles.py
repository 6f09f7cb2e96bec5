"""Tiles of the attention matrix, each one attention call, and their masks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import attrgetter
from typing import Any, ClassVar

from cp_dtensor.spec.intervals import IntervalBand, IntervalSet, clipped_bands, count_pairs
from cp_dtensor.spec.layouts import Segment, Span

# Runs of keys


@dataclass(frozen=True)
class KeyRun:
    """Rows of keys whose positions ascend, so that an interval of positions is an interval of rows.

    `segments` follow each other; each begins beyond the end of the one before, and none is empty.

    >>> run = KeyRun((Segment.contiguous(2, 4), Segment.contiguous(6, 9)))
    >>> run.starts, run.rows_before(3), run.rows_before(6), run.rows_before(8), run.position(2)
    ((0, 2, 5), 1, 2, 4, 6)
    """

    segments: tuple[Segment, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each segment, then the number of rows."""
        return tuple(accumulate((segment.length for segment in self.segments), initial=0))

    @property
    def positions(self) -> Span:
        """The range from the first to the last position."""
        return self.segments[0].start, self.segments[-1].last + 1

    def rows_before(self, position: int) -> int:
        """Return the number of rows whose position is smaller."""
        index = bisect_right(self.segments, (position + 1,)) - 1
        return 0 if index < 0 else self.starts[index] + self.segments[index].rows_before(position)

    def position(self, row: int) -> int:
        """Return the position of a row."""
        index = bisect_right(self.starts, row) - 1
        return self.segments[index].position(row - self.starts[index])


def runs_of(pieces: Iterable[tuple[int, Segment]], *, unbroken: bool) -> list[tuple[int, KeyRun]]:
    """Return consecutive rows as few runs, each with its first row.

    `pieces` are first rows and segments, in the order of rows; there may be gaps between rows. If `unbroken`, the
    positions of a run have equal distances.
    """
    runs: list[tuple[int, list[Segment]]] = []
    end = -1
    for row, segment in pieces:
        if segment.length:
            if row == end and _continues(runs[-1][1][-1], segment, unbroken):
                runs[-1][1].append(segment)
            else:
                runs.append((row, [segment]))
            end = row + segment.length
    return [(first, KeyRun(tuple(segments))) for first, segments in runs]


def _continues(before: Segment, segment: Segment, unbroken: bool) -> bool:
    if unbroken:
        return before.is_contiguous and segment.is_contiguous and before.last + 1 == segment.start
    return before.last < segment.start


@dataclass(frozen=True)
class ShapedMask:
    """No mask, or the causal triangle of a square tile: row i sees the columns j <= i."""

    is_causal: bool

    @property
    def is_full(self) -> bool:
        return not self.is_causal


FULL_TILE = ShapedMask(is_causal=False)
CAUSAL_TILE = ShapedMask(is_causal=True)


_FEW_SEGMENTS = 16
"""Pairs of runs with at most so many segments are counted segment by segment, of others estimated."""


@dataclass(frozen=True, eq=False)
class IntervalMask:
    """Row i of a tile sees the columns whose keys are in an interval of its query, or in one of several.

    No row sees a column in two of them. Compared by identity, since tables on devices are cached by mask object.
    """

    sets: tuple[tuple[IntervalSet, ...], ...]
    """For each interval that rows see: one set for all of the tile's batch rows, or one for each."""
    queries: tuple[Segment, ...]
    """The shard of queries; the tile has its rows `q`."""
    q: Span
    keys: KeyRun
    kv: Span
    """The tile's columns, counted in rows of `keys`."""

    is_full: ClassVar[bool] = False
    is_causal: ClassVar[bool] = False

    def union(self, others: Iterable[IntervalMask]) -> IntervalMask:
        """Return the union with masks of the same queries and keys, in the smallest tile that holds all of them."""
        masks = (self, *others)
        rows, columns = [*chain(*[mask.q for mask in masks])], [*chain(*[mask.kv for mask in masks])]
        sets = tuple(chain(*[mask.sets for mask in masks]))
        return replace(self, sets=sets, q=(min(rows), max(rows)), kv=(min(columns), max(columns)))

    @cached_property
    def pairs(self) -> int:
        """Number of (row, column) pairs, on average over batch rows; an estimate for stripes and many segments."""
        total = 0.0
        for bands in chain(*self.sets):
            for segment in self.queries:
                share = segment.length / max(segment.last + 1 - segment.start, 1)  # of a stripe's range
                for band in clipped_bands(bands, (segment.start, segment.last + 1), self.keys.positions):
                    total += share * self._pairs_of(band)
        return int(total) // len(self.sets[0])

    def _pairs_of(self, band: IntervalBand) -> float:
        """Return pairs of all queries of a clipped band with this tile's keys."""
        lo, hi = band.key_range
        if len(self.keys.segments) > _FEW_SEGMENTS:
            return band.pairs * (self.keys.rows_before(hi) - self.keys.rows_before(lo)) / (hi - lo)
        total = 0.0
        for keys in self.keys.segments:
            start, stop = keys.start, keys.last + 1
            if start < hi and lo < stop:
                pairs = count_pairs(((band,),), (band.first, band.last), (start, stop))
                total += keys.length / (stop - start) * pairs
        return total


TileMask = ShapedMask | IntervalMask


# Tiles


@dataclass(frozen=True)
class Tile:
    """One attention call: some local queries against some keys and values."""

    source: int | None
    """The rank whose shard `kv` counts rows of; None if these are rows of the gathered buffer."""
    batch: Span
    """Batch rows."""
    q: Span
    """Rows of the local queries."""
    kv: Span
    mask: TileMask


def joined(tiles: Iterable[Tile]) -> list[Tile]:
    """Return fewer and larger tiles that cover the same pairs: adjacent full tiles are one."""
    for dim, other in (("q", "kv"), ("kv", "q")):
        found: list[Tile] = []
        for tile in sorted(tiles, key=attrgetter(other, dim)):
            last = found[-1] if found else tile
            (start, end), (begin, stop) = getattr(last, dim), getattr(tile, dim)
            is_adjacent = end == begin and getattr(last, other) == getattr(tile, other)
            if is_adjacent and last.mask.is_full and tile.mask.is_full:
                longer: Any = {dim: (start, stop)}
                found[-1] = replace(last, **longer)
            else:
                found.append(tile)
        tiles = found
    return sorted(tiles, key=attrgetter("q", "kv"))


def without_long_triangles(tiles: Iterable[Tile], longest: int) -> tuple[Tile, ...]:
    """Cut every triangle of more than `longest` rows into two of half its size and a square.

    >>> [(t.q, t.kv) for t in without_long_triangles([Tile(0, (0, 1), (0, 4), (0, 4), CAUSAL_TILE)], 2)]
    [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((2, 4), (2, 4))]
    """
    cut: list[Tile] = []
    for tile in tiles:
        (first, last), columns = tile.q, tile.kv[0]
        if tile.mask != CAUSAL_TILE or last - first <= longest:
            cut.append(tile)
            continue
        half = (last - first) // 2
        upper = replace(tile, q=(first, first + half), kv=(columns, columns + half))
        square = replace(tile, q=(first + half, last), kv=upper.kv, mask=FULL_TILE)
        lower = replace(tile, q=square.q, kv=(columns + half, tile.kv[1]))
        cut += without_long_triangles([upper, square, lower], longest)
    return tuple(cut)
