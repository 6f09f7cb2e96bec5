"""Routes of sequence rows between ranks: halos, shifts and changes of layout, as integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from typing import ClassVar, NamedTuple

from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import CachedHash, Layout, Segment, Span

Edges = tuple[int, ...]
"""Ascending positions where documents begin and end; () for one document."""


@dataclass(frozen=True)
class SequenceLayout(CachedHash):
    """A sequence of known length in a layout, for one group of batch rows."""

    layout: Layout
    seq_len: int
    world_size: int
    group: int = 0
    edges: Edges = ()

    @property
    def documents(self) -> int:
        """Number of documents; 1 without edges."""
        return max(len(self.edges) - 1, 1)

    def document(self, position: int) -> Span:
        """Return the ends of the document of a position. Tokens outside of all documents are one more on each side."""
        index = bisect_right(self.edges, position)
        start = self.edges[index - 1] if index else 0
        return start, self.edges[index] if index < len(self.edges) else max(self.seq_len, start)

    def segments(self, rank: int) -> Sequence[Segment]:
        """Return the positions of a rank, in local order."""
        return self.layout.segments(self.seq_len, rank, self.world_size, self.group)

    def runs(self, rank: int) -> list[Span]:
        """Return the longest ranges of consecutive positions of a rank, in local order.

        A rank without tokens has one empty run, (0, 0), so that every rank has at least one.

        >>> from cp_dtensor.spec.layouts import HeadTail
        >>> [SequenceLayout(HeadTail(), 8, 2).runs(rank) for rank in range(2)]
        [[(0, 2), (6, 8)], [(2, 6)]]
        """
        found: list[Span] = []
        for segment in self.segments(rank):
            for start, stop in segment.spans():
                if found and found[-1][1] == start:
                    found[-1] = found[-1][0], stop
                elif start < stop:
                    found.append((start, stop))
        return found or [(0, 0)]

    def pieces(self, rank: int) -> list[Span]:
        """Return the runs of a rank, cut where documents begin and end.

        >>> from cp_dtensor.spec.layouts import HeadTail
        >>> SequenceLayout(HeadTail(), 8, 2, edges=(0, 3, 3, 8)).pieces(1)
        [(2, 3), (3, 6)]
        """
        found: list[Span] = []
        for start, stop in self.runs(rank):
            inner = self.edges[bisect_right(self.edges, start) : bisect_left(self.edges, stop)]
            ends = [start, *dict.fromkeys(inner), stop]
            found += pairwise(ends)
        return found


class RowMap(ABC):
    """The position that each row of a result comes from. Its `repr` names it in compiled code."""

    keeps_rows: ClassVar[bool] = False
    """True if every rank's result has as many rows as its shard."""

    @abstractmethod
    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        """Yield ranges of positions, in the order of the rank's result. Rows of (-n, 0) are n rows of zeros."""

    def rows_out(self, sequence: SequenceLayout, rank: int) -> int:
        """Return the number of rows of the rank's result."""
        return sum(stop - start for start, stop in self.rows(sequence, rank))


def rows_before(sequence: SequenceLayout, position: int, left: int) -> Iterator[Span]:
    """Yield the `left` positions before a position, zeros before its document."""
    inside = min(left, position - sequence.document(position)[0])
    yield inside - left, 0
    yield position - inside, position


@dataclass(frozen=True)
class Halo(RowMap):
    """The `left` rows before each run."""

    left: int

    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        for start, _ in sequence.runs(rank):
            yield from rows_before(sequence, start, self.left)


