"""Attention sinks on two GPUs in bfloat16: every backend and KV transport, and CUDA graphs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gpu_checks import NAMES, WAYS, WORLD_SIZE, Tensors, captured, relative_norm, replayed_differences
from support.problems import shard
from support.processes import Processes
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import Causal, HeadTail, Mask, SlidingWindow, context_parallel_attention

pytestmark = pytest.mark.gpu(WORLD_SIZE)
LENGTH, BATCH, HEADS, KV_HEADS, HEAD_DIM, WINDOW = 1237, 2, 4, 2, 64, 200
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def _draw(seed: int) -> Tensors:
    """q, k, v, sinks and the gradient of out, of the whole sequence and alike on both ranks."""
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(seed)
    shapes = [(BATCH, heads, LENGTH, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, grad_out = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes
    )
    sinks = torch.randn(HEADS, generator=generator, device="cuda", dtype=torch.bfloat16)
    return q, k, v, sinks * 3.0, grad_out


def _on_one_gpu(whole: Tensors, seen: torch.Tensor, dtype: torch.dtype) -> Tensors:
    """out and all gradients (in bfloat16 without that of sinks), by torch: sinks are the bias of a key of value 0."""
    *tensors, grad_out = (tensor.to(dtype) for tensor in whole)
    leaves = [tensor.detach().requires_grad_(tensor.dim() == 4 or dtype == torch.float64) for tensor in tensors]
    q, k, v, sinks = leaves
    k, v = (F.pad(tensor.repeat_interleave(HEADS // KV_HEADS, 1), (0, 0, 0, 1)) for tensor in (k, v))
    hidden = torch.zeros(LENGTH, LENGTH, dtype=dtype, device="cuda").masked_fill(~seen, float("-inf"))
    of_sinks = sinks[:, None, None].expand(HEADS, LENGTH, 1)
    bias = torch.cat([hidden.expand(HEADS, -1, -1), of_sinks], -1).expand(BATCH, -1, -1, -1)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    out.backward(grad_out)
    return out.detach(), *(leaf.grad for leaf in leaves)


def _attend(inputs: Tensors, mask: Mask, **options: Any) -> Tensors:
    """out and all gradients of shards."""
    *tensors, grad_out = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = context_parallel_attention(
        *leaves[:3], sinks=leaves[3], mesh=dist.group.WORLD, mask=mask, enable_gqa=True, seq_len=LENGTH, **options
    )
    assert isinstance(out, torch.Tensor)
    out.backward(grad_out)
    return out.detach(), *(leaf.grad for leaf in leaves)


def _shards(whole: Tensors, rank: int) -> Tensors:
    """Of all but the sinks, which every rank has."""
    return tuple(shard(x, HeadTail(), rank, WORLD_SIZE) if x.dim() == 4 else x.clone() for x in whole)


def _complaints(rank: int, name: str) -> list[str]:
    """What is less precise than one GPU by more than half."""
    whole, backend = _draw(5), BACKENDS.get(name)
    mask = Causal() if backend else SlidingWindow(WINDOW, 0)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device="cuda").tril().triu(-LENGTH if backend else -WINDOW)
    truth, torchs = (_on_one_gpu(whole, seen, dtype) for dtype in (torch.float64, torch.bfloat16))
    exact, limits, grad_sinks = _shards(truth[:4], rank), _shards(torchs[:4], rank), truth[4]
    found = []
    for way, options in WAYS.items():
        allowed: AbstractContextManager[None] = sdpa_kernel(backend) if backend else nullcontext()
        with allowed:
            *results, share = _attend(_shards(whole, rank), mask, **options)
        for what, ours, wanted, theirs in zip(NAMES, results, exact, limits, strict=True):
            error, limit = ((x.double() - wanted).norm().item() for x in (ours, theirs))
            if not error <= 1.5 * limit:
                found.append(f"{way}, {what}: {error / wanted.norm().item():.1e} is {error / limit:.2f} of one GPU")
        total = share.double()
        dist.all_reduce(total)
        error = ((total - grad_sinks).norm() / grad_sinks.norm()).item()
        if not error <= 2e-2:
            found.append(f"{way}, dsinks: {error:.1e}")
    return found


@pytest.mark.parametrize("name", [*BACKENDS, "by row"])
def test_bf16_errors_are_near_those_of_one_gpu(gpus: Processes, name: str) -> None:
    for complaints in gpus.run(_complaints, name):
        assert not complaints, "\n".join(complaints)


def _graph(rank: int, way: str) -> list[float]:
    def call(inputs: Tensors) -> Tensors:
        return _attend(inputs, Causal(), **WAYS[way])

    return replayed_differences(rank, call, call, lambda seed: _shards(_draw(seed), rank), relative_norm)


@pytest.mark.parametrize("way", captured(["allgather", "ulysses"]))
def test_a_captured_call_takes_fresh_sinks(gpus: Processes, way: str) -> None:
    for worst in gpus.run(_graph, way):
        assert all(each < 1e-2 for each in worst), worst
