"""The symm_mem rotation on two GPUs that share memory: numbers, races, several groups, CUDA graphs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from problems import Problem, reference, shard
from processes import Processes

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, ring_attention
from cp_dtensor.rotation import workspace
from cp_dtensor.rotation.allgather import Staging
from cp_dtensor.rotation.choice import METHODS
from cp_dtensor.rotation.symm_mem import SymmetricMemory

pytestmark = pytest.mark.gpu(2)
WORLD_SIZE = 2
LAYERS = 4
PROBLEMS = (
    Problem(256, 256, 2, 8, 2, 32, is_causal=True),
    Problem(203, 203, 1, 4, 4, 64, is_causal=True),
    Problem(96, 160, 2, 4, 1, 16),
    Problem(3, 1, 1, 2, 2, 8, is_causal=True),
)


@pytest.fixture(scope="module")
def gpus() -> Iterator[Processes]:
    processes = Processes(WORLD_SIZE, timeout=120, backend="nccl")
    yield processes
    processes.stop()


def _attend(
    inputs: tuple[torch.Tensor, ...], problem: Problem, layout: Layout, group: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv of shards."""
    *qkv, grad_out = inputs
    q, k, v = (tensor.detach().requires_grad_() for tensor in qkv)
    out = ring_attention(
        q, k, v, mesh=group, is_causal=problem.is_causal, enable_gqa=True, layout=layout,
        seq_len=(problem.q_len, problem.kv_len), **options,
    )  # fmt: skip
    out.backward(grad_out)
    return out.detach(), *(tensor.grad for tensor in (q, k, v))


def _errors(rank: int, problem: Problem, layout: Layout, staged: bool) -> list[float]:
    drawn = problem.draw(5, "cuda")
    expected = [shard(tensor, layout, rank, WORLD_SIZE) for tensor in reference(problem, *drawn)]
    local = tuple(shard(tensor, layout, rank, WORLD_SIZE) for tensor in drawn)
    usual = METHODS["symm_mem"]
    if staged:
        METHODS["symm_mem"] = SymmetricMemory(Staging(1, 1, 1, 1e-3))
    try:
        results = _attend(local, problem, layout, dist.group.WORLD, rotate_method="symm_mem")
    finally:
        METHODS["symm_mem"] = usual
    assert workspace.why_not(dist.group.WORLD, local[0].device) is None
    return [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True) if want.numel()]


@pytest.mark.parametrize("staged", [False, True], ids=["one stage", "a stage per head"])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), MirroredBatch()], ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_equals_one_device_in_float64(gpus: Processes, problem: Problem, layout: Layout, staged: bool) -> None:
    for errors in gpus.run(_errors, problem, layout, staged):
        assert max(errors) < 1e-10, errors


def _delay(draw: random.Random) -> None:
    if draw.random() < 0.5:
        torch.cuda._sleep(draw.randrange(1_000_000))  # cycles: up to half a millisecond


def _layers(rank: int, groups: list[Any], rotate_method: str, seed: int, delays: random.Random | None) -> list[Any]:
    """Several layers, on several groups in turns, then one backward through all of them."""
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.float32)
    q, k, v, grad_out = (shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(seed, "cuda"))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    outs = []
    for layer in range(LAYERS):
        if delays:
            _delay(delays)
        q, k, v = (leaf * (1 + layer) ** 0.5 for leaf in leaves)
        outs.append(
            ring_attention(
                q, k, v, mesh=groups[layer % len(groups)], is_causal=True, enable_gqa=True, seq_len=512,
                rotate_method=rotate_method,
            )
        )  # fmt: skip
    if delays:
        _delay(delays)
    torch.autograd.backward(outs, [grad_out] * LAYERS)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def _race(rank: int, rounds: int) -> list[str]:
    groups = [dist.group.WORLD, dist.new_group(range(WORLD_SIZE))]
    draw = random.Random(rank)
    wrong = []
    for seed in range(rounds):
        expected = _layers(rank, groups, "allgather", seed, None)
        for attempt in range(3):
            results = _layers(rank, groups, "symm_mem", seed, draw)
            for index, (ours, want) in enumerate(zip(results, expected, strict=True)):
                if not torch.allclose(ours, want, rtol=1e-4, atol=1e-5):
                    wrong.append(f"seed {seed}, attempt {attempt}, result {index}: {(ours - want).abs().max().item()}")
    return wrong


