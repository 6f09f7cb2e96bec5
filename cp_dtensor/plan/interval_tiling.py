"""Tiles of any mask: rows of queries against runs of keys, where every row sees an interval.

Shards are cut into parts where the keys that some rank attends to begin or end, so a rank receives the keys of its
window and no more. It receives them in the order of their positions, without gaps, so they are one run of keys, and one
tile for each interval set of the mask computes all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise

from cp_dtensor.plan.tiles import IntervalMask, KeyRun, Tile, rows_before, runs_of
from cp_dtensor.plan.tiling import RUN, GatheredRows, GroupSegments, Masking, ShapeTiling, Tiling
from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSet, clipped_bands
from cp_dtensor.spec.layouts import Segment, Span
from cp_dtensor.spec.masks import Mask, interval_sets_of

_MOST_PARTS = 64
"""Each part is a transfer of its own; shards of more pieces travel whole."""


@lru_cache(maxsize=256)
def tiling_of(groups: tuple[GroupSegments, ...], mask: Mask, masking: Masking, lengths: tuple[int, int]) -> Tiling:
    """Returns the tiling of one call over one axis; `lengths` are the global lengths of queries and keys."""
    if masking is Masking.BY_SHAPE:
        return ShapeTiling(groups, mask)
    run = RUN if masking is Masking.INTERVALS_IN_RUNS else 1
    return IntervalTiling(groups, mask, lengths, masking is Masking.INTERVALS_UNBROKEN, run)


_NOTHING: Span = (1 << 62, 0)
"""The empty range that any other one widens to itself."""


@dataclass(frozen=True)
class _Entry:
    """A segment of queries and a band of keys that it sees."""

    segment: Segment
    first_row: int
    """First row of the segment in the shard."""
    band: IntervalBand


class IntervalTiling(Tiling):
    """Tiles masked by intervals, for all ranks of an axis.

    Args:
        groups: segments of all ranks, by batch groups.
        mask: which query may see which key.
        lengths: global lengths of queries and keys.
        unbroken: True if the keys of a tile must have adjacent positions.
        run: ranks receive whole multiples of `run` positions, and tiles begin at multiples of `run` rows and columns.
    """

    def __init__(
        self, groups: tuple[GroupSegments, ...], mask: Mask, lengths: tuple[int, int], unbroken: bool, run: int = 1
    ) -> None:
        self.groups, self._unbroken, self._run = groups, unbroken, run
        by_row = interval_sets_of(mask, *lengths, groups[-1].batch[1])
        count = max(map(len, by_row))
        padded = [(*sets, *[()] * (count - len(sets))) for sets in by_row]
        self._sets: tuple[tuple[IntervalSet, ...], ...] = tuple(zip(*padded, strict=True))
        """`_sets[index]`: the index-th interval set of every batch row, or one for all rows."""
        self._seen: dict[tuple[int, int], list[Span]] = {}
        self._pieces_of: dict[tuple[int, int], list[list[Segment]]] = {}

    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        parts = range(len(self._cuts[source]) - 1) if rank == source else self.recv_parts(rank, source)
        starts = {(source, part): self._cuts[source][part] for part in parts}
        return tuple(self._tiles(rank, starts, source))

    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        rows = self.gathered_rows(rank)
        starts = {(source, part): rows.starts[source][part] for source, part in rows.places}
        return tuple(self._tiles(rank, starts, None))

    def gathered_rows(self, rank: int) -> GatheredRows:
        return self._rows[rank]

    def recv_parts(self, rank: int, source: int) -> tuple[int, ...]:
        return self._wanted[rank][source]

    def _tiles(self, rank: int, starts: dict[tuple[int, int], int], source: int | None) -> Iterator[Tile]:
        """Yields tiles against parts of shards; `starts` has their first rows, in the order of rows."""
        for index, group in enumerate(self.groups):
            pieces = chain.from_iterable(
                _placed(self._pieces(index, owner, part), start) for (owner, part), start in starts.items()
            )
            for row, run in runs_of(pieces, unbroken=self._unbroken):
                for sets in self._sets:
                    tile = _tile_against(group, rank, source, row, run, _of_batch(sets, group.batch), self._run)
                    if tile is not None:
                        yield tile

    def _pieces(self, index: int, owner: int, part: int) -> Sequence[Segment]:
        """Returns the segments of a part of a shard in a batch group."""
        found = self._pieces_of.get((index, owner))
        if found is None:
            found = self._pieces_of[index, owner] = _divided(self.groups[index].kv_by_rank[owner], self._cuts[owner])
        return found[part]

    @cached_property
    def _cuts(self) -> tuple[tuple[int, ...], ...]:
        """Rows where each rank's shard is cut into parts; equally many on every rank."""
        cuts = [self._cuts_of(owner) for owner in range(self.world_size)]
        most = max(map(len, cuts))
        return tuple((*rows, *[rows[-1]] * (most - len(rows))) for rows in cuts)

    def _cuts_of(self, owner: int) -> list[int]:
        shards = [group.kv_by_rank[owner] for group in self.groups]
        cuts = {row for segments in shards for row in accumulate((s.length for s in segments), initial=0)}
        whole = sorted({0, max(cuts)})
        # Shards of more segments than there may be parts travel whole. Stripes are not cut: a cut inside of a stripe
        # would be at other positions in another batch group.
        if len(cuts) <= _MOST_PARTS and all(segment.is_contiguous for segments in shards for segment in segments):
            cuts |= {cut for index in range(len(shards)) for cut in self._edges_of_readers(owner, index)}
        return sorted(cuts) if len(cuts) <= _MOST_PARTS else whole

    def _edges_of_readers(self, owner: int, index: int) -> Iterator[int]:
        """Yields rows of a shard where the keys that another rank attends to begin or end, in a batch group."""
        readers = [reader for reader in range(self.world_size) if reader != owner]
        row = 0
        for segment in self.groups[index].kv_by_rank[owner]:
            for reader in readers:
                for edge in _edges_inside(self._spans_seen(reader, index), segment):
                    yield row + edge - segment.start
            row += segment.length

    @cached_property
    def _wanted(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(self._wanted_of(reader, owner) if reader != owner else () for owner in range(self.world_size))
            for reader in range(self.world_size)
        )

    def _wanted_of(self, reader: int, owner: int) -> tuple[int, ...]:
        return tuple(
            part
            for part in range(len(self._cuts[owner]) - 1)
            if any(
                _meets(self._spans_seen(reader, index), (piece.start, piece.last + 1))
                for index in range(len(self.groups))
                for piece in self._pieces(index, owner, part)
            )
        )

    @cached_property
    def _rows(self) -> tuple[GatheredRows, ...]:
        lengths = tuple(tuple(stop - start for start, stop in pairwise(rows)) for rows in self._cuts)
        return tuple(self._rows_of(reader, lengths) for reader in range(self.world_size))

    def _rows_of(self, reader: int, lengths: tuple[tuple[int, ...], ...]) -> GatheredRows:
        places = [(owner, part) for owner, parts in enumerate(self._wanted[reader]) for part in parts]
        places.sort(key=lambda place: next((piece.start for piece in self._pieces(0, *place)), -1))
        starts = [[-1] * len(parts) for parts in lengths]
        row = 0
        for owner, part in places:
            starts[owner][part] = row
            row += lengths[owner][part]
        return GatheredRows(lengths, tuple(map(tuple, starts)))

    def _spans_seen(self, rank: int, index: int) -> list[Span]:
        """Returns the ranges of key positions that a rank's queries see in a batch group, joined."""
        found = self._seen.get((rank, index))
        if found is None:
            group = self.groups[index]
            spans = [
                self._of_whole_runs(entry.band.key_range)
                for sets in self._sets
                for bands in _of_batch(sets, group.batch)
                for entry in _entries(group.q_by_rank[rank], bands)
            ]
            found = self._seen[rank, index] = _joined(spans)
        return found

    def _of_whole_runs(self, keys: Span) -> Span:
        return keys[0] // self._run * self._run, -(-keys[1] // self._run) * self._run


