"""Predictions of the cost model beside the committed tables of the benchmark."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.measured import measured

from cp_dtensor.comm.select import ROTATE_METHODS
from cp_dtensor.engine.cost_model import Axis, Estimate, estimates, fastest, ring_estimate
from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.balanced_layouts import Balanced
from cp_dtensor.spec.layouts import HeadTail
from cp_dtensor.spec.masks import Causal
from cp_dtensor.tools.parsing import mask_by_name

H200 = Hardware.of("H200")
BY_NAME: dict[str, Callable[[CallSpec, Axis], Estimate]] = {
    "ours-symm_mem": lambda shape, axis: ring_estimate(shape, axis, ROTATE_METHODS["symm_mem"]),
    "ours-alltoall": lambda shape, axis: ring_estimate(shape, axis, ROTATE_METHODS["alltoall"]),
    "ours-ulysses": lambda shape, axis: estimates(shape, axis, None, ROTATE_METHODS["auto"])["ulysses"],
}
FEW_RANKS = [(2, 8, "2xH200"), (2, 32, "2xH200-mha"), (4, 8, "4xH200"), (4, 32, "4xH200-mha")]
EIGHT_RANKS = [(8, 8, "8xH200"), (8, 32, "8xH200-mha")]
on_few_ranks, on_any = (
    pytest.mark.parametrize(("ranks", "kv_heads", "table"), tables) for tables in (FEW_RANKS, FEW_RANKS + EIGHT_RANKS)
)
each_length = pytest.mark.parametrize("length", [8192, 32768, 131072])


def times_of(table: str, length: int, mask: str = "causal", layout: str = "HeadTail") -> dict[tuple[str, str], float]:
    """Return milliseconds by method and pass; empty where the case was not measured."""
    return next(
        (times for case, times in measured().items() if (case.table, case[2:5]) == (table, (length, mask, layout))), {}
    )


def shape_of(length: int, ranks: int, kv_heads: int) -> CallSpec:
    partition = LayoutPartition(HeadTail(), length, length, 1, ranks)
    return CallSpec(partition, Causal(), 1, 32, kv_heads, 128, 128, "bfloat16")


@each_length
@on_few_ranks
def test_times_are_near_what_was_measured(ranks: int, kv_heads: int, table: str, length: int) -> None:
    """Where the host decides they are bounds from below: its speed on the rented machines varied by half."""
    shape, axis = shape_of(length, ranks, kv_heads), Axis(ranks, H200, shares_memory=True)
    for name, estimate in BY_NAME.items():
        found = estimate(shape, axis)
        for pass_name, seconds in (("fwd", found.forward), ("fwdbwd", found.seconds)):
            ratio = 1e3 * seconds / times_of(table, length)[name, pass_name]
            assert (0.4 if length < 16384 else 0.8) < ratio < 1.1, (name, pass_name, ratio)


@each_length
@on_any
def test_what_auto_takes_is_within_5_percent_of_the_best(ranks: int, kv_heads: int, table: str, length: int) -> None:
    """Within 10 at 8,192 tokens, where the times of one and the same ring differ by as much from run to run."""
    shape, axis = shape_of(length, ranks, kv_heads), Axis(ranks, H200, shares_memory=True)
    method = fastest(estimates(shape, axis, None, ROTATE_METHODS["auto"]))
    name = "ours-ulysses" if method == "ulysses" else "ours-symm_mem"  # the ring's KV transport, see test_cost
    took = {name: times_of(table, length)[name, "fwdbwd"] for name in BY_NAME}
    assert took[name] <= (1.1 if length < 16384 else 1.05) * min(took.values()), took


@pytest.mark.parametrize("layout", ["HeadTail", "Balanced"])
@pytest.mark.parametrize("length", [65536, 131072])
@pytest.mark.parametrize("name", ["documents 2048", "window 4096"])
@pytest.mark.parametrize(("ranks", "table"), [(2, "2xH200-masks"), (4, "4xH200-masks"), (8, "8xH200-masks-flex")])
def test_times_under_masks_are_near_what_was_measured(
    ranks: int, table: str, name: str, length: int, layout: str
) -> None:
    """Of every way that was measured; and the one that is taken is the fastest of them, or nearly so."""
    mask = mask_by_name(name, length)
    partition = LayoutPartition(
        Balanced(mask, length) if layout == "Balanced" else HeadTail(), length, length, 1, ranks
    )
    spec = CallSpec(partition, mask, 1, 32, 8, 128, 128, "bfloat16", Masking.INTERVALS)
    found = estimates(spec, Axis(ranks, H200, shares_memory=True), None, ROTATE_METHODS["auto"])
    baselines = {"ring": "ours-symm_mem", "ulysses": "ours-ulysses"}
    known_times = times_of(table, length, name, layout)
    times = {
        method: [known_times.get((baseline, each)) for each in ("fwd", "fwdbwd")]
        for method, baseline in baselines.items()
    }
    for method, (forward, both) in times.items():
        if forward is not None and both is not None:
            assert 0.8 < 1e3 * found[method].forward / forward < 1.11, method
            assert 0.93 < 1e3 * found[method].seconds / both < 1.07, method
    known = {method: both for method, (_, both) in times.items() if both is not None}
    assert "ring" in known
    if len(known) == len(found):
        assert known[fastest(found)] <= 1.05 * min(known.values())
    # Of documents of 65,536 tokens on 8 ranks both ways were measured before stages had more work: 8.36 and 8.87 ms.
    if layout == "Balanced" and (ranks, name, length) != (8, "documents 2048", 65536):
        assert fastest(found) == "ring"
