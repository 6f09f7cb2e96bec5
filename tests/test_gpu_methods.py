"""Ulysses on two GPUs: numbers, races, CUDA graphs, through shared memory and by collectives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from problems import Problem, reference, shard
from processes import Processes

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel_attention,
    planning,
    ring,
    splitting,
)
from cp_dtensor.planning import HeadStaging
from cp_dtensor.ring import ring_forward
from cp_dtensor.rotation import head_exchange_symm_mem
from cp_dtensor.rotation.head_exchange_symm_mem import SharedMemoryHeads, shared_memory_heads

pytestmark = pytest.mark.gpu(2)
WORLD_SIZE = 2
LAYERS = 4
PROBLEMS = (
    Problem(256, 256, 2, 8, 2, 32, is_causal=True),
    Problem(203, 203, 1, 4, 4, 64, is_causal=True),
    Problem(96, 160, 2, 4, 1, 16),
    Problem(40, 40, 1, 3, 3, 8, is_causal=True),
    Problem(3, 1, 1, 2, 2, 8, is_causal=True),
)
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def gpus() -> Iterator[Processes]:
    processes = Processes(WORLD_SIZE, timeout=120, backend="nccl")
    yield processes
    processes.stop()


def _attend(inputs: Tensors, problem: Problem, layout: Layout, method: str, **options: Any) -> Tensors:
    """out, dq, dk and dv of shards."""
    *qkv, grad_out = inputs
    q, k, v = (tensor.detach().requires_grad_() for tensor in qkv)
    out = context_parallel_attention(
        q, k, v, mesh=dist.group.WORLD, method=method, is_causal=problem.is_causal, enable_gqa=True, layout=layout,
        seq_len=(problem.q_len, problem.kv_len), **options,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    out.backward(grad_out)
    return out.detach(), *(tensor.grad for tensor in (q, k, v))


def _errors(rank: int, problem: Problem, layout: Layout, stages: int, shares_memory: bool) -> list[float]:
    drawn = problem.draw(5, "cuda")
    expected = [shard(tensor, layout, rank, WORLD_SIZE) for tensor in reference(problem, *drawn)]
    local = tuple(shard(tensor, layout, rank, WORLD_SIZE) for tensor in drawn)
    exchanges: list[object] = []

    def exchange_of(*args: Any) -> object:
        exchanges.append(shared_memory_heads(*args) if shares_memory else "not wanted in this test")
        return exchanges[-1]

    with ExitStack() as stack:
        staging = HeadStaging(flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planning, "DEFAULT_HEAD_STAGING", staging))
        stack.enter_context(mock.patch.object(planning, "shared_memory_heads", exchange_of))
        stack.enter_context(mock.patch.object(splitting, "_decisions", splitting._Decisions()))  # decide anew
        results = _attend(local, problem, layout, "ulysses")
    assert exchanges
    for exchange in exchanges:
        assert isinstance(exchange, SharedMemoryHeads) == shares_memory, exchange
    return [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True) if want.numel()]


@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared memory", "collectives"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), MirroredBatch()], ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ulysses_equals_one_device_in_float64(
    gpus: Processes, problem: Problem, layout: Layout, stages: int, shares_memory: bool
) -> None:
    for errors in gpus.run(_errors, problem, layout, stages, shares_memory):
        assert max(errors) < 1e-10, errors


def _delay(draw: random.Random) -> None:
    if draw.random() < 0.5:
        torch.cuda._sleep(draw.randrange(1_000_000))  # cycles: up to half a millisecond


def _layers(rank: int, methods: list[tuple[str, str]], seed: int, delays: random.Random | None) -> list[Any]:
    """Several layers, by several methods in turns, then one backward through all of them."""
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.float32)
    q, k, v, grad_out = (shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(seed, "cuda"))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    outs = []
    for layer in range(LAYERS):
        if delays:
            _delay(delays)
        q, k, v = (leaf * (1 + layer) ** 0.5 for leaf in leaves)
        method, rotate_method = methods[layer % len(methods)]
        outs.append(
            context_parallel_attention(
                q, k, v, mesh=dist.group.WORLD, method=method, is_causal=True, enable_gqa=True, seq_len=512,
                rotate_method=rotate_method,
            )
        )  # fmt: skip
    if delays:
        _delay(delays)
    torch.autograd.backward(outs, [grad_out] * LAYERS)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def _race(rank: int, methods: list[tuple[str, str]], stages: int, rounds: int) -> list[str]:
    draw = random.Random(rank)
    wrong = []
    copy = head_exchange_symm_mem._Table.copy

    def late_copy(table: Any, targets: Any, stream: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):  # streams that read may be late as well
            _delay(draw)
        copy(table, targets, stream, current)

    with ExitStack() as stack:
        staging = HeadStaging(flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planning, "DEFAULT_HEAD_STAGING", staging))
        stack.enter_context(mock.patch.object(head_exchange_symm_mem._Table, "copy", late_copy))
        stack.enter_context(mock.patch.object(splitting, "_decisions", splitting._Decisions()))  # decide anew
        for seed in range(rounds):
            expected = _layers(rank, [("ring", "allgather")], seed, None)
            for attempt in range(3):
                results = _layers(rank, methods, seed, draw)
                for index, (ours, want) in enumerate(zip(results, expected, strict=True)):
                    if not torch.allclose(ours, want, rtol=1e-4, atol=1e-4):
                        worst = (ours - want).abs().max().item()
                        wrong.append(f"seed {seed}, attempt {attempt}, result {index}: {worst}")
    return wrong


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


def _compiled(rank: int, method: str, stages: int) -> list[float]:
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.bfloat16)
    inputs = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(0, "cuda"))
    with ExitStack() as stack:
        staging = HeadStaging(flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planning, "DEFAULT_HEAD_STAGING", staging))
        stack.enter_context(mock.patch.object(splitting, "_decisions", splitting._Decisions()))  # decide anew
        expected = _attend(inputs, problem, HeadTail(), method)
        compiled = torch.compile(_attention_of(method, problem), fullgraph=True, backend="aot_eager")
        *qkv, grad_out = inputs
        q, k, v = (tensor.detach().requires_grad_() for tensor in qkv)
        out = compiled(q, k, v)
        out.backward(grad_out)
    results = (out.detach(), q.grad, k.grad, v.grad)
    return [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True)]


def _attention_of(method: str, problem: Problem) -> Any:
    mesh = dist.group.WORLD
    return lambda q, k, v: context_parallel_attention(
        q, k, v, mesh=mesh, method=method, is_causal=problem.is_causal, enable_gqa=True, seq_len=problem.q_len
    )


@pytest.mark.parametrize(("method", "stages"), [("ring", 1), ("ulysses", 1), ("ulysses", 2)])
def test_compiled_equals_eager(gpus: Processes, method: str, stages: int) -> None:
    for worst in gpus.run(_compiled, method, stages):
        assert max(worst) == 0, worst


def _error(rank: int) -> float:
    """The largest difference in a call after one that has raised in its second stage."""
    problem = Problem(512, 512, 1, 8, 8, 64, is_causal=True, dtype=torch.float32)
    inputs = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(0, "cuda"))
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return ring_forward(*args)

    with ExitStack() as stack:
        staging = HeadStaging(flops_per_stage=1e-3, most=4)
        stack.enter_context(mock.patch.object(planning, "DEFAULT_HEAD_STAGING", staging))
        stack.enter_context(mock.patch.object(splitting, "_decisions", splitting._Decisions()))  # decide anew
        expected = _attend(inputs, problem, HeadTail(), "ulysses")
        with mock.patch.object(ring, "ring_forward", failing), pytest.raises(RuntimeError, match="planted"):
            _attend(inputs, problem, HeadTail(), "ulysses")
        results = _attend(inputs, problem, HeadTail(), "ulysses")
    return max((ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True))


def test_a_call_after_one_that_raised_half_way(gpus: Processes) -> None:
    assert max(gpus.run(_error)) == 0


def _graph(rank: int, stages: int) -> list[float]:
    with ExitStack() as stack:
        staging = HeadStaging(flops_per_stage=1e-3, most=stages)
        stack.enter_context(mock.patch.object(planning, "DEFAULT_HEAD_STAGING", staging))
        stack.enter_context(mock.patch.object(splitting, "_decisions", splitting._Decisions()))  # decide anew
        return _replayed(rank)


def _replayed(rank: int) -> list[float]:
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.float32)
    inputs = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(0, "cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _attend(inputs, problem, HeadTail(), "ulysses")
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = _attend(inputs, problem, HeadTail(), "ulysses")
    worst = []
    for seed in range(5):
        drawn = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(seed, "cuda"))
        for tensor, fresh in zip(inputs, drawn, strict=True):
            tensor.copy_(fresh)
        torch.cuda._sleep(random.Random(seed + 7 * rank).randrange(500_000))
        graph.replay()
        expected = _attend(drawn, problem, HeadTail(), "ring", rotate_method="allgather")
        worst += [(ours - want).abs().max().item() for ours, want in zip(captured, expected, strict=True)]
    return worst


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_captured_graph_is_replayed_with_other_inputs(gpus: Processes, stages: int) -> None:
    for worst in gpus.run(_graph, stages):
        assert max(worst) < 1e-4, worst
