"""BalancedBlocks: whole blocks, even work, few ranges, refusals."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor import BalancedBlocks, Causal, HeadTail, _torch, imbalance
from cp_dtensor.tools.cases import Case, Heads, block_mask


@st.composite
def layouts(draw: st.DrawFn) -> BalancedBlocks:
    work = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=40)))
    block = draw(st.integers(1, 5))
    tolerance = draw(st.sampled_from([0.0, 0.01, 0.3]))
    return BalancedBlocks(work, block, block * len(work) - draw(st.integers(0, block - 1)), tolerance=tolerance)


@settings(max_examples=200)
@given(layouts(), st.integers(1, 9))
def test_ranks_own_whole_blocks_equally_many_of_each(layout: BalancedBlocks, ranks: int) -> None:
    by_rank = layout.blocks(ranks)
    owned = sorted(span for ranges in by_rank for span in ranges)
    assert [start for start, _ in owned] == [0, *(stop for _, stop in owned[:-1])]
    assert owned[-1][1] == layout.seq_len
    counts = []
    for rank, ranges in enumerate(by_rank):
        assert all(start % layout.alignment == 0 for start, _ in ranges)
        in_shard = accumulate((stop - start for start, stop in ranges[:-1]), initial=0)
        assert all(first % layout.alignment == 0 for first in in_shard)
        assert all(stop < start for (_, stop), (start, _) in pairwise(ranges))
        counts.append(sum(-(-(stop - start) // layout.block) for start, stop in ranges))
        segments = layout.segments(layout.seq_len, rank, ranks)
        assert [(s.start, s.start + s.length) for s in segments if s.length] == ranges
        assert layout.local_length(layout.seq_len, rank, ranks) == sum(stop - start for start, stop in ranges)
    assert max(counts) - min(counts) <= 1
    assert sum(map(len, by_rank)) <= max(1, 2 * ranks - 1)


@settings(max_examples=100)
@given(layouts(), st.sampled_from([2, 4, 8]))
def test_work_is_even_up_to_a_few_blocks(layout: BalancedBlocks, ranks: int) -> None:
    """Each cut is off by what one block more or less changes, half the ranks at a time."""
    if len(layout.work) % ranks:
        return
    shares = [
        sum(sum(layout.work[start // layout.block : -(-stop // layout.block)]) for start, stop in ranges)
        for ranges in layout.blocks(ranks)
    ]
    mean = sum(layout.work) / ranks
    assert max(shares) <= mean * (1 + layout.tolerance) + 2 * max(layout.work)
    if mean:
        assert layout.imbalance(ranks) == pytest.approx(max(shares) / mean - 1)
    else:
        assert layout.imbalance(ranks) == 0.0


def test_a_causal_block_mask_is_divided_as_head_tail() -> None:
    mask = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu", BLOCK_SIZE=16)
    layout = BalancedBlocks(mask)
    assert layout.work == tuple(range(1, 17))
    for ranks in (2, 4, 8):
        found = [layout.segments(256, rank, ranks) for rank in range(ranks)]
        expected = [HeadTail().segments(256, rank, ranks) for rank in range(ranks)]
        ranges = [
            sorted({position for segment in segments for position in segment.positions()})
            for segments in (*found, *expected)
        ]
        assert sorted(ranges[:ranks]) == sorted(ranges[ranks:])
        assert imbalance(layout, Causal(), 256, ranks) == imbalance(HeadTail(), Causal(), 256, ranks)


@pytest.mark.parametrize(("name", "ranks"), [("documents 256", 2), ("window 2048", 2), ("causal", 4)])
def test_real_masks_are_even(name: str, ranks: int) -> None:
    layout = BalancedBlocks(block_mask(Case(8_192, Heads(1, 1, 8), name), torch.device("cpu")))
    assert layout.imbalance(ranks) < 0.03


def test_batch_rows_and_heads_count_together() -> None:
    def mod(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (q >= kv) & ((b > 0) | (h > 0) | (kv < 8))

    mask = create_block_mask(mod, 2, 2, 30, 30, device="cpu", BLOCK_SIZE=8)
    assert BalancedBlocks(mask) == BalancedBlocks((1 + 3, 1 + 6, 1 + 9, 1 + 12), 8, 30)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BalancedBlocks((1, 2), 4, 9), r"the work of 3 blocks, .*9 tokens in blocks of 4; got \(1, 2\)"),
        (lambda: BalancedBlocks((1,) * 9, 4, 9), "got 9 values"),
        (lambda: BalancedBlocks([1, 2], 4, 8), r"as a tuple.*got \[1, 2\]"),
        (lambda: BalancedBlocks((1, -2), 4, 8), r"integers >= 0 as a tuple.*got \(1, -2\)"),
        (lambda: BalancedBlocks((1.0, 2), 4, 8), r"got \(1.0, 2\)"),
        (lambda: BalancedBlocks((), 0, 8), "block to be an integer >= 1, got 0"),
        (lambda: BalancedBlocks((), 4, -1), "seq_len to be an integer >= 0, got -1"),
        (lambda: BalancedBlocks((1,), 4, 4, tolerance=-1), "BalancedBlocks expects tolerance to be a fraction"),
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("what", [Causal(), None, torch.ones(8, 8)], ids=str)
def test_what_is_no_block_mask_is_refused(what: object) -> None:
    with pytest.raises(TypeError, match=f"expects a BlockMask, .*; got {type(what).__name__}"):
        BalancedBlocks(what)


def test_a_mask_of_one_block_that_goes_with_all_lengths_is_refused() -> None:
    """It has no length of its own: the layout would be of one token."""
    mask = BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=_torch.WHOLE_BLOCK, seq_lengths=(1, 1),
    )  # fmt: skip
    with pytest.raises(ValueError, match="or of a single block that goes with all lengths"):
        BalancedBlocks(mask)