@dataclass(frozen=True)
class Extended(RowMap):
    """Each run within a document, after the `left` rows before it."""

    left: int

    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        for start, stop in sequence.pieces(rank):
            yield from rows_before(sequence, start, self.left)
            yield start, stop

    def tokens(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        """Yield the ranges of the result that have the rank's own tokens."""
        first = 0
        for start, stop in sequence.pieces(rank):
            first += self.left
            yield first, first + stop - start
            first += stop - start


@dataclass(frozen=True)
class Shift(RowMap):
    """Token i gets token i - by of its document, zeros where there is none."""

    by: int
    keeps_rows = True

    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        for start, stop in sequence.pieces(rank):
            first, last = sequence.document(start)
            lo, hi = (min(max(end - self.by, first), last) for end in (start, stop))
            length = stop - start
            before = min(max(first - (start - self.by), 0), length)
            yield -before, 0
            yield lo, hi
            yield -(length - before - (hi - lo)), 0


@dataclass(frozen=True)
class Relayout(RowMap):
    """The rank's tokens in another layout."""

    target: Layout
    group: int = 0
    """Of batch rows, in the other layout."""

    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        of_target = SequenceLayout(self.target, sequence.seq_len, sequence.world_size, self.group)
        yield from of_target.runs(rank)


@dataclass(frozen=True)
class Whole(RowMap):
    """All rows, in the order of positions."""

    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        yield 0, sequence.seq_len


Passed = tuple[tuple[int, ...], ...]


class Copy(NamedTuple):
    """Rows of one rank's shard that are rows of another rank's result."""

    owner: int
    source: int
    """The first row in the owner's shard."""
    target: int
    """The first row in the result."""
    rows: int


@dataclass(frozen=True)
class RowRoute(CachedHash):
    """One rank's part of an exchange of rows."""

    rows_in: int
    rows_out: int
    own: tuple[Copy, ...]
    """The copies within this rank."""
    sent: tuple[tuple[Copy, ...], ...]
    """By rank: the copies to it."""
    received: tuple[tuple[Copy, ...], ...]
    """By rank: the copies from it, in the order in which it sends them."""
    moves: bool
    """True if any rank sends rows to another one; alike on every rank."""
    passed: tuple[Passed, ...]
    """For each axis, the inner one first, `[i][o]`: rows that rank i of the axis sends to this rank, for it or another
    of its place, whose place along the outer axes is o."""
    passed_back: tuple[Passed, ...]
    """As `passed`, of gradients, which travel from receivers to owners."""

    @cached_property
    def rows_sent(self) -> tuple[int, ...]:
        """By rank: the rows that this rank sends to it."""
        return tuple(sum(copy.rows for copy in copies) for copies in self.sent)

    @cached_property
    def rows_received(self) -> tuple[int, ...]:
        """By rank: the rows that this rank receives from it."""
        return tuple(sum(copy.rows for copy in copies) for copies in self.received)

    @cached_property
    def has_several_copies(self) -> bool:
        """True if some row of this rank has copies in two places."""
        spans = sorted((copy.source, copy.source + copy.rows) for copies in (self.own, *self.sent) for copy in copies)
        return any(stop > start for (_, stop), (start, _) in pairwise(spans))


@lru_cached
def row_route(row_map: RowMap, sequence: SequenceLayout, rank: int, sizes: tuple[int, ...] = ()) -> RowRoute:
    """Return a rank's part of the exchange that gives every rank its result.

    Args:
        sizes: ranks of each axis, the outer one first; () for one axis.

    >>> from cp_dtensor.spec.layouts import Contiguous
    >>> route = row_route(Shift(1), SequenceLayout(Contiguous(), 4, 2), rank=1)
    >>> route.own, route.received[0]
    ((Copy(owner=1, source=0, target=1, rows=1),), (Copy(owner=0, source=1, target=0, rows=1),))
    """
    size, owners = sequence.world_size, _owners(sequence)
    sent: list[list[Copy]] = [[] for _ in range(size)]
    received: list[list[Copy]] = [[] for _ in range(size)]
    blocks = _blocks(sizes or (size,))
    passed, passed_back = (
        [[[0] * (size // wide) for _ in range(wide // near)] for near, wide in blocks] for _ in range(2)
    )
    moves = False
    # A table of all pairs of ranks would be megabytes for a thousand ranks, and each needs a few rows of it.
    for receiver in range(size):
        for copy in _copies(row_map.rows(sequence, receiver), owners):
            if receiver == rank:
                received[copy.owner].append(copy)
            elif copy.owner == rank:
                sent[receiver].append(copy)
            if copy.owner == receiver:
                continue
            moves = True
            for source, target, tables in ((copy.owner, receiver, passed), (receiver, copy.owner, passed_back)):
                for table, (near, wide) in zip(tables, blocks, strict=True):
                    if _on_the_way(source, target, wide) == rank:
                        table[source % wide // near][target // wide] += copy.rows
    own, received[rank] = received[rank], []
    return RowRoute(
        sum(stop - start for start, stop in sequence.runs(rank)),
        row_map.rows_out(sequence, rank),
        tuple(own),
        tuple(map(tuple, sent)),
        tuple(map(tuple, received)),
        moves,
        tuple(tuple(map(tuple, table)) for table in passed),
        tuple(tuple(map(tuple, table)) for table in passed_back),
    )


def _blocks(sizes: tuple[int, ...]) -> list[Span]:
    """Return for each axis, the inner one first, the ranks of the axes within it, and of these and itself."""
    return list(pairwise(accumulate(sizes[::-1], mul, initial=1)))


def _on_the_way(source: int, target: int, block: int) -> int:
    """Return the rank that has rows on their way once they have the right place within a block of ranks.

    They go along the inner axis first, so that few of them cross the outer ones.
    """
    return source // block * block + target % block


def rows_over_axes(
    row_map: RowMap, sequence: SequenceLayout, sizes: tuple[int, ...], weights: tuple[int, int] = (1, 1)
) -> list[tuple[int, ...]]:
    """Return by rank the rows received over each axis, the outer one first, in an exchange and its transpose together.

    Args:
        sizes: ranks of each axis, the outer one first.
        weights: of a row of the exchange, and of one of its transpose, such as their bytes.

    >>> from cp_dtensor.spec.layouts import Contiguous
    >>> rows_over_axes(Shift(1), SequenceLayout(Contiguous(), 4, 2), (2,))  # a row, and a gradient back
    [(1,), (1,)]
    """
    owners, blocks = _owners(sequence), _blocks(sizes)
    received = [[0] * len(sizes) for _ in range(sequence.world_size)]
    for rank in range(sequence.world_size):
        for copy in _copies(row_map.rows(sequence, rank), owners):
            for source, target, weight in ((copy.owner, rank, weights[0]), (rank, copy.owner, weights[1])):
                for axis, (near, wide) in enumerate(blocks, 1):
                    before, after = _on_the_way(source, target, near), _on_the_way(source, target, wide)
                    received[after][-axis] += weight * copy.rows * (before != after)
    return list(map(tuple, received))


def _owners(sequence: SequenceLayout) -> list[tuple[int, int, int, int]]:
    """Return `(first position, stop, rank, first local row)` of all runs, by position."""
    found = []
    for rank in range(sequence.world_size):
        row = 0
        for start, stop in sequence.runs(rank):
            if start < stop:
                found.append((start, stop, rank, row))
            row += stop - start
    return sorted(found)


def _copies(wanted: Iterable[Span], owners: list[tuple[int, int, int, int]]) -> Iterator[Copy]:
    """Yield the copies that bring wanted rows to their places, in the order of the result."""
    target = 0
    for start, stop in wanted:
        if start < 0:  # zeros
            target += stop - start
            continue
        index = bisect_right(owners, (start, float("inf"))) - 1
        while start < stop:
            first, last, rank, row = owners[index]
            count = min(last, stop) - start
            yield Copy(rank, row + start - first, target, count)
            start, target, index = start + count, target + count, index + 1
