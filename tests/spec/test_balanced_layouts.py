"""Layouts that balance a mask: every position belongs to one rank, shards and work are even, blocks are few."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drawn_masks import LONGEST, any_mask, cu_seqlens, keys_seen

from cp_dtensor import (
    Balanced,
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    PerDocument,
    PrefixLM,
    SlidingWindow,
    imbalance,
)
from cp_dtensor.spec.layouts import Span, chunk
from cp_dtensor.spec.masks import workload_by_rank
from cp_dtensor.tools.parsing import lognormal_documents

rank_counts = st.one_of(st.integers(1, 9), st.integers(10, 40))


@st.composite
def per_document(draw: st.DrawFn) -> PerDocument:
    edges = draw(cu_seqlens)
    return PerDocument(edges, seq_len=edges[-1] + draw(st.integers(0, 20)))


balanced = st.builds(
    lambda mask, more, tolerance: Balanced(mask, LONGEST + more, tolerance=tolerance),
    any_mask, st.integers(0, 150), st.sampled_from([0.0, 0.01, 0.2]),
)  # fmt: skip
any_layout = st.one_of(per_document(), balanced)


def positions(layout: Layout, seq_len: int, rank: int, ranks: int) -> list[int]:
    return [p for segment in layout.segments(seq_len, rank, ranks) for p in segment.positions()]


def documents_of(layout: PerDocument) -> list[Span]:
    return [span for span in pairwise((0, *layout.cu_seqlens, layout.seq_len)) if span[0] < span[1]]


def work_of_ranks(layout: PerDocument | Balanced, mask: Mask, seq_len: int, ranks: int) -> list[int]:
    return workload_by_rank([((0, 1), [layout.segments(seq_len, rank, ranks) for rank in range(ranks)])], mask, seq_len)


@given(any_layout, rank_counts)
def test_every_position_belongs_to_exactly_one_rank_in_order(layout: PerDocument | Balanced, ranks: int) -> None:
    """Shards differ by at most one token."""
    owned = [positions(layout, layout.seq_len, rank, ranks) for rank in range(ranks)]
    assert sorted(p for of_rank in owned for p in of_rank) == list(range(layout.seq_len))
    assert all(of_rank == sorted(of_rank) for of_rank in owned)
    lengths = [layout.local_length(layout.seq_len, rank, ranks) for rank in range(ranks)]
    assert lengths == [*map(len, owned)]
    spans = [chunk((0, layout.seq_len), ranks, rank) for rank in range(ranks)]
    assert lengths == [stop - start for start, stop in spans]


@given(any_layout, rank_counts, st.integers(0, 300))
def test_other_lengths_are_refused(layout: PerDocument | Balanced, ranks: int, length: int) -> None:
    assert layout.only_length == layout.seq_len
    if length == layout.seq_len:
        return
    message = f"divides sequences of {layout.seq_len} tokens only, got {length} tokens"
    with pytest.raises(ValueError, match=message):
        layout.segments(length, 0, ranks)
    with pytest.raises(ValueError, match=message):
        layout.local_length(length, 0, ranks)


@given(per_document(), rank_counts)
def test_documents_are_cut_head_to_tail(layout: PerDocument, ranks: int) -> None:
    owner = {p: rank for rank in range(ranks) for p in positions(layout, layout.seq_len, rank, ranks)}
    for start, stop in documents_of(layout):
        owners = [owner[p] for p in range(start, stop)]
        turn = owners.index(max(owners))
        assert owners[turn:] == sorted(owners[turn:], reverse=True)
        assert owners[:turn] == sorted(owners[:turn])
        counts = [owners.count(rank) for rank in range(ranks)]
        assert max(counts) - min(counts) <= 1
        if not (stop - start) % (2 * ranks):  # as HeadTail alone would
            expected = {p: r for r in range(ranks) for p in positions(HeadTail(), stop - start, r, ranks)}
            assert owners == [expected[p] for p in range(stop - start)]


@given(per_document(), rank_counts)
def test_causal_work_differs_by_two_queries_of_each_document(layout: PerDocument, ranks: int) -> None:
    mask = Documents([0, *layout.cu_seqlens, layout.seq_len], within=Causal())
    work = work_of_ranks(layout, mask, layout.seq_len, ranks)
    assert max(work) - min(work) <= 2 * layout.seq_len


@pytest.mark.parametrize("length", [1, 3, 4, 8, 12, 23, 100])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_what_does_not_divide_evens_out_over_many_documents(length: int, ranks: int) -> None:
    seq_len = 480 * length
    layout = PerDocument(range(0, seq_len + 1, length))
    assert {layout.local_length(seq_len, rank, ranks) for rank in range(ranks)} == {seq_len // ranks}
    assert imbalance(layout, Documents(layout.cu_seqlens, within=Causal()), seq_len, ranks) < 0.01


@settings(max_examples=150)
@given(balanced, rank_counts)
def test_work_is_even_up_to_two_queries(layout: Balanced, ranks: int) -> None:
    seen = keys_seen(layout.mask, layout.seq_len)
    work = [sum(seen[p] for p in positions(layout, layout.seq_len, rank, ranks)) for rank in range(ranks)]
    assert max(work) <= (1 + layout.tolerance) * sum(work) / ranks + 2 * max(seen)
    expected = max(work) * ranks / sum(work) - 1 if sum(work) else 0.0
    assert layout.imbalance(ranks) == pytest.approx(expected)


@given(balanced, rank_counts)
def test_blocks_are_few(layout: Balanced, ranks: int) -> None:
    counts = [len(blocks) for blocks in layout.blocks(ranks)]
    assert sum(counts) <= 2 * ranks - 1
    assert max(counts) <= 1 + (ranks - 1).bit_length()


MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "window": SlidingWindow(4095, 0),
    "prefix": PrefixLM(10_000),
    "window and prefix": SlidingWindow(5000, 0) | PrefixLM(700),
    "batched": Batched([Causal(), PrefixLM(9000), lognormal_documents(65_536, 1000, 1.0, seed=7)]),
}


@pytest.mark.parametrize("seq_len", [65_536, 131_072])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_work_of_long_sequences_is_within_the_tolerance(mask: Mask, seq_len: int) -> None:
    for ranks in (2, 3, 8):
        assert Balanced(mask, seq_len).imbalance(ranks) <= 0.01


@settings(max_examples=20)
@given(st.sampled_from([128, 1000, 8000]), st.sampled_from([1.0, 1.5]), st.integers(0, 1000))
def test_work_of_lognormal_documents_is_within_the_tolerance(median: int, sigma: float, seed: int) -> None:
    for seq_len in (65_536, 131_072):
        layout = Balanced(lognormal_documents(seq_len, median, sigma, seed), seq_len)
        assert layout.imbalance(8) <= 0.01
        assert max(map(len, layout.blocks(8))) <= 4


@given(st.integers(1, 40), rank_counts)
def test_of_a_causal_mask_it_is_head_tail(chunk: int, ranks: int) -> None:
    seq_len = 2 * ranks * chunk
    layout = Balanced(Causal(), seq_len, tolerance=0.0)
    for rank in range(ranks):
        assert positions(layout, seq_len, rank, ranks) == positions(HeadTail(), seq_len, rank, ranks)
    assert work_of_ranks(layout, Causal(), seq_len, ranks) == [chunk * (seq_len + 1)] * ranks


@given(st.integers(0, 100), rank_counts)
def test_one_block_a_rank_where_that_is_balanced(seq_len: int, ranks: int) -> None:
    layout = Balanced(Full(), seq_len, tolerance=1.0)
    for rank in range(ranks):
        assert positions(layout, seq_len, rank, ranks) == positions(Contiguous(), seq_len, rank, ranks)


@pytest.mark.parametrize("mask", [lognormal_documents(65_536, 1000, 1.0), Causal()], ids=["documents", "causal"])
def test_ranks_of_an_inner_axis_are_balanced_together(mask: Mask) -> None:
    """And own few blocks together: what the outer axis sees."""
    work = work_of_ranks(Balanced(mask, 65_536), mask, 65_536, 8)
    for size in (2, 4):
        together = [sum(work[first : first + size]) for first in range(0, 8, size)]
        assert max(together) <= 1.01 * sum(together) / len(together)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerDocument([0, 4, 2]), "PerDocument expects cu_seqlens to be >= 0 and ascending"),
        (lambda: PerDocument([0, 4.5]), "PerDocument expects cu_seqlens to be one list of integers"),
        (lambda: PerDocument(Documents([0, 4])), r"PerDocument expects cu_seqlens to be .*, got Documents\("),
        (lambda: PerDocument([0, 4], seq_len=3), "PerDocument expects seq_len >= 4, where the documents end; got 3"),
        (lambda: PerDocument([0, 4], seq_len=True), "PerDocument expects seq_len >= 4"),
        (lambda: Balanced(Causal(), -1), "Balanced expects seq_len to be an integer >= 0, got -1"),
        (lambda: Balanced(Causal(), 4, tolerance=-0.1), "tolerance to be a fraction >= 0, got -0.1"),
        (lambda: Balanced(Causal(), 4, tolerance=float("nan")), "got nan"),
        (lambda: Balanced(Documents([0, 5]), 4), "documents of a mask end at 5"),
    ],
)
def test_what_does_not_fit_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
    with pytest.raises(TypeError, match="expects a mask such as"):
        Balanced(Causal, 4)  # type: ignore[arg-type]
