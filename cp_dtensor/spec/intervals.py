"""Interval sets: masks as bands of integers.

A band gives each query of a range one interval of keys, whose ends are fixed or move along with the query. An interval
set is a tuple of bands over disjoint, ascending ranges of queries, so each query sees one interval of keys. A mask is a
tuple of interval sets that have no (query, key) pair in common. The cost of all operations grows with the number of
bands, not of tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
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
        """Returns the interval of a query of the band; empty if its end is not beyond its start."""
        return max(self.lo, query - self.left), min(self.hi, query + self.right + 1)

    def clipped(self, queries: Span | None = None, keys: Span = (-FAR, FAR)) -> IntervalBand | None:
        """Returns the band within some queries (None: its own) and some keys, None if it is empty.

        Every query of the result sees at least one key, and the intervals of neighbours touch or overlap.
        """
        lo, hi = max(self.lo, keys[0]), min(self.hi, keys[1])
        if lo >= hi or self.left + self.right < 0:
            return None
        # i + right + 1 > lo and i - left < hi; then the moving ends leave something too.
        first, last = max(self.first, lo - self.right), min(self.last, hi + self.left)
        if queries is not None:
            first, last = max(first, queries[0]), min(last, queries[1])
        return IntervalBand(first, last, lo, hi, self.left, self.right) if first < last else None

    @property
    def key_range(self) -> Span:
        """The keys that any query of a clipped band sees: one range."""
        return self.keys(self.first)[0], self.keys(self.last - 1)[1]

    @property
    def pairs(self) -> int:
        """Number of (query, key) pairs of a clipped band."""
        queries = (self.first, self.last)
        return _sum_of_smaller(queries, self.right + 1, self.hi) + _sum_of_smaller(queries, self.left, -self.lo, -1)


IntervalSet = tuple[IntervalBand, ...]
IntervalSets = tuple[IntervalSet, ...]


def _sum_of_smaller(queries: Span, shift: int, limit: int, sign: int = 1) -> int:
    """Sum over queries i of min(limit, sign * i + shift)."""
    first, last = queries if sign > 0 else (1 - queries[1], 1 - queries[0])  # of sign * i, ascending
    turn = min(max(limit - shift, first), last)  # below it, i + shift is the smaller one
    moving = (first + turn - 1) * (turn - first) // 2 + shift * (turn - first)
    return moving + limit * (last - turn)


def clipped_bands(bands: IntervalSet, queries: Span, keys: Span = (-FAR, FAR)) -> Iterator[IntervalBand]:
    """Yields the bands of an interval set within some queries and keys."""
    index = max(bisect_right(bands, queries[0], key=lambda band: band.first) - 1, 0)
    while index < len(bands) and bands[index].first < queries[1]:
        band = bands[index].clipped(queries, keys)
        if band is not None:
            yield band
        index += 1


def without_empty(bands: Iterable[IntervalBand]) -> IntervalSet:
    """Returns all bands clipped, without empty ones."""
    return tuple(clipped for band in bands if (clipped := band.clipped()) is not None)


def count_pairs(sets: IntervalSets, queries: Span, keys: Span = (-FAR, FAR)) -> int:
    """Returns the number of (query, key) pairs within some queries and keys."""
    return sum(band.pairs for bands in sets for band in clipped_bands(bands, queries, keys))


def intersection(ours: IntervalSets, theirs: IntervalSets) -> IntervalSets:
    """Returns the pairs that are in both."""
    found = (
        without_empty(
            piece._replace(left=min(band.left, piece.left), right=min(band.right, piece.right))
            for band in one
            for piece in clipped_bands(other, (band.first, band.last), (band.lo, band.hi))
        )
        for one in ours
        for other in theirs
    )
    return tuple(bands for bands in found if bands)


def union(ours: IntervalSets, theirs: IntervalSets) -> IntervalSets:
    """Returns the pairs that are in either."""
    added: list[IntervalSet] = list(theirs)
    for bands in ours:
        added = [part for other in added for part in _difference(other, bands) if part]
    return (*ours, *added)


def _difference(bands: IntervalSet, other: IntervalSet) -> tuple[IntervalSet, IntervalSet]:
    """Returns the pairs of `bands` that are not in `other`: keys below and keys above the intervals of `other`."""
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
    return without_empty(below), without_empty(above)
