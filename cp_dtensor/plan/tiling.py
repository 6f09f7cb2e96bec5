"""Tiling: the tiles that each rank computes, and the K/V rows that it receives for them.

Over all ranks, tiles cover every allowed (query, key) pair exactly once and no other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate, chain, pairwise, zip_longest

from cp_dtensor.plan.reading import Reading
from cp_dtensor.plan.tiles import (
    CAUSAL_TILE,
    FULL_TILE,
    IntervalMask,
    KeyRun,
    Tile,
    TileMask,
    joined,
    runs_of,
)
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSet, clipped_bands
from cp_dtensor.spec.layouts import Segment, Span, joined_spans
from cp_dtensor.spec.masks import Causal, Full, Mask, interval_sets_of


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
    def of(lengths: tuple[tuple[int, ...], ...], order: Iterable[tuple[int, int]]) -> GatheredRows:
        """Return a buffer of some parts, each (rank, part), in this order."""
        starts = [[-1] * len(parts) for parts in lengths]
        row = 0
        for rank, part in order:
            starts[rank][part] = row
            row += lengths[rank][part]
        return GatheredRows(lengths, tuple(map(tuple, starts)))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.lengths)

    @cached_property
    def most_parts(self) -> int:
        """Parts of the shard that has most; a layout by a permutation may give ranks different numbers."""
        return max(map(len, self.lengths))

    @cached_property
    def total(self) -> int:
        """Rows of the buffer."""
        starts = chain(*self.starts)
        return sum(length for length, start in zip(chain(*self.lengths), starts, strict=True) if start >= 0)

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
        """Return the rows of a part in the buffer."""
        start = self.starts[rank][part]
        return start, start + self.lengths[rank][part]

    def local_span(self, rank: int, part: int) -> Span:
        """Return the rows of a part in its rank's own shard."""
        start = sum(self.lengths[rank][:part])
        return start, start + self.lengths[rank][part]


def rows_in_order(by_rank: Sequence[Sequence[Segment]]) -> GatheredRows:
    """Return a buffer of the rows of all ranks, with segments in the order of their positions."""
    lengths = tuple(tuple(segment.length for segment in segments) for segments in by_rank)
    parts = [(each.start, rank, part) for rank, row in enumerate(by_rank) for part, each in enumerate(row)]
    return GatheredRows.of(lengths, [(rank, part) for _, rank, part in sorted(parts)])


def _with_first_rows(segments: Iterable[Segment]) -> Iterator[tuple[int, Segment]]:
    """Yield segments that follow each other, each with its first row."""
    row = 0
    for segment in segments:
        yield row, segment
        row += segment.length


RUN = 16
"""Positions that begin at a multiple of this number and share a draw of dropout's random numbers."""


class Masking(Enum):
    """The masking of tiles: by their shape, or by intervals."""

    BY_SHAPE = "by shape"
    """Rectangles and triangles, for which every backend has fast kernels. For plain masks."""
    INTERVALS = "by row"
    """Every row sees an interval of columns. For any mask."""
    INTERVALS_TOGETHER = "by row, of several intervals"
    """Every row sees the intervals of all interval sets of the mask, for backends that take several."""
    INTERVALS_IN_RUNS = "by row, in runs of positions"
    """Intervals, for calls that change softmax weights; tiles begin at multiples of `RUN` positions if shards do, which
    makes dropout faster."""
    INTERVALS_UNBROKEN = "by row, of unbroken columns"
    """Intervals; the columns of a tile have adjacent positions, so that a slice of a bias belongs to them."""


