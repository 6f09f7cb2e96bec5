"""Layouts: which global token positions each rank owns, in which local order.

A layout is a frozen value of integers: no tensors, no process group. Everything else in the library (sharding of
buffers, schedules, positions for RoPE, the pictures in the docs) reads layouts through the methods of `Layout`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

# Values of many numbers, such as the edges of documents, that are looked up at every call of attention.


class CachedHash:
    """Of frozen dataclasses, computed once. They say `__hash__ = CachedHash.__hash__`, or are given another."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, each.name) for each in fields(self)))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # hashes differ by process


Span = tuple[int, int]
"""A half-open range of rows, `(start, stop)`."""


@dataclass(frozen=True)
class Segment:
    """A run of consecutive local tokens and the arithmetic of their global positions.

    Local token `i` of the segment stands at global position `start + (i // block) * period + i % block`: blocks of
    `block` adjacent tokens, `period` apart. A contiguous segment is one block.

    >>> list(Segment(start=2, length=5, block=2, period=8).positions())
    [2, 3, 10, 11, 18]
    """

    start: int
    length: int
    block: int
    period: int

    @classmethod
    def contiguous(cls, start: int, stop: int) -> Segment:
        """The segment of positions `start, ..., stop - 1`."""
        return cls(start=start, length=stop - start, block=max(stop - start, 1), period=max(stop - start, 1))

    @property
    def is_contiguous(self) -> bool:
        """Whether the positions are one unbroken range."""
        return self.length <= self.block or self.block == self.period

    @property
    def last(self) -> int:
        """The last position; `start - 1` of an empty segment."""
        return self.position(self.length - 1) if self.length else self.start - 1

    def position(self, index: int) -> int:
        """Where a local token stands; of a tensor of tokens, where each does."""
        return self.start + index // self.block * self.period + index % self.block

    def positions(self) -> range | list[int]:
        """Global positions in local order."""
        if self.is_contiguous:
            return range(self.start, self.start + self.length)
        return [self.position(index) for index in range(self.length)]


def chunk_length(seq_len: int, chunks: int, index: int) -> int:
    """Length of chunk `index` when `seq_len` tokens are cut into `chunks` whose lengths differ by at most one.

    The longer chunks come first.

    >>> [chunk_length(10, 4, i) for i in range(4)]
    [3, 3, 2, 2]
    """
    return seq_len // chunks + (index < seq_len % chunks)


