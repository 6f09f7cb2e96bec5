"""Bands: what masks are made of. Exact arithmetic of integers, by the band and never by the token.

A band says of a range of queries which keys each sees: an interval whose ends are fixed or move along with the query.
A layer is a tuple of bands over disjoint ranges of queries, in their order: each query sees one interval of keys. A
mask is a tuple of layers that show no pair twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

Span = tuple[int, int]

FAR = 1 << 60
"""Beyond every position: an end that does not move with the query has this distance."""


class IntervalBand(NamedTuple):
    """Query i, first <= i < last, sees the keys j with max(lo, i - left) <= j < min(hi, i + right + 1).

    `left` and `right` may be negative: queries may be numbered otherwise than keys.
    """

    first: int
    last: int
    lo: int
    hi: int
    left: int = FAR
    right: int = FAR

    def keys(self, query: int) -> Span:
        """The interval that a query of the band sees; empty if its end is not beyond its start."""
        return max(self.lo, query - self.left), min(self.hi, query + self.right + 1)

    def clipped(self, queries: Span, keys: Span = (-FAR, FAR)) -> IntervalBand | None:
        """The band within some queries and some keys, without queries that see nothing; None if nothing is left.

        Every query of the result sees something, and the intervals of neighbours touch or overlap.
        """
        lo, hi = max(self.lo, keys[0]), min(self.hi, keys[1])
        if lo >= hi or self.left + self.right < 0:
            return None
        # i + right + 1 > lo and i - left < hi; then the moving ends leave something too.
        first = max(self.first, queries[0], lo - self.right)
        last = min(self.last, queries[1], hi + self.left)
        return IntervalBand(first, last, lo, hi, self.left, self.right) if first < last else None

    @property
    def shown(self) -> Span:
        """All keys that a clipped band shows to any query: one range."""
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


def within(layer: IntervalSet, queries: Span, keys: Span = (-FAR, FAR)) -> Iterator[IntervalBand]:
    """The bands of a layer within some queries and keys, clipped."""
    index = max(bisect_right(layer, queries[0], key=lambda band: band.first) - 1, 0)
    while index < len(layer) and layer[index].first < queries[1]:
        band = layer[index].clipped(queries, keys)
        if band is not None:
            yield band
        index += 1


def pairs_of(layers: IntervalSets, queries: Span, keys: Span = (-FAR, FAR)) -> int:
    """How many (query, key) pairs there are within some queries and keys."""
    return sum(band.pairs for layer in layers for band in within(layer, queries, keys))


def intersected(ours: IntervalSets, theirs: IntervalSets) -> IntervalSets:
    """The pairs that both show."""
    met = (_met(one, other) for one in ours for other in theirs)
    return tuple(layer for layer in met if layer)


def merged(ours: IntervalSets, theirs: IntervalSets) -> IntervalSets:
    """The pairs that either shows."""
    added: list[IntervalSet] = list(theirs)
    for layer in ours:
        added = [part for other in added for part in _without(other, layer) if part]
    return (*ours, *added)


def _met(one: IntervalSet, other: IntervalSet) -> IntervalSet:
    bands = []
    for band in one:
        for piece in within(other, (band.first, band.last), (band.lo, band.hi)):
            both = piece._replace(left=min(band.left, piece.left), right=min(band.right, piece.right))
            clipped = both.clipped((both.first, both.last))
            if clipped is not None:
                bands.append(clipped)
    return tuple(bands)


def _without(layer: IntervalSet, other: IntervalSet) -> tuple[IntervalSet, IntervalSet]:
    """What a layer shows and another one does not: the keys below, and those above, of what the other one shows."""
    below: list[IntervalBand] = []
    above: list[IntervalBand] = []
    for band in layer:
        reached = band.first
        for hidden in within(other, (band.first, band.last)):
            below.append(band._replace(first=reached, last=hidden.first))
            reached = hidden.last
            # The lower end of what is hidden is fixed up to a turn, and moves from there; the upper end likewise.
            turn = min(max(hidden.lo + hidden.left, hidden.first), hidden.last)
            below.append(band._replace(first=hidden.first, last=turn, hi=min(band.hi, hidden.lo)))
            right = min(band.right, -hidden.left - 1)
            below.append(band._replace(first=turn, last=hidden.last, right=right))
            turn = min(max(hidden.hi - hidden.right - 1, hidden.first), hidden.last)
            left = min(band.left, -hidden.right - 1)
            above.append(band._replace(first=hidden.first, last=turn, left=left))
            above.append(band._replace(first=turn, last=hidden.last, lo=max(band.lo, hidden.hi)))
        below.append(band._replace(first=reached))
    return _clipped(below), _clipped(above)


def _clipped(bands: list[IntervalBand]) -> IntervalSet:
    clipped = (band.clipped((band.first, band.last)) for band in bands)
    return tuple(band for band in clipped if band is not None)
