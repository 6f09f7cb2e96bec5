"""`torch.compile(mode="reduce-overhead")` on two GPUs, from the first call of a process group."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import fresh
from support.gpu_checks import WAYS, WORLD_SIZE, attend, captured, shards
from support.problems import Problem
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Documents, HeadTail, Mask, context_parallel, context_parallel_attention
from cp_dtensor.engine import planner as planning
from cp_dtensor.plan.partition import head_stages

pytestmark = pytest.mark.gpu(WORLD_SIZE)
# auto measures links at first; the stages of Ulysses are computed on two streams in turns.
WAYS = {**WAYS, "auto": {"method": "auto"}, "ulysses in stages": {"method": "ulysses"}}
MASKS = {"causal": None, "documents": Documents((0, 100, 300, 512)) & Causal()}
STEPS = 5


def _steps(rank: int, way: str, mask: Mask | None) -> tuple[list[float], int, int]:
    """The largest differences from uncompiled calls of other ways; how many graphs have been made, and have not."""
    fresh()
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # one of torch's own
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    counters.clear()
    staging = partial(head_stages, flops_per_stage=1e-3, most=4 if way == "ulysses in stages" else 1)
    problem = Problem(512, 512, 1, 8 * WORLD_SIZE, 4 * WORLD_SIZE, 64, is_causal=mask is None, dtype=torch.float32)
    group = dist.new_group()  # of which nothing has been found out or prepared
    masked: dict[str, Any] = {"is_causal": True} if mask is None else {"mask": mask}

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_parallel_attention(
            q * 2.0, k, v, mesh=group, enable_gqa=True, seq_len=512, layout=HeadTail(), **WAYS[way], **masked
        )

    worst = []
    for step in range(STEPS):
        inputs = shards(problem, step, HeadTail(), rank)
        torch.compiler.cudagraph_mark_step_begin()
        q, k, v = (tensor.detach().requires_grad_() for tensor in inputs[:3])
        with mock.patch.object(planning, "head_stages", staging):
            out = function(q, k, v)
        out.backward(inputs[3])
        results = [x.clone() for x in (out.detach(), q.grad, k.grad, v.grad)]
        del out
        other = "allgather" if WAYS[way]["method"] == "ulysses" else "ulysses"
        options = WAYS[other] if mask is None else {**WAYS[other], "mask": mask}
        expected = list(attend((inputs[0] * 2.0, *inputs[1:]), problem, HeadTail(), dist.group.WORLD, **options))
        expected[1] = expected[1] * 2.0
        worst += [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True)]
    graphs = get_manager(torch.cuda.current_device()).new_graph_id().id
    skipped = counters["inductor"]["cudagraph_skips"]
    # A communicator cannot be destroyed while there are graphs with its collectives.
    torch.compiler.reset()
    dist.destroy_process_group(group)
    return worst, graphs, skipped


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", captured(WAYS))
def test_first_calls_may_be_in_graphs(gpus: Processes, way: str, mask: str) -> None:
    for worst, graphs, skipped in gpus.run(_steps, way, MASKS[mask]):
        assert all(each < 1e-4 for each in worst), worst
        assert graphs >= 2, "forward and backward"
        assert not skipped


def _in_regions(rank: int, with_grad: bool) -> list[float]:
    """The largest differences in a context whose documents are others in every step, with shapes that are not."""
    fresh()
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
    mesh = init_device_mesh("cuda", (WORLD_SIZE,))
    problem = Problem(512, 512, 1, 8, 2, 64, dtype=torch.float32)

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 2.0, k, v, is_causal=True, enable_gqa=True) * 3.0

    worst = []
    for step in range(STEPS):
        documents = Documents((0, 100 + 7 * step, 300 + step, 512))
        inputs = shards(problem, step, HeadTail(), rank)
        scaled = (inputs[0] * 2.0, *inputs[1:3], inputs[3] * 3.0)
        out, dq, dk, dv = attend(
            scaled, problem, HeadTail(), dist.group.WORLD, mask=documents & Causal(), **WAYS["allgather"]
        )
        expected = [out * 3.0, dq * 2.0, dk, dv]
        torch.compiler.cudagraph_mark_step_begin()
        q, k, v = (tensor.detach().requires_grad_(with_grad) for tensor in inputs[:3])
        with context_parallel(mesh, mask=documents), torch.set_grad_enabled(with_grad):
            out = function(q, k, v)
            if with_grad:
                out.backward(inputs[3])
        results = [x.clone() for x in (out.detach(), q.grad, k.grad, v.grad) if x is not None]
        del out
        worst += [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=False)]
    torch.compiler.reset()
    return worst


@pytest.mark.parametrize("with_grad", [False, True])
def test_masks_of_contexts_are_those_of_each_step(gpus: Processes, with_grad: bool) -> None:
    """They are known when the code runs, so attention is left out of graphs."""
    for worst in gpus.run(_in_regions, with_grad):
        assert all(each < 1e-3 for each in worst), worst
