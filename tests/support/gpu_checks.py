"""Shards of a problem, cases of the matrix by every method, and replays of CUDA graphs, for tests on GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from matrix.features import Case
from torch.nn.attention import SDPBackend

from cp_dtensor import Layout, context_parallel_attention
from support.problems import Problem, shard
from support.processes import GPU_RANKS

Tensors = tuple[torch.Tensor, ...]
WORLD_SIZE = GPU_RANKS
"""Number of ranks of the fixture `gpus`."""
WAYS: dict[str, dict[str, str]] = {
    "symm_mem": {"method": "ring", "rotate_method": "symm_mem"},
    "allgather": {"method": "ring", "rotate_method": "allgather"},
    "alltoall": {"method": "ring", "rotate_method": "alltoall"},
    "ulysses": {"method": "ulysses"},
}
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
with_nccl = pytest.mark.gpu(WORLD_SIZE, nccl=True)
"""Mark of tests that gloo cannot run on CUDA tensors: captures of collectives, and all-gathers of DTensors, at which
the process ends with a segmentation fault (https://github.com/pytorch/pytorch/issues/152645)."""


def one_setting_of_autotuners() -> None:
    """Lets kernels of flash-linear-attention, if it is here, compile one of their settings: all take minutes."""
    if not torch.cuda.is_available() or find_spec("fla") is None:
        return
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def one_setting(self: Any, fn: Any, names: Any, configs: Any, *arguments: Any, **options: Any) -> None:
        original(self, fn, names, list(configs)[:1], *arguments, **options)

    Autotuner.__init__ = one_setting


def captured(ways: Iterable[str]) -> list[Any]:
    """Ways as parameters of a test that captures calls: collectives need NCCL, shared memory does not."""
    return [pytest.param(way, marks=with_nccl) if way in ("allgather", "alltoall") else way for way in ways]


def by(way: str, case: Case) -> Case:
    """Returns a case of the matrix by one of `WAYS`, or by another method and the transport "auto"."""
    method, transport = {"method": way, **WAYS.get(way, {})}["method"], WAYS.get(way, {}).get("rotate_method", "auto")
    return replace(case, method=method, transport=transport)


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


def replays(
    rank: int,
    call: Callable[[], Tensors],
    inputs: Sequence[torch.Tensor],
    draw: Callable[[int], Sequence[torch.Tensor]],
) -> Iterator[tuple[int, Tensors]]:
    """Captures a call that has run once; yields seeds, and results of a replay with the inputs that each draws."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = call()
    for seed in range(1, 5):
        for tensor, new in zip(inputs, draw(seed), strict=True):
            tensor.copy_(new)
        torch.cuda._sleep(random.Random(seed + 7 * rank).randrange(500_000))
        graph.replay()
        yield seed, tuple(tensor.clone() for tensor in results)
