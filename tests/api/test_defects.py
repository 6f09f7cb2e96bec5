"""Defects of torch's experimental context parallelism that this package avoids."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import HeadTail, ring_attention

EFFICIENT, FLOAT = SDPBackend.EFFICIENT_ATTENTION, torch.float32
# Backend, dtype, length and tolerance.
ON_GPUS = {
    "math in float32": (SDPBackend.MATH, FLOAT, 256, 2e-3), "efficient in float32": (EFFICIENT, FLOAT, 256, 2e-3),
    **{f"a local length of {length // 2}, no multiple of 64": (EFFICIENT, torch.bfloat16, length, 0.04)
       for length in (64, 100, 250, 258)},
    "strides of out and of its gradient differ": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, 256, 0.04),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPUS)
def test_backends_on_a_gpu(name: str) -> None:
    """Ranks are threads that share a GPU."""
    backend, dtype, length, tolerance = ON_GPUS[name]
    problem = Problem(length, length, head_dim=64, is_causal=True, dtype=dtype)
    whole = problem.draw(seed=0, device="cuda")
    expected = reference(problem, *whole)

    def body(rank: int) -> None:
        *leaves, grad_out = (shard(each, HeadTail(), rank, 2) for each in whole)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = ring_attention(*leaves, mesh=dist.group.WORLD, is_causal=True)
        # A transposed gradient, as of models that go on in (B, S, H, D): its strides are not those of out.
        grad_out = grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        with torch.autograd.set_multithreading_enabled(False):  # autograd has but one thread for a GPU
            out.backward(grad_out)
        for got, wanted in zip((out, *(leaf.grad for leaf in leaves)), expected, strict=True):
            wanted = shard(wanted, HeadTail(), rank, 2)
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)

    with sdpa_kernel(backend):
        run_ranks(2, body)
