"""Shards of a problem, layers with random delays, and replays of CUDA graphs, for tests on GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from cp_dtensor import HeadTail, Layout, context_parallel_attention
from support.problems import Problem, shard
from support.processes import GPU_RANKS

Tensors = tuple[torch.Tensor, ...]
WORLD_SIZE = GPU_RANKS
"""Number of ranks of the fixture `gpus`."""
LAYERS = 4
NAMES = ("out", "dq", "dk", "dv")
WAYS: dict[str, dict[str, str]] = {
    "symm_mem": {"method": "ring", "rotate_method": "symm_mem"},
    "allgather": {"method": "ring", "rotate_method": "allgather"},
    "alltoall": {"method": "ring", "rotate_method": "alltoall"},
    "ulysses": {"method": "ulysses"},
}
with_nccl = pytest.mark.gpu(WORLD_SIZE, nccl=True)
"""Mark of tests that gloo cannot run on CUDA tensors: captures of collectives, and all-gathers of DTensors, at which
the process ends with a segmentation fault (https://github.com/pytorch/pytorch/issues/152645)."""


def captured(ways: Iterable[str]) -> list[Any]:
    """Ways as parameters of a test that captures calls: collectives need NCCL, shared memory does not."""
    return [pytest.param(way, marks=with_nccl) if way in ("allgather", "alltoall") else way for way in ways]


def shards(problem: Problem, seed: int, layout: Layout, rank: int, size: int = WORLD_SIZE) -> Tensors:
    """Returns a rank's q, k, v and gradient of out."""
    return tuple(shard(tensor, layout, rank, size) for tensor in problem.draw(seed, "cuda"))


def attend(inputs: Tensors, problem: Problem, layout: Layout, group: Any, **options: Any) -> Tensors:
    """Returns out, dq, dk and dv of shards."""
    *qkv, grad_out = inputs
    q, k, v = (tensor.detach().requires_grad_() for tensor in qkv)
    out = context_parallel_attention(
        q, k, v, mesh=group, is_causal=problem.is_causal, enable_gqa=True, layout=layout,
        seq_len=(problem.q_len, problem.kv_len), **options,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    out.backward(grad_out)
    return out.detach(), *(tensor.grad for tensor in (q, k, v))


def delay(draw: random.Random) -> None:
    """Delays the current stream, at random."""
    if draw.random() < 0.5:
        torch.cuda._sleep(draw.randrange(1_000_000))  # cycles: up to half a millisecond


def layers(rank: int, ways: Sequence[dict[str, Any]], seed: int, delays: random.Random | None) -> list[torch.Tensor]:
    """Returns out of layers that use `ways` (options of calls) in turns, and gradients of one backward through all."""
    problem = Problem(512, 512, 1, 8 * WORLD_SIZE, 4 * WORLD_SIZE, 64, is_causal=True, dtype=torch.float32)
    q, k, v, grad_out = shards(problem, seed, HeadTail(), rank)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    outs = []
    for layer in range(LAYERS):
        if delays:
            delay(delays)
        q, k, v = (leaf * (1 + layer) ** 0.5 for leaf in leaves)
        way = ways[layer % len(ways)]
        outs.append(context_parallel_attention(q, k, v, is_causal=True, enable_gqa=True, seq_len=512, **way))
    if delays:
        delay(delays)
    torch.autograd.backward(outs, [grad_out] * LAYERS)
    return [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]


def different_layers(
    rank: int, expected: Sequence[dict[str, Any]], ways: Sequence[dict[str, Any]], rounds: int, draw: random.Random
) -> list[str]:
    """Compares `layers` with delays to layers with the `expected` options and no delays; returns the differences."""
    wrong = []
    for seed in range(rounds):
        wanted = layers(rank, expected, seed, None)
        for attempt in range(3):
            for index, (ours, want) in enumerate(zip(layers(rank, ways, seed, draw), wanted, strict=True)):
                if not torch.allclose(ours, want, rtol=1e-4, atol=1e-4):
                    wrong.append(f"seed {seed}, attempt {attempt}, result {index}: {(ours - want).abs().max().item()}")
    return wrong


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def relative_norm(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp_min(torch.finfo(b.dtype).tiny)).item()


def replayed_differences(
    rank: int, captured_call: Callable[[Tensors], Tensors], eager_call: Callable[[Tensors], Tensors],
    draw: Callable[[int], Tensors], distance: Callable[[torch.Tensor, torch.Tensor], float] = largest_difference,
) -> list[float]:  # fmt: skip
    """Replays a captured call with new inputs; returns the distances of its results from those of the eager call.

    `draw(seed)` returns new inputs. The call runs once before it is captured.
    """
    inputs = draw(0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured_call(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        captured = captured_call(inputs)
    worst = []
    for seed in range(5):
        drawn = draw(seed)
        for tensor, fresh in zip(inputs, drawn, strict=True):
            tensor.copy_(fresh)
        torch.cuda._sleep(random.Random(seed + 7 * rank).randrange(500_000))
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        worst += [distance(a, b) for a, b in zip(replayed, eager_call(drawn), strict=True)]
    return worst
