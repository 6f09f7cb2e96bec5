"""Rings and heads by a backend that computes several intervals of a row in one tile: cuDNN's, by its stand-in."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.masked_problems import shown
from support.package_kernels import Unwanted, relative
from support.pretended_packages import FlexModule, fresh_process, install
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Batched, Causal, Documents, HeadTail, Layout, Mask, SlidingWindow, Striped
from cp_dtensor import context_parallel_attention as attention
from cp_dtensor.attention.backends import cudnn_flex
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.engine import planner
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.model_masks import Keys

LENGTH = 96
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
    plan = planner.plan_ring(spec, AllGather(), CudnnFlexAttention(), None, 0)
    assert plan.spec == spec
    (tile,) = [tile for step in plan.tile_plan.forward for tile in step.tiles]
    assert len(getattr(tile.mask, "sets", ())) > 1


WAYS: dict[str, tuple[tuple[int, ...], str]] = {
    "ring": ((2,), "ring"), "ulysses": ((2,), "ulysses"), "hybrid": ((2, 2), "hybrid"), "nested ring": ((2, 2), "ring"),
}  # fmt: skip
"""Ranks of each axis, and the method."""


@pytest.mark.parametrize("shortest", [1, 45, 97], ids=["by cuDNN", "by both", "by ours"])
@pytest.mark.parametrize("layout", [HeadTail(), Striped(8)], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MASKS)
def test_tiles_of_several_intervals(name: str, way: str, layout: Layout, shortest: int) -> None:
    shape, method = WAYS[way]
    ranks = math.prod(shape)
    mask, masks = MASKS[name], []
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(2, heads, LENGTH, 16, generator=generator).bfloat16() for heads in (4, 2, 2, 4)]

    def body(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses")[: len(shape)])
        q, k, v, grad_out = (shard(x, layout, rank, ranks) for x in values)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(
            *leaves, mesh=mesh, enable_gqa=True, mask=mask, layout=layout, seq_len=LENGTH, method=method,
            rotate_method="allgather",
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        out.backward(grad_out)
        return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]

    with fresh_process() as patch:
        module = FlexModule()
        install(patch, flex=module)
        patch.setattr(cudnn_flex, "SHORTEST", shortest)
        patch.setattr(planner, "choose_backend", lambda *_: CudnnFlexAttention())
        forward = CudnnFlexAttention.forward

        def recorded(self: Any, q: Any, k: Any, v: Any, mask: Any, scale: float) -> Any:
            masks.append(mask)
            return forward(self, q, k, v, mask, scale)

        patch.setattr(CudnnFlexAttention, "forward", recorded)
        if shortest == 1:
            patch.setattr(cudnn_flex, "_INTERVALS", Unwanted())
        results = run_ranks(ranks, body)
    assert any(len(tile.sets) > 1 for tile in masks)
    wide = [x.double().requires_grad_() for x in values[:3]]
    want = F.scaled_dot_product_attention(*wide, attn_mask=shown(mask, LENGTH, LENGTH, 2), enable_gqa=True)
    want.backward(values[3].double())
    expected = [want.detach(), *(x.grad for x in wide if x.grad is not None)]
    for rank, got in enumerate(results):
        for one, whole in zip(got, expected, strict=True):
            assert relative(one, shard(whole, layout, rank, ranks)) < 1e-2