class Tiling(ABC):
    """Tiles of all ranks of an axis, and the K/V rows that they read; the same on every rank.

    Shards are cut into parts. A rank gathers the parts of other shards that its queries attend to, in the order of
    their positions and without gaps, so that many of them are one run of keys.
    """

    def __init__(self, groups: tuple[GroupSegments, ...]) -> None:
        self.groups = groups
        """Segments of all ranks, by batch groups."""
        self._rows: dict[int, GatheredRows] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.groups[0].world_size

    @cached_property
    @abstractmethod
    def pieces(self) -> list[list[list[list[Segment]]]]:
        """`pieces[index][owner][part]`: the segments of a part of a shard in a batch group, none of them empty."""

    @cached_property
    @abstractmethod
    def seen(self) -> list[list[list[int]]]:
        """`seen[index][rank]`: the edges of ranges of key positions that a rank's queries see in a batch group."""

    @abstractmethod
    def tiles(self, rank: int, starts: dict[tuple[int, int], int], source: int | None) -> Iterator[Tile]:
        """Yield tiles against parts of shards; `starts` has the first row of each (owner, part), in ascending order."""

    @cached_property
    def reading(self) -> Reading:
        """The parts of other shards that each rank's queries attend to."""
        return Reading(self.pieces, self.seen)

    @cached_property
    def _lengths(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each part of each shard."""
        return tuple(tuple(sum(each.length for each in part) for part in parts) for parts in self.pieces[0])

    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        """Return tiles of `rank`'s queries against the shard of `source` (maybe its own), in rows of that shard."""
        firsts = list(accumulate(self._lengths[source], initial=0))
        parts = range(len(firsts) - 1) if rank == source else self.reading.parts(rank, source)
        return tuple(self.tiles(rank, {(source, part): firsts[part] for part in parts}, source))

    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        """Return tiles of `rank`'s queries against all other ranks' keys, in rows of `gathered_rows`."""
        rows = self.gathered_rows(rank)
        return tuple(self.tiles(rank, {(owner, part): rows.starts[owner][part] for owner, part in rows.places}, None))

    def gathered_rows(self, rank: int) -> GatheredRows:
        """Return the places of parts of shards in the K/V that `rank` gathers; lengths are those of all parts."""
        rows = self._rows.get(rank)
        if rows is None:
            rows = self._rows.setdefault(rank, GatheredRows.of(self._lengths, self.reading.places(rank)))
        return rows


# Tiles by shape


class ShapeTiling(Tiling):
    """Rectangles and triangles of a plain mask; parts are segments."""

    def __init__(self, groups: tuple[GroupSegments, ...], mask: Mask) -> None:
        super().__init__(groups)
        self._mask = mask

    def tiles(self, rank: int, starts: dict[tuple[int, int], int], source: int | None) -> Iterator[Tile]:
        """Yield tiles (see `Tiling`). Causal attention in a head-tail layout takes two, for any number of ranks."""
        for group, pieces in zip(self.groups, self.pieces, strict=True):
            queries = group.q_by_rank[rank]
            filled = [segment for segment in queries if segment.length]
            ascend = all(one.last < other.start for one, other in pairwise(filled))
            if self._mask == Causal() and rank == source and queries == group.kv_by_rank[rank] and filled and ascend:
                whole = 0, sum(segment.length for segment in filled)
                yield Tile(rank, group.batch, whole, whole, CAUSAL_TILE)
                continue
            yield from joined(
                Tile(source, group.batch, _shift(q_span, q_row), _shift(kv_span, start), mask)
                for (owner, part), start in starts.items()
                for keys in pieces[owner][part]
                for q_row, segment in _with_first_rows(queries)
                for q_span, kv_span, mask in _segment_tiles(segment, keys, self._mask)
                if q_span[0] < q_span[1] and kv_span[0] < kv_span[1]
            )

    @cached_property
    def pieces(self) -> list[list[list[list[Segment]]]]:
        return [
            [[[each] if each.length else [] for each in segments] for segments in group.kv_by_rank]
            for group in self.groups
        ]

    @cached_property
    def seen(self) -> list[list[list[int]]]:
        """See `Tiling`. Under a causal mask, queries see all positions up to the last one of theirs."""

        def edges(queries: Sequence[Segment]) -> list[int]:
            last = max((segment.last for segment in queries if segment.length), default=-1)
            return [0, last + 1 if self._mask == Causal() or last < 0 else FAR]

        return [list(map(edges, group.q_by_rank)) for group in self.groups]


def _segment_tiles(q: Segment, kv: Segment, mask: Mask) -> Iterator[tuple[Span, Span, TileMask]]:
    """Yield rectangles and triangles between two segments, in rows of these; some may be empty."""
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


# Tiles of any mask

_MOST_PARTS = 64
"""Each part is a transfer of its own; shards of more pieces travel whole."""
_MOST_TOGETHER = 8
"""Interval sets in one tile, whose tables have two ends for each set and row."""


class IntervalTiling(Tiling):
    """Rows of queries against runs of keys, where every row sees an interval; for any mask.

    Shards are cut into parts where the keys that some rank attends to begin or end, so a rank receives the keys of its
    window and no more. It receives them in the order of their positions, without gaps, so they are one run of keys. One
    tile for each interval set of the mask computes all of them, or one tile for a few sets together.
    """

    def __init__(
        self, groups: tuple[GroupSegments, ...], mask: Mask, masking: Masking, lengths: tuple[int, int]
    ) -> None:
        super().__init__(groups)
        self._unbroken = masking is Masking.INTERVALS_UNBROKEN
        self._together = masking is Masking.INTERVALS_TOGETHER
        self._run = RUN if masking is Masking.INTERVALS_IN_RUNS else 1
        """Ranks receive whole multiples of so many positions; tiles begin at multiples of it, in rows and columns."""
        by_row = interval_sets_of(mask, *lengths, groups[-1].batch[1])
        self._sets: tuple[tuple[IntervalSet, ...], ...] = tuple(zip_longest(*by_row, fillvalue=()))
        """`_sets[index]`: the index-th interval set of every batch row, or one for all rows."""

    def tiles(self, rank: int, starts: dict[tuple[int, int], int], source: int | None) -> Iterator[Tile]:
        for group, pieces in zip(self.groups, self.pieces, strict=True):
            placed = [
                (start + row, piece)
                for (owner, part), start in starts.items()
                for row, piece in _with_first_rows(pieces[owner][part])
            ]
            for first_row, run in runs_of(placed, unbroken=self._unbroken):
                of_batch = (_of_batch(sets, group.batch) for sets in self._sets)
                masks = (self._mask_of_tile(sets, group.q_by_rank[rank], run) for sets in of_batch)
                found = [mask for mask in masks if mask is not None]
                is_joined = self._together and 1 < len(found) <= _MOST_TOGETHER
                for mask in [found[0].union(found[1:])] if is_joined else found:
                    kv = first_row + mask.kv[0], first_row + mask.kv[1]
                    yield Tile(source, group.batch, mask.q, kv, mask)

    def _mask_of_tile(
        self, sets: tuple[IntervalSet, ...], queries: tuple[Segment, ...], run: KeyRun
    ) -> IntervalMask | None:
        """Return the mask of the smallest tile of all that queries see of a run of keys, None if they see nothing."""
        rows, columns = [], []
        for bands in sets:
            for row, segment, band in _bands_by_segment(queries, bands, run.positions):
                lo, hi = map(run.rows_before, band.key_range)
                first, last = segment.rows_before(band.first), segment.rows_before(band.last)
                if lo < hi and first < last:
                    rows += [row + first, row + last]
                    columns += [lo, hi]
        if not rows:
            return None
        q, kv = ((min(places) // self._run * self._run, max(places)) for places in (rows, columns))
        return IntervalMask((sets,), queries, q, run, kv)

    @cached_property
    def seen(self) -> list[list[list[int]]]:
        def edges(batch: Span, queries: Sequence[Segment]) -> list[int]:
            sets = (bands for sets in self._sets for bands in _of_batch(sets, batch))
            keys = (band.key_range for bands in sets for _, _, band in _bands_by_segment(queries, bands))
            run = self._run
            return list(chain(*joined_spans((start // run * run, -(-stop // run) * run) for start, stop in keys)))

        return [[edges(group.batch, queries) for queries in group.q_by_rank] for group in self.groups]

    @cached_property
    def _cuts(self) -> list[list[int]]:
        """Rows where each rank's shard is cut into parts; equally many on every rank."""
        edges = list(map(_with_readers, self.seen))
        cuts = [self._cuts_of(owner, edges) for owner in range(self.world_size)]
        most = max(map(len, cuts))
        return [rows + [rows[-1]] * (most - len(rows)) for rows in cuts]

    def _cuts_of(self, owner: int, edges_of_groups: list[list[tuple[int, int]]]) -> list[int]:
        shards = [group.kv_by_rank[owner] for group in self.groups]
        cuts = {row for segments in shards for row in accumulate((s.length for s in segments), initial=0)}
        whole = sorted({0, max(cuts)})
        # Shards of more segments than there may be parts travel whole. Stripes are not cut: a cut inside of a stripe
        # would be at other positions in another batch group.
        if len(cuts) <= _MOST_PARTS and all(segment.is_contiguous for segments in shards for segment in segments):
            for segments, edges in zip(shards, edges_of_groups, strict=True):
                for row, segment in _with_first_rows(segments):
                    inside = bisect_left(edges, (segment.start + 1,)), bisect_left(edges, (segment.last + 1,))
                    cuts |= {row + edge - segment.start for edge, reader in edges[slice(*inside)] if reader != owner}
        return sorted(cuts) if len(cuts) <= _MOST_PARTS else whole

    @cached_property
    def pieces(self) -> list[list[list[list[Segment]]]]:
        return [list(map(_divided, group.kv_by_rank, self._cuts)) for group in self.groups]


def _of_batch(sets: tuple[IntervalSet, ...], batch: Span) -> tuple[IntervalSet, ...]:
    """Return the interval sets of some batch rows; `sets` has one for each row or one for all."""
    return sets[slice(*batch)] if len(sets) > 1 else sets


def _with_readers(seen: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return all edges, ascending, each with the rank whose edge it is, -1 if there are several."""
    readers: dict[int, int] = {}
    for rank, edges in enumerate(seen):
        for edge in edges:
            readers[edge] = rank if readers.get(edge, rank) == rank else -1
    return sorted(readers.items())


def _divided(segments: Sequence[Segment], cuts: Sequence[int]) -> list[list[Segment]]:
    """Return the segments of each part between two cuts."""
    parts: list[list[Segment]] = []
    for start, stop in pairwise(cuts):
        parts.append([])
        for row, segment in _with_first_rows(segments):
            first, last = max(start - row, 0), min(stop - row, segment.length)
            if first < last:  # stripes are not cut
                cut = Segment.contiguous(segment.start + first, segment.start + last)
                parts[-1].append(segment if last - first == segment.length else cut)
    return parts


def _bands_by_segment(
    segments: Sequence[Segment], bands: IntervalSet, keys: Span = (-FAR, FAR)
) -> Iterator[tuple[int, Segment, IntervalBand]]:
    """Yield segments of queries with the bands of keys that they see, and the first row of the segment."""
    for row, segment in _with_first_rows(segments):
        for band in clipped_bands(bands, (segment.start, segment.last + 1), keys):
            yield row, segment, band


@lru_cached
def tiling_of(groups: tuple[GroupSegments, ...], mask: Mask, masking: Masking, lengths: tuple[int, int]) -> Tiling:
    """Return the tiling of one call over one axis; `lengths` are the global lengths of queries and keys."""
    if masking is Masking.BY_SHAPE:
        return ShapeTiling(groups, mask)
    return IntervalTiling(groups, mask, masking, lengths)
