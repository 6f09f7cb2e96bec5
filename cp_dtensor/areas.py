"""How many (query, key) pairs the first queries of a mask have: by the band in closed form, never by the token."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import add

from cp_dtensor.bands import Band, Layer, Layers, within
from cp_dtensor.layouts import Layout, Segment, Span
from cp_dtensor.masks import Mask, is_integer, layers_of


class Areas:
    """The area of a mask, a prefix sum over its queries: of any range of queries in the time of a binary search.

    Between two edges of bands the number of keys that a query sees grows along a straight line, so its sum is a
    polynomial. Rows of the batch with masks of their own are added.

    >>> from cp_dtensor.masks import Causal
    >>> areas = Areas([Causal().layers(4, 4)])
    >>> [areas.before(position) for position in range(5)]
    [0, 1, 3, 6, 10]
    """

    def __init__(self, layers_of_rows: Iterable[Layers]) -> None:
        self._layers = tuple(layers_of_rows)
        changes: dict[int, list[int]] = {0: [0, 0]}  # position -> by how much the line changes there
        for layers in self._layers:
            for layer in layers:
                for band in layer:
                    _add_lines(changes, band)
        self._edges = sorted(changes)
        self._lines: list[tuple[int, int, int]] = []  # from each edge on: area before it, keys = constant + slope * i
        area = constant = slope = reached = 0
        for edge in self._edges:
            area += _sum_of_line(constant, slope, reached, edge)
            constant += changes[edge][0]
            slope += changes[edge][1]
            reached = edge
            self._lines.append((area, constant, slope))

    def before(self, position: int) -> int:
        """Number of pairs of the queries before `position`."""
        index = bisect_right(self._edges, position) - 1
        area, constant, slope = self._lines[index]
        return area + _sum_of_line(constant, slope, self._edges[index], position)

    def of(self, queries: Span) -> int:
        """Number of pairs of some queries."""
        return self.before(queries[1]) - self.before(queries[0])

    def reach_across(self, position: int) -> int:
        """How many keys the two queries on either side of a cut see on the other side of it, and up to there.

        What a cut costs: about so many rows must be brought from whoever owns them.

        >>> from cp_dtensor.masks import Causal
        >>> Areas([Causal().layers(4, 4)]).reach_across(3)
        3
        """
        reach = 0
        for layers in self._layers:
            first_keys = [band.keys(position)[0] for layer in layers for band in _at(layer, position)]
            last_keys = [band.keys(position - 1)[1] for layer in layers for band in _at(layer, position - 1)]
            reach += max([position, *last_keys]) - min([position, *first_keys])
        return reach


def areas_of(mask: Mask, seq_len: int, rows: Span | None = None) -> Areas:
    """The areas of a mask over so many queries and as many keys: all batch rows together, or some of them.

    Raises:
        ValueError: a mask that does not fit the length.
    """
    return _areas(mask, seq_len, None if mask.batch_size is None else rows)


@lru_cache(maxsize=64)
def _areas(mask: Mask, seq_len: int, rows: Span | None) -> Areas:
    layers = layers_of(mask, seq_len, seq_len, mask.batch_size or 1)
    return Areas(layers if rows is None else layers[slice(*rows)])


def areas_by_rank(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> list[int]:
    """Number of (query, key) pairs of each rank's queries, all batch rows together.

    Where a layout divides batch rows differently and the mask does not, of one row of each kind.

    >>> from cp_dtensor import Causal, Contiguous
    >>> areas_by_rank(Contiguous(), Causal(), seq_len=4, world_size=2)
    [3, 7]
    """
    batch = mask.batch_size or len(layout.batch_groups(2))
    found = [0] * world_size
    for group, rows in enumerate(layout.batch_groups(batch)):
        by_rank = [layout.segments(seq_len, rank, world_size, group) for rank in range(world_size)]
        found = list(map(add, found, areas_of_segments(by_rank, areas_of(mask, seq_len, rows))))
    return found


def areas_of_segments(by_rank: Sequence[Sequence[Segment]], areas: Areas) -> list[int]:
    """Number of (query, key) pairs of each rank's queries."""
    return [sum(areas.of(span) for segment in segments for span in spans_of(segment)) for segments in by_rank]


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
    areas = areas_by_rank(layout, mask, seq_len, world_size)
    total = sum(areas)
    return (max(areas) * world_size - total) / total if total else 0.0


def spans_of(segment: Segment) -> list[Span]:
    """The unbroken ranges of a segment's positions."""
    if segment.is_contiguous:
        return [(segment.start, segment.start + segment.length)]
    starts = range(0, segment.length, segment.block)
    firsts = map(segment.position, starts)
    lengths = [min(segment.block, segment.length - start) for start in starts]
    return [(first, first + length) for first, length in zip(firsts, lengths, strict=True)]


def _at(layer: Layer, query: int) -> Iterator[Band]:
    return within(layer, (query, query + 1))


def _sum_of_line(constant: int, slope: int, first: int, last: int) -> int:
    """Sum of constant + slope * i over first <= i < last."""
    return constant * (last - first) + slope * ((first + last - 1) * (last - first) // 2)


def _add_lines(changes: dict[int, list[int]], band: Band) -> None:
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
