"""Gathering K/V for FlexAttention on two GPUs: symmetric memory against NCCL, many layers, CUDA graphs."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
import torch.distributed as dist
from support.gathered_kv import IN_RANGES, IN_STRIPES, WIDTHS, check, drawn, kv_gather
from support.gpu_checks import WORLD_SIZE, Tensors, delay, replayed_differences, with_nccl
from support.problems import shard
from support.processes import Processes

from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.comm.transports import ROTATE_METHODS, gathers_by_symm_mem

pytestmark = pytest.mark.gpu(WORLD_SIZE)
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64)
LENGTH, LAYERS = 512, 6


def _gathered(rank: int, layout: Layout, rotate_method: str) -> None:
    for dtype, widths, length in product(DTYPES, WIDTHS, (None, 1)):
        of_layout = {} if length is None or layout.only_length else {"length": length}
        method = ROTATE_METHODS[rotate_method]
        check(rank, layout, lambda x: x.mT.contiguous().mT, dtype, widths, method, device="cuda", **of_layout)


@pytest.mark.parametrize("layout", [*IN_RANGES, *IN_STRIPES], ids=repr)
@pytest.mark.parametrize("rotate_method", ["symm_mem", "auto", "alltoall"])
def test_every_bit_arrives(gpus: Processes, layout: Layout, rotate_method: str) -> None:
    gpus.run(_gathered, layout, rotate_method)


def _there_and_back(inputs: Tensors, layout: Layout, rotate_method: str) -> Tensors:
    k, v, grad_k, grad_v = inputs
    keys = kv_gather(layout, LENGTH, ROTATE_METHODS[rotate_method])
    return *keys.gather(k, v), *keys.reduce_gradients(grad_k, grad_v, k.size(2))


def _inputs(seed: int, layout: Layout, rank: int) -> Tensors:
    whole = [drawn(seed + index, 64, LENGTH).to("cuda", torch.bfloat16) for index in range(2)]
    grads = [drawn(10 * rank + seed + index, 64, LENGTH).to("cuda", torch.bfloat16) for index in range(2)]
    return *(shard(x, layout, rank, WORLD_SIZE) for x in whole), *grads


def _race(rank: int, rounds: int) -> list[str]:
    """Many layers on two streams share symmetric memory, with random delays: results equal those by NCCL."""
    random_delays, wrong = random.Random(rank), []
    device = torch.device("cuda", torch.cuda.current_device())
    assert gathers_by_symm_mem(ROTATE_METHODS["auto"], dist.group.WORLD, device)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for seed in range(rounds):
        layers = [((HeadTail(), Contiguous())[layer % 2], seed * LAYERS + layer) for layer in range(LAYERS)]
        inputs = [_inputs(number, layout, rank) for layout, number in layers]
        found = {}
        for rotate_method in ("allgather", "auto"):
            results = []
            torch.cuda.synchronize()
            for (layout, number), tensors in zip(layers, inputs, strict=True):
                with torch.cuda.stream(streams[number // 2 % 2 if rotate_method == "auto" else 0]):
                    delay(random_delays)
                    results.append(_there_and_back(tensors, layout, rotate_method))
            torch.cuda.synchronize()
            found[rotate_method] = results
        for layer, (one, other) in enumerate(zip(*found.values(), strict=True)):
            if not all(map(torch.equal, one, other)):
                wrong.append(f"round {seed}, layer {layer}")
    return wrong


def test_random_delays_on_random_ranks_change_nothing(gpus: Processes) -> None:
    for wrong in gpus.run(_race, 10):
        assert not wrong, wrong


def _graph(rank: int, rotate_method: str) -> list[float]:
    return replayed_differences(
        rank, lambda inputs: _there_and_back(inputs, HeadTail(), rotate_method),
        lambda inputs: _there_and_back(inputs, HeadTail(), "allgather"),
        lambda seed: _inputs(seed, HeadTail(), rank),
    )  # fmt: skip


@with_nccl  # gradients return by a collective
@pytest.mark.parametrize("rotate_method", ["auto", "allgather"])
def test_a_captured_graph_replays_with_fresh_inputs(gpus: Processes, rotate_method: str) -> None:
    for worst in gpus.run(_graph, rotate_method):
        assert all(each == 0 for each in worst), worst