def chunk_start(seq_len: int, chunks: int, index: int) -> int:
    """First position of chunk `index`, cut as in `chunk_length`."""
    return index * (seq_len // chunks) + min(index, seq_len % chunks)


def _chunk(seq_len: int, chunks: int, index: int) -> Segment:
    start = chunk_start(seq_len, chunks, index)
    return Segment.contiguous(start, start + chunk_length(seq_len, chunks, index))


class Layout(ABC):
    """How a sequence is divided over the ranks of a context-parallel axis.

    A layout is a frozen, hashable value. It covers any sequence length >= 0 (or `only_length`) and any number of ranks:
    every position belongs to exactly one rank. All rows of the batch share one division, unless `batch_groups` says
    otherwise.
    """

    @abstractmethod
    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        """The tokens of `rank`, in local order.

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

    @abstractmethod
    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        """Ranges of batch rows that share one division of the sequence; together they are the whole batch."""

    @abstractmethod
    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        """Number of tokens that `rank` owns, the same in every batch group."""

    @property
    @abstractmethod
    def only_length(self) -> int | None:
        """The one length that the layout divides; None if it divides any."""

    @property
    @abstractmethod
    def alignment(self) -> int:
        """Unbroken ranges begin at multiples of it, in the sequence and in the shard, whatever the rank; 1 if anywhere.

        A constant of the layout, so 1 where it would depend on the length or on the number of ranks.
        """


class _AnyLength(Layout):
    """Layouts of sequences of any length."""

    @property
    def only_length(self) -> int | None:
        return None

    @property
    def alignment(self) -> int:
        return 1


class _WholeBatch(_AnyLength):
    """Layouts that divide every row of the batch alike."""

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        return ((0, batch_size),)

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        return sum(segment.length for segment in self.segments(seq_len, rank, world_size))


@dataclass(frozen=True)
class Contiguous(_WholeBatch):
    """Rank r owns the r-th of n adjacent chunks, whose lengths differ by at most one.

    Under a causal mask the last rank has the most work; prefer `HeadTail` there.

    >>> [list(Contiguous().segments(8, r, 4)[0].positions()) for r in range(4)]
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        return (_chunk(seq_len, world_size, rank),)


@dataclass(frozen=True)
class HeadTail(_WholeBatch):
    """Rank r of n owns chunks r and 2n-1-r of 2n, which balances causal attention (also called zigzag).

    Same order as torch's head-tail load balancer where the length divides by 2n.
    Source: Llama 3 report (arXiv 2407.21783), section 3.3.2; zhuzilin's ring-flash-attention calls it zigzag.

    >>> [[list(s.positions()) for s in HeadTail().segments(8, r, 2)] for r in range(2)]
    [[[0, 1], [6, 7]], [[2, 3], [4, 5]]]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        chunks = 2 * world_size
        return (_chunk(seq_len, chunks, rank), _chunk(seq_len, chunks, chunks - 1 - rank))


@dataclass(frozen=True)
class Striped(_WholeBatch):
    """Blocks of `block` tokens are dealt to the ranks in turn, like cards.

    Source: Striped Attention (arXiv 2311.09431), section 3, which has block = 1.

    >>> [list(Striped(block=2).segments(10, r, 2)[0].positions()) for r in range(2)]
    [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]
    """

    block: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"Striped: expected block to be an integer >= 1, got {self.block!r}")

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        period = self.block * world_size
        start = rank * self.block
        last = min(max(seq_len % period - start, 0), self.block)
        return (Segment(start, seq_len // period * self.block + last, self.block, period),)


@dataclass(frozen=True)
class MirroredBatch(_AnyLength):
    """Contiguous chunks, dealt to the ranks in reversed order for the second half of the batch ("step attention").

    Balances causal attention without cutting a row in two, as long as the batch has an even number of rows; of an odd
    batch the first half has one row more. Rank r has the same number of tokens in both halves. Attention takes the rows
    of a whole batch as they were sharded: parts of it (microbatches) would be halved anew.

    >>> [[list(MirroredBatch().segments(4, r, 2, group=g)[0].positions()) for g in (0, 1)] for r in range(2)]
    [[[0, 1], [2, 3]], [[2, 3], [0, 1]]]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        start = chunk_start(seq_len, world_size, rank)
        length = chunk_length(seq_len, world_size, rank)
        if group == 1:  # the ranks line up from the last to the first: whoever is behind us in rank is before us here
            start = seq_len - start - length
        return (Segment.contiguous(start, start + length),)

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        half = (batch_size + 1) // 2
        return ((0, half), (half, batch_size)) if half < batch_size else ((0, batch_size),)

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        return chunk_length(seq_len, world_size, rank)


@dataclass(frozen=True)
class TorchChunk(_WholeBatch):
    """The division of DTensor's `Shard`, that of `torch.chunk`: ceil(S / n) tokens a rank, the last ranks have fewer.

    >>> [TorchChunk().local_length(10, r, 4) for r in range(4)]
    [3, 3, 3, 1]
    """

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        chunk = -(-seq_len // world_size)
        start = min(rank * chunk, seq_len)
        return (Segment.contiguous(start, min(start + chunk, seq_len)),)


def share(span: Span, index: int, count: int) -> Span:
    """The index-th of `count` consecutive shares, which differ by at most one."""
    length = span[1] - span[0]
    return span[0] + -(-length * index // count), span[0] + -(-length * (index + 1) // count)
