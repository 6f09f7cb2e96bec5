"""Every front with every feature, against dense attention in float64, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st
from support.cases import examples
from support.processes import GPU_RANKS, Processes

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
    processes = Processes(2, 120, "nccl")
    yield processes
    processes.stop()


@pytest.mark.parametrize(("name", "feature"), CELLS)
def test_fronts_by_features(name: str, feature: str) -> None:
    world = WORLDS["threads(2)"]
    _cell(name, (feature,), world, case_of(name, (feature,), world.size))


FEATURES_OF_WORLDS = ("causal", "documents", "sinks", "checkpoint")
IN_COMPILED_CODE = ("softcap", "bool_bias", "float_bias", "scale<0", "gqa", "lse", "window", "bf16")
"""Constants, arguments and results of the operator, for fronts that reach it in different ways."""
GPUS = torch.cuda.device_count()
MARKS = {
    "compiled(2)": pytest.mark.slow,
    "compiled_dynamic(2)": pytest.mark.slow,
    "gpu(2)": pytest.mark.gpu(GPU_RANKS),
    "gpu_shared(2)": pytest.mark.skipif(GPUS != 1, reason=f"needs one GPU that ranks share, this machine has {GPUS}"),
}


@pytest.mark.parametrize("world_name", [pytest.param(each, marks=MARKS.get(each, ())) for each in [*WORLDS][1:]])
@pytest.mark.parametrize("name", FRONTS)
def test_fronts_by_worlds(name: str, world_name: str, request: pytest.FixtureRequest) -> None:
    world = WORLDS[world_name]
    base = Case() if world.device == "cpu" else Case(device="cuda", dtype="bfloat16", head_dim=64, lengths=(384, 384))
    features = FEATURES_OF_WORLDS
    if world_name == "compiled(2)" and name in ("function", "ulysses", "mla", "provider"):
        features += IN_COMPILED_CODE
    found = {feature: case_of(name, (feature,), world.size, base) for feature in features}
    cases = {feature: case for feature, case in found.items() if case is not None}
    if world.dynamic and not FRONTS[name].is_whole_graph:
        pytest.skip("it runs between graphs, as in compiled(2): its code is compiled for no length")
    if world.dynamic:  # the others do not depend on lengths, and each takes seconds to compile
        cases = {feature: cases[feature] for feature in ["documents" if "documents" in cases else "causal"]}
    if not world.fixture:
        for feature, case in cases.items():
            _cell(name, (feature,), world, case)
        return
    by_rank = request.getfixturevalue(world.fixture).run(check_all, name, cases, world)
    assert all(messages == by_rank[0] for messages in by_rank)
    for feature in cases:
        allowed, message = refusals_of(name, (feature,), 1, world.compiles), by_rank[0].get(feature)
        assert (message is not None) == bool(allowed), f"{feature}: {message}"
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
