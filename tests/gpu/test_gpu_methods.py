"""Ulysses on two GPUs: numbers, races, CUDA graphs, through shared memory and by collectives."""

from __future__ import annotations

import random
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import (
    WORLD_SIZE,
    Tensors,
    attend,
    delay,
    different_layers,
    largest_difference,
    relative_norm,
    replayed_differences,
    shards,
)
from support.problems import Problem, reference, shard
from support.processes import Processes

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, context_parallel_attention
from cp_dtensor.comm import head_exchange_symm_mem
from cp_dtensor.comm.head_exchange_symm_mem import obstacle_to_shared_memory
from cp_dtensor.engine import planner
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.plan.partition import head_stages

pytestmark = pytest.mark.gpu(WORLD_SIZE)
PROBLEMS = (
    Problem(256, 256, 2, 4 * WORLD_SIZE, 2 * WORLD_SIZE, 32, is_causal=True),
    Problem(203, 203, 1, 4, 4, 64, is_causal=True),
    Problem(96, 160, 2, 4, 1, 16),
    Problem(40, 40, 1, 3, 3, 8, is_causal=True),
    Problem(3, 1, 1, 2, 2, 8, is_causal=True),
)


def _errors(rank: int, problem: Problem, layout: Layout, stages: int, shares_memory: bool) -> list[float]:
    expected = [shard(tensor, layout, rank, WORLD_SIZE) for tensor in reference(problem, *problem.draw(5, "cuda"))]
    local = shards(problem, 5, layout, rank)
    found: list[str | None] = []

    def obstacle(*args: Any) -> str | None:
        found.append(obstacle_to_shared_memory(*args) if shares_memory else "not wanted in this test")
        return found[-1]

    with ExitStack() as stack:
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planner, "head_stages", staging))
        stack.enter_context(mock.patch.object(planner, "obstacle_to_shared_memory", obstacle))
        stack.enter_context(mock.patch.object(planner, "_plans", WeakKeyDictionary()))  # decide anew
        results = attend(local, problem, layout, dist.group.WORLD, method="ulysses")
    assert found
    assert all((each is None) == shares_memory for each in found), found
    return [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True) if want.numel()]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "collectives"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), MirroredBatch()], ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ulysses_equals_one_device_in_float64(
    gpus: Processes, problem: Problem, layout: Layout, stages: int, shares_memory: bool
) -> None:
    for errors in gpus.run(_errors, problem, layout, stages, shares_memory):
        assert all(each < 1e-10 for each in errors), errors


def _race(rank: int, methods: list[tuple[str, str]], stages: int, rounds: int) -> list[str]:
    draw = random.Random(rank)
    copy = head_exchange_symm_mem._Table.copy

    def late_copy(table: Any, targets: Any, stream: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):  # streams that read may be late as well
            delay(draw)
        copy(table, targets, stream, current)

    with ExitStack() as stack:
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planner, "head_stages", staging))
        stack.enter_context(mock.patch.object(head_exchange_symm_mem._Table, "copy", late_copy))
        stack.enter_context(mock.patch.object(planner, "_plans", WeakKeyDictionary()))  # decide anew
        expected, *ways = (
            {"mesh": dist.group.WORLD, "method": method, "rotate_method": rotate_method}
            for method, rotate_method in [("ring", "allgather"), *methods]
        )
        return different_layers(rank, [expected], ways, rounds, draw)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    "methods",
    [[("ulysses", "auto")], [("ulysses", "auto"), ("ring", "symm_mem")]],
    ids=["ulysses", "in turns with a ring"],
)
def test_random_delays_on_random_ranks_change_nothing(
    gpus: Processes, methods: list[tuple[str, str]], stages: int
) -> None:
    """Shared memory that is overwritten too early, or read too early, would show."""
    for wrong in gpus.run(_race, methods, stages, 6):
        assert not wrong, wrong


