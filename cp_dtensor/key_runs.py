"""Runs of keys: rows whose positions ascend, so that an interval of positions is an interval of rows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from cp_dtensor.layouts import Segment, Span


@dataclass(frozen=True)
class KeyRun:
    """Segments one after the other, each beginning beyond the end of the one before; none is empty.

    >>> run = KeyRun((Segment.contiguous(2, 4), Segment.contiguous(6, 9)))
    >>> run.length, run.rows_before(3), run.rows_before(6), run.rows_before(8), run.position(2)
    (5, 1, 2, 4, 6)
    """

    segments: tuple[Segment, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each segment, and the number of rows."""
        return tuple(accumulate((segment.length for segment in self.segments), initial=0))

    @cached_property
    def _first_positions(self) -> list[int]:
        return [segment.start for segment in self.segments]

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.starts[-1]

    @property
    def positions(self) -> Span:
        """From the first position to beyond the last."""
        return self.segments[0].start, self.segments[-1].last + 1

    def rows_before(self, position: int) -> int:
        """Number of rows whose position is smaller."""
        index = bisect_right(self._first_positions, position) - 1
        return 0 if index < 0 else self.starts[index] + rows_before(self.segments[index], position)

    def meeting(self, positions: Span) -> Iterator[Segment]:
        """The segments that reach into a range of positions."""
        index = max(bisect_right(self._first_positions, positions[0]) - 1, 0)
        while index < len(self.segments) and self.segments[index].start < positions[1]:
            if self.segments[index].last >= positions[0]:
                yield self.segments[index]
            index += 1

    def position(self, row: int) -> int:
        """The position of a row."""
        index = bisect_right(self.starts, row) - 1
        return self.segments[index].position(row - self.starts[index])


def rows_before(segment: Segment, position: int) -> int:
    """Number of a segment's tokens whose position is smaller.

    >>> [rows_before(Segment(start=2, length=5, block=2, period=8), position) for position in (2, 4, 10, 11, 99)]
    [0, 2, 2, 3, 5]
    """
    beyond = max(position - segment.start, 0)
    blocks, rest = divmod(beyond, segment.period)
    return min(blocks * segment.block + min(rest, segment.block), segment.length)


def runs_of(pieces: Iterable[tuple[int, Segment]], *, unbroken: bool) -> Iterator[tuple[int, KeyRun]]:
    """Consecutive rows as few runs, each with its first row.

    Args:
        pieces: segments and their first rows, in the order of rows; rows that nobody wants may be left out.
        unbroken: whether positions in a run must have equal distances (and stripes of blocks an own run).
    """
    first, segments, end = 0, list[Segment](), 0
    for row, segment in pieces:
        if not segment.length:
            continue
        if segments and row == end and _continues(segments[-1], segment, unbroken):
            segments.append(segment)
        else:
            if segments:
                yield first, KeyRun(tuple(segments))
            first, segments = row, [segment]
        end = row + segment.length
    if segments:
        yield first, KeyRun(tuple(segments))


def _continues(before: Segment, segment: Segment, unbroken: bool) -> bool:
    if unbroken:
        return before.is_contiguous and segment.is_contiguous and before.last + 1 == segment.start
    return before.last < segment.start
