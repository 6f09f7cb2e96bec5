"""Attention masks as values: the (query, key) pairs that attention computes, and the workload of ranks.

Queries and keys are numbered by their positions in the whole sequence, whatever the layout. Masks combine: `a & b` has
the pairs of both, `a | b` those of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeGuard

from cp_dtensor.spec import intervals
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSets, Workload, clipped_bands
from cp_dtensor.spec.layouts import Layout, Segment, Span

_TOO_LONG = 1 << 31
Alignment = Literal["top_left", "bottom_right"]


class Mask(ABC):
    """The (query, key) pairs that attention computes. A frozen, hashable value.

    `a & b` has the pairs that both masks have, `a | b` those that either has:

    >>> (Causal() & SlidingWindow(1, 1)).pairs(4, 4)  # 1 + 2 + 2 + 2
    7
    """

    @abstractmethod
    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        """Return the intervals of keys that each query sees, for `q_len` queries and `kv_len` keys."""

    def of_batch_row(self, row: int) -> Mask:
        """Return the mask of one batch row; most masks are the same in all rows."""
        return self

    @property
    def batch_size(self) -> int | None:
        """Batch rows that the mask is made for; None if it is the same in all rows."""
        return None

    def __and__(self, other: Mask) -> Mask:
        return _combined(self, other, Intersection)

    def __or__(self, other: Mask) -> Mask:
        return _combined(self, other, Union)

    def pairs(self, q_len: int, kv_len: int) -> int:
        """Return the number of (query, key) pairs in one batch row, on average if rows have masks of their own."""
        return workload_of(self, q_len, kv_len).before(q_len) // (self.batch_size or 1)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        return ((IntervalBand(0, q_len, 0, kv_len),),)


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees the keys j <= i, as with torch's `is_causal`.

    Args:
        alignment: "top_left": the first query sees the first key. "bottom_right": the last query sees the last key, as
            in FlashAttention.

    >>> [Causal().interval_sets(3, 3)[0][0].keys(i) for i in range(3)]
    [(0, 1), (0, 2), (0, 3)]
    """

    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        _check_alignment(self)

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        return ((IntervalBand(0, q_len, 0, kv_len, right=_offset(self.alignment, q_len, kv_len)),),)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees the keys i - left to i + right.

    A sliding window of W tokens, as models count them, includes the query's own position: `SlidingWindow(W - 1, 0)`.

    Args:
        left: keys before the query's own position, None for all.
        right: keys behind it, None for all.
        alignment: "top_left": query 0 is at key 0. "bottom_right": the last query is at the last key, as in
            FlashAttention.

    Raises:
        ValueError: a negative number of keys, or another alignment.

    >>> [SlidingWindow(1, 0).interval_sets(3, 3)[0][0].keys(i) for i in range(3)]
    [(0, 1), (0, 2), (1, 3)]
    """

    left: int | None
    right: int | None
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        _check_alignment(self)
        for end in (self.left, self.right):
            if end is not None and not (is_integer(end) and end >= 0):
                raise ValueError(f"SlidingWindow expects numbers of keys >= 0, or None for no limit; got {self}")

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        offset = _offset(self.alignment, q_len, kv_len)
        left = FAR if self.left is None or self.left >= FAR else self.left - offset
        right = FAR if self.right is None or self.right >= FAR else self.right + offset
        return ((IntervalBand(0, q_len, 0, kv_len, left, right),),)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, and every query sees the first `length` keys.

    >>> [band.keys(i) for i in range(3) for band in PrefixLM(2).interval_sets(3, 3)[0] if band.first <= i < band.last]
    [(0, 2), (0, 2), (0, 3)]
    """

    length: int

    def __post_init__(self) -> None:
        if not is_integer(self.length) or self.length < 0:
            raise ValueError(f"PrefixLM expects a number of keys >= 0, got {self.length!r}")

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        prefix = min(self.length, q_len)
        prefix_band = IntervalBand(0, prefix, 0, min(self.length, kv_len))
        return ((prefix_band, IntervalBand(prefix, q_len, 0, kv_len, right=0)),)


@dataclass(frozen=True)
class Intersection(Mask):
    """The pairs of all of some masks: `a & b`."""

    masks: tuple[Mask, ...]

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        return reduce(intervals.intersection, (clipped_interval_sets(mask, q_len, kv_len) for mask in self.masks))


@dataclass(frozen=True)
class Union(Mask):
    """The pairs of any of some masks: `a | b`."""

    masks: tuple[Mask, ...]

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        return reduce(intervals.union, (clipped_interval_sets(mask, q_len, kv_len) for mask in self.masks))


@dataclass(frozen=True, init=False)
class Batched(Mask):
    """A mask for each row of the batch.

    Args:
        masks: one mask for each row; a call must have as many rows.

    Raises:
        ValueError: no masks, or a mask that is `Batched` itself.
    """

    masks: tuple[Mask, ...]

    def __init__(self, masks: Iterable[Mask]) -> None:
        if isinstance(masks, Mask):
            raise ValueError(f"Batched expects a list, of a mask for each row of the batch, got one mask: {masks}")
        masks = tuple(masks)
        if not masks or any(not isinstance(mask, Mask) or mask.batch_size is not None for mask in masks):
            raise ValueError(f"Batched expects a mask for each row of the batch, got {masks}")
        object.__setattr__(self, "masks", masks)

    def interval_sets(self, q_len: int, kv_len: int) -> IntervalSets:
        raise ValueError("Batched has interval sets by batch row only: of_batch_row(row).interval_sets(...)")

    def of_batch_row(self, row: int) -> Mask:
        return self.masks[row]

    @property
    def batch_size(self) -> int:
        return len(self.masks)


