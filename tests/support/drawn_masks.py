"""Strategies for masks, and counts of attended keys, for tests of layouts that balance masks."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from cp_dtensor import Batched, Causal, Documents, Full, Mask, PrefixLM, SlidingWindow

LONGEST = 60
"""Longest sequence that fits all of these masks."""
cu_seqlens = st.lists(st.integers(0, LONGEST), min_size=1, max_size=9).map(sorted)
edges = cu_seqlens.filter(
    lambda cu: cu[0] == 0 or (cu[0] < cu[-1] and not LONGEST <= sum(cu) <= 4 * LONGEST)
)  # others would be interpreted as lengths
ends = st.one_of(st.none(), st.integers(0, LONGEST))
windows = st.builds(SlidingWindow, ends, ends)
simple = st.one_of(
    st.sampled_from([Full(), Causal()]),
    st.builds(PrefixLM, st.integers(0, LONGEST)),
    windows,
    st.builds(lambda cu, mask: Documents(cu, within=mask), edges, st.one_of(st.just(Causal()), windows)),
)
of_one_row = st.one_of(
    simple, st.builds(lambda a, b: a & b, simple, simple), st.builds(lambda a, b: a | b, simple, simple)
)
"""Masks that are equal in all batch rows."""
any_mask = st.one_of(of_one_row, st.builds(Batched, st.lists(of_one_row, min_size=1, max_size=3)))


def keys_seen(mask: Mask, seq_len: int) -> np.ndarray:
    """Counts the keys that each query attends to, over all batch rows, query by query."""
    seen = np.zeros(seq_len, dtype=np.int64)
    for row in range(mask.batch_size or 1):
        for bands in mask.of_batch_row(row).interval_sets(seq_len, seq_len):
            for band in bands:
                for query in range(band.first, band.last):
                    first, last = band.keys(query)
                    seen[query] += max(last - first, 0)
    return seen
