"""Rings and heads by a backend that computes several intervals of a row in one tile: cuDNN's, by its stand-in."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from matrix.features import Case
from matrix.worlds import World, run_threads
from support.package_kernels import Unwanted
from support.pretended_packages import FlexModule, fresh_process, install

from cp_dtensor import Batched, Causal, Documents, HeadTail, Layout, Mask, SlidingWindow, Striped
from cp_dtensor.attention.backends import cudnn_flex
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.model_masks import Keys

SINKS = Causal() & (SlidingWindow(9, 0) | Keys(((0, 4), (40, 43))))
"""A window, the first keys, and some more."""
MASKS: dict[str, Mask] = {
    "first keys": SINKS,
    "a batch row alone": Batched([Causal(), SINKS]),
    "documents and first keys": (Documents([0, 30, 50, 96]) | Keys(((0, 5),))) & Causal(),
}


def test_tiles_alone_have_several_intervals() -> None:
    """Predictions and transfers use the spec of the call, which is equal on ranks with different kernels."""
    spec = CallSpec(LayoutPartition(HeadTail(), 96, 96, 1, 1), SINKS, 1, 4, 2, 16, 16, "bfloat16", Masking.INTERVALS)
    plan = planner.plan_ring(spec, AllGather(), CudnnFlexAttention(), None)
    assert plan.spec == spec
    (tile,) = [tile for step in plan.tile_plan.forward for tile in step.tiles]
    assert len(getattr(tile.mask, "sets", ())) > 1


WORLDS: dict[str, tuple[tuple[int, ...], str]] = {
    "ring": ((2,), "ring"), "ulysses": ((2,), "ulysses"), "hybrid": ((2, 2), "hybrid"), "nested ring": ((2, 2), "ring"),
}  # fmt: skip
"""Ranks of each axis, and the method."""
SHORTEST = {1: "by cuDNN", 45: "by both", 97: "by ours"}
CASES = [
    pytest.param(
        world, shortest, [*MASKS][(number + number // 3) % 3], (HeadTail(), Striped(8))[number % 2],
        id=f"{world} {SHORTEST[shortest]}",
    )
    for number, (world, shortest) in enumerate(product(WORLDS, SHORTEST))
]  # fmt: skip


@pytest.mark.parametrize(("world", "shortest", "mask", "layout"), CASES)
def test_tiles_of_several_intervals(world: str, shortest: int, mask: str, layout: Layout) -> None:
    shape, method = WORLDS[world]
    masks = []
    forward = CudnnFlexAttention.forward

    def recorded(self: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
        masks.append(mask)
        return forward(self, q, k, v, mask, scale)

    with fresh_process() as patch:
        install(patch, flex=FlexModule())
        patch.setattr(cudnn_flex, "SHORTEST", shortest)
        patch.setattr(planner, "choose_backend", lambda *_: CudnnFlexAttention())
        patch.setattr(CudnnFlexAttention, "forward", recorded)
        if shortest == 1:
            patch.setattr(cudnn_flex, "_INTERVALS", Unwanted())
        case = Case(
            (96, 96), heads=(2, 1), enable_gqa=True, head_dim=16, dtype="bfloat16", mask=MASKS[mask], layout=layout,
            method=method, transport="allgather",
        )  # fmt: skip
        run_threads("function", case, World(shape))
    assert any(len(tile.sets) > 1 for tile in masks)
