"""Any method over any ranks, layout, lengths, heads and stages equals one device; and what the search has found."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from method_checks import RING_ULYSSES, ULYSSES_RING, check
from problems import Problem

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, planning
from cp_dtensor.planning import HeadStaging


@dataclass(frozen=True)
class Ranks:
    """A mesh and a method that it can do."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    method: str


any_layout = st.one_of(
    st.sampled_from([Contiguous(), HeadTail(), MirroredBatch()]), st.builds(Striped, block=st.integers(1, 4))
)
one_axis = st.builds(
    Ranks, st.just(("cp",)), st.tuples(st.integers(1, 6)), st.sampled_from(["ulysses", "ring", "auto"])
)
two_axes = st.builds(
    Ranks,
    st.sampled_from([RING_ULYSSES, ULYSSES_RING, ("cp_node", "cp_gpu")]),
    st.sampled_from([(outer, inner) for outer in range(1, 5) for inner in range(1, 5) if outer * inner <= 8]),
    st.sampled_from(["hybrid", "ring", "auto"]),
)


@st.composite
def any_problem(draw: st.DrawFn) -> Problem:
    kv_heads, q_len = draw(st.integers(1, 4)), draw(st.integers(0, 30))
    return Problem(
        q_len=q_len,
        kv_len=draw(st.one_of(st.just(q_len), st.integers(1, 30))),
        batch=draw(st.integers(1, 3)),
        q_heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=2,
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, -0.3, 0.0])),
    )


def check_staged(problem: Problem, layout: Layout, ranks: Ranks, stages: int, rotate_method: str) -> None:
    staging = HeadStaging(flops_per_stage=1e-3, most=stages)  # however little work a stage has
    with mock.patch.object(planning, "DEFAULT_HEAD_STAGING", staging):
        check(problem, layout, ranks.names, ranks.shape, method=ranks.method, rotate_method=rotate_method)


@settings(max_examples=100)
@given(
    any_problem(),
    any_layout,
    st.one_of(one_axis, two_axes),
    st.integers(1, 4),
    st.sampled_from(["auto", "allgather", "alltoall"]),
)
def test_any_method_of_any_problem_equals_one_device(
    problem: Problem, layout: Layout, ranks: Ranks, stages: int, rotate_method: str
) -> None:
    check_staged(problem, layout, ranks, stages, rotate_method)


@pytest.mark.parametrize("names", [RING_ULYSSES, ULYSSES_RING], ids=", ".join)
@pytest.mark.parametrize("method", ["hybrid", "ring"])
@pytest.mark.parametrize(
    ("block", "q_len", "kv_len"), [(1, 5, 5), (3, 13, 13), (3, 13, 2), (3, 2, 13), (2, 9, 1)], ids=str
)
def test_ends_of_stripes_that_some_ranks_have_and_others_do_not(
    block: int, q_len: int, kv_len: int, method: str, names: tuple[str, ...]
) -> None:
    problem = Problem(q_len, kv_len, q_heads=4, kv_heads=2, head_dim=4, is_causal=True)
    check(problem, Striped(block), names, (2, 2), method=method)
