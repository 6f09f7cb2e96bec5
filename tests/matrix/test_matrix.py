"""Every front with every feature, against dense attention in float64, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from support.cases import examples
from support.processes import GPU_RANKS, Processes, started

from matrix.features import FEATURES
from matrix.fronts import CELLS, FRONTS, METHODS, Case, case_of, layouts_of, refusals_of
from matrix.worlds import REFUSALS, WORLDS, World, check_all, run_threads


def _cell(name: str, features: tuple[str, ...], world: World, case: Case | None) -> None:
    assert case is not None
    messages = refusals_of(name, features, len(world.shape))
    if not messages:
        run_threads(name, case, world)
        return
    with pytest.raises(REFUSALS, match="|".join(messages)):  # not RanksFailed: alike on all ranks
        run_threads(name, case, world)


@pytest.fixture(scope="module")
def shared_gpu() -> Iterator[Processes]:
    """Two processes on one GPU."""
    yield from started(2, 120, "nccl")


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_fronts_by_features(name: str, feature: str) -> None:
    world = WORLDS["threads(2)"]
    _cell(name, (feature,), world, case_of(name, (feature,), world.size))


FEATURES_OF_WORLDS = ("causal", "documents", "sinks", "checkpoint")
TOGETHER_IN_COMPILED_CODE = (("causal",), ("documents", "sinks", "checkpoint"))
"""As `FEATURES_OF_WORLDS`, in few cases, since each takes seconds to compile."""
OF_THE_OPERATOR = (("softcap", "float_bias", "scale<0"), ("bool_bias", "gqa", "lse", "window"), ("bf16",))
"""Constants, arguments and results of the operator, for fronts that reach it in different ways."""
IN_COMPILE = ("ring", "zigzag", "ring_documents", "zigzag_documents")
"""Fronts that call others of these, and of which tests/compile has compiled calls, too."""
OVER_OTHERS = (*IN_COMPILE, "ulysses", "varlen", "unified", "torch_experimental", "usp", "diffusers", "flex")
"""Fronts that call others of these, or are there with lengths that change: that is enough every time."""
GPUS = torch.cuda.device_count()
MARKS = {
    "compiled(2)": pytest.mark.slow,
    "compiled_dynamic(2)": pytest.mark.slow,
    "gpu(2)": pytest.mark.gpu(GPU_RANKS),
    "gpu_shared(2)": pytest.mark.skipif(GPUS != 1, reason=f"needs one GPU that ranks share, this machine has {GPUS}"),
}


def _compiled_groups(name: str) -> list[tuple[str, ...]]:
    """Returns the features of each compiled case: those that the front takes together, others alone."""
    groups = []
    of_operator = OF_THE_OPERATOR if name in ("function", "ulysses", "mla", "provider") else ()
    for group in (*TOGETHER_IN_COMPILED_CODE, *of_operator):
        expressed = [feature for feature in group if feature not in FRONTS[name].lacks]
        refused = [feature for feature in expressed if refusals_of(name, (feature,), compiles=True)]
        together = tuple(feature for feature in expressed if feature not in refused)
        groups += [(feature,) for feature in refused] + ([together] if together else [])
    return groups


def _marks(name: str, world_name: str) -> list[pytest.MarkDecorator]:
    marks = [MARKS[world_name]] if world_name in MARKS else []
    world = WORLDS[world_name]
    rarely = OVER_OTHERS if world.dynamic else IN_COMPILE if world.compiles else ()
    return [*marks, pytest.mark.sweep] if name in rarely else marks


@pytest.mark.parametrize(
    ("name", "world_name"),
    [pytest.param(*each, marks=_marks(*each)) for each in product(FRONTS, [*WORLDS][1:])],
)
def test_fronts_by_worlds(name: str, world_name: str, request: pytest.FixtureRequest) -> None:
    world = WORLDS[world_name]
    base = Case() if world.device == "cpu" else Case(device="cuda", dtype="bfloat16", head_dim=64, lengths=(384, 384))
    groups = _compiled_groups(name) if world.compiles else [(feature,) for feature in FEATURES_OF_WORLDS]
    if world.dynamic and not (FRONTS[name].is_whole_graph and not FRONTS[name].is_sized):
        pytest.skip("its code is compiled for one length, or for none: it runs between graphs, as in compiled(2)")
    if world.dynamic:  # the others do not depend on lengths
        groups = [("causal",) if "documents" in FRONTS[name].lacks else ("documents",)]
    found = {features: case_of(name, features, world.size, base) for features in groups}
    cases = {features: case for features, case in found.items() if case is not None}
    if not world.fixture:
        for features, case in cases.items():
            _cell(name, features, world, case)
        return
    by_rank = request.getfixturevalue(world.fixture).run(check_all, name, cases, world)
    assert all(messages == by_rank[0] for messages in by_rank)
    for features in cases:
        allowed, message = refusals_of(name, features, 1, world.compiles), by_rank[0].get(features)
        assert (message is not None) == bool(allowed), f"{features}: {message}"
        assert message is None or re.search("|".join(allowed), message), message


THREADS = [name for name in WORLDS if name.startswith("threads")]


@settings(max_examples=examples(100), derandomize=examples(0) == 0, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([*FRONTS]), st.sets(st.sampled_from([*FEATURES]), min_size=2, max_size=3),
    st.sampled_from(THREADS), st.randoms(use_true_random=False),
)  # fmt: skip
def test_features_together(name: str, features: set[str], world_name: str, random: Random) -> None:
    world, chosen = WORLDS[world_name], tuple(sorted(features, key=[*FEATURES].index))
    base = Case(
        method=random.choice(METHODS[len(world.shape)]), transport=random.choice(("auto", "allgather", "alltoall"))
    )
    base = replace(base, layout=random.choice(layouts_of(base)))
    case = case_of(name, chosen, world.size, base)
    assume(case is not None)
    # Undeclared lengths of unequal shards are refused, as `test_refusals` shows.
    assume(case.declared or all(length % (2 * world.size) == 0 for length in case.lengths))
    note(f"{name} {chosen} {world_name} {case}")
    _cell(name, chosen, world, case)
