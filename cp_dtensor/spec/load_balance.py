"""Workload of a mask, and balanced partitions of a sequence.

The workload of queries is the number of (query, key) pairs that they attend to.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add

from cp_dtensor.spec.intervals import IntervalBand, IntervalSets, clipped_bands
from cp_dtensor.spec.layouts import Layout, Segment, Span, joined_spans
from cp_dtensor.spec.masks import Mask, interval_sets_of, is_integer


class Workload:
    """Prefix sums of the workload over queries; a range of queries takes the time of a binary search.

    Between two edges of bands the number of keys that a query sees is linear in its position, so sums are polynomials.
    Batch rows with masks of their own are added.

    >>> from cp_dtensor.spec.masks import Causal
    >>> workload = Workload([Causal().interval_sets(4, 4)])
    >>> [workload.before(position) for position in range(5)]
    [0, 1, 3, 6, 10]
    """

    def __init__(self, rows: Iterable[IntervalSets], counts: Sequence[int] = ()) -> None:
        """From the interval sets of each batch row, or (with no rows) from the work of each query."""
        self._rows = tuple(rows)
        changes: dict[int, list[int]] = {0: [0, 0]}  # position -> change of (constant, slope) of keys by query
        for query, count in enumerate(counts):
            _add_line(changes, (query, query + 1), count, 0)
        for band in (band for sets in self._rows for bands in sets for band in bands):
            _add_band(changes, band)
        self._edges = sorted(changes)
        self._lines: list[tuple[int, int, int]] = []  # from each edge on: workload before it, constant, slope
        workload = constant = slope = reached = 0
        for edge in self._edges:
            workload += _sum_of_line(constant, slope, reached, edge)
            constant += changes[edge][0]
            slope += changes[edge][1]
            reached = edge
            self._lines.append((workload, constant, slope))

    def before(self, position: int) -> int:
        """Returns the number of pairs of the queries before `position`."""
        index = bisect_right(self._edges, position) - 1
        workload, constant, slope = self._lines[index]
        return workload + _sum_of_line(constant, slope, self._edges[index], position)

    def of(self, queries: Span) -> int:
        """Returns the number of pairs of some queries."""
        return self.before(queries[1]) - self.before(queries[0])

    def reach_across(self, position: int) -> int:
        """Returns about how many K/V rows must be sent because of a cut at `position`.

        It is the distance from the first key that the query behind the cut sees, to the last key that the query before
        the cut sees, where these are on the other side.

        >>> from cp_dtensor.spec.masks import Causal
        >>> Workload([Causal().interval_sets(4, 4)]).reach_across(3)
        3
        """
        reach = 0
        for sets in self._rows:
            first_keys = [band.keys(position)[0] for band in _bands_at(sets, position)]
            last_keys = [band.keys(position - 1)[1] for band in _bands_at(sets, position - 1)]
            reach += max([position, *last_keys]) - min([position, *first_keys])
        return reach


def _bands_at(sets: IntervalSets, query: int) -> Iterator[IntervalBand]:
    return (band for bands in sets for band in clipped_bands(bands, (query, query + 1)))


def _sum_of_line(constant: int, slope: int, first: int, last: int) -> int:
    """Sum of constant + slope * i over first <= i < last."""
    return constant * (last - first) + slope * ((first + last - 1) * (last - first) // 2)


def _add_band(changes: dict[int, list[int]], band: IntervalBand) -> None:
    """Adds the keys that each query of a clipped band sees: min(hi, i + right + 1) - max(lo, i - left)."""
    turn = min(max(band.hi - band.right - 1, band.first), band.last)
    _add_line(changes, (band.first, turn), band.right + 1, 1)
    _add_line(changes, (turn, band.last), band.hi, 0)
    turn = min(max(band.lo + band.left, band.first), band.last)
    _add_line(changes, (band.first, turn), -band.lo, 0)
    _add_line(changes, (turn, band.last), band.left, -1)


def _add_line(changes: dict[int, list[int]], queries: Span, constant: int, slope: int) -> None:
    if queries[0] < queries[1]:
        for edge, sign in ((queries[0], 1), (queries[1], -1)):
            change = changes.setdefault(edge, [0, 0])
            change[0] += sign * constant
            change[1] += sign * slope


@lru_cache(maxsize=64)
def workload_of(mask: Mask, seq_len: int, rows: Span | None = None) -> Workload:
    """Returns the workload of a mask over `seq_len` queries and keys, of all batch rows together or of some.

    Raises:
        ValueError: a mask that does not fit the length.
    """
    by_row = interval_sets_of(mask, seq_len, seq_len, mask.batch_size or 1)
    return Workload(by_row if rows is None or mask.batch_size is None else by_row[slice(*rows)])


def workload_by_rank(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> list[int]:
    """Returns the number of (query, key) pairs of each rank's queries, all batch rows together.

    If the layout divides batch rows differently and the mask is the same in all, one row of each kind is counted.

    >>> from cp_dtensor import Causal, Contiguous
    >>> workload_by_rank(Contiguous(), Causal(), seq_len=4, world_size=2)
    [3, 7]
    """
    found = [0] * world_size
    for group, rows in enumerate(layout.batch_groups(mask.batch_size or len(layout.batch_groups(2)))):
        by_rank = [layout.segments(seq_len, rank, world_size, group) for rank in range(world_size)]
        found = list(map(add, found, workload_of_segments(by_rank, workload_of(mask, seq_len, rows))))
    return found


def workload_of_segments(by_rank: Sequence[Sequence[Segment]], workload: Workload) -> list[int]:
    """Returns the number of (query, key) pairs of each rank's queries."""
    return [sum(workload.of(span) for segment in segments for span in spans_of(segment)) for segments in by_rank]