def _compiled(rank: int, method: str, stages: int, deterministic: bool) -> list[float]:
    problem = Problem(512, 512, 1, 4 * WORLD_SIZE, 2 * WORLD_SIZE, 64, is_causal=True, dtype=torch.bfloat16)
    inputs = shards(problem, 0, HeadTail(), rank)
    with ExitStack() as stack:
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planner, "head_stages", staging))
        stack.enter_context(mock.patch.object(planner, "_plans", WeakKeyDictionary()))  # decide anew
        options = {"method": method, "deterministic": deterministic}
        expected = attend(inputs, problem, HeadTail(), dist.group.WORLD, **options)
        compiled = torch.compile(_attention_of(options, problem), fullgraph=True, backend="aot_eager")
        *qkv, grad_out = inputs
        q, k, v = (tensor.detach().requires_grad_() for tensor in qkv)
        out = compiled(q, k, v)
        out.backward(grad_out)
    results = (out.detach(), q.grad, k.grad, v.grad)
    return [relative_norm(ours, want) for ours, want in zip(results, expected, strict=True)]


def _attention_of(options: dict[str, Any], problem: Problem) -> Any:
    mesh = dist.group.WORLD
    return lambda q, k, v: context_parallel_attention(
        q, k, v, mesh=mesh, is_causal=problem.is_causal, enable_gqa=True, seq_len=problem.q_len, **options
    )


@pytest.mark.parametrize(("method", "stages"), [("ring", 1), ("ulysses", 1), ("ulysses", 2)])
@pytest.mark.parametrize("deterministic", [False, True])  # some kernels add in another order in each run
def test_compiled_equals_eager(gpus: Processes, method: str, stages: int, deterministic: bool) -> None:
    for worst in gpus.run(_compiled, method, stages, deterministic):
        assert all(each <= (0 if deterministic else 1e-3) for each in worst), worst


def _differences(rank: int) -> list[float]:
    """The largest differences in a call after one that has raised in its second stage."""
    problem = Problem(512, 512, 1, 2 * WORLD_SIZE, 2 * WORLD_SIZE, 64, is_causal=True, dtype=torch.float32)
    inputs = shards(problem, 0, HeadTail(), rank)
    calls = []
    forward = RingPlan.forward

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return forward(*args)

    with ExitStack() as stack:
        staging = partial(head_stages, flops_per_stage=1e-3, most=4)
        stack.enter_context(mock.patch.object(planner, "head_stages", staging))
        stack.enter_context(mock.patch.object(planner, "_plans", WeakKeyDictionary()))  # decide anew
        expected = attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ulysses")
        with mock.patch.object(RingPlan, "forward", failing), pytest.raises(RuntimeError, match="planted"):
            attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ulysses")
        results = attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ulysses")
    return [largest_difference(ours, want) for ours, want in zip(results, expected, strict=True)]


def test_a_call_after_one_that_raised_half_way(gpus: Processes) -> None:
    assert gpus.run(_differences) == [[0.0] * 4] * WORLD_SIZE


def _graph(rank: int, stages: int) -> list[float]:
    with ExitStack() as stack:
        staging = partial(head_stages, flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planner, "head_stages", staging))
        stack.enter_context(mock.patch.object(planner, "_plans", WeakKeyDictionary()))  # decide anew
        return _replayed(rank)


def _replayed(rank: int) -> list[float]:
    problem = Problem(512, 512, 1, 8 * WORLD_SIZE, 4 * WORLD_SIZE, 64, is_causal=True, dtype=torch.float32)

    def call(inputs: Tensors, **options: Any) -> Tensors:
        return attend(inputs, problem, HeadTail(), dist.group.WORLD, **options)

    return replayed_differences(
        rank, partial(call, method="ulysses"), partial(call, method="ring", rotate_method="allgather"),
        lambda seed: shards(problem, seed, HeadTail(), rank),
    )  # fmt: skip


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_captured_graph_is_replayed_with_other_inputs(gpus: Processes, stages: int) -> None:
    for worst in gpus.run(_graph, stages):
        assert all(each < 1e-4 for each in worst), worst
