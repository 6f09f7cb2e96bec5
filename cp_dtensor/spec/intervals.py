"""Interval sets: masks as bands of integers, and the workload of queries under a mask.

A band gives each query of a range one interval of keys, whose ends are fixed or move along with the query. An interval
set is a tuple of bands over disjoint, ascending ranges of queries, so each query sees one interval of keys. A mask is a
tuple of interval sets that have no (query, key) pair in common. The cost of all operations grows with the number of
bands, not of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cp_dtensor.spec.layouts import Span

FAR = 1 << 60
"""A distance beyond every position: an end at this distance is fixed."""


class IntervalBand(NamedTuple):
    """Query i, first <= i < last, sees the keys j with max(lo, i - left) <= j < min(hi, i + right + 1).

    `left` and `right` may be negative, since queries and keys may be numbered differently.
    """

    first: int
    last: int
    lo: int
    hi: int
    left: int = FAR
    right: int = FAR

    def keys(self, query: int) -> Span:
        """Return the interval of a query of the band; empty if its end is not beyond its start."""
        return max(self.lo, query - self.left), min(self.hi, query + self.right + 1)

    def clipped(self, queries: Span, keys: Span = (-FAR, FAR)) -> IntervalBand | None:
        """Return the band within some queries and some keys, None if it is empty.

        Every query of the result sees at least one key, and the intervals of neighbours touch or overlap.
        """
        lo, hi = max(self.lo, keys[0]), min(self.hi, keys[1])
        if lo >= hi or self.left + self.right < 0:
            return None
        # i + right + 1 > lo and i - left < hi; then the moving ends leave something too.
        first = max(self.first, lo - self.right, queries[0])
        last = min(self.last, hi + self.left, queries[1])
        return IntervalBand(first, last, lo, hi, self.left, self.right) if first < last else None

    @property
    def key_range(self) -> Span:
        """The keys that any query of a clipped band sees: one range."""
        return self.keys(self.first)[0], self.keys(self.last - 1)[1]

    @property
    def lines(self) -> tuple[Line, ...]:
        """Lines whose sum is the number of keys that each query of a clipped band sees."""
        # min(hi, i + right + 1) - max(lo, i - left), each with one turn
        upper = min(max(self.hi - self.right - 1, self.first), self.last)
        lower = min(max(self.lo + self.left, self.first), self.last)
        return (
            Line(self.first, upper, self.right + 1, 1),
            Line(upper, self.last, self.hi, 0),
            Line(self.first, lower, -self.lo, 0),
            Line(lower, self.last, self.left, -1),
        )

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs of a clipped band."""
        return sum(line.total for line in self.lines)


IntervalSet = tuple[IntervalBand, ...]
IntervalSets = tuple[IntervalSet, ...]


