"""The parts of shards that each rank reads from the others, for all ranks of an axis in time linear in their number."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from cp_dtensor.spec.layouts import Segment, Span, joined_spans

Parts = Sequence[Sequence[Sequence[Segment]]]
"""`parts[owner][part]`: the segments of a part of a shard, none of them empty."""


class Reading:
    """The parts of other shards that each rank reads.

    Parts with rows are numbered in the order of their positions. What a rank reads is a few ranges of these numbers, so
    a rank takes little time and memory, however many others there are.
    """

    def __init__(self, groups: Sequence[Parts], seen: Sequence[Sequence[Sequence[int]]]) -> None:
        """Find the parts.

        Args:
            groups: the parts in each batch group; as many rows in each.
            seen: for each batch group and reader, the edges of ascending and separate ranges of positions. The reader
                needs each part that has a piece with positions in one of them, in any batch group.
        """
        ranks = range(len(groups[0]))
        filled = sorted(
            (segments[0].start, owner, part)
            for owner, parts in enumerate(groups[0]) for part, segments in enumerate(parts) if segments
        )  # fmt: skip
        self._order = [(owner, part) for _, owner, part in filled]
        lengths = (sum(each.length for each in groups[0][owner][part]) for owner, part in self._order)
        self._rows = list(accumulate(lengths, initial=0))
        """Rows of all parts before each number."""
        numbers = {place: number for number, place in enumerate(self._order)}
        self._parts: list[list[tuple[int, int]]] = [[] for _ in ranks]
        """(part, number) of the parts of each owner, by part."""
        for owner, part in sorted(numbers):
            self._parts[owner].append((part, numbers[owner, part]))
        pieces = [
            _Pieces((each, number) for (owner, part), number in numbers.items() for each in parts[owner][part])
            for parts in groups
        ]
        self._spans = [self._read_by(rank, pieces, seen) for rank in ranks]
        """By reader: ranges of numbers."""

    def _read_by(self, reader: int, pieces: Sequence[_Pieces], seen: Sequence[Sequence[Sequence[int]]]) -> list[Span]:
        found = (span for of_group, edges in zip(pieces, seen, strict=True) for span in of_group.meeting(edges[reader]))
        own = sorted(number for _, number in self._parts[reader])
        spans: list[Span] = []
        for start, stop in joined_spans(found):
            for number in own[bisect_left(own, start) : bisect_left(own, stop)]:
                spans.append((start, number))
                start = number + 1
            spans.append((start, stop))
        return [span for span in spans if span[0] < span[1]]

    def parts(self, reader: int, owner: int) -> tuple[int, ...]:
        """Return the parts of the owner's shard that the reader needs, ascending; none of its own."""
        return tuple(part for part, number in self._parts[owner] if self._is_read(reader, number))

    def starts(self, reader: int, owner: int) -> tuple[int, ...]:
        """Return the first row of each of these among all rows that the reader needs, in the order of positions."""
        return tuple(
            self._rows_read(reader, number) for _, number in self._parts[owner] if self._is_read(reader, number)
        )

    def places(self, reader: int) -> Iterator[tuple[int, int]]:
        """Yield (owner, part) of all parts that the reader needs, in the order of positions."""
        for start, stop in self._spans[reader]:
            yield from self._order[start:stop]

    def received_rows(self) -> list[int]:
        """Return rows that each rank needs."""
        return [self._rows_read(reader, len(self._order)) for reader in range(len(self._parts))]

    def sent_rows(self) -> list[int]:
        """Return rows of each rank that others need, counted once for each of these."""
        changes = [0] * (len(self._order) + 1)
        for start, stop in (span for spans in self._spans for span in spans):
            changes[start] += 1
            changes[stop] -= 1
        sent = [0] * len(self._parts)
        for number, readers in enumerate(accumulate(changes[:-1])):
            sent[self._order[number][0]] += readers * (self._rows[number + 1] - self._rows[number])
        return sent

    def _is_read(self, reader: int, number: int) -> bool:
        spans = self._spans[reader]
        index = bisect_right(spans, (number + 1,)) - 1
        return index >= 0 and number < spans[index][1]

    def _rows_read(self, reader: int, before: int) -> int:
        """Return rows of the parts with smaller numbers that a reader needs."""
        rows, total = self._rows, 0
        for start, stop in self._spans[reader]:
            if start >= before:
                break
            total += rows[min(stop, before)] - rows[start]
        return total


class _Pieces:
    """Pieces of numbered parts in the order of their positions. Stripes overlap: each spans the whole sequence."""

    def __init__(self, pieces: Iterable[tuple[Segment, int]]) -> None:
        found = sorted((each.start, each.last + 1, number) for each, number in pieces)
        self._starts = [start for start, _, _ in found]
        self._stops = [stop for _, stop, _ in found]
        self._last_stop = list(accumulate(self._stops, max))
        """Of this piece and those before it."""
        self._first_stop = list(accumulate(reversed(self._stops), min))[::-1]
        """Of this piece and those after it."""
        self._numbers = [number for _, _, number in found]
        self._runs: list[int] = []
        """First pieces of runs in which numbers grow, or fall, by one."""
        step = 0
        for index, number in enumerate(self._numbers):
            change = number - self._numbers[index - 1] if index else 0
            if step and change == step:
                continue
            if index and not step and abs(change) == 1:
                step = change
            else:
                self._runs.append(index)
                step = 0

    def meeting(self, edges: Sequence[int]) -> Iterator[Span]:
        """Yield ranges of the numbers of pieces that overlap a range of positions; `edges` are those of the ranges."""
        reached = 0  # pieces up to here have been found, if they overlap this range or a later one
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            first = max(bisect_right(self._last_stop, start), reached)
            last = bisect_left(self._starts, stop)
            if first >= last:
                continue
            if self._first_stop[first] > start:
                yield from self._numbers_of(first, last)
                reached = last
            else:  # some stripes end before this range
                for index in range(first, last):
                    if self._stops[index] > start:
                        yield from self._numbers_of(index, index + 1)

    def _numbers_of(self, first: int, last: int) -> Iterator[Span]:
        """Yield the numbers of consecutive pieces as ranges."""
        run = bisect_right(self._runs, first) - 1
        while first < last:
            end = self._runs[run + 1] if run + 1 < len(self._runs) else len(self._numbers)
            ends = self._numbers[first], self._numbers[min(end, last) - 1]
            yield min(ends), max(ends) + 1
            first, run = end, run + 1
