"""The symm_mem transport on two GPUs that share memory: results, races, several groups, CUDA graphs."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import (
    WORLD_SIZE,
    Tensors,
    attend,
    captured,
    delay,
    different_layers,
    replayed_differences,
    shards,
)
from support.problems import Problem, reference, shard
from support.processes import Processes
from support.staging import BY_HEAD

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, context_parallel_attention
from cp_dtensor.comm import symm_mem_workspace as workspace
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.tools.ranks import Device

pytestmark = pytest.mark.gpu(WORLD_SIZE)
PROBLEMS = (
    Problem(256, 256, 2, 8, 2, 32, is_causal=True),
    Problem(203, 203, 1, 4, 4, 64, is_causal=True),
    Problem(96, 160, 2, 4, 1, 16),
    Problem(3, 1, 1, 2, 2, 8, is_causal=True),
)


def _errors(rank: int, problem: Problem, layout: Layout, staged: bool) -> list[float]:
    expected = [shard(tensor, layout, rank, WORLD_SIZE) for tensor in reference(problem, *problem.draw(5, "cuda"))]
    local = shards(problem, 5, layout, rank)
    usual = ROTATE_METHODS["symm_mem"]
    if staged:
        ROTATE_METHODS["symm_mem"] = SymmetricMemory(BY_HEAD)
    try:
        results = attend(local, problem, layout, dist.group.WORLD, method="ring", rotate_method="symm_mem")
    finally:
        ROTATE_METHODS["symm_mem"] = usual
    assert workspace.p2p_obstacle(dist.group.WORLD, local[0].device) is None
    return [(ours - want).abs().max().item() for ours, want in zip(results, expected, strict=True) if want.numel()]


@pytest.mark.parametrize("staged", [False, True], ids=["one stage", "a stage per head"])
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), MirroredBatch()], ids=repr)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_equals_one_device_in_float64(gpus: Processes, problem: Problem, layout: Layout, staged: bool) -> None:
    for errors in gpus.run(_errors, problem, layout, staged):
        assert all(each < 1e-10 for each in errors), errors


def _trained_after_inference(rank: int) -> list[float]:
    problem = Problem(96, 96, 1, 4, 2, 32, is_causal=True)
    group = dist.new_group(range(WORLD_SIZE))  # without a workspace, so that inference mode maps one
    local = shards(problem, 3, HeadTail(), rank)
    options = {"mesh": group, "seq_len": 96, "is_causal": True, "enable_gqa": True}
    with torch.inference_mode():
        context_parallel_attention(*local[:3], method="ring", rotate_method="symm_mem", **options)
        context_parallel_attention(*local[:3], method="ulysses", **options)
    expected = [shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in reference(problem, *problem.draw(3, "cuda"))]
    results = attend(local, problem, HeadTail(), group, method="ring", rotate_method="symm_mem")
    results += attend(local, problem, HeadTail(), group, method="ulysses")
    return [(ours - want).abs().max().item() for ours, want in zip(results, [*expected, *expected], strict=True)]


def test_training_after_inference(gpus: Processes) -> None:
    for errors in gpus.run(_trained_after_inference):
        assert all(each < 1e-10 for each in errors), errors


def _race(rank: int, rounds: int) -> list[str]:
    groups = [dist.group.WORLD, dist.new_group(range(WORLD_SIZE))]
    expected, ways = (
        [{"mesh": group, "method": "ring", "rotate_method": transport} for group in groups]
        for transport in ("allgather", "symm_mem")
    )
    return different_layers(rank, expected, ways, rounds, random.Random(rank))


def test_random_delays_on_random_ranks_change_nothing(gpus: Processes) -> None:
    """They would if memory were overwritten or read too early."""
    for wrong in gpus.run(_race, 10):
        assert not wrong, wrong


def _graph(rank: int, rotate_method: str) -> list[float]:
    problem = Problem(512, 512, 1, 8, 2, 64, is_causal=True, dtype=torch.float32)

    def call(inputs: Tensors, rotate_method: str) -> Tensors:
        return attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ring", rotate_method=rotate_method)

    return replayed_differences(
        rank, partial(call, rotate_method=rotate_method), partial(call, rotate_method="allgather"),
        lambda seed: shards(problem, seed, HeadTail(), rank),
    )  # fmt: skip


@pytest.mark.parametrize("rotate_method", captured(["symm_mem", "allgather", "alltoall", "auto"]))
def test_a_captured_graph_replays_with_fresh_inputs(gpus: Processes, rotate_method: str) -> None:
    for worst in gpus.run(_graph, rotate_method):
        assert all(each < 1e-4 for each in worst), worst


def _grow_in_capture(rank: int) -> str:
    group = dist.new_group(range(WORLD_SIZE))
    problem = Problem(64, 64, 1, 2, 2, 16, is_causal=True, dtype=torch.float32)
    inputs = shards(problem, 0, HeadTail(), rank)
    assert workspace.p2p_obstacle(group, inputs[0].device) is None
    graph = torch.cuda.CUDAGraph()
    raises = pytest.raises(RuntimeError, match="run one forward and backward of this size before capturing")
    with raises as raised, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        inputs[0].add(1)  # torch warns of empty graphs
        attend(inputs, problem, HeadTail(), group, method="ring", rotate_method="symm_mem")
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
    """Makes calls whose readers differ; each has to wait for the readers of the call before it."""
    draw = random.Random(rank)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    wrong = []
    for seed in range(rounds):
        cases = [(problem, layout, shards(problem, seed, layout, rank, FOUR)) for problem, layout in MIXED]
        outcomes = {}
        for method in ("allgather", "symm_mem"):
            results = []
            torch.cuda.synchronize()
            for number, (problem, layout, inputs) in enumerate(cases):
                with torch.cuda.stream(streams[number % 2 if method == "symm_mem" else 0]):
                    delay(draw)
                    results.append(
                        attend(inputs, problem, layout, dist.group.WORLD, method="ring", rotate_method=method)
                    )
            torch.cuda.synchronize()
            outcomes[method] = results
        for number, (ours, want) in enumerate(zip(outcomes["symm_mem"], outcomes["allgather"], strict=True)):
            close = all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, want, strict=True))
            wrong += [] if close else [f"seed {seed}, case {number}"]
    return wrong


@pytest.mark.gpu(FOUR)
def test_calls_with_other_readers_and_streams_wait_for_each_other() -> None:
    processes = Processes(FOUR, timeout=120, backend="nccl")
    try:
        for wrong in processes.run(_mixed, 30):
            assert not wrong, wrong
    finally:
        processes.stop()


def _after_release(rank: int) -> tuple[list[float], int, int]:
    """Errors of a call after the memory of a larger one was released, and the bytes mapped by each."""
    device = Device(use_gpu=True)
    large, small = (
        Problem(length, length, 1, 4, 2, 64, is_causal=True, dtype=torch.float32) for length in (1 << 15, 512)
    )
    way = {"method": "ring", "rotate_method": "symm_mem"}
    mapped = []
    for problem in (large, small):
        device.synchronize()
        dist.barrier()
        device.free_unused()
        inputs = shards(problem, 5, HeadTail(), rank)
        results = attend(inputs, problem, HeadTail(), dist.group.WORLD, **way)
        mapped.append(device.mapped_bytes())
    expected = attend(inputs, small, HeadTail(), dist.group.WORLD, method="ring", rotate_method="allgather")
    return [(a - b).abs().max().item() for a, b in zip(results, expected, strict=True)], *mapped


def test_memory_is_released_and_mapped_again(gpus: Processes) -> None:
    for errors, large, small in gpus.run(_after_release):
        assert all(each < 1e-4 for each in errors)
        assert large > 16 << 20 > small
