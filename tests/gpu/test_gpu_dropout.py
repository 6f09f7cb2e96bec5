"""Seed of dropout on a GPU: a new one at each replay of a CUDA graph, the saved one in recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.processes import Processes
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, HeadTail, context_parallel, context_parallel_attention

pytestmark = pytest.mark.gpu(1)
LENGTH = 300
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Processes]:
    processes = Processes(1, timeout=120, backend="nccl")
    yield processes
    processes.stop()


def drawn() -> Tensors:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(2, heads, LENGTH, 64) for heads in (4, 2, 2, 4)]
    return tuple(torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16) for size in sizes)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True, enable_gqa=True)


def forward_and_backward(leaves: Tensors, grad_out: torch.Tensor, function: Any = attend) -> Tensors:
    out = function(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def dropped_alike(v: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor, dv: torch.Tensor) -> bool:
    """Whether backward dropped what forward did. Out is linear in v: then <out, grad_out> = <v, dv>, in each head."""
    by_head = [(a.double() * b.double()).sum((2, 3)) for a, b in ((out, grad_out), (v, dv))]
    queries = by_head[0].unflatten(1, (v.size(1), -1)).sum(2)
    return bool((queries - by_head[1]).norm() < 2e-2 * queries.norm())


def replays(rank: int) -> None:
    *inputs, grad_out = drawn()
    leaves = tuple(tensor.requires_grad_() for tensor in inputs)
    with context_parallel(dist.group.WORLD, seq_len=LENGTH):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            forward_and_backward(leaves, grad_out)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = forward_and_backward(leaves, grad_out)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append([tensor.clone() for tensor in captured])
    for out, _, _, dv in seen:
        assert dropped_alike(leaves[2].detach(), grad_out, out, dv)
    assert not dropped_alike(leaves[2].detach(), grad_out, seen[0][0], seen[1][3])
    assert not torch.equal(seen[0][0], seen[1][0])
    assert not torch.equal(seen[1][0], seen[2][0])


def test_every_replay_of_a_graph_drops_something_else(gpu: Processes) -> None:
    gpu.run(replays)


def recomputed(rank: int) -> None:
    *inputs, grad_out = drawn()
    leaves = tuple(tensor.requires_grad_() for tensor in inputs)

    def checkpointed(*tensors: torch.Tensor) -> torch.Tensor:
        out = checkpoint(attend, *tensors, use_reentrant=False)
        torch.rand(3, device="cuda")  # the generator moves on before backward
        return out

    with context_parallel(dist.group.WORLD, seq_len=LENGTH):
        results = []
        for function in (attend, checkpointed):
            torch.manual_seed(5)
            results.append(forward_and_backward(leaves, grad_out, function))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_recompute_drops_the_same(gpu: Processes) -> None:
    gpu.run(recomputed)


def kernels_and_layouts(rank: int) -> None:
    """Triton in bfloat16, torch operations in float64: the same weights are dropped."""
    *inputs, grad_out = drawn()
    results = []
    for dtype, layout in ((torch.bfloat16, HeadTail()), (torch.float64, Contiguous())):
        leaves = tuple(tensor.to(dtype).requires_grad_() for tensor in inputs)
        torch.manual_seed(6)
        out = context_parallel_attention(
            *leaves,
            mesh=dist.group.WORLD,
            layout=layout,
            seq_len=LENGTH,
            dropout_p=0.3,
            is_causal=True,
            enable_gqa=True,
        )
        results.append((out, *torch.autograd.grad(out, leaves, grad_out.to(dtype))))
    for one, other in zip(*results, strict=True):
        assert (one.double() - other).norm() < 2e-2 * other.norm()


def test_kernels_drop_what_torch_operations_drop(gpu: Processes) -> None:
    gpu.run(kernels_and_layouts)
