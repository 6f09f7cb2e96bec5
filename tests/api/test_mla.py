"""Multi-head latent attention on ranks that are threads, by every method, against one device in float64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.latent_problems import LatentCase, LatentProblem, check_latents
from support.masked_checks import LAYOUTS, WAYS
from support.masked_problems import any_mask, fits
from support.ranks import run_ranks

from cp_dtensor import Contiguous, Documents, SlidingWindow, context_parallel_mla
from cp_dtensor.engine import latent as latents


@st.composite
def cases(draw: st.DrawFn, axes: int) -> LatentCase:
    q_len, batch = draw(st.integers(1, 26)), draw(st.integers(1, 2))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 26)))
    mask = draw(any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch)))
    problem = LatentProblem(
        q_len, kv_len, mask, batch, draw(st.integers(1, 7)), is_causal=draw(st.booleans()),
        bias=draw(st.sampled_from(["", "", "", "boolean bhs", "additive hs", "additive s"])), sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.7, -0.3])), softcap=draw(st.sampled_from([0.0, 0.0, 0.8])),
    )  # fmt: skip
    options = draw(st.sampled_from(WAYS[axes]))
    return LatentCase(problem, draw(st.sampled_from(LAYOUTS)), tuple(options.items()), draw(st.integers(0, 1000)))


group_bytes = st.sampled_from([1, 3000, latents.EXPANDED_BYTES])
"""Limits that make a group of one head, of a few, and of all."""


@settings(max_examples=examples(60))
@given(st.lists(cases(1), min_size=1, max_size=3), st.integers(1, 5), group_bytes)
def test_any_problem_over_one_axis(some: list[LatentCase], ranks: int, most: int) -> None:
    with mock.patch.object(latents, "EXPANDED_BYTES", most):
        check_latents(some, (ranks,))


@pytest.mark.parametrize("way", WAYS[1], ids=str)
def test_rows_that_are_not_sent_between_rows_that_are(way: dict[str, str]) -> None:
    """Memory for rows that no query of a rank sees is uninitialised, so NaN in tests."""
    window_and_first_keys = SlidingWindow(4, 0) | Documents([0, 20], [0, 2])
    check_latents([LatentCase(LatentProblem(20, 20, window_and_first_keys), Contiguous(), tuple(way.items()))], (2,))


def test_the_example_of_the_docstring() -> None:
    def body(_: int) -> torch.Tensor:
        latent = torch.tensor([[[1.0], [2.0]]])
        up = torch.tensor([[3.0], [5.0]])
        q = torch.zeros(1, 1, 2, 2)
        return context_parallel_mla(q, latent, latent, up=up, mesh=dist.group.WORLD, is_causal=True)  # type: ignore[return-value]

    (out,) = run_ranks(1, body)
    torch.testing.assert_close(out.flatten(), torch.tensor([5.0, 7.5]))
