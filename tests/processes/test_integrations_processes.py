"""Recomputation after a mode of an integration, on gloo processes and on GPUs, where autograd has its own threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, dense, reference
from support.processes import Processes, started
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, context_parallel_shard
from cp_dtensor.integrations.unified import RingAttnMode, UlyssesAttnMode

WORLD_SIZE = 2
TOLERANCE = {torch.float64: 1e-10, torch.bfloat16: 5e-2}


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu(WORLD_SIZE))])
def ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
    if request.param == "gloo":
        yield request.getfixturevalue("two_processes")
        return
    yield from started(WORLD_SIZE, timeout=120, backend=request.param)


def _sharded(tensor: torch.Tensor) -> torch.Tensor:
    return context_parallel_shard(dist.group.WORLD, [tensor], [2], Contiguous())[0]


def _recomputed(rank: int, device: str, dtype: torch.dtype) -> None:
    """Of sharded attention, and of attention to keys that every rank has whole."""
    problem = Problem(48, 48, batch=2, q_heads=4, kv_heads=2, head_dim=64, is_causal=True, dtype=dtype)
    whole = problem.draw(0, device)
    text = whole[1][:, :, :7]
    out, dq, dk, dv = reference(problem, *whole)
    q = whole[0].double().requires_grad_()
    of_text, _ = dense(q, text.double(), text.double())
    wanted = out + of_text.detach(), dq + torch.autograd.grad(of_text, q, whole[3].double())[0], dk, dv

    def cross(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, text, text, enable_gqa=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    *shards, grad_out = map(_sharded, whole)
    for make in (UlyssesAttnMode, RingAttnMode):
        for use_reentrant in (False, True):
            leaves = [each.detach().requires_grad_() for each in shards]
            with make():
                found = checkpoint(attend, *leaves, use_reentrant=use_reentrant)
                with make.replicated_keys():
                    found = found + checkpoint(cross, leaves[0], use_reentrant=use_reentrant)
            found.backward(grad_out)
            for got, exact in zip((found, *(leaf.grad for leaf in leaves)), wanted, strict=True):
                tolerance = TOLERANCE[dtype]
                torch.testing.assert_close(got.double(), _sharded(exact), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.gpu(WORLD_SIZE))])
def test_recomputation_after_a_mode(ranks: Processes, dtype: torch.dtype) -> None:
    ranks.run(_recomputed, "cuda" if ranks.backend == "nccl" else "cpu", dtype)
