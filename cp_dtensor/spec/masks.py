"""Masks: which query may see which key, as values. Of a whole problem (`Mask`); those of tiles are in `tile_masks`.

Queries and keys are counted by their positions in the whole sequence, whatever the layout. Masks combine: `a & b` shows
what both show, `a | b` what either shows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Literal, TypeGuard

from cp_dtensor.spec.intervals import FAR, IntervalBand, IntervalSets, intersected, merged, pairs_of

_TOO_LONG = 1 << 31
Alignment = Literal["top_left", "bottom_right"]


class Mask(ABC):
    """Which query may see which key. A frozen, hashable value."""

    @abstractmethod
    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        """What each query sees, for a problem of so many queries and keys."""

    def of_batch_row(self, row: int) -> Mask:
        """The mask of one row of the batch: for most, the same in each."""
        del row
        return self

    @property
    def batch_size(self) -> int | None:
        """How many rows the batch must have; None for masks that are the same in each."""
        return None

    def __and__(self, other: Mask) -> Mask:
        return _combined(self, other, Intersection)

    def __or__(self, other: Mask) -> Mask:
        return _combined(self, other, Union)

    def pairs(self, q_len: int, kv_len: int) -> int:
        """Number of (query, key) pairs that are shown, in one batch row (with masks of their own: on average)."""
        return _pairs_shown(self, q_len, kv_len)


@dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        return _one_layer(IntervalBand(0, q_len, 0, kv_len))


@dataclass(frozen=True)
class Causal(Mask):
    """Query i sees keys j <= i, as torch's `is_causal`; aligned "bottom_right", the last query sees the last key.

    >>> [Causal().layers(3, 3)[0][0].keys(i) for i in range(3)]
    [(0, 1), (0, 2), (0, 3)]
    """

    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        _check_alignment(self)

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        return _one_layer(IntervalBand(0, q_len, 0, kv_len, right=_offset(self.alignment, q_len, kv_len)))


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """Query i sees keys i - left to i + right; None: without end on that side.

    It sees its own place besides: what models call a sliding window of W tokens is `SlidingWindow(W - 1, 0)`.

    Aligned "bottom_right", the last query stands at the last key, as in FlashAttention.

    >>> [SlidingWindow(1, 0).layers(3, 3)[0][0].keys(i) for i in range(3)]
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

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        offset = _offset(self.alignment, q_len, kv_len)
        left = FAR if self.left is None or self.left >= FAR else self.left - offset
        right = FAR if self.right is None or self.right >= FAR else self.right + offset
        return _one_layer(IntervalBand(0, q_len, 0, kv_len, left, right))


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, but that every query sees the first `length` keys.

    >>> [band.keys(i) for i in range(3) for band in PrefixLM(2).layers(3, 3)[0] if band.first <= i < band.last]
    [(0, 2), (0, 2), (0, 3)]
    """

    length: int

    def __post_init__(self) -> None:
        if not is_integer(self.length) or self.length < 0:
            raise ValueError(f"PrefixLM expects a number of keys >= 0, got {self.length!r}")

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        prefix = min(self.length, q_len)
        return _one_layer(
            IntervalBand(0, prefix, 0, min(self.length, kv_len)), IntervalBand(prefix, q_len, 0, kv_len, right=0)
        )


@dataclass(frozen=True)
class Intersection(Mask):
    """What all of some masks show: `a & b`."""

    masks: tuple[Mask, ...]

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        return reduce(intersected, (clipped_interval_sets(mask, q_len, kv_len) for mask in self.masks))


@dataclass(frozen=True)
class Union(Mask):
    """What any of some masks shows: `a | b`."""

    masks: tuple[Mask, ...]

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        return reduce(merged, (clipped_interval_sets(mask, q_len, kv_len) for mask in self.masks))


@dataclass(frozen=True, init=False)
class Batched(Mask):
    """A mask of its own for each row of the batch."""

    masks: tuple[Mask, ...]

    def __init__(self, masks: Iterable[Mask]) -> None:
        if isinstance(masks, Mask):
            raise ValueError(f"Batched expects a list, of a mask for each row of the batch, got one mask: {masks}")
        masks = tuple(masks)
        if not masks or any(not isinstance(mask, Mask) or mask.batch_size is not None for mask in masks):
            raise ValueError(f"Batched expects a mask for each row of the batch, got {masks}")
        object.__setattr__(self, "masks", masks)

    def layers(self, q_len: int, kv_len: int) -> IntervalSets:
        raise ValueError("a mask that differs by batch row has layers by batch row: of_batch_row(row).layers(...)")

    def of_batch_row(self, row: int) -> Mask:
        return self.masks[row]

    @property
    def batch_size(self) -> int:
        return len(self.masks)


# Both are asked several times when a call of a new mask is planned.
@lru_cache(maxsize=64)
def _pairs_shown(mask: Mask, q_len: int, kv_len: int) -> int:
    rows = _layers_by_row(mask, q_len, kv_len)
    return sum(pairs_of(layers, (0, q_len), (0, kv_len)) for layers in rows) // len(rows)


@lru_cache(maxsize=64)
def _layers_by_row(mask: Mask, q_len: int, kv_len: int) -> tuple[IntervalSets, ...]:
    return tuple(clipped_interval_sets(mask.of_batch_row(row), q_len, kv_len) for row in range(mask.batch_size or 1))


def interval_sets_of(mask: Mask, q_len: int, kv_len: int, batch_size: int) -> tuple[IntervalSets, ...]:
    """The layers of a mask: once, if they are the same in every batch row, else for each row.

    Raises:
        ValueError: a mask that does not fit lengths or batch.
    """
    if max(q_len, kv_len) >= _TOO_LONG:
        raise ValueError(
            f"masks count positions with 32 bits: expected fewer than 2^31 tokens, got {q_len} and {kv_len}"
        )
    if mask.batch_size not in (None, batch_size):
        raise ValueError(f"the mask is of {mask.batch_size} batch rows, got a batch of {batch_size}")
    return _layers_by_row(mask, q_len, kv_len)


def is_plain(mask: Mask, q_len: int, kv_len: int) -> bool:
    """Whether a mask is nothing, or the causal triangle from the top left, for which every backend has kernels."""
    return mask in (Full(), Causal()) or (isinstance(mask, Causal) and q_len == kv_len)


def as_plain(mask: Mask) -> Mask:
    """A plain mask as tiles by shape have it: a causal one of whatever alignment is the triangle from the top left."""
    return mask if mask == Full() else Causal()


@lru_cache(maxsize=256)  # one object for equal ones, which are looked up at every call
def shown_by_both(one: Mask, other: Mask) -> Mask:
    """`one & other`, or just one of them where the other hides nothing more.

    >>> shown_by_both(Causal(), Full()), shown_by_both(Causal(), Causal())
    (Causal(alignment='top_left'), Causal(alignment='top_left'))
    """
    if one in (Full(), other):
        return other
    return one if other == Full() else one & other


def clipped_interval_sets(mask: Mask, q_len: int, kv_len: int) -> IntervalSets:
    """The layers of a mask, without what shows nothing."""
    layers = []
    for layer in mask.layers(q_len, kv_len):
        clipped = (band.clipped((band.first, band.last)) for band in layer)
        layers.append(tuple(band for band in clipped if band is not None))
    return tuple(layer for layer in layers if layer)


def _one_layer(*bands: IntervalBand) -> IntervalSets:
    return (bands,)


def _offset(alignment: Alignment, q_len: int, kv_len: int) -> int:
    """Where query 0 stands among the keys."""
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
    """Whether a value is an integer, which a flag is not."""
    return isinstance(value, int) and not isinstance(value, bool)


# The mask of packed documents.


# Documents of several batch rows whose tokens stand one after the other, as torch's `varlen_attn` is called with.