def _of_batch(sets: tuple[IntervalSet, ...], batch: Span) -> tuple[IntervalSet, ...]:
    """Returns the interval sets of some batch rows; `sets` has one for each row or one for all."""
    return sets[slice(*batch)] if len(sets) > 1 else sets


def _divided(segments: Sequence[Segment], cuts: Sequence[int]) -> list[list[Segment]]:
    """Returns the segments of each part between two cuts."""
    parts: list[list[Segment]] = [[] for _ in pairwise(cuts)]
    row = 0
    for segment in segments:
        stop = row + segment.length
        part = bisect_right(cuts, row) - 1
        while part < len(parts) and cuts[part] < stop:
            first, last = max(cuts[part], row), min(cuts[part + 1], stop)
            if (first, last) == (row, stop) and row < stop:
                parts[part].append(segment)
            elif first < last:
                parts[part].append(Segment.contiguous(segment.start + first - row, segment.start + last - row))
            part += 1
        row = stop
    return parts


def _placed(pieces: Iterable[Segment], row: int) -> Iterator[tuple[int, Segment]]:
    for piece in pieces:
        yield row, piece
        row += piece.length


def _entries(segments: Sequence[Segment], bands: IntervalSet, keys: Span = (-FAR, FAR)) -> Iterator[_Entry]:
    row = 0
    for segment in segments:
        for band in clipped_bands(bands, (segment.start, segment.last + 1), keys):
            yield _Entry(segment, row, band)
        row += segment.length


def _tile_against(
    group: GroupSegments,
    rank: int,
    source: int | None,
    row: int,
    run: KeyRun,
    sets: tuple[IntervalSet, ...],
    multiple: int,
) -> Tile | None:
    """Returns the smallest tile of all that a rank's queries see of a run of keys, None if they see nothing.

    `row` is the first row of the run. The tile begins at `multiple` rows of queries and of the run.
    """
    queries = group.q_by_rank[rank]
    q = kv = _NOTHING
    for bands in sets:
        for entry in _entries(queries, bands, run.positions):
            lo, hi = map(run.rows_before, entry.band.key_range)
            first, last = (
                entry.first_row + rows_before(entry.segment, position)
                for position in (entry.band.first, entry.band.last)
            )
            if lo < hi and first < last:
                q, kv = (min(q[0], first), max(q[1], last)), (min(kv[0], lo), max(kv[1], hi))
    if q == _NOTHING:
        return None
    q, kv = ((first // multiple * multiple, last) for first, last in (q, kv))
    mask = IntervalMask(sets, queries, q, run, kv)
    return Tile(source, group.batch, q, (row + kv[0], row + kv[1]), mask)


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        else:
            joined.append((start, stop))
    return joined


def _edges_inside(spans: Sequence[Span], segment: Segment) -> Iterator[int]:
    """Yields the edges of spans that are inside of a segment's range of positions."""
    index = bisect_left(spans, segment.start, key=lambda span: span[1])
    while index < len(spans) and spans[index][0] <= segment.last:
        yield from (edge for edge in spans[index] if segment.start < edge <= segment.last)
        index += 1


def _meets(spans: Sequence[Span], range_of_keys: Span) -> bool:
    """True if any of some ascending spans overlaps a range."""
    index = bisect_right(spans, range_of_keys[0], key=lambda span: span[1])
    return index < len(spans) and spans[index][0] < range_of_keys[1]
