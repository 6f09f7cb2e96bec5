"""FlexAttention of shards on two GPUs over NCCL, forward and backward: torch's own kernels, compiled and not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.flex_checks import SCALE, block_mask, context, distance, documents, draw, one_device, window
from support.problems import shard
from support.processes import GPU_RANKS, Processes
from torch.nn.attention.flex_attention import flex_attention

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, context_parallel_flex_attention

RANKS = GPU_RANKS
TIMES = -(-RANKS // 4)
"""Of lengths: torch takes another kernel for fewer than 128 queries, which has no configuration for these masks."""
pytestmark = pytest.mark.gpu(RANKS)


def _model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
    return flex_attention(q * 1.0, k, v, score, mask, SCALE, True) * 1.0


def _function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
    out = context_parallel_flex_attention(
        q * 1.0, k, v, mesh=dist.group.WORLD, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True,
        seq_len=mask.seq_lengths,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out * 1.0


def _function_compiled_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> Any:
    return context_parallel_flex_attention(
        q, k, v, mesh=dist.group.WORLD, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True, compiled=True,
        seq_len=q.size(2) * RANKS,
    )  # fmt: skip


def _flex_attention_itself() -> Callable[..., Any]:
    code = torch.compile(flex_attention, fullgraph=True)
    return lambda q, k, v, mask, score: code(q, k, v, score, mask, SCALE, True)


WAYS: dict[str, Callable[[], Callable[..., Any]]] = {
    "flex_attention": _flex_attention_itself,
    "model": lambda: torch.compile(_model, fullgraph=True),
    "function": lambda: torch.compile(_function, fullgraph=True),
    "function compiled inside": lambda: _function_compiled_inside,
    "uncompiled": lambda: _model,
}


def _results(way: Callable[..., Any], inputs: list[torch.Tensor], grad: torch.Tensor, *more: Any) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = way(*leaves, *more)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _errors(
    rank: int, way: str, layout: Layout, length: int, mask_mod: Any, score: Any, dtype: torch.dtype
) -> list[list[float]]:
    """Relative errors of out, dq, dk, dv: of this rank's part, and on rank 0 of one GPU on the whole."""
    warnings.simplefilter("ignore")  # the compiler's advice
    length *= TIMES
    whole = draw(length, 64, dtype, "cuda")
    truth = one_device([tensor.double() for tensor in whole], mask_mod, score)[:4]
    mask = None if mask_mod is None else block_mask(mask_mod, length, 128, device="cuda")
    *local, grad = (shard(tensor, layout, rank, RANKS) for tensor in whole)
    with context(layout=layout, seq_len=length):
        ours = _results(WAYS[way](), local, grad, mask, score)
    one = _model if way == "uncompiled" else torch.compile(_model)
    # Compiled once, since that takes as long as all the rest.
    single = truth if rank else _results(one, whole[:3], whole[3], mask, score)

    def relative(got: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
        return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True)]

    return [relative(ours, [shard(each, layout, rank, RANKS) for each in truth]), relative(single, truth)]


BF16 = torch.bfloat16
CASES = {
    "flex_attention": ("flex_attention", HeadTail(), 1024, window, None, BF16),
    "model": ("model", HeadTail(), 1001, documents, distance, BF16),
    "stripes": ("model", Striped(1), 900, window, distance, BF16),
    "mirrored": ("model", MirroredBatch(), 900, documents, None, BF16),
    "no mask": ("model", Contiguous(), 1024, None, distance, BF16),
    "function": ("function", HeadTail(), 1001, documents, distance, BF16),
    "function compiled inside": ("function compiled inside", HeadTail(), 1024, documents, distance, BF16),
    "uncompiled": ("uncompiled", HeadTail(), 301, documents, distance, torch.float64),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_are_near_those_of_one_gpu(slow_gpus: Processes, case: str) -> None:
    (_, single), *_ = errors = slow_gpus.run(_errors, *CASES[case])
    for ours, _ in errors:
        assert all(a <= 1.5 * b + 1e-12 for a, b in zip(ours, single, strict=True)), (ours, single)


def _captured(rank: int) -> list[float]:
    """A learned bias by position: each rank has a share of its gradient."""
    warnings.simplefilter("ignore")
    whole = draw(640 * TIMES, 64, torch.float32, "cuda")
    bias = torch.linspace(-1, 1, 640 * TIMES, device="cuda")

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, lambda score, b, h, q, kv: score + bias[kv], enable_gqa=True)

    def gradient(tensors: list[torch.Tensor]) -> torch.Tensor:
        leaf = bias.clone().requires_grad_()
        out = torch.compile(attention)(*tensors[:3], leaf)
        return torch.autograd.grad(out, leaf, tensors[3])[0]

    expected = gradient(whole)
    with context():
        share = gradient([shard(tensor, HeadTail(), rank, RANKS) for tensor in whole])
    dist.all_reduce(share)
    return [(share - expected).abs().max().item(), expected.abs().max().item()]


def test_gradients_of_what_a_score_captures(slow_gpus: Processes) -> None:
    for difference, size in slow_gpus.run(_captured):
        assert difference < 1e-3 * max(size, 1)
