"""Attention modes on real processes over gloo, and on GPUs, where autograd has its own threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, reference
from support.processes import Processes
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, Layout, context_parallel_shard
from cp_dtensor.integrations.unified import RingAttnMode, UlyssesAttnMode

WORLD_SIZE = 2
PROBLEM = Problem(48, 48, batch=2, q_heads=4, kv_heads=2, head_dim=64, is_causal=True)


@pytest.fixture(scope="module", params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu(WORLD_SIZE))])
def ranks(request: pytest.FixtureRequest) -> Iterator[Processes]:
    if request.param == "gloo":
        yield request.getfixturevalue("two_processes")
        return
    processes = Processes(WORLD_SIZE, timeout=120, backend=request.param)
    yield processes
    processes.stop()


def device_of(processes: Processes) -> str:
    return "cuda" if processes.backend == "nccl" else "cpu"


def heads_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor, dtype: torch.dtype, what: object) -> None:
    assert actual is not None
    tolerance = 1e-10 if dtype == torch.float64 else 5e-2
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def sharded(tensor: torch.Tensor, layout: Layout = Contiguous()) -> torch.Tensor:  # noqa: B008, immutable
    return context_parallel_shard(dist.group.WORLD, [tensor], [1], layout)[0]


def draw(device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and the gradient of out, and out, dq, dk and dv; (batch, sequence, heads, head dim)."""
    tensors = [tensor.to(dtype) for tensor in PROBLEM.draw(0, device)]
    truth = reference(PROBLEM, *tensors)
    return list(map(heads_last, tensors)), list(map(heads_last, truth))


def _recomputed_modes(rank: int, device: str, dtype: torch.dtype) -> None:
    """Recomputation after a mode, of sharded attention and of attention to keys that every rank has whole."""
    (*qkv, grad_out), truth = draw(device, dtype)
    text = qkv[1][:, :7].transpose(1, 2)

    def cross(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, text, text, enable_gqa=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    whole_q = qkv[0].transpose(1, 2).detach().double().requires_grad_()
    heads = 2 * torch.arange(4, device=device) // 4
    of_text = text.double()[:, heads]
    alone = F.scaled_dot_product_attention(whole_q, of_text, of_text)
    alone.backward(heads_last(grad_out).double())
    assert whole_q.grad is not None
    wanted_out = truth[0] + heads_last(alone.detach())
    wanted_grads = (truth[1] + heads_last(whole_q.grad), *truth[2:])
    for make in (UlyssesAttnMode, RingAttnMode):
        for use_reentrant in (False, True):
            q, k, v = (sharded(tensor).transpose(1, 2).requires_grad_() for tensor in qkv)
            with make():
                out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
                with make.replicated_keys():
                    out = out + checkpoint(cross, q, use_reentrant=use_reentrant)
            out.backward(sharded(grad_out).transpose(1, 2))
            for got, wanted in zip((out, q.grad, k.grad, v.grad), (wanted_out, *wanted_grads), strict=True):
                assert got is not None
                local = sharded(wanted)
                assert_close(heads_last(got), local, dtype, (make.__name__, use_reentrant))


def test_out_and_gradients_are_those_of_one_device(ranks: Processes) -> None:
    ranks.run(_recomputed_modes, device_of(ranks), torch.float64)


@pytest.mark.gpu(WORLD_SIZE)
def test_with_fused_kernels(ranks: Processes) -> None:
    ranks.run(_recomputed_modes, device_of(ranks), torch.bfloat16)
