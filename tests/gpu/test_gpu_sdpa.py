"""SDPA on two GPUs over NCCL: of DTensors by each backend, and in a recompute that is not torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gpu_checks import BACKENDS, WORLD_SIZE, with_nccl
from support.problems import Problem, reference
from support.processes import Processes
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.attention import sdpa_kernel

from cp_dtensor import context_parallel, enable_context_parallel_dispatcher

pytestmark = pytest.mark.gpu(WORLD_SIZE)

SEQUENCE, MIXED = (Shard(2), Shard(2), Shard(2)), (Shard(2), Replicate(), Replicate())
LIMIT = max(1.5, (1 + WORLD_SIZE / 2) ** 0.5)
"""Of errors: all-reduces of gradients of replicated tensors round at each hop, and shards of few rows vary more."""


def _of_dtensors(
    rank: int, name: str, dtype: torch.dtype, head_dim: int, placements: tuple[Placement, ...], length: int
) -> None:
    """Compares errors of this rank's shards with those of the same rows on one GPU."""
    problem = Problem(length, length, 2, q_heads=4, kv_heads=4, head_dim=head_dim, is_causal=True, dtype=dtype)
    mesh, call = init_device_mesh("cuda", (WORLD_SIZE,)), partial(F.scaled_dot_product_attention, is_causal=True)
    q, k, v, grad_out = problem.draw(11, "cuda")
    inputs = [
        distribute_tensor(tensor, mesh, [placement], src_data_rank=None).requires_grad_()
        for tensor, placement in zip((q, k, v), placements, strict=True)
    ]
    whole = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    with sdpa_kernel(BACKENDS[name]):
        with enable_context_parallel_dispatcher():
            out = call(*inputs)
            assert isinstance(out, DTensor)
            assert out.placements == (Shard(2),)
            out.backward(distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None))
        single = call(*whole)
        single.backward(grad_out)
    if length % WORLD_SIZE == 0:  # torch 2.11 gathers gradients of uneven shards, whatever the operation
        assert [tensor.grad.placements for tensor in inputs] == [(placement,) for placement in placements]
    ours = (out, *(tensor.grad for tensor in inputs))
    on_one = (single, *(tensor.grad for tensor in whole))
    for mine, one, exact in zip(ours, on_one, reference(problem, q, k, v, grad_out), strict=True):
        here, wanted = (
            distribute_tensor(each.detach(), mesh, mine.placements, src_data_rank=None).to_local().double()
            for each in (one, exact)
        )
        error, of_one = ((each - wanted).norm().item() for each in (mine.to_local().double(), here))
        assert error <= LIMIT * of_one + 1e-12 * wanted.norm().item(), (error, of_one)


@pytest.mark.parametrize(
    ("name", "dtype", "head_dim", "placements"),
    [
        pytest.param(*case, placements, marks=with_nccl if placements is MIXED else ())
        for case in (
            ("cudnn", torch.bfloat16, 64), ("flash", torch.bfloat16, 64), ("efficient", torch.float32, 64),
            ("math", torch.float64, 64), ("math", torch.float32, 33),
        )
        for placements in (SEQUENCE, MIXED)
    ],
)  # fmt: skip
# DTensor gathers gradients of uneven shards in torch 2.11, and those of replicated tensors.
@pytest.mark.parametrize("length", [256, pytest.param(101, marks=with_nccl)])
def test_dtensors(
    gpus: Processes, name: str, dtype: torch.dtype, head_dim: int, placements: tuple[Placement, ...], length: int
) -> None:
    gpus.run(_of_dtensors, name, dtype, head_dim, placements, length)


class _OwnRecompute(torch.autograd.Function):
    """A recompute that torch.utils.checkpoint knows nothing of."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q)
        return F.scaled_dot_product_attention(q, q, q)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            (q,) = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
            out = F.scaled_dot_product_attention(q, q, q)
        return torch.autograd.grad(out, q, grad_out)[0]


def _own_recompute(rank: int) -> None:
    q = torch.randn(1, 2, 8, 16, device="cuda").add_(rank).requires_grad_()
    with context_parallel(dist.group.WORLD):
        out = _OwnRecompute.apply(q)
        with pytest.raises(RuntimeError, match="is ambiguous"):
            out.sum().backward()


def test_a_recompute_that_is_not_torchs_is_refused(gpus: Processes) -> None:
    gpus.run(_own_recompute)
