"""Tiles of any mask: rows of queries against runs of keys, of which every row sees an interval.

The keys that a rank wants of others are known by the token: shards are cut into parts where some rank's interest begins
or ends, so that a window brings a window's keys and no more. Brought together in the order of their positions, without
gaps and without its own, they are one run: so one tile for each layer of the mask computes all that came.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise

from cp_dtensor.plan.tiles import IntervalMask, KeyRun, Tile, rows_before, runs_of
from cp_dtensor.plan.tiling import RUN, GatheredRows, GroupSegments, Masking, ShapeTiling, Tiling
from cp_dtensor.spec.intervals import IntervalBand, IntervalSet, within
from cp_dtensor.spec.layouts import Segment, Span
from cp_dtensor.spec.masks import Mask, interval_sets_of

_MOST_PARTS = 64
"""Each part is a transfer of its own; shards of more pieces travel whole."""


@lru_cache(maxsize=256)
def tiling_of(groups: tuple[GroupSegments, ...], mask: Mask, masking: Masking, lengths: tuple[int, int]) -> Tiling:
    """The tiling of one call over one axis; `lengths` are those of all queries and keys, which the mask speaks of."""
    if masking is Masking.BY_SHAPE:
        return ShapeTiling(groups, mask)
    run = RUN if masking is Masking.INTERVALS_IN_RUNS else 1
    return IntervalTiling(groups, mask, lengths, masking is Masking.INTERVALS_UNBROKEN, run)


_NOTHING: Span = (1 << 62, 0)
"""The empty range that any other one widens to itself."""


@dataclass(frozen=True)
class _Entry:
    """A segment of queries that sees something by one band."""

    segment: Segment
    first_row: int
    """Of the segment, in the shard."""
    band: IntervalBand


class IntervalTiling(Tiling):
    """See above. With `unbroken`, runs of keys have neighbouring positions.

    Interests, and so what travels, are of whole multiples of `run` positions, and tiles begin at multiples of as many
    rows and columns.
    """

    def __init__(
        self, groups: tuple[GroupSegments, ...], mask: Mask, lengths: tuple[int, int], unbroken: bool, run: int = 1
    ) -> None:
        self._groups, self._unbroken, self._run = groups, unbroken, run
        by_row = interval_sets_of(mask, *lengths, groups[-1].batch[1])
        count = max(map(len, by_row))
        padded = [(*layers, *[()] * (count - len(layers))) for layers in by_row]
        self._layers: tuple[tuple[IntervalSet, ...], ...] = tuple(zip(*padded, strict=True))
        """Of each layer, that of every batch row (or one for all)."""
        self._seen: dict[tuple[int, int], list[Span]] = {}
        self._pieces_of: dict[tuple[int, int], list[list[Segment]]] = {}

    @property
    def groups(self) -> Sequence[GroupSegments]:
        return self._groups

    @property
    def world_size(self) -> int:
        return self._groups[0].world_size

    def tiles_against(self, rank: int, source: int) -> tuple[Tile, ...]:
        parts = range(len(self._cuts[source]) - 1) if rank == source else self.wanted(rank, source)
        starts = {(source, part): self._cuts[source][part] for part in parts}
        return tuple(self._tiles(rank, starts, source))

    def gathered_tiles(self, rank: int) -> tuple[Tile, ...]:
        rows = self.gathered_rows(rank)
        starts = {(source, part): rows.starts[source][part] for source, part in rows.places}
        return tuple(self._tiles(rank, starts, None))

    def gathered_rows(self, rank: int) -> GatheredRows:
        return self._rows[rank]

    def wanted(self, rank: int, source: int) -> tuple[int, ...]:
        return self._wanted[rank][source]

    def _tiles(self, rank: int, starts: dict[tuple[int, int], int], source: int | None) -> Iterator[Tile]:
        """Tiles against parts of shards, given their first rows in the order of rows."""
        for index, group in enumerate(self._groups):
            pieces = chain.from_iterable(
                _placed(self._pieces(index, owner, part), start) for (owner, part), start in starts.items()
            )
            for row, run in runs_of(pieces, unbroken=self._unbroken):
                for layers in self._layers:
                    tile = _tile_against(group, rank, source, row, run, _of_batch(layers, group.batch), self._run)
                    if tile is not None:
                        yield tile

    def _pieces(self, index: int, owner: int, part: int) -> Sequence[Segment]:
        """The segments of a part, or what of them lies in it, in a batch group."""
        found = self._pieces_of.get((index, owner))
        if found is None:
            found = self._pieces_of[index, owner] = _divided(self._groups[index].kv_by_rank[owner], self._cuts[owner])
        return found[part]

    @cached_property
    def _cuts(self) -> tuple[tuple[int, ...], ...]:
        """Where each rank's shard is cut into parts, in rows; equally many on every rank."""
        cuts = [self._cuts_of(owner) for owner in range(self.world_size)]
        most = max(map(len, cuts))
        return tuple((*rows, *[rows[-1]] * (most - len(rows))) for rows in cuts)

    def _cuts_of(self, owner: int) -> list[int]:
        shards = [group.kv_by_rank[owner] for group in self._groups]
        cuts = {row for segments in shards for row in accumulate((s.length for s in segments), initial=0)}
        whole = sorted({0, max(cuts)})
        # What is cut already into more pieces than can travel apart need not be looked at. A cut inside of a stripe
        # would not be one in another batch group.
        if len(cuts) <= _MOST_PARTS and all(segment.is_contiguous for segments in shards for segment in segments):
            cuts |= {cut for index in range(len(shards)) for cut in self._interests(owner, index)}
        return sorted(cuts) if len(cuts) <= _MOST_PARTS else whole

    def _interests(self, owner: int, index: int) -> Iterator[int]:
        """Where, in rows of a shard, the interest of another rank begins or ends in a batch group."""
        readers = [reader for reader in range(self.world_size) if reader != owner]
        row = 0
        for segment in self._groups[index].kv_by_rank[owner]:
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
                for index in range(len(self._groups))
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
        """The ranges of key positions that a rank's queries see in a batch group, merged."""
        found = self._seen.get((rank, index))
        if found is None:
            group = self._groups[index]
            spans = [
                self._of_whole_runs(entry.band.shown)
                for layers in self._layers
                for layer in _of_batch(layers, group.batch)
                for entry in _entries(group.q_by_rank[rank], layer)
            ]
            found = self._seen[rank, index] = _merged(spans)
        return found

    def _of_whole_runs(self, keys: Span) -> Span:
        return keys[0] // self._run * self._run, -(-keys[1] // self._run) * self._run


