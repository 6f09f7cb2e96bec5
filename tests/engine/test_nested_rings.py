"""Nested rings whose outer ring is by groups of heads, as those of long sequences over networks are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from matrix.fronts import case_of
from matrix.worlds import WORLDS, World, run_threads

from cp_dtensor import Causal, HeadTail
from cp_dtensor.comm.collective import OUTER_TRANSPORT, AllToAll
from cp_dtensor.engine import planner
from cp_dtensor.engine.ring import NestedRingPlan
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, nested_rings
from cp_dtensor.plan.plan import TilePlan

BY_HEAD = AllToAll(shard_bytes=1, grad_shard_bytes=1, flops_per_hop=1e-6, most_head_groups=8)
FEATURES = ("causal", "gqa", "window", "documents", "sinks", "dropout", "softcap", "float_bias", "bool_bias", "lse")


@pytest.fixture
def outer_steps() -> Iterator[list[int]]:
    """Makes groups of one head; has the number of outer steps of each plan."""
    found: list[int] = []
    original = NestedRingPlan.__init__

    def noted(self: NestedRingPlan, tile_plan: TilePlan, *rest: object) -> None:
        found.append(len(tile_plan.forward))
        original(self, tile_plan, *rest)  # type: ignore[arg-type]

    with mock.patch.object(planner, "OUTER_TRANSPORT", BY_HEAD), mock.patch.object(NestedRingPlan, "__init__", noted):
        yield found


@pytest.mark.parametrize("feature", FEATURES)
def test_a_group_of_heads_at_a_time(feature: str, outer_steps: list[int]) -> None:
    case = case_of("function", (feature,), 4)
    assert case is not None
    run_threads("function", replace(case, method="ring"), WORLDS["threads(2x2)"])
    assert outer_steps
    assert min(outer_steps) == 2 * case.heads[1], "own tiles and one hop for each head"


def test_a_group_of_heads_at_a_time_on_every_axis(outer_steps: list[int]) -> None:
    """The heads of a group are one group of the ring over the axis within."""
    case = case_of("function", ("documents", "gqa"), 8)
    assert case is not None
    run_threads("function", replace(case, method="ring"), World((2, 2, 2)))
    assert {*outer_steps} == {2 * case.heads[1], 2}


def plan_of(tokens: int, ranks: int = 8, inner: int = 2) -> TilePlan:
    """Returns the outer plan of long sequences, on the first rank."""
    spec = CallSpec(LayoutPartition(HeadTail(), tokens, tokens, 1, ranks), Causal(), 1, 32, 8, 128, 128, "bfloat16")
    return nested_rings(spec, 0, inner, 0, OUTER_TRANSPORT.head_groups(spec, ranks // inner))[0]


def test_transfers_are_small_parts_of_a_long_pass() -> None:
    """The first tiles wait for one of them, and the last gradients travel under the own tiles of their heads."""
    plan = plan_of(1 << 18)
    for steps in (plan.forward, plan.backward):
        assert [step.heads for step in steps if step.transfer is None] == [(head, head + 1) for head in range(8)]
        assert sum(step.transfer is not None for step in steps) == 3 * 8
    assert plan.forward[-1].transfer is not None
    assert plan.backward[-1].transfer is None
    assert plan.backward[-1].is_last
    assert plan.backward[0].transfer is None, "they hide the first transfer"
    assert not any(step.is_last for step in plan.backward[-4:-1])


def test_short_sequences_are_not_cut() -> None:
    plan = plan_of(1 << 13)
    assert [step.hop for step in plan.forward] == [step.hop for step in plan.backward] == [0, 1, 2, 3]
