"""Calls that share symmetric memory, with random delays on random ranks: what is read or written too early, shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.gathered_kv import drawn, kv_gather
from support.gpu_checks import WAYS, WORLD_SIZE, Tensors, attend, delay, replays, shards, with_nccl
from support.problems import Problem, shard
from support.processes import Processes
from support.staging import in_stages

from cp_dtensor import Contiguous, HeadTail, MirroredBatch, context_parallel_attention
from cp_dtensor.comm import head_exchange_symm_mem
from cp_dtensor.comm.transports import ROTATE_METHODS, gathers_by_symm_mem

pytestmark = pytest.mark.gpu(WORLD_SIZE)
Delays = random.Random | None
ATTEMPTS = 3


def wrong_results(rank: int, rounds: int, run: Callable[[int, Delays], list[torch.Tensor]]) -> list[str]:
    """Compares results of `run(seed, delays)` with those without delays, for which it takes no shared memory."""
    wrong, delays = [], random.Random(rank)
    for seed in range(rounds):
        found = []
        for each in (None, *[delays] * ATTEMPTS):
            torch.cuda.synchronize()
            found.append(run(seed, each))
        torch.cuda.synchronize()
        for attempt, results in enumerate(found[1:]):
            for index, (ours, wanted) in enumerate(zip(results, found[0], strict=True)):
                if not torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4):
                    wrong.append(f"seed {seed}, attempt {attempt}, result {index}")
    return wrong


LAYERS = 4


def _layers(rank: int, ways: list[dict[str, Any]], seed: int, delays: Delays) -> list[torch.Tensor]:
    """Returns out of layers that use `ways` in turns, and gradients of one backward through all."""
    problem = Problem(512, 512, 1, 8 * WORLD_SIZE, 4 * WORLD_SIZE, 64, is_causal=True, dtype=torch.float32)
    q, k, v, grad_out = shards(problem, seed, HeadTail(), rank)
    leaves, outs = [tensor.detach().requires_grad_() for tensor in (q, k, v)], []
    for layer in range(LAYERS):
        way = ways[layer % len(ways)] if delays else {"mesh": dist.group.WORLD, **WAYS["allgather"]}
        if delays:
            delay(delays)
        q, k, v = (leaf * (1 + layer) ** 0.5 for leaf in leaves)
        outs.append(context_parallel_attention(q, k, v, is_causal=True, enable_gqa=True, seq_len=512, **way))
    if delays:
        delay(delays)
    torch.autograd.backward(outs, [grad_out] * LAYERS)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def _race(rank: int, ways: list[str], groups: int, stages: int, rounds: int) -> list[str]:
    draw, copy = random.Random(rank), head_exchange_symm_mem._Table.copy

    def late_copy(table: Any, targets: Any, stream: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):  # streams that read may be late as well
            delay(draw)
        copy(table, targets, stream, current)

    of_calls: list[Any] = [dist.group.WORLD, *(dist.new_group(range(WORLD_SIZE)) for _ in range(groups - 1))]
    options = [{"mesh": group, **WAYS[way]} for group in of_calls for way in ways]
    with in_stages(stages), mock.patch.object(head_exchange_symm_mem._Table, "copy", late_copy):
        return wrong_results(rank, rounds, partial(_layers, rank, options))


@pytest.mark.parametrize(
    ("ways", "groups", "stages", "rounds"),
    [
        (["symm_mem"], 2, 1, 10),
        *((ways, 1, stages, 6) for ways in (["ulysses"], ["ulysses", "symm_mem"]) for stages in (1, 2, 4)),
    ],
    ids=str,
)
def test_layers(gpus: Processes, ways: list[str], groups: int, stages: int, rounds: int) -> None:
    for wrong in gpus.run(_race, ways, groups, stages, rounds):
        assert not wrong, wrong


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
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]

    def run(seed: int, delays: Delays) -> list[torch.Tensor]:
        cases = [(*case, shards(case[0], seed, case[1], rank, FOUR)) for case in MIXED]
        results: list[torch.Tensor] = []
        torch.cuda.synchronize()
        for number, (problem, layout, inputs) in enumerate(cases):
            with torch.cuda.stream(streams[number % 2 if delays else 0]):
                if delays:
                    delay(delays)
                way = WAYS["symm_mem" if delays else "allgather"]
                results += attend(inputs, problem, layout, dist.group.WORLD, **way)
        return results

    return wrong_results(rank, rounds, run)


@pytest.mark.gpu(FOUR)
def test_calls_with_other_readers_and_streams() -> None:
    processes = Processes(FOUR, timeout=120, backend="nccl")
    try:
        for wrong in processes.run(_mixed, 10):
            assert not wrong, wrong
    finally:
        processes.stop()


# Keys and values that FlexAttention gathers

LENGTH = 512


def _there_and_back(inputs: Tensors, layout: Any, rotate_method: str) -> Tensors:
    k, v, grad_k, grad_v = inputs
    keys = kv_gather(layout, LENGTH, ROTATE_METHODS[rotate_method])
    return *keys.gather(k, v), *keys.reduce_gradients(grad_k, grad_v, k.size(2))


def _gathers(seed: int, layout: Any, rank: int) -> Tensors:
    whole, grads = (
        [drawn(first + seed + index, 64, LENGTH).to("cuda", torch.bfloat16) for index in range(2)]
        for first in (0, 10 * rank)
    )
    return *(shard(x, layout, rank, WORLD_SIZE) for x in whole), *grads


def _gather_race(rank: int, rounds: int, layers: int) -> list[str]:
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    device = torch.device("cuda", torch.cuda.current_device())
    assert gathers_by_symm_mem(ROTATE_METHODS["auto"], dist.group.WORLD, device)

    def run(seed: int, delays: Delays) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for number in range(seed * layers, (seed + 1) * layers):
            layout = (HeadTail(), Contiguous())[number % 2]
            with torch.cuda.stream(streams[number // 2 % 2 if delays else 0]):
                inputs = _gathers(number, layout, rank)
                if delays:
                    delay(delays)
                found += _there_and_back(inputs, layout, "auto" if delays else "allgather")
        return found

    return wrong_results(rank, rounds, run)


def test_gathered_keys(gpus: Processes) -> None:
    for wrong in gpus.run(_gather_race, 10, 6):
        assert not wrong, wrong


def _gather_graph(rank: int, rotate_method: str) -> None:
    inputs = _gathers(0, HeadTail(), rank)
    draw = partial(_gathers, layout=HeadTail(), rank=rank)
    for seed, results in replays(rank, lambda: _there_and_back(inputs, HeadTail(), rotate_method), inputs, draw):
        assert all(map(torch.equal, results, _there_and_back(draw(seed), HeadTail(), "allgather")))


@with_nccl  # gradients return by a collective
@pytest.mark.parametrize("rotate_method", ["auto", "allgather"])
def test_captured_gathers_take_fresh_inputs(gpus: Processes, rotate_method: str) -> None:
    gpus.run(_gather_graph, rotate_method)
