"""Predictions of the cost model beside the committed tables of the benchmark; `test_choices` compares the methods."""

from __future__ import annotations

import math
from statistics import median

import pytest
from support.measured import Case, measured

from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine.choose import estimates, ring_estimate
from cp_dtensor.plan.cost import Cluster, Hardware, Tier
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, masking_of

FEW_RANKS = ["2xH200", "2xH200-mha", "2xH200-graphs", "4xH200", "4xH200-mha", "4xH200-graphs"]
EIGHT_RANKS = ["8xH200", "8xH200-mha", "8xH200-graphs"]
MASKS = ["2xH200-masks", "4xH200-masks", "8xH200-masks-flex"]
LAYOUTS = ("HeadTail", "Contiguous", "Balanced")
AUTO = ROTATE_METHODS["auto"]


def ratios(case: Case, launch: float, kind: str = "") -> dict[tuple[str, str], float]:
    """Return the predicted over the measured time, by method and pass."""
    mask, layout = case.values()
    partition = LayoutPartition(layout, case.tokens, case.tokens, 1, case.ranks)
    spec = CallSpec(
        partition, mask, 1, case.q_heads, case.kv_heads, case.head_dim, case.head_dim, "bfloat16",
        masking_of(partition, mask),
    )  # fmt: skip
    gpu = Hardware(**{**vars(Hardware.of("H200")), "launch": launch})
    cluster = Cluster(gpu, (Tier.of(gpu, case.ranks),))
    found = {
        "ours-symm_mem": ring_estimate(spec, cluster, AUTO),
        "ours-alltoall": ring_estimate(spec, cluster, ROTATE_METHODS["alltoall"]),
        "ours-ulysses": estimates(spec, cluster, AUTO)["ulysses"],
    }
    times = measured()[case]
    return {
        (method, name): 1e3 * seconds / times[method + kind, name]
        for method, each in found.items()
        for name, seconds in (("fwd", each.forward), ("fwdbwd", each.seconds))
        if (method + kind, name) in times
    }


def cases(tables: list[str], shortest: int, longest: int = 1 << 20) -> list[Case]:
    return [
        case for case in measured()
        if case.table in tables and case.layout in LAYOUTS and shortest <= case.tokens <= longest
    ]  # fmt: skip


@pytest.mark.parametrize("case", cases(FEW_RANKS, 32768), ids=str)
def test_long_calls_take_what_was_measured(case: Case) -> None:
    for key, ratio in ratios(case, Hardware.launch).items():
        assert 0.74 < ratio < 1.17, (key, ratio)


@pytest.mark.parametrize("case", cases(["2xH200-graphs", "8xH200-graphs"], 8192, 131072), ids=str)
def test_graphs_take_what_was_measured_without_launches(case: Case) -> None:
    found = ratios(case, 0.0, " graph")
    assert len(found) == 4
    for key, ratio in found.items():
        assert 0.85 < ratio < 1.1, (key, ratio)


def test_short_calls_are_launched_in_about_the_time_that_was_measured() -> None:
    """The speed of the hosts of the rented machines differed by more than a half."""
    short = cases(FEW_RANKS + EIGHT_RANKS, 2048, 8192)
    found = [math.log(ratio) for case in short for ratio in ratios(case, Hardware.launch).values()]
    assert abs(median(found)) < math.log(1.15)
    assert max(map(abs, found)) < math.log(2.0)


@pytest.mark.parametrize("case", [case for case in cases(MASKS, 65536) if case.mask != "causal"], ids=str)
def test_times_under_masks_are_near_what_was_measured(case: Case) -> None:
    """In forward on 8 ranks, the slowest of the hosts decides."""
    for (method, name), ratio in ratios(case, Hardware.launch).items():
        assert (0.68 if name == "fwd" else 0.86) < ratio < 1.13, (method, name, ratio)
