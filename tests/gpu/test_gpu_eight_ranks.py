"""Errors of eight ranks (threads that share one GPU), relative to those of one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, reference, shard
from support.ranks import run_ranks

from cp_dtensor import HeadTail, ring_attention
from cp_dtensor._torch import collectives
from cp_dtensor.attention.backends import flash4

pytestmark = pytest.mark.gpu(1)
RANKS, LENGTH = 8, 16_384
PROBLEMS = [
    Problem(LENGTH, LENGTH, 1, heads, kv_heads, dim, is_causal=True, dtype=torch.bfloat16)
    for heads, kv_heads, dim in ((8, 2, 128), (4, 1, 256))
]
NAMES = ("out", "dq", "dk", "dv")
Tensors = list[torch.Tensor]


@pytest.fixture(scope="module", params=PROBLEMS, ids=str)
def problem(request: pytest.FixtureRequest) -> tuple[Tensors, Tensors, list[float]]:
    """q, k, v and the gradient of out; out, dq, dk and dv in float64; errors of bfloat16 SDPA."""
    with torch.autograd.set_multithreading_enabled(False):  # autograd's own thread has no context for cuBLAS yet
        whole = list(request.param.draw(0, "cuda"))
        # By head, in whose float64 a matrix of all pairs has 2 GiB.
        group = whole[0].size(1) // whole[1].size(1)
        by_head = []
        for head in range(whole[0].size(1)):
            heads = (slice(head, head + 1), *[slice(head // group, head // group + 1)] * 2, slice(head, head + 1))
            by_head.append(reference(request.param, *(x[:, each] for x, each in zip(whole, heads, strict=True))))
        out, dq, dk, dv = (torch.cat(each, 1) for each in zip(*by_head, strict=True))
        truth = [out, dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))]
        leaves = [x.clone().requires_grad_() for x in whole[:3]]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        results = (out.detach(), *torch.autograd.grad(out, leaves, whole[3]))
    single = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, truth, strict=True)]
    torch.cuda.empty_cache()  # 10 GiB of float64, which other workers may need
    return whole, truth, single


@pytest.mark.parametrize("transport", ["allgather", "alltoall"])
def test_errors_are_near_those_of_one_gpu(
    problem: tuple[Tensors, Tensors, list[float]], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, truth, single = problem
    device = torch.cuda.current_device()
    monkeypatch.setattr(collectives, "_backend_name", lambda *_: "threaded")  # which has no object to ask

    def body(rank: int) -> Tensors:
        torch.cuda.set_device(device)  # each thread has a device of its own
        q, k, v, grad = (shard(x, HeadTail(), rank, RANKS) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.autograd.set_multithreading_enabled(False):  # ranks would wait for each other in one thread
            out = ring_attention(
                *leaves, mesh=dist.group.WORLD, is_causal=True, enable_gqa=True, rotate_method=transport, seq_len=LENGTH
            )
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    results = run_ranks(RANKS, body)
    ratios = {}
    for index, name in enumerate(NAMES):
        parts = [shard(truth[index], HeadTail(), rank, RANKS) for rank in range(RANKS)]
        square = sum((results[rank][index].double() - part).square().sum() for rank, part in enumerate(parts))
        ratios[name] = ((square**0.5) / truth[index].norm()).item() / single[index]  # type: ignore[union-attr]
    print(f"\n{transport}, {RANKS} ranks, {whole[0].shape}:", {name: round(each, 3) for name, each in ratios.items()})
    # Without the packages own tiles have gradients in float32 with `allgather`. With them dK and dV had 1.00 and 1.02
    # times the error at head dim 128, by FlashAttention-4, and 1.15 at 256, by cuDNN, on an H200.
    is_of_128 = whole[0].size(3) == 128
    limits = dict.fromkeys(NAMES, 1.13 if transport == "allgather" and is_of_128 else 1.25)
    if is_of_128 and flash4.PACKAGE.version and torch.cuda.get_device_capability() == (9, 0):
        limits["dk"] = limits["dv"] = 1.03
    assert all(each <= limits[name] for name, each in ratios.items()), ratios
