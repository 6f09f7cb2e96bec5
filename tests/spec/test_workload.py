"""Workload: prefix sums over queries, the reach across a cut, and the imbalance of layouts."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drawn_masks import LONGEST, any_mask, keys_seen, of_one_row

from cp_dtensor import Causal, HeadTail, Mask, imbalance
from cp_dtensor.spec.intervals import FAR
from cp_dtensor.spec.masks import workload_of


@given(any_mask, st.integers(LONGEST, 2 * LONGEST))
def test_workloads_are_sums_of_the_keys_that_queries_see(mask: Mask, seq_len: int) -> None:
    workloads = workload_of(mask, seq_len, seq_len)
    expected = [0, *accumulate(keys_seen(mask, seq_len).tolist())]
    assert [workloads.before(position) for position in range(seq_len + 1)] == expected


@given(of_one_row, st.integers(1, LONGEST - 1))
def test_what_reaches_across_a_cut(mask: Mask, cut: int) -> None:
    sets = mask.interval_sets(LONGEST, LONGEST)
    seen = {
        query: [band.keys(query) for bands in sets for band in bands if band.first <= query < band.last]
        for query in (cut - 1, cut)
    }
    shown = {query: [span for span in spans if span[0] < span[1]] for query, spans in seen.items()}
    first = min([FAR if not shown[cut] else min(shown[cut])[0], cut])
    last = max([stop for _, stop in shown[cut - 1]] + [cut])
    assert workload_of(mask, LONGEST, LONGEST).reach_across(cut) == last - first


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Causal(), HeadTail(), 16, 4), TypeError, r"a layout and a mask, .* got Causal\(.*, HeadTail\(\)"),
        ((HeadTail, Causal(), 16, 4), TypeError, r"a layout and a mask"),
        ((HeadTail(), Causal(), 16, "mesh"), ValueError, "world_size to be a number of ranks >= 1, got 'mesh'"),
        ((HeadTail(), Causal(), 16, 0), ValueError, "world_size to be a number of ranks >= 1, got 0"),
    ],
)
def test_imbalance_of_what_is_none_is_refused(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        imbalance(*arguments)
