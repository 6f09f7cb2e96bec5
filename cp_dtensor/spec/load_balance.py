"""Division of a sequence such that every rank has as many tokens and as much work, in as few blocks as can be.

A sequence whose ends are joined is a necklace, and two quantities are to be shared out evenly: tokens, and (query, key)
pairs. Any k of n ranks can have one unbroken piece of it with k/n of both: of all windows of k/n of the tokens some
have more than k/n of the pairs and some less, for on average they have just that; in sliding from one to another the
window must pass one that has it. What is left is a shorter necklace for the other ranks, and both are divided further
in the same way. Each such cut makes two more blocks, so n ranks have 2 n - 1 blocks together, whatever the mask.

Source: Goldberg and West, Bisection of circle colorings (1985); Alon, Splitting necklaces (1987).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import Protocol

from cp_dtensor.spec.intervals import IntervalBand, IntervalSet, IntervalSets, within
from cp_dtensor.spec.layouts import Layout, Segment, Span
from cp_dtensor.spec.masks import Mask, interval_sets_of, is_integer

# How many (query, key) pairs the first queries of a mask have: by the band in closed form, never by the token.


class Workload:
    """The area of a mask, a prefix sum over its queries: of any range of queries in the time of a binary search.

    Between two edges of bands the number of keys that a query sees grows along a straight line, so its sum is a
    polynomial. Rows of the batch with masks of their own are added.

    >>> from cp_dtensor.spec.masks import Causal
    >>> areas = Workload([Causal().layers(4, 4)])
    >>> [areas.before(position) for position in range(5)]
    [0, 1, 3, 6, 10]
    """

    def __init__(self, layers_of_rows: Iterable[IntervalSets]) -> None:
        self._layers = tuple(layers_of_rows)
        changes: dict[int, list[int]] = {0: [0, 0]}  # position -> by how much the line changes there
        for layers in self._layers:
            for layer in layers:
                for band in layer:
                    _add_lines(changes, band)
        self._edges = sorted(changes)
        self._lines: list[tuple[int, int, int]] = []  # from each edge on: area before it, keys = constant + slope * i
        workload = constant = slope = reached = 0
        for edge in self._edges:
            workload += _sum_of_line(constant, slope, reached, edge)
            constant += changes[edge][0]
            slope += changes[edge][1]
            reached = edge
            self._lines.append((workload, constant, slope))

    def before(self, position: int) -> int:
        """Number of pairs of the queries before `position`."""
        index = bisect_right(self._edges, position) - 1
        workload, constant, slope = self._lines[index]
        return workload + _sum_of_line(constant, slope, self._edges[index], position)

    def of(self, queries: Span) -> int:
        """Number of pairs of some queries."""
        return self.before(queries[1]) - self.before(queries[0])

    def reach_across(self, position: int) -> int:
        """How many keys the two queries on either side of a cut see on the other side of it, and up to there.

        What a cut costs: about so many rows must be brought from whoever owns them.

        >>> from cp_dtensor.spec.masks import Causal
        >>> Workload([Causal().layers(4, 4)]).reach_across(3)
        3
        """
        reach = 0
        for layers in self._layers:
            first_keys = [band.keys(position)[0] for layer in layers for band in _at(layer, position)]
            last_keys = [band.keys(position - 1)[1] for layer in layers for band in _at(layer, position - 1)]
            reach += max([position, *last_keys]) - min([position, *first_keys])
        return reach


def workload_of(mask: Mask, seq_len: int, rows: Span | None = None) -> Workload:
    """The areas of a mask over so many queries and as many keys: all batch rows together, or some of them.

    Raises:
        ValueError: a mask that does not fit the length.
    """
    return _workload(mask, seq_len, None if mask.batch_size is None else rows)


@lru_cache(maxsize=64)
def _workload(mask: Mask, seq_len: int, rows: Span | None) -> Workload:
    layers = interval_sets_of(mask, seq_len, seq_len, mask.batch_size or 1)
    return Workload(layers if rows is None else layers[slice(*rows)])


def workload_by_rank(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> list[int]:
    """Number of (query, key) pairs of each rank's queries, all batch rows together.

    Where a layout divides batch rows differently and the mask does not, of one row of each kind.

    >>> from cp_dtensor import Causal, Contiguous
    >>> workload_by_rank(Contiguous(), Causal(), seq_len=4, world_size=2)
    [3, 7]
    """
    batch = mask.batch_size or len(layout.batch_groups(2))
    found = [0] * world_size
    for group, rows in enumerate(layout.batch_groups(batch)):
        by_rank = [layout.segments(seq_len, rank, world_size, group) for rank in range(world_size)]
        found = list(map(add, found, workload_of_segments(by_rank, workload_of(mask, seq_len, rows))))
    return found


def workload_of_segments(by_rank: Sequence[Sequence[Segment]], workloads: Workload) -> list[int]:
    """Number of (query, key) pairs of each rank's queries."""
    return [sum(workloads.of(span) for segment in segments for span in spans_of(segment)) for segments in by_rank]


