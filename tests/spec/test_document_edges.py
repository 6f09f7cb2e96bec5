"""Layers take over the documents that attention keeps to."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.masked_problems import shown

from cp_dtensor import Batched, Causal, Documents, Full, Mask, PrefixLM, SlidingWindow
from cp_dtensor.spec.documents import edges_of_documents
from cp_dtensor.spec.masks import interval_sets_of

LENGTH = 12
positions = st.lists(st.integers(0, LENGTH), min_size=2, max_size=4).map(sorted)
# In each of these, a query sees the key before it.
without_documents = st.sampled_from(
    [Full(), Causal(), PrefixLM(2), SlidingWindow(1, 0), Causal() | SlidingWindow(0, 2)]
)


@st.composite
def documents(draw: st.DrawFn, parts: st.SearchStrategy[Mask]) -> Mask:
    within, edges = draw(parts), draw(positions)
    with suppress(NotImplementedError, ValueError):
        inner = edges_of_documents(within)
        if inner and draw(st.booleans()):  # documents that are full of those within them
            edges = [count * inner[-1] for count in range(draw(st.integers(2, 4)))]
    if draw(st.booleans()):
        return Documents.for_length(edges, LENGTH, within=within)
    return Documents(edges, within=within)


masks = st.recursive(
    without_documents,
    lambda parts: st.one_of(
        documents(parts),
        st.builds(lambda a, b: a & b, parts, parts),
        st.builds(lambda a, b: a | b, parts, parts),
        st.builds(lambda a, b: (a & b) | (a & Causal()), parts, without_documents),
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(st.one_of(masks, st.builds(lambda mask: Batched([mask]) & Causal(), masks)))
def test_a_token_is_of_the_document_of_the_token_that_it_sees_before_it(mask: Mask) -> None:
    try:
        interval_sets_of(mask, LENGTH, LENGTH, 1)
    except ValueError:
        with pytest.raises((ValueError, NotImplementedError)):
            edges_of_documents(mask, LENGTH)
        return
    try:
        edges = edges_of_documents(mask, LENGTH)
    except NotImplementedError:
        return
    event(f"{len(edges)} edges")
    sees = shown(mask, LENGTH, LENGTH, 1)[0, 0]
    inside = range(edges[0], edges[-1]) if edges else range(LENGTH)
    assert sees.any(0).nonzero().flatten().tolist() == [*inside]
    for token in inside[1:]:
        assert (token in edges) != bool(sees[token, token - 1])


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Documents([0, 5, 10], within=Documents([0, 2, 5])), (0, 2, 5, 7, 10)),
        (Documents([0, 5, 10], within=Causal() & Documents([0, 2, 5], within=SlidingWindow(1, 0))), (0, 2, 5, 7, 10)),
        (Documents([0, 8], within=Documents([0, 4, 8], within=Documents([0, 1, 4]))), (0, 1, 4, 5, 8)),
        (Documents([0, 4, 12], within=Documents([0, 2, 4])), (0, 2, 4, 6, 8)),  # padding behind the last one
        (Documents([0, 4, 10]) & Documents([0, 6, 10]), (0, 4, 6, 10)),
        (Documents([0, 3, 3, 8]) & Documents.for_length([2, 5], 12), (2, 3, 3, 5)),
        (Documents([0, 3]) & Documents.for_length([5, 12], 12), (5,)),  # no token is in both
        (Batched([Documents([0, 4]), Documents([0, 4]) & Causal()]), (0, 4)),
        (Causal() & Documents([0, 4, 4, 12]), (0, 4, 4, 12)),
        (Documents.for_length([2, 5, 8], 12), (2, 5, 8)),
        (SlidingWindow(1, 0) | PrefixLM(3), ()),
    ],
    ids=str,
)
def test_edges(mask: Mask, expected: tuple[int, ...]) -> None:
    assert edges_of_documents(mask, LENGTH) == expected
