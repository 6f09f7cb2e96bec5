"""The layout that is made for a block mask of FlexAttention: ranks own whole blocks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from cp_dtensor.layouts import Span, chunk_length
from cp_dtensor.mask_layouts import OneLength, check_tolerance
from cp_dtensor.masks import is_integer
from cp_dtensor.necklace import Dealing
from cp_dtensor.remembered_hash import RememberedHash


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
    __hash__ = RememberedHash.__hash__

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