@lru_cached
def _interval_sets_by_row(mask: Mask, q_len: int, kv_len: int) -> tuple[IntervalSets, ...]:
    return tuple(clipped_interval_sets(mask.of_batch_row(row), q_len, kv_len) for row in range(mask.batch_size or 1))


def interval_sets_of(mask: Mask, q_len: int, kv_len: int, batch_size: int) -> tuple[IntervalSets, ...]:
    """Return the interval sets of each batch row, or one entry if they are the same in all rows; check the sizes."""
    if max(q_len, kv_len) >= _TOO_LONG:
        raise ValueError(
            f"masks count positions with 32 bits: expected fewer than 2^31 tokens, got {q_len} and {kv_len}"
        )
    if mask.batch_size not in (None, batch_size):
        raise ValueError(f"the mask is of {mask.batch_size} batch rows, got a batch of {batch_size}")
    return _interval_sets_by_row(mask, q_len, kv_len)


@lru_cached
def workload_of(mask: Mask, q_len: int, kv_len: int, rows: Span | None = None) -> Workload:
    """Return the workload of the queries of a mask, of all batch rows together, or of some of a mask by row."""
    by_row = _interval_sets_by_row(mask, q_len, kv_len)
    return Workload(by_row if rows is None else by_row[slice(*rows)])


def workload_by_rank(groups: Iterable[tuple[Span, Sequence[Sequence[Segment]]]], mask: Mask, seq_len: int) -> list[int]:
    """Return the number of (query, key) pairs of each rank's queries; `groups`: batch rows, and segments by rank.

    >>> groups = [((0, 1), [[Segment.contiguous(0, 2)], [Segment.contiguous(2, 4)]])]
    >>> workload_by_rank(groups, Causal(), 4)
    [3, 7]
    """
    by_group = []
    for batch, by_rank in groups:
        workload = workload_of(mask, seq_len, seq_len, batch if mask.batch_size else None)
        rows = 1 if mask.batch_size else batch[1] - batch[0]
        spans = [[span for segment in segments for span in segment.spans()] for segments in by_rank]
        by_group.append([rows * sum(map(workload.of, each)) for each in spans])
    return list(map(sum, zip(*by_group, strict=True)))


def imbalance(layout: Layout, mask: Mask, seq_len: int, world_size: int) -> float:
    """Return the excess of the busiest rank's workload over the mean, as a fraction of the mean.

    0.0 is perfect; 0.5 means that attention takes half as long again as with perfect balance. Batch rows with masks of
    their own count together.

    Args:
        layout: the queries of each rank.
        mask: the keys that each query sees.
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
    check_rank_count(world_size)
    groups = [
        (batch, [layout.segments(seq_len, rank, world_size, group) for rank in range(world_size)])
        for group, batch in enumerate(layout.batch_groups(mask.batch_size or len(layout.batch_groups(2))))
    ]
    by_rank = workload_by_rank(groups, mask, seq_len)
    return excess(max(by_rank), sum(by_rank), world_size)


def check_rank_count(world_size: int) -> None:
    """Refuse anything but a number of ranks, of which there is an imbalance."""
    if not is_integer(world_size) or world_size < 1:
        raise ValueError(f"imbalance expects world_size to be a number of ranks >= 1, got {world_size!r}")


def excess(busiest: int, total: int, world_size: int) -> float:
    """Return the excess of the busiest rank over the mean, as a fraction of the mean; 0.0 without any work."""
    return (busiest * world_size - total) / total if total else 0.0


def clipped_interval_sets(mask: Mask, q_len: int, kv_len: int) -> IntervalSets:
    """Return the interval sets of a mask without empty bands."""
    return tuple(bands for each in mask.interval_sets(q_len, kv_len) if (bands := tuple(clipped_bands(each))))


def is_plain(mask: Mask, q_len: int, kv_len: int) -> bool:
    """Return whether a mask is full or the causal triangle from the top left, for which every backend has kernels."""
    return mask in (Full(), Causal()) or (isinstance(mask, Causal) and q_len == kv_len)


def as_plain(mask: Mask) -> Mask:
    """Return a plain mask as `Full()` or `Causal()`, whatever its alignment."""
    return mask if mask == Full() else Causal()


def mask_intersection(one: Mask, other: Mask) -> Mask:
    """Return `one & other`, or one of them alone if the other has all its pairs.

    >>> mask_intersection(Causal(), Full()), mask_intersection(Causal(), Causal())
    (Causal(alignment='top_left'), Causal(alignment='top_left'))
    """
    if isinstance(one, Full) or one is other:
        return other
    return one if isinstance(other, Full) or one == other else one & other


def _offset(alignment: Alignment, q_len: int, kv_len: int) -> int:
    """Return the position of query 0 among the keys."""
    return kv_len - q_len if alignment == "bottom_right" else 0


def _check_alignment(mask: Causal | SlidingWindow) -> None:
    if mask.alignment not in ("top_left", "bottom_right"):
        raise ValueError(f'expected alignment to be "top_left" or "bottom_right", got {mask.alignment!r}')


def _combined(one: Mask, other: Mask, kind: Callable[[tuple[Mask, ...]], Mask]) -> Mask:
    if not isinstance(other, Mask):
        return NotImplemented
    sizes = {size for size in (one.batch_size, other.batch_size) if size is not None}
    if not sizes:
        return kind((one, other))
    if len(sizes) > 1:
        raise ValueError(f"masks of different batch sizes cannot be combined: {one.batch_size}, {other.batch_size}")
    return Batched(kind((one.of_batch_row(row), other.of_batch_row(row))) for row in range(sizes.pop()))


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)
