"""Compiled calls on two GPUs: by Inductor, in its CUDA graphs from the first call of a group on, other masks each step.

Calls are cases of tests/matrix, compared with dense attention in float64.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matrix.features import Case, Tensors
from matrix.fronts import FRONTS
from matrix.worlds import WORLDS, check_in_turns, compare, leaves_of, mesh_of, results_of
from support.compile_checks import fresh
from support.gpu_checks import WAYS, WORLD_SIZE, by, captured
from support.processes import Processes
from support.staging import in_stages
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from cp_dtensor import Batched, Causal, Documents, context_parallel, context_parallel_shard

pytestmark = pytest.mark.gpu(WORLD_SIZE)
WORLD = WORLDS["gpu(2)"]
CASE = Case(device="cuda", dtype="bfloat16", lengths=(512, 512), heads=(8, 4), enable_gqa=True, head_dim=64)
STEPS = 5


def _documents(step: int) -> Documents:
    return Documents((0, 100 + 7 * step, 300 + step, 512), within=Causal())


def _compile(front: str, **options: Any) -> Any:
    """Returns compiled code of a front, with other operations before and after it."""
    fresh()
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # one of torch's own
    warnings.filterwarnings("ignore", ".*autograd.function.Function.* should not be instantiated")  # Dynamo does

    def function(case: Case, mesh: Any, x: Tensors) -> Any:
        return FRONTS[front].call(case, mesh, {**x, "q": x["q"] * 1.0}) * 1.0

    return torch.compile(function, fullgraph=True, **options)


def _by_inductor(rank: int, front: str, cases: list[Case], stages: int, is_equal: bool) -> None:
    """Two contexts in turns, backward after both; deterministic calls have the bits of uncompiled ones."""
    cases, mesh = [FRONTS[front].settle(case, WORLD.size) for case in cases], mesh_of(WORLD)
    with in_stages(stages):
        check_in_turns(replace(FRONTS[front], slack=4.0), cases, mesh, _compile(front))
        if not is_equal:
            return
        case = replace(cases[0], deterministic=True)
        eager, (x, grad_out) = results_of(FRONTS[front], case, mesh), leaves_of(case, mesh)
        out = _compile(front, backend="aot_eager")(case, mesh, x)
        out.backward(grad_out)
        assert torch.equal(out, eager["out"])
        assert all(torch.equal(leaf.grad, eager[name]) for name, leaf in x.items())


PACKED = [
    replace(CASE, seed=step, mask=Batched([_documents(step), Documents((0, 1 + step, 512), within=Causal())]))
    for step in range(2)
]
DENSE = [replace(CASE, is_causal=True), replace(CASE, is_causal=True, seed=1)]


@pytest.mark.parametrize(
    ("front", "way", "stages"),
    [
        ("function", "ring", 1), ("function", "ulysses", 1), ("function", "ulysses", 2),
        ("varlen_attn", "ring", 1), ("varlen_attn", "ulysses", 1),
    ],
)  # fmt: skip
def test_by_inductor(slow_gpus: Processes, front: str, way: str, stages: int) -> None:
    cases = [by(way, case) for case in (DENSE if front == "function" else PACKED)]
    slow_gpus.run(_by_inductor, front, cases, stages, front == "function")


def _in_graphs(rank: int, front: str, cases: list[Case], stages: int, with_grad: bool = True) -> tuple[int, int]:
    """Checks steps of one code; returns how many graphs have been made, and have not."""
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    function = _compile(front, mode="reduce-overhead")
    counters.clear()
    mesh, group = mesh_of(WORLD), dist.new_group()  # of which nothing has been found out or prepared
    with in_stages(stages) if stages else nullcontext():
        for step, case in enumerate(cases):
            torch.compiler.cudagraph_mark_step_begin()
            x, grad_out = leaves_of(case, mesh)
            stance = torch.compiler.set_stance("fail_on_recompile" if step else "default")
            with stance, torch.set_grad_enabled(with_grad):
                if not with_grad:
                    x = {name: each.detach() for name, each in x.items()}
                with FRONTS[front].around(case, mesh, x):
                    out = function(case, group, x)
                if with_grad:
                    out.backward(grad_out)
            results = {"out": out.detach().clone(), **{name: each.grad for name, each in x.items() if with_grad}}
            del out
            results = {name: each.clone() for name, each in results.items()}
            case = case if with_grad else replace(case, around="no_grad")
            compare(case, mesh, results, replace(FRONTS[front], slack=4.0))
    found = get_manager(torch.cuda.current_device()).new_graph_id().id, counters["inductor"]["cudagraph_skips"]
    # A communicator cannot be destroyed while there are graphs with its collectives.
    torch.compiler.reset()
    dist.destroy_process_group(group)
    return found


# "auto" measures links at first; the stages of Ulysses are computed on two streams in turns.
@pytest.mark.parametrize("mask", ["causal", "documents"])
@pytest.mark.parametrize("way", captured([*WAYS, "auto", "ulysses in stages"]))
def test_first_calls_may_be_in_graphs(slow_gpus: Processes, way: str, mask: str) -> None:
    way, _, stages = way.partition(" in ")
    case = replace(CASE, is_causal=True) if mask == "causal" else replace(CASE, mask=_documents(0))
    cases = [by(way, replace(case, heads=(8 * WORLD_SIZE, 4 * WORLD_SIZE), seed=step)) for step in range(STEPS)]
    for graphs, skipped in slow_gpus.run(_in_graphs, "function", cases, 4 if stages else 1):
        assert graphs >= 2, "forward and backward"
        assert not skipped


@pytest.mark.parametrize("with_grad", [False, True])
def test_masks_of_contexts_are_those_of_each_step(slow_gpus: Processes, with_grad: bool) -> None:
    """They are known when the code runs, so attention is left out of graphs."""
    cases = [by("allgather", replace(CASE, mask=_documents(step), seed=step)) for step in range(STEPS)]
    slow_gpus.run(_in_graphs, "context", cases, 0, with_grad)


# FlexAttention in contexts, with a new block mask in every step

LENGTH, APART = 1024, 256


def _layers_with_masks(x: torch.Tensor, start: torch.Tensor, layers: int) -> torch.Tensor:
    """Each causal in two documents, of which the second begins at `start`, and APART later in the next layer."""
    for _ in range(layers):
        x = _attend(x, (torch.arange(LENGTH, device=x.device) >= start).int())
        start = start + APART + (x[0, 0, 0, 0] * 0).int()  # so that the next mask is made only now
    return x


def _attend(x: torch.Tensor, ids: torch.Tensor) -> Any:
    def one_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[i] == ids[j])

    mask = create_block_mask(one_document, None, None, LENGTH, LENGTH, device=x.device)
    return flex_attention(x, x, x, block_mask=mask)


def _dense_layers(x: torch.Tensor, start: int, layers: int) -> torch.Tensor:
    """The same on one device."""
    i = torch.arange(LENGTH, device=x.device)
    for layer in range(layers):
        second = i >= start + layer * APART
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=(i[:, None] >= i) & (second[:, None] == second))
    return x


def _errors(rank: int, layers: int, mode: str) -> list[float]:
    """Of all steps, relative."""
    fresh()
    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
    warnings.filterwarnings("ignore", ".*autograd.function.Function.* should not be instantiated")
    device = torch.device("cuda", torch.cuda.current_device())
    whole = torch.randn(1, 4, LENGTH, 64, device=device, generator=torch.Generator(device).manual_seed(1))
    compiled: Any = torch.compile(_layers_with_masks, fullgraph=True, mode=mode)
    found = []
    with torch.no_grad():
        for start in (100, 300, 200, 500, 60, 700):
            x, expected = context_parallel_shard(dist.group.WORLD, [whole, _dense_layers(whole, start, layers)], [2, 2])
            torch.compiler.cudagraph_mark_step_begin()
            with context_parallel(dist.group.WORLD, seq_len=LENGTH):
                out = compiled(x, torch.tensor(start, device=device, dtype=torch.int32), layers)
            found.append(((out - expected).norm() / expected.norm()).item())
    return found


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_block_masks_are_those_of_each_step(slow_gpus: Processes, mode: str, layers: int) -> None:
    for found in slow_gpus.run(_errors, layers, mode):
        assert all(each < 1e-2 for each in found), found
