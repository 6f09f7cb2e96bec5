"""Layouts that balance the workload of a given mask, each for one sequence length."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite
from operator import add
from typing import Any

from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.documents import ascending
from cp_dtensor.spec.intervals import Workload
from cp_dtensor.spec.layouts import CachedHash, Layout, Segment, Span, chunk, joined_spans
from cp_dtensor.spec.masks import Mask, check_rank_count, excess, interval_sets_of, is_integer, workload_of


class OneLength(CachedHash, Layout):
    """Base of layouts of contiguous blocks for one length, the same in all batch rows.

    Subclasses are frozen dataclasses.
    """

    seq_len: int

    @property
    def only_length(self) -> int:
        return self.seq_len

    @abstractmethod
    def blocks(self, world_size: int) -> list[list[Span]]:
        """Return the ranges of positions that each rank owns: ascending, not empty, no two of them adjacent."""

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        if seq_len != self.seq_len:
            raise ValueError(
                f"this {type(self).__name__} divides sequences of {self.seq_len} tokens only, got {seq_len} tokens"
            )
        return _segments(self, world_size)[rank]


@lru_cached
def _segments(layout: OneLength, world_size: int) -> tuple[tuple[Segment, ...], ...]:
    by_rank = layout.blocks(world_size)
    most = max(1, *map(len, by_rank))
    nothing = [(layout.seq_len,) * 2]
    return tuple(
        tuple(Segment.contiguous(*block) for block in blocks + nothing * (most - len(blocks))) for blocks in by_rank
    )


@dataclass(frozen=True, init=False)
class PerDocument(OneLength):
    """Head-tail within each document: of its 2n chunks, rank r of n owns chunks r and 2n-1-r.

    Causal attention within documents is balanced document by document. Chunks of a document, and shards of the whole
    sequence, differ by one token at most: the ranks with longer chunks take turns from document to document, and the
    longer chunk is the head or the tail, whichever keeps the work of ranks more even. Tokens before the first and after
    the last document (padding) are divided in the same way.

    A rank has up to two blocks of every document and needs keys of nearly all blocks of others; for many documents
    `Balanced` has fewer blocks and sends less. The time to plan a call grows with the number of blocks: 0.2 s for 300
    documents on 8 ranks.

    Args:
        cu_seqlens: ascending positions, one more than documents; integers or a tensor (see `Documents`).
        seq_len: global number of tokens; the end of the last document if None.

    Raises:
        ValueError: positions that do not ascend, or that are beyond `seq_len`.

    >>> [PerDocument([0, 4, 12]).blocks(2)[rank] for rank in range(2)]
    [[(0, 1), (3, 6), (10, 12)], [(1, 3), (6, 10)]]
    >>> PerDocument([0, 1, 2, 3, 4]).blocks(2)  # ranks take turns
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    """

    cu_seqlens: tuple[int, ...]
    seq_len: int

    def __init__(self, cu_seqlens: Any, *, seq_len: int | None = None) -> None:
        edges = ascending(cu_seqlens, "PerDocument", "cu_seqlens")
        length = edges[-1] if seq_len is None else seq_len
        if not is_integer(length) or length < edges[-1]:
            raise ValueError(f"PerDocument expects seq_len >= {edges[-1]}, where the documents end; got {length!r}")
        object.__setattr__(self, "cu_seqlens", edges)
        object.__setattr__(self, "seq_len", length)

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
            work, chunks = min(zip(works, cuts, strict=True), key=lambda choice: sum(x**2 for x in choice[0]))
            for rank, length in chunks:
                by_rank[rank].append((start, start + length))
                start += length
        return list(map(joined_spans, by_rank))


def _chunks(shortest: int, more: list[int], to_tails: bool) -> list[tuple[int, int]]:
    """Return (rank, length) of a document's chunks in order; `more`: each rank's tokens beyond two of `shortest`.

    >>> _chunks(shortest=1, more=[1, 2], to_tails=False)
    [(0, 2), (1, 2), (1, 2), (0, 1)]
    """
    heads = [(rank, shortest + (count == 2 or (count == 1 and not to_tails))) for rank, count in enumerate(more)]
    tails = [(rank, shortest + (count == 2 or (count == 1 and to_tails))) for rank, count in enumerate(more)]
    return heads + tails[::-1]


def _causal_work(chunks: list[tuple[int, int]]) -> list[int]:
    """Return the pairs of each rank under a causal mask within a document.

    >>> _causal_work([(0, 1), (1, 1), (1, 1), (0, 1)])
    [5, 5]
    """
    work = [0] * (len(chunks) // 2)
    start = 0
    for rank, length in chunks:
        work[rank] += length * start + length * (length + 1) // 2
        start += length
    return work


class _EvenWork(OneLength):
    """Base of layouts by a balanced partition."""

    @abstractmethod
    def _partition(self, world_size: int) -> BalancedPartition:
        """Return the partition of tokens, or of blocks of `alignment` tokens."""

    def blocks(self, world_size: int) -> list[list[Span]]:
        size = self.alignment
        by_rank = self._partition(world_size).blocks()
        return [[(start * size, min(stop * size, self.seq_len)) for start, stop in spans] for spans in by_rank]

    def imbalance(self, world_size: int) -> float:
        """Return the excess of the busiest rank's work over the mean, as a fraction of the mean.

        >>> from cp_dtensor import Causal
        >>> Balanced(Causal(), 8).imbalance(world_size=2), BalancedBlocks((1, 3), block=128, seq_len=256).imbalance(2)
        (0.0, 0.5)
        """
        check_rank_count(world_size)
        partition = self._partition(world_size)
        return excess(partition.busiest(partition.blocks()), partition.total, world_size)


@dataclass(frozen=True)
class Balanced(_EvenWork):
    """Every rank owns equally many tokens and computes equally many (query, key) pairs of `mask`.

    A rank has one block if that is balanced already; otherwise n ranks own at most 2n - 1 blocks together, and no rank
    more than 1 + ceil(log2(n)). Few blocks and cheap cuts keep transfers of K/V small. For a causal mask this is
    `HeadTail`. The busiest rank exceeds the mean by at most `tolerance` and the pairs of a few queries, which matters
    for short sequences only. Over two mesh axes, the ranks of each inner axis own a balanced share together, too.

    Args:
        mask: the keys that each query sees; if batch rows have masks of their own, their sum is balanced.
        seq_len: global number of tokens.
        tolerance: the excess of the busiest rank over the mean that is allowed, as a fraction of the mean, if it saves
            blocks.

    Raises:
        TypeError: `mask` is no mask.
        ValueError: a mask that does not fit the length; a length or tolerance below 0.

    >>> from cp_dtensor import Causal, Documents
    >>> Balanced(Causal(), 8).blocks(2)
    [[(0, 2), (6, 8)], [(2, 6)]]
    >>> Balanced(Documents([0, 4, 8], within=Causal()), 8).blocks(2)
    [[(0, 4)], [(4, 8)]]
    """

    mask: Mask
    seq_len: int
    tolerance: float = field(default=0.01, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise TypeError(f"Balanced expects a mask such as Causal(), got {self.mask!r}")
        _checked_length("Balanced", self.seq_len, self.tolerance)
        interval_sets_of(self.mask, self.seq_len, self.seq_len, self.mask.batch_size or 1)  # refuses other lengths

    def _partition(self, world_size: int) -> BalancedPartition:
        workload = workload_of(self.mask, self.seq_len, self.seq_len)
        return BalancedPartition(workload, self.seq_len, world_size, self.tolerance)


def _checked_length(layout: str, seq_len: Any, tolerance: float) -> int:
    """Return `seq_len`; refuse values that are no length or no tolerance."""
    if not is_integer(seq_len) or seq_len < 0:
        raise ValueError(f"{layout} expects seq_len to be an integer >= 0, got {seq_len!r}")
    if not (isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"{layout} expects tolerance to be a fraction >= 0, got {tolerance!r}")
    return seq_len


@dataclass(frozen=True, init=False)
class BalancedBlocks(_EvenWork):
    """`Balanced` for FlexAttention: ranks own whole blocks of a block mask, equally many and of equal work.

    A rank's block mask then consists of rows of the whole block mask. The numbers of blocks differ by one at most, so
    shards are equal if the number of blocks is a multiple of the number of ranks and the last block is whole. As with
    `Balanced`, n ranks own at most 2n - 1 ranges of blocks together.

    `BalancedBlocks(block_mask)` reads the work of each block of queries, which is the number of blocks of keys that it
    sees, all batch rows and heads together. A mask on a GPU is copied to the host, which waits for the GPU.

    Args:
        work: a `BlockMask` of as many queries as keys, the same on every rank; or the work of each block of queries, in
            any unit, as a tuple of integers.
        block: tokens of a block; the last block may be shorter. None with a `BlockMask`, which has it.
        seq_len: global number of tokens. None with a `BlockMask`.
        tolerance: the excess of the busiest rank over the mean that is allowed, as a fraction of the mean, if it saves
            ranges.

    Raises:
        TypeError: neither a `BlockMask` nor the work of blocks.
        ValueError: a block mask of another number of keys than of queries, or of one block for all lengths; work of
            another number of blocks than there are, or below 0; no length, block or tolerance.

    >>> BalancedBlocks((1, 2, 3, 4), block=128, seq_len=512).blocks(2)  # of a causal mask
    [[(0, 128), (384, 512)], [(128, 384)]]
    """

    work: tuple[int, ...]
    block: int
    seq_len: int
    tolerance: float = field(default=0.01, kw_only=True)

    def __init__(
        self, work: Any, block: int | None = None, seq_len: int | None = None, *, tolerance: float = 0.01
    ) -> None:
        if block is None and seq_len is None:
            work, block, seq_len = _work_of_block_mask(work)
        seq_len = _checked_length("BalancedBlocks", seq_len, tolerance)
        if not is_integer(block) or block < 1:
            raise ValueError(f"BalancedBlocks expects block to be an integer >= 1, got {block!r}")
        count = -(-seq_len // block)
        if not (isinstance(work, tuple) and len(work) == count and all(is_integer(x) and x >= 0 for x in work)):
            received = f"{len(work)} values" if isinstance(work, tuple) and len(work) > 8 else repr(work)
            raise ValueError(
                f"BalancedBlocks expects the work of {count} blocks, integers >= 0 as a tuple: {seq_len} tokens in "
                f"blocks of {block}; got {received}"
            )
        for name, value in (("work", work), ("block", block), ("seq_len", seq_len), ("tolerance", tolerance)):
            object.__setattr__(self, name, value)

    @property
    def alignment(self) -> int:
        return self.block

    def _partition(self, world_size: int) -> BalancedPartition:
        """Return the partition of blocks, not tokens. Cuts cost nothing, since FlexAttention gathers all keys."""
        return BalancedPartition(Workload((), self.work), len(self.work), world_size, self.tolerance)


def _work_of_block_mask(block_mask: Any) -> tuple[tuple[int, ...], int, int]:
    """Return the work of each block of queries, tokens of a block, and the length of the sequence."""
    if not hasattr(block_mask, "kv_num_blocks"):
        raise TypeError(
            "BalancedBlocks expects a BlockMask, or the work of blocks with block and seq_len; got "
            f"{type(block_mask).__name__}"
        )
    q_len, kv_len = block_mask.seq_lengths
    if q_len != kv_len:
        raise ValueError(
            f"BalancedBlocks divides queries and keys alike: expected a block mask of as many keys as queries, got "
            f"{q_len} queries and {kv_len} keys"
        )
    if q_len == 1 < min(block_mask.BLOCK_SIZE):  # the mask of FlexAttention called without one
        raise ValueError(
            "BalancedBlocks divides a sequence by the blocks of its mask: expected a block mask of the whole sequence, "
            "got one of a single token, or of a single block that goes with all lengths"
        )
    seen = block_mask.kv_num_blocks
    if block_mask.full_kv_num_blocks is not None:
        seen = seen + block_mask.full_kv_num_blocks
    return tuple(seen.sum((0, 1)).tolist()), block_mask.BLOCK_SIZE[0], q_len


# Balanced partition

_PROBES = 16
"""Windows that are tried at least; between two of them the workload may cross the even one."""
_FEW = 128
"""Below so many tokens every window is tried."""

Blocks = list[Span]


@dataclass(frozen=True)
class BalancedPartition:
    """Division of a sequence over n ranks with even lengths and workload, in at most 2 n - 1 blocks.

    The sequence is closed to a circle. Half of the ranks take one window of the circle that has their share of both
    tokens and workload; the other half take the rest; both are divided again. Such a window exists: over all windows of
    that length the mean workload is the even one, so sliding from a lighter to a heavier window passes it. Each window
    makes two cuts.

    Source: Goldberg and West, Bisection of circle colorings (1985); Alon, Splitting necklaces (1987).
    """

    workload: Workload
    length: int
    ranks: int
    tolerance: float
    """Excess over the mean that a rank may have, as a fraction of the mean, if that saves blocks."""

    @property
    def total(self) -> int:
        """Work of all queries."""
        return self.workload.before(self.length)

    def blocks(self) -> list[Blocks]:
        """Return the blocks of each rank in order: one block each if that is even enough."""
        contiguous = [joined_spans([chunk((0, self.length), self.ranks, rank)]) for rank in range(self.ranks)]
        if self.busiest(contiguous) <= self._most(1):
            return contiguous
        divided = self._divide([(0, self.length)], range(self.ranks))
        return min(divided, contiguous, key=self.busiest)

    def busiest(self, by_rank: Sequence[Blocks]) -> int:
        """Return the work of the rank that has most."""
        return max(sum(map(self.workload.of, blocks)) for blocks in by_rank)

    def _most(self, ranks: int) -> float:
        """Return the most work that `ranks` ranks may have before they are divided further.

        Each division may use up an equal part of the tolerance, so larger groups of ranks must be more even.
        """
        times = (self.ranks - 1).bit_length()
        done = times - (ranks - 1).bit_length()
        return self.total * ranks / self.ranks * (1 + self.tolerance * (done / times if times else 1))

    def _divide(self, blocks: Blocks, ranks: range) -> list[Blocks]:
        """Divide `blocks` over some ranks: a window to the second half of the ranks, the rest to the first half."""
        if len(ranks) == 1:
            return [blocks]
        first, second = ranks[: (len(ranks) + 1) // 2], ranks[(len(ranks) + 1) // 2 :]
        circle = Circle(blocks, self.workload)
        places = [chunk((0, self.length), self.ranks, rank) for rank in second]
        length = places[-1][1] - places[0][0]
        around, inside = circle.cut(self._best_window(circle, length, len(first), len(second)), length)
        return self._divide(around, first) + self._divide(inside, second)

    def _best_window(self, circle: Circle, length: int, first: int, second: int) -> int:
        """Return the start of the window of `second` ranks: even enough, with the fewest and cheapest cuts."""
        if length in (0, circle.length):
            return 0
        even = circle.workload * length / circle.length
        least, most = circle.workload - self._most(first), self._most(second)
        if least > most:  # too much work here for both to stay within the tolerance
            least = most = even

        ranks = first + second
        probes = -(-_PROBES // ranks) * ranks  # among them windows that cover the circle evenly
        windows = {
            start: (max(least - workload, workload - most, 0), len(circle.cuts(start, length)))
            for start, workload in circle.windows(length, even, probes).items()
        }
        best = min(windows.values())

        def price(start: int) -> tuple[int, int]:
            across = sum(self.workload.reach_across(circle.position(cut)) for cut in circle.cuts(start, length))
            return across, start if start + length > circle.length else -start

        return min((start for start, found in windows.items() if found == best), key=price)


class Circle:
    """Blocks of a sequence one after the other, with the end joined to the beginning. Places count along it.

    >>> from cp_dtensor import Causal
    >>> circle = Circle([(0, 2), (6, 8)], workload_of(Causal(), 8, 8))
    >>> [circle.window_workload(start, 2) for start in range(4)]  # queries 0 1 6 7 see 1 2 7 8 keys
    [3, 9, 15, 9]
    >>> circle.cut(1, 2)
    ([(0, 1), (7, 8)], [(1, 2), (6, 7)])
    """

    def __init__(self, blocks: Blocks, workload: Workload) -> None:
        # Twice, so that a window that runs over the end to the beginning is one range of places, too.
        self._blocks = [block for block in blocks if block[0] < block[1]] * 2
        self._workload = workload
        self._edges = list(accumulate((stop - start for start, stop in self._blocks), initial=0))
        before = list(accumulate(map(workload.of, self._blocks), initial=0))
        self.length, self.workload = self._edges[-1] // 2, before[-1] // 2
        self._shifts = [block[0] - edge for block, edge in zip(self._blocks, self._edges, strict=False)]
        self._offsets = [work - workload.before(block[0]) for block, work in zip(self._blocks, before, strict=False)]

    def cuts(self, start: int, length: int) -> list[int]:
        """Return the ends of a window that are no ends of blocks."""
        return [end for end in (start, start + length) if self._edges[bisect_right(self._edges, end) - 1] != end]

    def position(self, place: int) -> int:
        """Return the position in the sequence of a place."""
        return place + self._shifts[bisect_right(self._edges, place) - 1]

    def window_workload(self, start: int, length: int) -> int:
        """Return the work of a window, which may run over the end to the beginning."""
        return self._before(start + length) - self._before(start)

    def windows(self, length: int, workload: float, probes: int) -> dict[int, int]:
        """Return candidates and their work: windows at edges of blocks, evenly spread, and nearest to `workload`."""
        starts = {(edge - back) % self.length for edge in self._edges for back in (0, length)}
        starts |= {self.length * probe // probes for probe in range(probes)}
        few = range(self.length) if self.length <= _FEW else sorted(starts)
        found = {start: self.window_workload(start, length) for start in few}
        for (low, of_low), (high, of_high) in pairwise([*found.items(), (self.length, found[0])]):
            is_above = of_low > workload
            if is_above == (of_high > workload):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                of_middle = self.window_workload(middle, length)
                if (of_middle > workload) == is_above:
                    low, of_low = middle, of_middle
                else:
                    high, of_high = middle, of_middle
            is_high = abs(of_high - workload) < abs(of_low - workload)
            found[high % self.length if is_high else low] = of_high if is_high else of_low
        return found

    def cut(self, start: int, length: int) -> tuple[Blocks, Blocks]:
        """Return the blocks around a window and the blocks in it."""
        stop = start + length
        return self._between(stop, start + self.length), self._between(start, stop)

    def _before(self, place: int) -> int:
        index = min(bisect_right(self._edges, place), len(self._shifts)) - 1
        return self._offsets[index] + self._workload.before(place + self._shifts[index])

    def _between(self, first: int, last: int) -> Blocks:
        """Return the blocks of some places, with neighbours joined."""
        return joined_spans(
            (max(start, start + first - edge), min(stop, start + last - edge))
            for (start, stop), edge in zip(self._blocks, self._edges, strict=False)
        )