def _of_batch(layers: tuple[IntervalSet, ...], batch: Span) -> tuple[IntervalSet, ...]:
    """Those of some batch rows, of one for each batch row or one for all."""
    return layers[slice(*batch)] if len(layers) > 1 else layers


def _divided(segments: Sequence[Segment], cuts: Sequence[int]) -> list[list[Segment]]:
    """Of each part between two cuts the segments, or what of them lies in it."""
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


def _entries(segments: Sequence[Segment], layer: IntervalSet, keys: Span | None = None) -> Iterator[_Entry]:
    row = 0
    for segment in segments:
        queries = (segment.start, segment.last + 1)
        for band in within(layer, queries) if keys is None else within(layer, queries, keys):
            yield _Entry(segment, row, band)
        row += segment.length


def _tile_against(
    group: GroupSegments,
    rank: int,
    source: int | None,
    row: int,
    run: KeyRun,
    layers: tuple[IntervalSet, ...],
    multiple: int,
) -> Tile | None:
    """The smallest tile of all that a rank's queries see of a run, whose first row is given; None if nothing.

    It begins at a multiple of some rows of queries, and of the run's rows.
    """
    queries = group.q_by_rank[rank]
    q = kv = _NOTHING
    for layer in layers:
        for entry in _entries(queries, layer, run.positions):
            lo, hi = map(run.rows_before, entry.band.shown)
            first, last = (
                entry.first_row + rows_before(entry.segment, position)
                for position in (entry.band.first, entry.band.last)
            )
            if lo < hi and first < last:
                q, kv = (min(q[0], first), max(q[1], last)), (min(kv[0], lo), max(kv[1], hi))
    if q == _NOTHING:
        return None
    q, kv = ((first // multiple * multiple, last) for first, last in (q, kv))
    mask = IntervalMask(layers, queries, q, run, kv)
    return Tile(source, group.batch, q, (row + kv[0], row + kv[1]), mask)


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def _edges_inside(spans: Sequence[Span], segment: Segment) -> Iterator[int]:
    """Where the interest in a segment's positions begins or ends between them."""
    index = bisect_left(spans, segment.start, key=lambda span: span[1])
    while index < len(spans) and spans[index][0] <= segment.last:
        yield from (edge for edge in spans[index] if segment.start < edge <= segment.last)
        index += 1


def _meets(spans: Sequence[Span], range_of_keys: Span) -> bool:
    index = bisect_right(spans, range_of_keys[0], key=lambda span: span[1])
    return index < len(spans) and spans[index][0] < range_of_keys[1]
