"""Defects of torch's experimental context parallelism that this package avoids, named after the user's case."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import Contiguous, HeadTail, context_parallel, context_parallel_shard, ring_attention

WORLD = 4
CAUSAL = Problem(16, 16, is_causal=True)


class Attended:
    """Shards of a problem on one rank, in head-tail order, and what must come out."""

    def __init__(self, problem: Problem, rank: int, world_size: int = WORLD, device: str = "cpu") -> None:
        self.problem = problem
        *qkv, grad_out = problem.draw(seed=0, device=device)
        whole = (*qkv, grad_out, *reference(problem, *qkv, grad_out))
        shards = [shard(tensor, HeadTail(), rank, world_size) for tensor in whole]
        self.q, self.k, self.v = (tensor.requires_grad_() for tensor in shards[:3])
        self.grad_out, *self.expected = shards[3:]

    def sdpa(self, function: Callable[..., torch.Tensor] = F.scaled_dot_product_attention) -> torch.Tensor:
        return function(self.q, self.k, self.v, is_causal=self.problem.is_causal)

    def check(self, out: torch.Tensor, tolerance: float = 1e-10) -> None:
        out.backward(self.grad_out)
        for actual, expected in zip((out, self.q.grad, self.k.grad, self.v.grad), self.expected, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def on_every_rank(body: Callable[[Attended], None], problem: Problem = CAUSAL) -> None:
    run_ranks(WORLD, lambda rank: body(Attended(problem, rank)))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def on_one_gpu(problem: Problem, backend: SDPBackend, tolerance: float) -> None:
    """Ranks are threads that share a GPU."""

    def body(rank: int) -> None:
        shards = Attended(problem, rank, 2, "cuda")
        out = ring_attention(shards.q, shards.k, shards.v, mesh=dist.group.WORLD, is_causal=True)
        # A transposed gradient, as of models that go on in (B, S, H, D): its strides are not those of out.
        shards.grad_out = shards.grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        with torch.autograd.set_multithreading_enabled(False):  # autograd has but one thread for a GPU
            shards.check(out, tolerance)

    with sdpa_kernel(backend):
        run_ranks(2, body)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=["math", "efficient"])
def test_float32_on_a_gpu(backend: SDPBackend) -> None:
    on_one_gpu(Problem(256, 256, head_dim=64, is_causal=True, dtype=torch.float32), backend, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 100, 250, 258])
def test_efficient_backward_with_a_local_length_that_is_no_multiple_of_64(length: int) -> None:
    problem = Problem(length, length, head_dim=64, is_causal=True, dtype=torch.bfloat16)
    on_one_gpu(problem, SDPBackend.EFFICIENT_ATTENTION, 0.04)


@pytest.mark.gpu
def test_cudnn_backward_with_differing_strides_of_out_and_its_gradient() -> None:
    problem = Problem(256, 256, head_dim=64, is_causal=True, dtype=torch.bfloat16)
    on_one_gpu(problem, SDPBackend.CUDNN_ATTENTION, 0.04)


def test_shard_helper_used_inside_the_context() -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            context_parallel_shard(dist.group.WORLD, [torch.arange(16)], [0], Contiguous())
            out = shards.sdpa()  # still in head-tail order
        shards.check(out)
        q = shards.q.detach()
        torch.testing.assert_close(causal(q, q, q)[:, :, :1], q[:, :, :1])  # SDPA is plain again: the first row

    on_every_rank(body)
