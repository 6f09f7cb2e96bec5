"""Tiles of any mask: rows of queries against runs of keys, where every row sees an interval.

Shards are cut into parts where the keys that some rank attends to begin or end, so a rank receives the keys of its
window and no more. It receives them in the order of their positions, without gaps, so they are one run of keys, and one
tile for each interval set of the mask computes all of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from cp_dtensor.plan.tiles import IntervalMask, KeyRun, Tile, rows_before, runs_of
from cp_dtensor.plan.tiling import RUN, GatheredRows, GroupSegments, Masking, ShapeTiling, Tiling
from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSet, clipped_bands
from cp_dtensor.spec.layouts import Segment, Span, joined_spans
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
        return self._recv_parts[rank][source]

    def _tiles(self, rank: int, starts: dict[tuple[int, int], int], source: int | None) -> Iterator[Tile]:
        """Yields tiles against parts of shards; `starts` has their first rows, in the order of rows."""
        for group, pieces in zip(self.groups, self._pieces, strict=True):
            placed = [
                (start + row, piece)
                for (owner, part), start in starts.items()
                for row, piece in _with_first_rows(pieces[owner][part])
            ]
            for first_row, run in runs_of(placed, unbroken=self._unbroken):
                for sets in self._sets:
                    mask = self._mask_of_tile(_of_batch(sets, group.batch), group.q_by_rank[rank], run)
                    if mask is not None:
                        kv = first_row + mask.kv[0], first_row + mask.kv[1]
                        yield Tile(source, group.batch, mask.q, kv, mask)

    def _mask_of_tile(
        self, sets: tuple[IntervalSet, ...], queries: tuple[Segment, ...], run: KeyRun
    ) -> IntervalMask | None:
        """Returns the mask of the smallest tile of all that queries see of a run of keys, None if they see nothing."""
        rows, columns = [], []
        for bands in sets:
            for row, segment, band in _bands_by_segment(queries, bands, run.positions):
                lo, hi = map(run.rows_before, band.key_range)
                first, last = rows_before(segment, band.first), rows_before(segment, band.last)
                if lo < hi and first < last:
                    rows += [row + first, row + last]
                    columns += [lo, hi]
        if not rows:
            return None
        q, kv = ((min(places) // self._run * self._run, max(places)) for places in (rows, columns))
        return IntervalMask(sets, queries, q, run, kv)

    @cached_property
    def _seen(self) -> list[list[list[Span]]]:
        """`_seen[index][rank]`: the ranges of key positions that a rank's queries see in a batch group, joined."""

        def whole_runs(keys: Span) -> Span:
            return keys[0] // self._run * self._run, -(-keys[1] // self._run) * self._run

        return [
            [
                joined_spans(
                    whole_runs(band.key_range)
                    for sets in self._sets
                    for bands in _of_batch(sets, group.batch)
                    for _, _, band in _bands_by_segment(segments, bands)
                )
                for segments in group.q_by_rank
            ]
            for group in self.groups
        ]

    @cached_property
    def _cuts(self) -> list[list[int]]:
        """Rows where each rank's shard is cut into parts; equally many on every rank."""
        cuts = [self._cuts_of(owner) for owner in range(self.world_size)]
        most = max(map(len, cuts))
        return [rows + [rows[-1]] * (most - len(rows)) for rows in cuts]

    def _cuts_of(self, owner: int) -> list[int]:
        shards = [group.kv_by_rank[owner] for group in self.groups]
        cuts = {row for segments in shards for row in accumulate((s.length for s in segments), initial=0)}
        whole = sorted({0, max(cuts)})
        # Shards of more segments than there may be parts travel whole. Stripes are not cut: a cut inside of a stripe
        # would be at other positions in another batch group.
        if len(cuts) <= _MOST_PARTS and all(segment.is_contiguous for segments in shards for segment in segments):
            cuts |= {
                row + edge - segment.start
                for segments, seen in zip(shards, self._seen, strict=True)
                for row, segment in _with_first_rows(segments)
                for reader in range(self.world_size)
                if reader != owner
                for edge in _edges_inside(seen[reader], segment)
            }
        return sorted(cuts) if len(cuts) <= _MOST_PARTS else whole

    @cached_property
    def _pieces(self) -> list[list[list[list[Segment]]]]:
        """`_pieces[index][owner][part]`: the segments of a part of a shard in a batch group."""
        return [list(map(_divided, group.kv_by_rank, self._cuts)) for group in self.groups]

    @cached_property
    def _recv_parts(self) -> list[list[tuple[int, ...]]]:
        ranks = range(self.world_size)
        return [[self._recv_parts_of(reader, owner) for owner in ranks] for reader in ranks]

    def _recv_parts_of(self, reader: int, owner: int) -> tuple[int, ...]:
        if reader == owner:
            return ()
        return tuple(
            part
            for part in range(len(self._cuts[owner]) - 1)
            if any(
                _meets(seen[reader], (piece.start, piece.last + 1))
                for seen, pieces in zip(self._seen, self._pieces, strict=True)
                for piece in pieces[owner][part]
            )
        )

    @cached_property
    def _rows(self) -> list[GatheredRows]:
        lengths = tuple(tuple(stop - start for start, stop in pairwise(rows)) for rows in self._cuts)

        def first_position(place: tuple[int, int]) -> int:
            owner, part = place
            return next((piece.start for piece in self._pieces[0][owner][part]), -1)

        by_reader = (
            [(owner, part) for owner, parts in enumerate(received) for part in parts] for received in self._recv_parts
        )
        return [GatheredRows.of(lengths, sorted(places, key=first_position)) for places in by_reader]


def _of_batch(sets: tuple[IntervalSet, ...], batch: Span) -> tuple[IntervalSet, ...]:
    """Returns the interval sets of some batch rows; `sets` has one for each row or one for all."""
    return sets[slice(*batch)] if len(sets) > 1 else sets


def _divided(segments: Sequence[Segment], cuts: Sequence[int]) -> list[list[Segment]]:
    """Returns the segments of each part between two cuts."""
    parts: list[list[Segment]] = [[] for _ in pairwise(cuts)]
    for row, segment in _with_first_rows(segments):
        stop = row + segment.length
        part = bisect_right(cuts, row) - 1
        while part < len(parts) and cuts[part] < stop:
            first, last = max(cuts[part], row), min(cuts[part + 1], stop)
            if (first, last) == (row, stop) and row < stop:
                parts[part].append(segment)
            elif first < last:
                parts[part].append(Segment.contiguous(segment.start + first - row, segment.start + last - row))
            part += 1
    return parts


def _with_first_rows(segments: Iterable[Segment]) -> Iterator[tuple[int, Segment]]:
    """Yields segments that follow each other, each with its first row."""
    row = 0
    for segment in segments:
        yield row, segment
        row += segment.length


def _bands_by_segment(
    segments: Sequence[Segment], bands: IntervalSet, keys: Span = (-FAR, FAR)
) -> Iterator[tuple[int, Segment, IntervalBand]]:
    """Yields segments of queries with the bands of keys that they see, and the first row of the segment."""
    for row, segment in _with_first_rows(segments):
        for band in clipped_bands(bands, (segment.start, segment.last + 1), keys):
            yield row, segment, band


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
