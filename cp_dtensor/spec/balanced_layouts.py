"""Layouts that are made for a mask: of packed documents, and of any mask. Each is of one sequence length."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from math import isfinite
from operator import add
from typing import Any

from cp_dtensor.spec.documents import ascending
from cp_dtensor.spec.layouts import CachedHash, Layout, Segment, Span, chunk_length
from cp_dtensor.spec.load_balance import Dealing, imbalance, workload_of
from cp_dtensor.spec.masks import Mask, is_integer


class OneLength(CachedHash, Layout):
    """Layouts of contiguous blocks for one length, alike in all rows of the batch.

    Subclasses are frozen dataclasses.
    """

    @abstractmethod
    def blocks(self, world_size: int) -> list[list[Span]]:
        """The ranges of positions that each rank owns, ascending and not empty, no two of them neighbours."""

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        self._refuse_other_lengths(seq_len)
        return _segments(self, world_size)[rank]

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        return ((0, batch_size),)

    def _refuse_other_lengths(self, seq_len: int) -> None:
        if seq_len != self.only_length:
            raise ValueError(
                f"this {type(self).__name__} divides sequences of {self.only_length} tokens only, got {seq_len} tokens"
            )


@lru_cache(maxsize=128)
def _segments(layout: OneLength, world_size: int) -> tuple[tuple[Segment, ...], ...]:
    by_rank = layout.blocks(world_size)
    most = max(1, *map(len, by_rank))
    nothing = [(layout.only_length or 0,) * 2]
    return tuple(
        tuple(Segment.contiguous(*block) for block in blocks + nothing * (most - len(blocks))) for blocks in by_rank
    )


class _EvenShards(OneLength):
    """Shards differ by one token at most: the first ranks own the longer ones, as with `Contiguous`."""

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        self._refuse_other_lengths(seq_len)
        return chunk_length(seq_len, world_size, rank)

    @property
    def alignment(self) -> int:
        return 1


@dataclass(frozen=True, init=False)
class PerDocument(_EvenShards):
    """Head-tail within each document: of its 2n chunks, rank r of n owns chunks r and 2n-1-r.

    So causal attention within documents is balanced document by document. Chunks of a document differ by one token at
    most. Which ranks get the longer ones goes round from document to document, so that shards too differ by one token
    at most, however many documents there are and however short they are; whether their heads or their tails are longer
    is decided by what has been even so far. Tokens before the first and after the last document (padding) are dealt in
    the same way.

    A rank has up to two blocks of every document, and needs the keys of nearly all others' blocks; for many documents
    `Balanced` has fewer blocks and moves less. To plan a call takes the longer the more blocks there are: 0.2 s for 300
    documents on 8 ranks.

    Args:
        cu_seqlens: ascending positions, one more than documents; integers or a tensor (see `Documents`).
        seq_len: global number of tokens; the end of the last document if None.

    Raises:
        ValueError: positions that do not ascend, or that are beyond the end.

    >>> [PerDocument([0, 4, 12]).blocks(2)[rank] for rank in range(2)]
    [[(0, 1), (3, 6), (10, 12)], [(1, 3), (6, 10)]]
    >>> PerDocument([0, 1, 2, 3, 4]).blocks(2)  # short documents go round
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    """

    cu_seqlens: tuple[int, ...]
    seq_len: int
    __hash__ = CachedHash.__hash__

    def __init__(self, cu_seqlens: Any, *, seq_len: int | None = None) -> None:
        edges = ascending(cu_seqlens, "PerDocument", "cu_seqlens")
        length = edges[-1] if seq_len is None else seq_len
        if not is_integer(length) or length < edges[-1]:
            raise ValueError(f"PerDocument expects seq_len >= {edges[-1]}, where the documents end; got {length!r}")
        object.__setattr__(self, "cu_seqlens", edges)
        object.__setattr__(self, "seq_len", length)

    @property
    def only_length(self) -> int:
        return self.seq_len

    def blocks(self, world_size: int) -> list[list[Span]]:
        by_rank: list[list[Span]] = [[] for _ in range(world_size)]
        work = [0] * world_size
        turn = 0
        for start, stop in pairwise((0, *self.cu_seqlens, self.seq_len)):
            shortest, rest = divmod(stop - start, 2 * world_size)
            for_all, for_some = divmod(rest, world_size)
            more = [for_all + ((rank - turn) % world_size < for_some) for rank in range(world_size)]
            turn = (turn + for_some) % world_size
            cuts = [_chunks(shortest, more, to_tails) for to_tails in ((False, True) if 1 in more else (False,))]
            works = [list(map(add, work, _causal_work(chunks))) for chunks in cuts]
            work, chunks = min(
                zip(works, cuts, strict=True), key=lambda choice: sum(workload**2 for workload in choice[0])
            )
            for rank, length in chunks:
                if length:
                    _append(by_rank[rank], (start, start + length))
                    start += length
        return by_rank


def _chunks(shortest: int, more: list[int], to_tails: bool) -> list[tuple[int, int]]:
    """(rank, length) of a document's chunks in order; `more` tokens beyond two of `shortest` for each rank.

    >>> _chunks(shortest=1, more=[1, 2], to_tails=False)
    [(0, 2), (1, 2), (1, 2), (0, 1)]
    """
    heads = [(rank, shortest + (count == 2 or (count == 1 and not to_tails))) for rank, count in enumerate(more)]
    tails = [(rank, shortest + (count == 2 or (count == 1 and to_tails))) for rank, count in enumerate(more)]
    return heads + tails[::-1]


def _causal_work(chunks: list[tuple[int, int]]) -> list[int]:
    """Pairs of each rank under a causal mask within a document.

    >>> _causal_work([(0, 1), (1, 1), (1, 1), (0, 1)])
    [5, 5]
    """
    work = [0] * (len(chunks) // 2)
    start = 0
    for rank, length in chunks:
        work[rank] += length * start + length * (length + 1) // 2
        start += length
    return work


def _append(blocks: list[Span], block: Span) -> None:
    if blocks and blocks[-1][1] == block[0]:
        blocks[-1] = (blocks[-1][0], block[1])
    else:
        blocks.append(block)


@dataclass(frozen=True)
class Balanced(_EvenShards):
    """Every rank owns equally many tokens and computes equally many (query, key) pairs of `mask`, whatever it is.

    One block a rank where that is balanced already; otherwise n ranks own at most 2n - 1 blocks together, and no rank
    more than 1 + ceil(log2(n)) of them. Few blocks and cheap cuts keep what travels small. Of a causal mask this is
    `HeadTail`. The busiest rank exceeds the mean by at most `tolerance`, and by what a few single queries see: it
    matters for short sequences only.

    Over two axes the ranks of an inner one own a balanced share together, too.

    Args:
        mask: which query may see which key; if batch rows have masks of their own, all of them together are balanced.
        seq_len: global number of tokens.
        tolerance: how much more than the mean the busiest rank may have, as a fraction of it, if that saves blocks.

    Raises:
        TypeError: no mask.
        ValueError: a mask that is not of this length, a length or tolerance that is none.

    >>> from cp_dtensor import Causal, Documents
    >>> Balanced(Causal(), 8).blocks(2)
    [[(0, 2), (6, 8)], [(2, 6)]]
    >>> Balanced(Documents([0, 4, 8], within=Causal()), 8).blocks(2)
    [[(0, 4)], [(4, 8)]]
    """

    mask: Mask
    seq_len: int
    tolerance: float = field(default=0.01, kw_only=True)
    __hash__ = CachedHash.__hash__

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"Balanced expects a mask such as Causal(), got {self.mask!r}")
        if not is_integer(self.seq_len) or self.seq_len < 0:
            raise ValueError(f"Balanced expects seq_len to be an integer >= 0, got {self.seq_len!r}")
        check_tolerance("Balanced", self.tolerance)
        workload_of(self.mask, self.seq_len)

    @property
    def only_length(self) -> int:
        return self.seq_len

    def blocks(self, world_size: int) -> list[list[Span]]:
        lengths = tuple(chunk_length(self.seq_len, world_size, rank) for rank in range(world_size))
        return Dealing(workload_of(self.mask, self.seq_len), lengths, self.tolerance).blocks()

    def imbalance(self, world_size: int) -> float:
        """How many more (query, key) pairs the busiest rank has than the mean, as a fraction of it.

        >>> from cp_dtensor import Causal
        >>> Balanced(Causal(), 8).imbalance(world_size=2)
        0.0
        """
        return imbalance(self, self.mask, self.seq_len, world_size)


def check_tolerance(layout: str, tolerance: float) -> None:
    """Refuses what is none."""
    if not (isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"{layout} expects tolerance to be a fraction >= 0, got {tolerance!r}")


# The layout that is made for a block mask of FlexAttention: ranks own whole blocks of it.


@dataclass(frozen=True)
class BalancedBlocks(OneLength):
    """Every rank owns equally many blocks of tokens, and blocks of equal work, in few contiguous ranges.

    `Balanced` for FlexAttention, whose kernels compute block by block: cuts lie at blocks, so a rank's block mask is
    some rows of the whole one, with none of them mixed from two. The numbers of blocks differ by one at most; so shards
    are equal where the number of blocks is a multiple of the number of ranks and the last block is whole. As with
    `Balanced`, n ranks own at most 2n - 1 ranges together.

    Args:
        work: of each block of queries, in any unit.
        block: tokens of a block; the last one may be shorter.
        seq_len: global number of tokens.
        tolerance: how much more than the mean the busiest rank may have, as a fraction of it, if that saves ranges.

    Raises:
        ValueError: work of another number of blocks than there are, or less than none; no length, no block, no
            tolerance.

    >>> BalancedBlocks((1, 2, 3, 4), block=128, seq_len=512).blocks(2)  # of a causal mask
    [[(0, 128), (384, 512)], [(128, 384)]]
    """

    work: tuple[int, ...]
    block: int
    seq_len: int
    tolerance: float = field(default=0.01, kw_only=True)
    __hash__ = CachedHash.__hash__

    def __post_init__(self) -> None:
        if not is_integer(self.seq_len) or self.seq_len < 0:
            raise ValueError(f"BalancedBlocks expects seq_len to be an integer >= 0, got {self.seq_len!r}")
        if not is_integer(self.block) or self.block < 1:
            raise ValueError(f"BalancedBlocks expects block to be an integer >= 1, got {self.block!r}")
        count = -(-self.seq_len // self.block)
        if not isinstance(self.work, tuple) or len(self.work) != count or not all(map(_is_work, self.work)):
            raise ValueError(
                f"BalancedBlocks expects the work of {count} blocks, integers >= 0 as a tuple: {self.seq_len} tokens "
                f"in blocks of {self.block}; got {_shortened(self.work)}"
            )
        check_tolerance("BalancedBlocks", self.tolerance)

    @classmethod
    def of(cls, block_mask: Any, *, tolerance: float = 0.01) -> BalancedBlocks:
        """For a block mask of the whole sequence; it is waited for where it is on a GPU.

        A block of queries has as much work as it sees blocks of keys, all batch rows and heads of the mask together.

        Args:
            block_mask: a `BlockMask` of as many queries as keys, alike on every rank.
            tolerance: as for the class.

        Raises:
            TypeError: no `BlockMask`.
            ValueError: a mask of another number of keys than of queries, or of one block that goes with all lengths.
        """
        if not hasattr(block_mask, "kv_num_blocks"):
            raise TypeError(f"BalancedBlocks.of expects a BlockMask, got {type(block_mask).__name__}")
        q_len, kv_len = block_mask.seq_lengths
        if q_len != kv_len:
            raise ValueError(
                f"BalancedBlocks divides queries and keys alike: expected a block mask of as many keys as queries, got "
                f"{q_len} queries and {kv_len} keys"
            )
        if q_len == 1 < min(block_mask.BLOCK_SIZE):  # as FlexAttention makes it where it is given none
            raise ValueError(
                "BalancedBlocks divides a sequence by the blocks of its mask: expected a block mask of the whole "
                "sequence, got one of a single token, or of a single block that goes with all lengths"
            )
        seen = block_mask.kv_num_blocks
        if block_mask.full_kv_num_blocks is not None:
            seen = seen + block_mask.full_kv_num_blocks
        return cls(tuple(seen.sum((0, 1)).tolist()), block_mask.BLOCK_SIZE[0], q_len, tolerance=tolerance)

    @property
    def only_length(self) -> int:
        return self.seq_len

    @property
    def alignment(self) -> int:
        return self.block

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        return sum(segment.length for segment in self.segments(seq_len, rank, world_size))

    def blocks(self, world_size: int) -> list[list[Span]]:
        return [
            [(start * self.block, min(stop * self.block, self.seq_len)) for start, stop in ranges]
            for ranges in self._dealing(world_size).blocks()
        ]

    def imbalance(self, world_size: int) -> float:
        """How much more work than the mean the busiest rank has, as a fraction of it.

        >>> BalancedBlocks((1, 2, 3, 4), block=128, seq_len=512).imbalance(2)
        0.0
        """
        dealing = self._dealing(world_size)
        return dealing.busiest(dealing.blocks()) * world_size / dealing.total - 1 if dealing.total else 0.0

    def _dealing(self, world_size: int) -> Dealing:
        """Of blocks, not tokens."""
        lengths = tuple(chunk_length(len(self.work), world_size, rank) for rank in range(world_size))
        return Dealing(_Counted(self.work), lengths, self.tolerance)


class _Counted:
    """Work that is known by the block, as areas that count in blocks."""

    def __init__(self, work: Sequence[int]) -> None:
        self._before = list(accumulate(work, initial=0))

    def before(self, position: int) -> int:
        return self._before[position]

    def of(self, queries: Span) -> int:
        return self._before[queries[1]] - self._before[queries[0]]

    def reach_across(self, position: int) -> int:
        return 0  # FlexAttention gathers all keys, wherever they are


def _is_work(value: object) -> bool:
    return is_integer(value) and value >= 0


def _shortened(value: object) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) and len(value) > 8 else repr(value)