def spans_of(segment: Segment) -> list[Span]:
    """Returns the unbroken ranges of a segment's positions."""
    if segment.is_contiguous:
        return [(segment.start, segment.start + segment.length)]
    return [
        (segment.position(start), segment.position(start) + min(segment.block, segment.length - start))
        for start in range(0, segment.length, segment.block)
    ]


def imbalance(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> float:
    """Returns by how much the workload of the busiest rank exceeds the mean, as a fraction of the mean.

    0.0 is perfect; 0.5 means that attention takes half as long again as with perfect balance. Batch rows with masks of
    their own count together.

    Args:
        layout: which rank owns which queries.
        mask: which query may see which key.
        seq_len: global number of queries and of keys.
        world_size: number of ranks.

    Raises:
        TypeError: no layout or no mask, as when they are exchanged.
        ValueError: a mask or a layout that is not of this length; a number of ranks below 1.

    >>> from cp_dtensor import Causal, Contiguous, HeadTail
    >>> imbalance(Contiguous(), Causal(), seq_len=4, world_size=2)  # 3 and 7 pairs, 5 on average
    0.4
    >>> imbalance(HeadTail(), Causal(), seq_len=4, world_size=2)
    0.0
    """
    if not isinstance(layout, Layout) or not isinstance(mask, Mask):
        raise TypeError(
            f"imbalance expects a layout and a mask, such as HeadTail(), Causal(); got {layout!r}, {mask!r}"
        )
    if not is_integer(world_size) or world_size < 1:
        raise ValueError(f"imbalance expects world_size to be a number of ranks >= 1, got {world_size!r}")
    by_rank = workload_by_rank(layout, mask, seq_len, world_size)
    total = sum(by_rank)
    return (max(by_rank) * world_size - total) / total if total else 0.0


# Balanced partition

_PROBES = 16
"""Windows that are tried at least; between two of them the workload may cross the even one."""
_FEW = 128
"""Below so many tokens every window is tried."""

Blocks = list[Span]


@dataclass(frozen=True)
class BalancedPartition:
    """Division of a sequence over n ranks with given lengths and even workload, in at most 2 n - 1 blocks.

    The sequence is closed to a circle. Half of the ranks take one window of the circle that has their share of both
    tokens and workload; the other half take the rest; both are divided again. Such a window exists: over all windows of
    that length the mean workload is the even one, so sliding from a lighter to a heavier window passes it. Each window
    makes two cuts.

    Source: Goldberg and West, Bisection of circle colorings (1985); Alon, Splitting necklaces (1987).

    Args:
        workload: work by query.
        lengths: tokens of each rank.
        tolerance: how much more than the mean a rank may have, as a fraction of the mean, if that saves blocks.
    """

    workload: Workload
    lengths: tuple[int, ...]
    tolerance: float

    @property
    def total(self) -> int:
        """Work of all queries."""
        return self.workload.before(sum(self.lengths))

    def blocks(self) -> list[Blocks]:
        """Returns the blocks of each rank in order: one block each if that is even enough."""
        ends = list(accumulate(self.lengths, initial=0))
        contiguous = [[span] if span[0] < span[1] else [] for span in pairwise(ends)]
        if self.busiest(contiguous) <= self._most(1):
            return contiguous
        divided = self._divide([(0, ends[-1])], range(len(self.lengths)))
        return min(divided, contiguous, key=self.busiest)

    def busiest(self, by_rank: Sequence[Blocks]) -> int:
        """Returns the work of the rank that has most."""
        return max(sum(map(self.workload.of, blocks)) for blocks in by_rank)

    def _most(self, ranks: int) -> float:
        """Returns the most work that `ranks` ranks may have before they are divided further.

        Each division may use up an equal part of the tolerance, so larger groups of ranks must be more even.
        """
        times = (len(self.lengths) - 1).bit_length()
        done = times - (ranks - 1).bit_length()
        return self.total * ranks / len(self.lengths) * (1 + self.tolerance * (done / times if times else 1))

    def _divide(self, blocks: Blocks, ranks: range) -> list[Blocks]:
        """Divides `blocks` over some ranks: a window to the second half of the ranks, the rest to the first half."""
        if len(ranks) == 1:
            return [blocks]
        first, second = ranks[: (len(ranks) + 1) // 2], ranks[(len(ranks) + 1) // 2 :]
        circle = Circle(blocks, self.workload)
        length = sum(self.lengths[rank] for rank in second)
        around, inside = circle.cut(self._best_window(circle, length, len(first), len(second)), length)
        return self._divide(around, first) + self._divide(inside, second)

    def _best_window(self, circle: Circle, length: int, first: int, second: int) -> int:
        """Returns the start of the window of `second` ranks: even enough, with the fewest and cheapest cuts."""
        if length in (0, circle.length):
            return 0
        even = circle.workload * length / circle.length
        least, most = circle.workload - self._most(first), self._most(second)
        if least > most:  # too much work here for both to stay within the tolerance
            least = most = even

        def rank_window(start: int) -> tuple[float, int, int, int]:
            workload = circle.window_workload(start, length)
            ends = [end for end in (start, (start + length) % circle.length) if not circle.is_edge(end)]
            across = sum(self.workload.reach_across(circle.position(end)) for end in ends)
            wraps = start + length > circle.length
            return max(least - workload, workload - most, 0), len(ends), across, start if wraps else -start

        ranks = first + second
        probes = -(-_PROBES // ranks) * ranks  # among them windows that cover the circle evenly
        return min(circle.window_starts(length, even, probes), key=rank_window)


class Circle:
    """Blocks of a sequence one after the other, with the end joined to the beginning. Places count along it.

    >>> from cp_dtensor.spec.masks import Causal
    >>> circle = Circle([(0, 2), (6, 8)], Workload([Causal().interval_sets(8, 8)]))
    >>> [circle.window_workload(start, 2) for start in range(4)]  # queries 0 1 6 7 see 1 2 7 8 keys
    [3, 9, 15, 9]
    >>> circle.cut(1, 2)
    ([(0, 1), (7, 8)], [(1, 2), (6, 7)])
    """

    def __init__(self, blocks: Blocks, workload: Workload) -> None:
        self._blocks = [block for block in blocks if block[0] < block[1]]
        self._workload = workload
        self._edges = list(accumulate((stop - start for start, stop in self._blocks), initial=0))
        self._before_blocks = list(accumulate(map(workload.of, self._blocks), initial=0))
        self._offsets = [workload.before(start) for start, _ in self._blocks]
        self.length = self._edges[-1]
        self.workload = self._before_blocks[-1]

    def is_edge(self, place: int) -> bool:
        """True if two blocks meet at `place`."""
        return self._edges[bisect_right(self._edges, place) - 1] == place

    def position(self, place: int) -> int:
        """Returns the position in the sequence of a place."""
        index = bisect_right(self._edges, place) - 1
        return self._blocks[index][0] + place - self._edges[index]

    def window_workload(self, start: int, length: int) -> int:
        """Returns the work of a window, which may run over the end to the beginning."""
        stop = start + length
        if stop <= self.length:
            return self._before(stop) - self._before(start)
        return self.workload - self._before(start) + self._before(stop - self.length)

    def window_starts(self, length: int, workload: float, probes: int) -> Sequence[int]:
        """Returns candidates: windows at edges of blocks, evenly spread ones, and those nearest to `workload`."""
        if self.length <= _FEW:
            return range(self.length)
        aligned = {place % self.length for edge in self._edges for place in (edge, edge - length)}
        starts = sorted(aligned | {self.length * probe // probes for probe in range(probes)})
        return sorted({*starts, *self._crossings([*starts, starts[0] + self.length], length, workload)})

    def cut(self, start: int, length: int) -> tuple[Blocks, Blocks]:
        """Returns the blocks around a window and the blocks in it."""
        stop = start + length
        if stop <= self.length:
            return self._between((0, start), (stop, self.length)), self._between((start, stop))
        return self._between((stop - self.length, start)), self._between((0, stop - self.length), (start, self.length))

    def _before(self, place: int) -> int:
        index = bisect_right(self._edges, place, hi=len(self._edges) - 1) - 1
        workload = self._workload.before(self._blocks[index][0] + place - self._edges[index])
        return self._before_blocks[index] + workload - self._offsets[index]

    def _crossings(self, starts: Sequence[int], length: int, workload: float) -> Iterator[int]:
        """Yields the window nearest to `workload` between any two starts on different sides of it."""

        def excess(start: int) -> float:
            return self.window_workload(start % self.length, length) - workload

        for low, high in pairwise(starts):
            side = excess(low) > 0
            if side == (excess(high) > 0):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if (excess(middle) > 0) == side else (low, middle)
            yield min(low, high, key=lambda start: abs(excess(start))) % self.length

    def _between(self, *places: Span) -> Blocks:
        """Returns the blocks of some ranges of places, with neighbours joined."""
        return joined_spans(
            (max(start, start + first - edge), min(stop, start + last - edge))
            for first, last in places
            for (start, stop), edge in zip(self._blocks, self._edges, strict=False)
        )
