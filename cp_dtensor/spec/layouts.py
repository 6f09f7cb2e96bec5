"""Layouts: the global token positions of each rank, in local order. Frozen values of integers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

from cp_dtensor.spec.cache import lru_cached

Span = tuple[int, int]
"""A half-open range, `(start, stop)`."""


class CachedHash:
    """Mixin of frozen dataclasses with many numbers, whose hash is computed once."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.__hash__ = CachedHash.__hash__  # type: ignore[method-assign]  # `dataclass` leaves a class its own

    @cached_property
    def _hash(self) -> int:
        return hash(tuple([getattr(self, each.name) for each in fields(self)]))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # hashes differ by process


class Segment(NamedTuple):
    """Consecutive local tokens and the arithmetic of their global positions.

    Local token `i` of the segment is at global position `start + (i // block) * period + i % block`: blocks of `block`
    adjacent tokens, `period` apart. A contiguous segment is one block.

    >>> list(Segment(start=2, length=5, block=2, period=8).positions())
    [2, 3, 10, 11, 18]
    """

    start: int
    length: int
    block: int
    period: int

    @classmethod
    def contiguous(cls, start: int, stop: int) -> Segment:
        """Return the segment of positions `start, ..., stop - 1`."""
        return cls(start, stop - start, max(stop - start, 1), max(stop - start, 1))

    @property
    def is_contiguous(self) -> bool:
        """True if the positions are one unbroken range."""
        return self.length <= self.block or self.block == self.period

    @property
    def last(self) -> int:
        """The last position; `start - 1` of an empty segment."""
        return self.position(self.length - 1)

    def position(self, index: int) -> int:
        """Return the position of a local token (of a tensor of local tokens: their positions)."""
        if self.is_contiguous:
            return self.start + index
        return self.start + index // self.block * self.period + index % self.block

    def rows_before(self, position: int) -> int:
        """Return the number of tokens whose position is smaller.

        >>> [Segment(start=2, length=5, block=2, period=8).rows_before(position) for position in (2, 4, 10, 11, 99)]
        [0, 2, 2, 3, 5]
        """
        blocks, rest = divmod(max(position - self.start, 0), self.period)
        return min(blocks * self.block + min(rest, self.block), self.length)

    def positions(self) -> range | list[int]:
        """Return the global positions in local order."""
        if self.is_contiguous:
            return range(self.start, self.start + self.length)
        return [self.position(index) for index in range(self.length)]

    def spans(self) -> list[Span]:
        """Return the unbroken ranges of positions."""
        step = self.length if self.is_contiguous else self.block
        starts = range(0, self.length, max(step, 1))
        return [(self.position(start), self.position(start) + min(step, self.length - start)) for start in starts]