def test_random_delays_on_random_ranks_change_nothing(gpus: Processes) -> None:
    """Reused memory that is overwritten too early, or read too early, would show."""
    for wrong in gpus.run(_race, 10):
        assert not wrong, wrong


def _graph(rank: int, rotate_method: str) -> list[float]:
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.float32)
    inputs = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(0, "cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _attend(inputs, problem, HeadTail(), dist.group.WORLD, rotate_method=rotate_method)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = _attend(inputs, problem, HeadTail(), dist.group.WORLD, rotate_method=rotate_method)
    worst = []
    for seed in range(5):
        drawn = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(seed, "cuda"))
        for tensor, fresh in zip(inputs, drawn, strict=True):
            tensor.copy_(fresh)
        torch.cuda._sleep(random.Random(seed + 7 * rank).randrange(500_000))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        eager = _attend(drawn, problem, HeadTail(), dist.group.WORLD, rotate_method="allgather")
        worst.append(max((a - b).abs().max().item() for a, b in zip(replayed, eager, strict=True)))
    return worst


@pytest.mark.parametrize("rotate_method", ["symm_mem", "allgather", "alltoall", "auto"])
def test_a_captured_graph_replays_with_fresh_inputs(gpus: Processes, rotate_method: str) -> None:
    for worst in gpus.run(_graph, rotate_method):
        assert max(worst) < 1e-4, worst


def _grow_in_capture(rank: int) -> str:
    group = dist.new_group(range(WORLD_SIZE))
    problem = Problem(64, 64, 1, 2, 2, 16, is_causal=True, dtype=torch.float32)
    inputs = tuple(shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in problem.draw(0, "cuda"))
    assert workspace.why_not(group, inputs[0].device) is None
    graph = torch.cuda.CUDAGraph()
    raises = pytest.raises(RuntimeError, match="run one forward and backward of this size before capturing")
    with raises as raised, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        inputs[0].add(1)  # torch warns of empty graphs
        _attend(inputs, problem, HeadTail(), group, rotate_method="symm_mem")
    torch.cuda.synchronize()
    return str(raised.value)


def test_memory_is_not_mapped_in_a_capture(gpus: Processes) -> None:
    assert all(gpus.run(_grow_in_capture))


FOUR = 4
MIXED = [
    (Problem(256, 256, 1, 4, 2, 64, dtype=torch.float32), Contiguous()),
    (Problem(512, 512, 1, 4, 2, 64, is_causal=True, dtype=torch.float32), Contiguous()),
    (Problem(3, 3, 1, 4, 2, 64, is_causal=True, dtype=torch.float32), HeadTail()),
    (Problem(512, 512, 1, 4, 2, 64, is_causal=True, dtype=torch.float32), HeadTail()),
    (Problem(256, 256, 2, 4, 2, 64, is_causal=True, dtype=torch.float32), MirroredBatch()),
]


def _mixed(rank: int, rounds: int) -> list[str]:
    """Calls whose readers differ, one after the other: each has to wait for the readers of the one before."""
    draw = random.Random(rank)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    wrong = []
    for seed in range(rounds):
        cases = [
            (problem, layout, tuple(shard(tensor, layout, rank, FOUR) for tensor in problem.draw(seed, "cuda")))
            for problem, layout in MIXED
        ]
        outcomes = {}
        for method in ("allgather", "symm_mem"):
            results = []
            torch.cuda.synchronize()
            for number, (problem, layout, inputs) in enumerate(cases):
                with torch.cuda.stream(streams[number % 2 if method == "symm_mem" else 0]):
                    _delay(draw)
                    results.append(_attend(inputs, problem, layout, dist.group.WORLD, rotate_method=method))
            torch.cuda.synchronize()
            outcomes[method] = results
        for number, (ours, want) in enumerate(zip(outcomes["symm_mem"], outcomes["allgather"], strict=True)):
            close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, want, strict=True))
            wrong += [] if close else [f"seed {seed}, case {number}"]
    return wrong


@pytest.mark.gpu(FOUR)
def test_calls_with_other_readers_and_streams_wait_for_one_another() -> None:
    processes = Processes(FOUR, timeout=120, backend="nccl")
    try:
        for wrong in processes.run(_mixed, 30):
            assert not wrong, wrong
    finally:
        processes.stop()
