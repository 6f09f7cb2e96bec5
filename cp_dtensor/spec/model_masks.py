"""Masks of language models: chunks, keys without padding, and masks found by evaluating a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSets
from cp_dtensor.spec.layouts import CachedHash, Span
from cp_dtensor.spec.masks import Mask


@dataclass(frozen=True)
class Chunks(Mask):
    """Query and key are in the same chunk: (i - start) // size == (j - start) // size.

    >>> [Chunks(3, start=1).interval_sets(5, 5)[0][index].keys(0) for index in (0, 1, 2)]
    [(0, 1), (1, 4), (4, 5)]
    """

    size: int
    start: int = 0

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        edges = [0, *range(self.start % self.size or self.size, q_len, self.size), q_len]
        ends = [*edges[:-1], max(edges[-1], kv_len)]  # keys behind the last query belong to its chunk or to none
        last = self.start + ((q_len - 1 - self.start) // self.size + 1) * self.size
        return (
            tuple(
                IntervalBand(first, stop, lo, min(hi, kv_len, last) if stop == q_len else hi)
                for (first, stop), (lo, hi) in zip(pairwise(edges), pairwise(ends), strict=True)
            ),
        )


@dataclass(frozen=True)
class Keys(CachedHash, Mask):
    """Every query sees the keys of some ascending, disjoint ranges: all but padding.

    >>> [bands[0].keys(0) for bands in Keys(((0, 2), (5, 6))).interval_sets(1, 6)]
    [(0, 2), (5, 6)]
    """

    ranges: tuple[Span, ...]

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        return tuple((IntervalBand(0, q_len, lo, min(hi, kv_len)),) for lo, hi in self.ranges)


@dataclass(frozen=True)
class Bands(CachedHash, Mask):
    """The pairs of interval sets that were found for one length."""

    sets: IntervalSets
    lengths: tuple[int, int]

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        if (q_len, kv_len) != self.lengths:
            raise ValueError(
                f"the mask was evaluated for {self.lengths} queries and keys, got attention of {q_len} and {kv_len}"
            )
        return self.sets

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[Span]], kv_len: int) -> Bands:
        """Return the mask in which query i sees the keys of the ascending, disjoint ranges `rows[i]`.

        >>> [tuple(band[:2]) for band in Bands.of_rows([[(0, 1)], [(0, 2)], [(1, 3)]], 3).sets[0]]
        [(0, 2), (2, 3)]
        """
        most = max(map(len, rows), default=0)
        sets = tuple(tuple(_bands([row[index] if index < len(row) else None for row in rows])) for index in range(most))
        return cls(sets, (len(rows), kv_len))


def _bands(spans: list[Span | None]) -> list[IntervalBand]:
    """Return bands of queries whose ends are fixed or move along with the query."""
    bands: list[IntervalBand] = []
    query = 0
    while query < len(spans):
        span = spans[query]
        if span is None:
            query += 1
            continue
        steps = (0, 0)
        following = spans[query + 1] if query + 1 < len(spans) else None
        if following is not None:
            found = (following[0] - span[0], following[1] - span[1])
            steps = found if set(found) <= {0, 1} else steps
        stop = query + 1
        while stop < len(spans) and spans[stop] == tuple(
            end + step * (stop - query) for end, step in zip(span, steps, strict=True)
        ):
            stop += 1
        last = spans[stop - 1]
        assert last is not None
        left = query - span[0] if steps[0] else FAR
        right = span[1] - 1 - query if steps[1] else FAR
        bands.append(IntervalBand(query, stop, span[0], last[1], left, right))
        query = stop
    return bands