def chunk(span: Span, chunks: int, index: int) -> Span:
    """Return the index-th of consecutive chunks of a span, whose lengths differ by at most one, longer ones first.

    >>> [chunk((0, 10), 4, index) for index in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    length, longer = divmod(span[1] - span[0], chunks)
    start = span[0] + index * length + min(index, longer)
    return start, start + length + (index < longer)


class Layout(ABC):
    """Partition of a sequence over the ranks of a context-parallel axis.

    A layout is a frozen, hashable value. It covers any sequence length >= 0 (or `only_length`) and any number of ranks:
    every position belongs to exactly one rank. All rows of a batch group are divided alike.
    """

    @abstractmethod
    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        """Return the tokens of `rank`, in local order.

        The number of segments is the same on every rank (some may be empty), so that the i-th segments of all ranks
        can be gathered together.

        Args:
            seq_len: global sequence length in tokens.
            rank: rank within the context-parallel axis, 0 <= rank < world_size.
            world_size: number of ranks of the axis.
            group: index into `batch_groups`.

        Raises:
            ValueError: another length than `only_length`.
        """

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        """Return ranges of batch rows that are divided alike; together they are the whole batch."""
        return ((0, batch_size),)

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        """Return the number of tokens of `rank`, which is the same in every batch group."""
        return sum(segment.length for segment in self.segments(seq_len, rank, world_size))

    @property
    def only_length(self) -> int | None:
        """The one length that the layout divides; None if it divides any."""
        return None

    @property
    def alignment(self) -> int:
        """Unbroken ranges begin at multiples of this number, in the sequence and in the shard, on every rank.

        It is a constant of the layout: 1 if it would depend on the length or on the number of ranks.
        """
        return 1


@lru_cached
def shard_lengths(layout: Layout, seq_len: int, world_size: int) -> tuple[int, ...]:
    """Return the number of tokens of each rank.

    >>> shard_lengths(HeadTail(), 5, world_size=2)
    (3, 2)
    """
    return tuple(layout.local_length(seq_len, rank, world_size) for rank in range(world_size))


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r owns the r-th of n adjacent chunks, whose lengths differ by at most one.

    Under a causal mask the last rank has the most work; prefer `HeadTail` there.

    >>> [list(Contiguous().segments(8, r, 4)[0].positions()) for r in range(4)]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        return (Segment.contiguous(*chunk((0, seq_len), world_size, rank)),)


@dataclass(frozen=True)
class HeadTail(Layout):
    """Rank r of n owns chunks r and 2n-1-r of 2n, which balances causal attention (also called zigzag).

    Same order as torch's head-tail load balancer where the length divides by 2n.
    Source: Llama 3 report (arXiv 2407.21783), section 3.3.2; zhuzilin's ring-flash-attention calls it zigzag.

    >>> [[list(s.positions()) for s in HeadTail().segments(8, r, 2)] for r in range(2)]
    [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        chunks = 2 * world_size
        return tuple(Segment.contiguous(*chunk((0, seq_len), chunks, each)) for each in (rank, chunks - 1 - rank))


@dataclass(frozen=True)
class Striped(Layout):
    """Rank r of n owns every n-th block of `block` tokens, starting with block r.

    Causal attention is balanced up to one block. With block = 1, tiles are triangles; with larger blocks they are
    masked by intervals.
    Source: Striped Attention (arXiv 2311.09431), section 3, which has block = 1.

    Raises:
        ValueError: `block` is no integer >= 1.

    >>> [list(Striped(block=2).segments(10, r, 2)[0].positions()) for r in range(2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    """

    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(f"Striped expects block to be an integer >= 1, got {self.block!r}")

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        period = self.block * world_size
        start = rank * self.block
        last = min(max(seq_len % period - start, 0), self.block)
        return (Segment(start, seq_len // period * self.block + last, self.block, period),)


@dataclass(frozen=True)
class MirroredBatch(Layout):
    """Contiguous chunks, in reversed order of ranks for the second half of the batch ("step attention").

    Causal attention is balanced if the batch has an even number of rows; of an odd batch the first half has one row
    more. Rank r has the same number of tokens in both halves. Attention needs the rows of the whole batch as they were
    sharded: parts of it (microbatches) would be halved again.

    >>> [[list(MirroredBatch().segments(4, r, 2, group=g)[0].positions()) for g in (0, 1)] for r in range(2)]
    [[[0, 1], [2, 3]], [[2, 3], [0, 1]]]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        start, stop = chunk((0, seq_len), world_size, rank)
        if group == 1:
            start, stop = seq_len - stop, seq_len - start
        return (Segment.contiguous(start, stop),)

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        half = (batch_size + 1) // 2
        return ((0, half), (half, batch_size)) if half < batch_size else ((0, batch_size),)


@dataclass(frozen=True)
class TorchChunk(Layout):
    """Partition of DTensor's `Shard` and of `torch.chunk`: ceil(S / n) tokens a rank, fewer on the last ranks.

    >>> [TorchChunk().local_length(10, r, 4) for r in range(4)]
    [3, 3, 3, 1]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        longest = -(-seq_len // world_size)
        start = min(rank * longest, seq_len)
        return (Segment.contiguous(start, min(start + longest, seq_len)),)


def joined_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of some ranges as ascending ranges, none of them empty or adjacent to another.

    >>> joined_spans([(4, 6), (0, 2), (2, 3), (5, 8), (9, 9)])
    [(0, 3), (4, 8)]
    """
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined
