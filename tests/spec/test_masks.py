"""Masks and their combinations have exactly the pairs of their definitions."""

import os
import pickle
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.masked_problems import any_mask, fits, shown
from support.processes import Processes

from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.intervals import IntervalBand, IntervalSets, count_pairs
from cp_dtensor.spec.masks import Batched, Causal, Full, Mask, PrefixLM, SlidingWindow, interval_sets_of, is_plain

lengths = st.integers(0, 14)


@st.composite
def masked(draw: st.DrawFn) -> tuple[Mask, int, int, int]:
    q_len, batch = draw(lengths), draw(st.integers(1, 3))
    kv_len = draw(st.one_of(st.just(q_len), lengths))
    mask = any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch))
    return draw(mask), q_len, kv_len, batch


def dense(sets: IntervalSets, q_len: int, kv_len: int) -> torch.Tensor:
    count = torch.zeros(q_len, kv_len, dtype=torch.int64)
    for bands in sets:
        reached = 0
        for band in bands:
            assert reached <= band.first < band.last <= q_len, "bands are disjoint and in order"
            reached = band.last
            for query in range(band.first, band.last):
                lo, hi = band.keys(query)
                assert 0 <= lo < hi <= kv_len, "every query of a band sees something"
                count[query, lo:hi] += 1
    return count


@settings(max_examples=200)
@given(masked())
def test_interval_sets_have_every_allowed_pair_once_and_no_other(case: tuple[Mask, int, int, int]) -> None:
    mask, q_len, kv_len, batch = case
    by_row = interval_sets_of(mask, q_len, kv_len, batch)
    expected = shown(mask, q_len, kv_len, batch)
    found = torch.stack([dense(sets, q_len, kv_len) for sets in by_row]).unsqueeze(1).expand(batch, -1, -1, -1)
    assert torch.equal(found, expected.long())
    assert mask.pairs(q_len, kv_len) == int(expected.sum()) // batch


@settings(max_examples=200)
@given(masked(), st.data())
def test_pairs_of_a_part(case: tuple[Mask, int, int, int], data: st.DataObject) -> None:
    mask, q_len, kv_len, _ = case
    mask = mask.of_batch_row(0)
    queries = tuple(sorted(data.draw(st.tuples(st.integers(0, q_len), st.integers(0, q_len)))))
    keys = tuple(sorted(data.draw(st.tuples(st.integers(0, kv_len), st.integers(0, kv_len)))))
    (sets,) = interval_sets_of(mask, q_len, kv_len, 1)
    expected = shown(mask, q_len, kv_len, 1)[0, 0, slice(*queries), slice(*keys)].sum()
    assert count_pairs(sets, queries, keys) == int(expected)


def test_millions_of_tokens_take_no_longer_than_few() -> None:
    million = 1 << 20
    assert Causal().pairs(million, million) == million * (million + 1) // 2
    assert SlidingWindow(3, 0).pairs(million, million) == 4 * million - 6