class Line(NamedTuple):
    """Numbers that are linear in the query: constant + slope * i for first <= i < last."""

    first: int
    last: int
    constant: int
    slope: int

    @property
    def total(self) -> int:
        """Sum over the queries."""
        count = self.last - self.first
        return self.constant * count + self.slope * ((self.first + self.last - 1) * count // 2)


def clipped_bands(
    bands: Sequence[IntervalBand], queries: Span = (-FAR, FAR), keys: Span = (-FAR, FAR)
) -> Iterator[IntervalBand]:
    """Yield the bands of an interval set within some queries and keys, without empty ones."""
    index = max(bisect_right(bands, (queries[0] + 1,)) - 1, 0)
    while index < len(bands) and bands[index].first < queries[1]:
        band = bands[index].clipped(queries, keys)
        if band is not None:
            yield band
        index += 1


def count_pairs(sets: IntervalSets, queries: Span, keys: Span = (-FAR, FAR)) -> int:
    """Return the number of (query, key) pairs within some queries and keys."""
    return sum(band.pairs for bands in sets for band in clipped_bands(bands, queries, keys))


def intersection(ours: IntervalSets, theirs: IntervalSets) -> IntervalSets:
    """Return the pairs that are in both."""
    found = (
        [
            piece._replace(left=min(band.left, piece.left), right=min(band.right, piece.right))
            for band in one
            for piece in clipped_bands(other, (band.first, band.last), (band.lo, band.hi))
        ]
        for one in ours
        for other in theirs
    )
    return tuple(clipped for bands in found if (clipped := tuple(clipped_bands(bands))))


def union(ours: IntervalSets, theirs: IntervalSets) -> IntervalSets:
    """Return the pairs that are in either."""
    added: list[IntervalSet] = list(theirs)
    for bands in ours:
        added = [part for other in added for part in _difference(other, bands) if part]
    return (*ours, *added)


def _difference(bands: IntervalSet, other: IntervalSet) -> tuple[IntervalSet, IntervalSet]:
    """Return the pairs of `bands` that are not in `other`: keys below and keys above the intervals of `other`."""
    below: list[IntervalBand] = []
    above: list[IntervalBand] = []
    for band in bands:
        reached = band.first
        for hidden in clipped_bands(other, (band.first, band.last)):
            below.append(band._replace(first=reached, last=hidden.first))
            reached = hidden.last
            # The lower end of a hidden interval is fixed up to a turn, and moves from there; the upper end likewise.
            turn = min(max(hidden.lo + hidden.left, hidden.first), hidden.last)
            below.append(band._replace(first=hidden.first, last=turn, hi=min(band.hi, hidden.lo)))
            right = min(band.right, -hidden.left - 1)
            below.append(band._replace(first=turn, last=hidden.last, right=right))
            turn = min(max(hidden.hi - hidden.right - 1, hidden.first), hidden.last)
            left = min(band.left, -hidden.right - 1)
            above.append(band._replace(first=hidden.first, last=turn, left=left))
            above.append(band._replace(first=turn, last=hidden.last, lo=max(band.lo, hidden.hi)))
        below.append(band._replace(first=reached))
    return tuple(clipped_bands(below)), tuple(clipped_bands(above))


class Workload:
    """Prefix sums of the workload over queries; a range of queries takes the time of a binary search.

    Between two edges of bands the number of keys that a query sees is linear in its position, so sums are polynomials.
    Batch rows with masks of their own are added.

    >>> workload = Workload([((IntervalBand(0, 4, 0, 4, right=0),),)])
    >>> [workload.before(position) for position in range(5)]
    [0, 1, 3, 6, 10]
    """

    def __init__(self, rows: Iterable[IntervalSets], counts: Sequence[int] = ()) -> None:
        """Make the sums from the interval sets of each batch row, or (with no rows) from the work of each query."""
        self._rows = tuple(rows)
        lines = [line for sets in self._rows for bands in sets for band in bands for line in band.lines]
        lines += [Line(query, query + 1, count, 0) for query, count in enumerate(counts)]
        changes: dict[int, list[int]] = {0: [0, 0]}  # position -> change of (constant, slope) of keys by query
        for line in lines:
            for edge, sign in ((line.first, 1), (line.last, -1)):
                change = changes.setdefault(edge, [0, 0])
                change[0] += sign * line.constant
                change[1] += sign * line.slope
        self._edges = sorted(changes)
        self._sums: list[tuple[int, int, int]] = []  # from each edge on: offset, constant, slope of the workload before
        offset = constant = slope = 0
        for edge in self._edges:
            more, steeper = changes[edge]
            offset -= more * edge + steeper * (edge * (edge - 1) // 2)
            constant += more
            slope += steeper
            self._sums.append((offset, constant, slope))

    def before(self, position: int) -> int:
        """Return the number of pairs of the queries before `position`."""
        offset, constant, slope = self._sums[bisect_right(self._edges, position) - 1]
        return offset + constant * position + slope * (position * (position - 1) // 2)

    def of(self, queries: Span) -> int:
        """Return the number of pairs of some queries."""
        return self.before(queries[1]) - self.before(queries[0])

    def reach_across(self, position: int) -> int:
        """Return about how many K/V rows must be sent because of a cut at `position`.

        It is the distance from the first key that the query behind the cut sees, to the last key that the query before
        the cut sees, where these are on the other side.

        >>> Workload([((IntervalBand(0, 4, 0, 4, right=0),),)]).reach_across(3)  # causal
        3
        """
        reach = 0
        for sets in self._rows:
            behind = [band for bands in sets for band in clipped_bands(bands, (position, position + 1))]
            before = [band for bands in sets for band in clipped_bands(bands, (position - 1, position))]
            last = max([position, *(band.key_range[1] for band in before)])
            reach += last - min([position, *(band.key_range[0] for band in behind)])
        return reach
