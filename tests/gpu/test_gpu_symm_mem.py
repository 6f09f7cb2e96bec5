"""Memory that two GPUs share: mapped in inference, never in a capture, released, and right after an error."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.gathered_kv import IN_RANGES, IN_STRIPES, WIDTHS, check
from support.gpu_checks import WAYS, WORLD_SIZE, attend, shards
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes
from support.staging import in_stages

from cp_dtensor import HeadTail, Layout, context_parallel_attention
from cp_dtensor.comm import symm_mem_workspace as workspace
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.tools.ranks import Device

pytestmark = pytest.mark.gpu(WORLD_SIZE)
RING = WAYS["symm_mem"]


def _trained_after_inference(rank: int) -> None:
    problem = Problem(96, 96, 1, 4, 2, 32, is_causal=True)
    group = dist.new_group(range(WORLD_SIZE))  # without a workspace, so that inference mode maps one
    local = shards(problem, 3, HeadTail(), rank)
    options = {"mesh": group, "seq_len": 96, "is_causal": True, "enable_gqa": True}
    with torch.inference_mode():
        for way in ("symm_mem", "ulysses"):
            context_parallel_attention(*local[:3], **WAYS[way], **options)
    expected = [shard(tensor, HeadTail(), rank, WORLD_SIZE) for tensor in reference(problem, *problem.draw(3, "cuda"))]
    for way in ("symm_mem", "ulysses"):
        for ours, want in zip(attend(local, problem, HeadTail(), group, **WAYS[way]), expected, strict=True):
            assert_close(ours, want, way)


def test_training_after_inference(gpus: Processes) -> None:
    gpus.run(_trained_after_inference)


def _grow_in_capture(rank: int) -> None:
    group = dist.new_group(range(WORLD_SIZE))
    problem = Problem(64, 64, 1, 2, 2, 16, is_causal=True, dtype=torch.float32)
    inputs = shards(problem, 0, HeadTail(), rank)
    assert workspace.p2p_obstacle(group, inputs[0].device) is None
    graph = torch.cuda.CUDAGraph()
    raises = pytest.raises(RuntimeError, match="run one forward and backward of this size before capturing")
    with raises, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        inputs[0].add(1)  # torch warns of empty graphs
        attend(inputs, problem, HeadTail(), group, **RING)
    torch.cuda.synchronize()


def test_memory_is_not_mapped_in_a_capture(gpus: Processes) -> None:
    gpus.run(_grow_in_capture)


def _after_release(rank: int) -> tuple[int, int]:
    """The bytes mapped by a large call, and by a small one after their release."""
    device = Device(use_gpu=True)
    problems = [Problem(length, length, 1, 4, 2, 64, is_causal=True, dtype=torch.float32) for length in (1 << 15, 512)]
    mapped = []
    for problem in problems:
        device.synchronize()
        dist.barrier()
        device.free_unused()
        inputs = shards(problem, 5, HeadTail(), rank)
        results = attend(inputs, problem, HeadTail(), dist.group.WORLD, **RING)
        mapped.append(device.mapped_bytes())
    expected = attend(inputs, problem, HeadTail(), dist.group.WORLD, **WAYS["allgather"])
    for ours, want in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-4)
    return mapped[0], mapped[1]


def test_memory_is_released_and_mapped_again(gpus: Processes) -> None:
    for large, small in gpus.run(_after_release):
        assert large > 16 << 20 > small


def _after_an_error(rank: int) -> None:
    """A call after one that has raised in its second stage has the bits of one before."""
    problem = Problem(512, 512, 1, 2 * WORLD_SIZE, 2 * WORLD_SIZE, 64, is_causal=True, dtype=torch.float32)
    inputs, calls = shards(problem, 0, HeadTail(), rank), []
    forward = RingPlan.forward

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return forward(*args)

    with in_stages(4):
        expected = attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ulysses")
        with mock.patch.object(RingPlan, "forward", failing), pytest.raises(RuntimeError, match="planted"):
            attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ulysses")
        assert all(map(torch.equal, attend(inputs, problem, HeadTail(), dist.group.WORLD, method="ulysses"), expected))


def test_a_call_after_one_that_raised_half_way(gpus: Processes) -> None:
    gpus.run(_after_an_error)


DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)


def _gathered(rank: int, layouts: list[Layout], rotate_method: str) -> None:
    for layout in layouts:
        for dtype in DTYPES:
            for widths in WIDTHS:
                for length in ({}, {} if layout.only_length else {"length": 1}):
                    method = ROTATE_METHODS[rotate_method]
                    check(rank, layout, lambda x: x.mT.contiguous().mT, dtype, widths, method, device="cuda", **length)


@pytest.mark.parametrize("rotate_method", ["symm_mem", "auto", "alltoall"])
def test_every_bit_of_gathered_keys_arrives(gpus: Processes, rotate_method: str) -> None:
    gpus.run(_gathered, [*IN_RANGES, *IN_STRIPES], rotate_method)