def test_masks_are_values() -> None:
    one, other = (Documents([0, 2, 5], within=Causal()) & SlidingWindow(3, 0) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert Documents([0, 2, 5]) == Documents(torch.tensor([0, 2, 5])) != Documents([0, 3, 5])
    assert repr(SlidingWindow(3, 0)) == "SlidingWindow(left=3, right=0, alignment='top_left')"


def test_documents_from_ids_and_lengths() -> None:
    one, several = Documents.from_ids(torch.tensor([4, 4, 9, 9, 9])), Documents.from_ids([[0, 0], [0, 1]])
    assert (
        one.interval_sets(5, 5)
        == Documents.from_lengths([2, 3]).interval_sets(5, 5)
        == Documents([0, 2, 5]).interval_sets(5, 5)
    )
    assert isinstance(several, Batched)
    assert [row.cu_seqlens for row in several.masks] == [(0, 2), (0, 1, 2)]
    assert pickle.loads(pickle.dumps(one)) == one == Documents.from_ids([0, 0, 1, 1, 1]) != Documents([0, 2, 5])
    assert Documents([1, 3, 3]).lengths == (2, 0)


def test_combined_with_a_mask_by_batch_row() -> None:
    by_row = Batched([Full(), SlidingWindow(0, 0)])
    assert (by_row & Causal()).of_batch_row(0) == Full() & Causal()
    assert (Causal() | by_row).of_batch_row(1) == Causal() | SlidingWindow(0, 0)


@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "plain"),
    [
        (Full(), 3, 5, True),
        (Causal(), 3, 5, True),
        (Causal("bottom_right"), 5, 5, True),
        (Causal("bottom_right"), 3, 5, False),
        (PrefixLM(0), 5, 5, False),
    ],
)
def test_masks_that_torch_has_kernels_of(mask: Mask, q_len: int, kv_len: int, plain: bool) -> None:
    assert is_plain(mask, q_len, kv_len) == plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(-1, 0), r"numbers of keys >= 0, or None for no limit; got SlidingWindow\(left=-1"),
        (lambda: SlidingWindow(1.5, 0), r"numbers of keys >= 0"),
        (lambda: Causal("right"), r'"top_left" or "bottom_right", got \'right\''),
        (lambda: PrefixLM(-2), r"a number of keys >= 0, got -2"),
        (lambda: Documents([0, 3, 2]), r"cu_seqlens to be >= 0 and ascending, got \[0, 3, 2\]"),
        (lambda: Documents([]), r"one list of integers, got \[\]"),
        (lambda: Documents(torch.zeros(2, 2)), r"one list of integers"),
        (lambda: Documents(10, 20), r"cu_seqlens to be one list of integers, got 10"),
        (lambda: Documents([0, 2], torch.tensor(2)), r"cu_seqlens_k to be one list of integers, got tensor\(2\)"),
        (lambda: Documents.from_lengths(3), r"lengths to be one list of integers >= 0, got 3"),
        (lambda: Documents.from_lengths([3, -4]), r"lengths to be one list of integers >= 0, got \[3, -4\]"),
        (lambda: Documents.from_lengths([[1, 2], [3]]), r"lengths to be one list .*, got \[\[1, 2\], \[3\]\]"),
        (lambda: Documents.from_lengths([3, 2.5]), r"lengths to be one list of integers >= 0, got \[3, 2.5\]"),
        (lambda: Documents.from_ids(3), r"ids to be a list or a tensor, \(S,\) or \(B, S\), got 3"),
        (lambda: Batched(Causal()), r"Batched expects a list, .* got one mask: Causal"),
        (lambda: Documents([0, 2], [0, 1, 2]), r"as many documents of keys as of queries, got 2 and 1"),
        (lambda: Batched([]), r"a mask for each row of the batch"),
        (lambda: Batched([Full()]) & Batched([Full(), Full()]), r"different batch sizes cannot be combined: 1, 2"),
        (
            lambda: Documents([0, 0, 0, 1, 1, 2]).pairs(6, 6),
            r"got 6 numbers \(0, 0, 0, 1, 1, 2\) for 6 tokens, .* a document id of each token",
        ),
        (
            lambda: Documents([7] * 9).pairs(9, 9),
            r"got 9 numbers \(7, ..., 7\) .* of each token: Documents.from_ids\(ids",
        ),
        (
            lambda: Documents([3, 4, 5]).pairs(12, 12),
            r"cu_seqlens .*got 3 numbers .* look like the lengths of documents",
        ),
        (lambda: Documents([4, 4]).pairs(12, 12), r"\(4, 4\) for 12 tokens, .* Documents.from_lengths\(lengths\)"),
        (lambda: Documents([0, 6], [3, 4]).pairs(6, 7), r"cu_seqlens_k to be .* look like the lengths"),
        (lambda: Documents.from_ids([0, 0, 1]).pairs(6, 6), "made of the ids of 3 tokens, or .* expected the 6 tokens"),
        (lambda: Documents([0, 9]).pairs(5, 5), r"end at 9 \(queries\) and 9 \(keys\), expected at most .* 5 and 5"),
        (lambda: interval_sets_of(Batched([Full()]), 3, 3, 2), r"of 1 batch rows, got a batch of 2"),
        (lambda: Batched([Full()]).interval_sets(3, 3), r"interval sets by batch row"),
    ],
)
def test_bad_masks_say_what_is_wrong(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(("edges", "tokens"), [([7, 7, 7, 7], 16), ([0, 0, 0], 3), ([0] * 6, 6), ([5, 5, 5], 12)])
def test_empty_documents_are_no_ids_and_no_lengths(edges: list[int], tokens: int) -> None:
    """Lengths that add up to more than the tokens are none, and zeros alone are a list without documents."""
    assert Documents(edges).pairs(tokens, tokens) == 0


def test_a_clipped_band_has_no_blind_query() -> None:
    band = IntervalBand(0, 10, 4, 6, left=0, right=0)
    assert band.clipped((0, 10)) == IntervalBand(4, 6, 4, 6, 0, 0)
    assert band.clipped((0, 4)) is None


def test_ends_beyond_all_positions_are_no_ends() -> None:
    for alignment in ("top_left", "bottom_right"):
        window = SlidingWindow(sys.maxsize, sys.maxsize, alignment)
        assert window.pairs(7, 5) == 35
    assert SlidingWindow(0, sys.maxsize).pairs(3, 3) == 6
    long = (1 << 30) + 10
    assert Full().pairs(long, long) == long * long
    with pytest.raises(ValueError, match=r"fewer than 2\^31"):
        interval_sets_of(Full(), 1 << 31, 3, 1)


def _documents(rank: int) -> tuple[bytes, int]:
    mask = Documents([0, 2, 5], within=Causal("bottom_right"))
    hash(mask)  # which it remembers
    return pickle.dumps(mask), hash("bottom_right")


def test_a_mask_that_comes_from_another_process_is_found_in_caches(two_processes: Processes) -> None:
    sent, hash_there = two_processes.run(_documents)[0]
    if "PYTHONHASHSEED" not in os.environ:
        assert hash_there != hash("bottom_right"), "the processes hash alike, which shows nothing"
    here = Documents([0, 2, 5], within=Causal("bottom_right"))
    assert {here: 1}[pickle.loads(sent)] == 1