def imbalance(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> float:
    """How much longer than the mean rank the busiest one computes: its (query, key) pairs over the mean, minus 1.

    0.0 is perfect; 0.5 says that attention takes half as long again as it had to. Masks with rows of their own count
    all of them.

    Args:
        layout: which rank owns which queries.
        mask: which query may see which key.
        seq_len: global number of queries and of keys.
        world_size: number of ranks.

    Raises:
        TypeError: no layout or no mask, or values of them in the other's place.
        ValueError: a mask or a layout that is not of this length; no number of ranks.

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
    workloads = workload_by_rank(layout, mask, seq_len, world_size)
    total = sum(workloads)
    return (max(workloads) * world_size - total) / total if total else 0.0


def spans_of(segment: Segment) -> list[Span]:
    """The unbroken ranges of a segment's positions."""
    if segment.is_contiguous:
        return [(segment.start, segment.start + segment.length)]
    starts = range(0, segment.length, segment.block)
    firsts = map(segment.position, starts)
    lengths = [min(segment.block, segment.length - start) for start in starts]
    return [(first, first + length) for first, length in zip(firsts, lengths, strict=True)]


def _at(layer: IntervalSet, query: int) -> Iterator[IntervalBand]:
    return within(layer, (query, query + 1))


def _sum_of_line(constant: int, slope: int, first: int, last: int) -> int:
    """Sum of constant + slope * i over first <= i < last."""
    return constant * (last - first) + slope * ((first + last - 1) * (last - first) // 2)


def _add_lines(changes: dict[int, list[int]], band: IntervalBand) -> None:
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


_PROBES = 16
"""Windows to look at, at least: between two of them the area may cross what is wanted, and any crossing will do."""
_FEW = 128
"""Of so many tokens every window is looked at."""

Blocks = list[Span]


class WorkloadLike(Protocol):
    """How much work the first tokens are: `Workload`, or what has been counted by the block."""

    def before(self, position: int, /) -> int:
        """That of all tokens before `position`."""

    def of(self, queries: Span, /) -> int:
        """That of some tokens."""

    def reach_across(self, position: int, /) -> int:
        """What a cut there costs."""


@dataclass(frozen=True)
class Dealing:
    """What is dealt, and how evenly it has to be.

    Args:
        areas: pairs by query.
        lengths: tokens of each rank.
        tolerance: by how much of the mean a rank may have more pairs than the mean, if that saves blocks.
    """

    workloads: WorkloadLike
    lengths: tuple[int, ...]
    tolerance: float

    @property
    def total(self) -> int:
        """Number of pairs."""
        return self.workloads.before(sum(self.lengths))

    def blocks(self) -> list[Blocks]:
        """The blocks of each rank, in order: one for each where that is even enough, else as they are found."""
        ends = list(accumulate(self.lengths, initial=0))
        contiguous = [[span] if span[0] < span[1] else [] for span in pairwise(ends)]
        if self.busiest(contiguous) <= self.most(1):
            return contiguous
        found = self._dealt([(0, ends[-1])], range(len(self.lengths)))
        return min(found, contiguous, key=self.busiest)

    def busiest(self, by_rank: Sequence[Blocks]) -> int:
        """Pairs of the rank that has most."""
        return max(sum(map(self.workloads.of, blocks)) for blocks in by_rank)

    def most(self, ranks: int) -> float:
        """Pairs that some ranks may have who are yet to be told apart; fewer beyond their share, the more they are."""
        times = (len(self.lengths) - 1).bit_length()
        done = times - (ranks - 1).bit_length()
        return self.total * ranks / len(self.lengths) * (1 + self.tolerance * (done / times if times else 1))

    def _dealt(self, blocks: Blocks, ranks: range) -> list[Blocks]:
        """`blocks` to some ranks: a window to the second half of them, what is around it to the first."""
        if len(ranks) == 1:
            return [blocks]
        first, second = ranks[: (len(ranks) + 1) // 2], ranks[(len(ranks) + 1) // 2 :]
        necklace = Necklace(blocks, self.workloads)
        length = sum(self.lengths[rank] for rank in second)
        start = self._best_window(necklace, length, len(first), len(second))
        around, inside = necklace.cut(start, length)
        return self._dealt(around, first) + self._dealt(inside, second)

    def _best_window(self, necklace: Necklace, length: int, first: int, second: int) -> int:
        """Where the window of `second` ranks starts: even enough, with the fewest cuts and the least across them."""
        if length in (0, necklace.length):
            return 0
        even = necklace.workload * length / necklace.length
        least, most = necklace.workload - self.most(first), self.most(second)
        if least > most:  # too much came here for both to stay within the tolerance
            least = most = even

        def rank_window(start: int) -> tuple[float, int, int, int]:
            workload = necklace.window_area(start, length)
            ends = [end for end in (start, (start + length) % necklace.length) if not necklace.is_edge(end)]
            across = sum(self.workloads.reach_across(necklace.position(end)) for end in ends)
            wraps = start + length > necklace.length
            return max(least - workload, workload - most, 0), len(ends), across, start if wraps else -start

        ranks = first + second
        probes = -(-_PROBES // ranks) * ranks  # among them windows that cover the necklace evenly
        return min(necklace.windows_of_area(length, even, probes), key=rank_window)


class Necklace:
    """Some blocks of a sequence, strung one after the other, and the end joined to the beginning.

    >>> from cp_dtensor.spec.load_balance import Workload
    >>> from cp_dtensor.spec.masks import Causal
    >>> necklace = Necklace([(0, 2), (6, 8)], Workload([Causal().layers(8, 8)]))
    >>> [necklace.window_area(start, 2) for start in range(4)]  # queries 0 1 6 7 see 1 2 7 8 keys
    [3, 9, 15, 9]
    >>> necklace.cut(1, 2)
    ([(0, 1), (7, 8)], [(1, 2), (6, 7)])
    """

    def __init__(self, blocks: Blocks, workloads: WorkloadLike) -> None:
        self._blocks = [block for block in blocks if block[0] < block[1]]
        self._workload = workloads
        self._edges = list(accumulate((stop - start for start, stop in self._blocks), initial=0))
        self._before_blocks = list(accumulate(map(workloads.of, self._blocks), initial=0))
        self._offsets = [workloads.before(start) for start, _ in self._blocks]
        self.length = self._edges[-1]
        self.workload = self._before_blocks[-1]

    def is_edge(self, place: int) -> bool:
        """Whether two blocks meet there."""
        index = bisect_right(self._edges, place) - 1
        return self._edges[index] == place

    def position(self, place: int) -> int:
        """The position in the sequence of a place, which counts along the necklace."""
        index = bisect_right(self._edges, place) - 1
        return self._blocks[index][0] + place - self._edges[index]

    def window_area(self, start: int, length: int) -> int:
        """Pairs of the queries of a window; it may run over the end to the beginning."""
        stop = start + length
        if stop <= self.length:
            return self._before(stop) - self._before(start)
        return self.workload - self._before(start) + self._before(stop - self.length)

    def windows_of_area(self, length: int, workload: float, probes: int) -> Sequence[int]:
        """Where to start windows: at or up to edges of blocks, evenly spread, and where the area crosses `area`."""
        if self.length <= _FEW:
            return range(self.length)
        aligned = {place % self.length for edge in self._edges for place in (edge, edge - length)}
        starts = sorted(aligned | {self.length * probe // probes for probe in range(probes)})
        return sorted({*starts, *self._crossings([*starts, starts[0] + self.length], length, workload)})

    def cut(self, start: int, length: int) -> tuple[Blocks, Blocks]:
        """The blocks around a window, and those in it."""
        stop = start + length
        if stop <= self.length:
            return self._between((0, start), (stop, self.length)), self._between((start, stop))
        return self._between((stop - self.length, start)), self._between((0, stop - self.length), (start, self.length))

    def _before(self, place: int) -> int:
        index = bisect_right(self._edges, place, hi=len(self._edges) - 1) - 1
        workload = self._workload.before(self._blocks[index][0] + place - self._edges[index])
        return self._before_blocks[index] + workload - self._offsets[index]

    def _crossings(self, starts: Sequence[int], length: int, workload: float) -> Iterator[int]:
        """The window nearest to `area`, between each two starts that lie on different sides of it."""

        def excess(start: int) -> float:
            return self.window_area(start % self.length, length) - workload

        for low, high in pairwise(starts):
            side = excess(low) > 0
            if side == (excess(high) > 0):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if (excess(middle) > 0) == side else (low, middle)
            yield min(low, high, key=lambda start: abs(excess(start))) % self.length

    def _between(self, *places: Span) -> Blocks:
        """The blocks of some ranges of places, neighbours joined."""
        found: Blocks = []
        for first, last in places:
            for (start, stop), edge in zip(self._blocks, self._edges, strict=False):
                low, high = max(start, start + first - edge), min(stop, start + last - edge)
                if low >= high:
                    continue
                if found and found[-1][1] == low:
                    found[-1] = (found[-1][0], high)
                else:
                    found.append((low, high))
        return found
