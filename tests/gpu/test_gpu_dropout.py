"""Dropout on GPUs: alike by all methods and kernels, another at each replay of a graph, the same in a recompute."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.gpu_checks import WAYS, WORLD_SIZE, Tensors, replays
from support.problems import Problem, shard
from support.processes import Processes
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, HeadTail, Layout, context_parallel_attention

pytestmark = pytest.mark.gpu(WORLD_SIZE)
PROBLEM = Problem(300, 300, 2, 4, 2, 64, dtype=torch.bfloat16)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return context_parallel_attention(
        q, k, v, seq_len=300, dropout_p=0.3, is_causal=True, enable_gqa=True, **{"mesh": dist.group.WORLD, **options}
    )


def _results(
    rank: int, ranks: int, dtype: torch.dtype, layout: Layout, function: Any = _attend, **options: Any
) -> Tensors:
    *leaves, grad_out = (shard(x.to(dtype), layout, rank, ranks) for x in PROBLEM.draw(0, "cuda"))
    torch.manual_seed(6)
    out = function(*(leaf.requires_grad_() for leaf in leaves), layout=layout, **options)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def _alike(rank: int) -> None:
    """Torch operations in float64 on one rank; Triton on one rank and by every method in another layout."""
    alone = [dist.new_group([each]) for each in range(WORLD_SIZE)][rank]
    exact = _results(0, 1, torch.float64, Contiguous(), mesh=alone)
    places: list[tuple[int, int, dict[str, Any]]] = [(0, 1, {"mesh": alone})]
    for here, ranks, options in places + [(rank, WORLD_SIZE, way) for way in WAYS.values()]:
        results = _results(here, ranks, torch.bfloat16, HeadTail(), **options)
        for got, whole in zip(results, exact, strict=True):
            want = shard(whole, HeadTail(), here, ranks)
            assert (got.double() - want).norm() < 2e-2 * want.norm(), options


def test_methods_and_kernels_drop_alike(gpus: Processes) -> None:
    gpus.run(_alike)


def _in_a_graph(rank: int) -> None:
    *leaves, grad_out = (x.requires_grad_() for x in PROBLEM.draw(0, "cuda"))
    alone = [dist.new_group([each]) for each in range(WORLD_SIZE)][rank]

    def call() -> Tensors:
        out = _attend(*leaves, mesh=alone)
        return out.detach(), torch.autograd.grad(out, leaves, grad_out)[2]

    def dropped_alike(out: torch.Tensor, dv: torch.Tensor) -> bool:
        """Whether backward dropped what forward did. Out is linear in v: then <out, grad_out> = <v, dv>, by head."""
        by_head = [(a.double() * b.double()).sum((2, 3)) for a, b in ((out, grad_out), (leaves[2], dv))]
        queries = by_head[0].unflatten(1, (leaves[2].size(1), -1)).sum(2)
        return bool((queries - by_head[1]).norm() < 2e-2 * queries.norm())

    seen = [results for _, results in replays(rank, call, [], lambda _seed: [])]
    assert all(dropped_alike(*results) for results in seen)
    for (out, _), (other, dv) in pairwise(seen):
        assert not torch.equal(out, other)
        assert not dropped_alike(out, dv)


def test_every_replay_of_a_graph_drops_something_else(gpus: Processes) -> None:
    gpus.run(_in_a_graph)


def _recomputed(rank: int) -> None:
    def checkpointed(*tensors: torch.Tensor, **options: Any) -> Any:
        out = checkpoint(_attend, *tensors, use_reentrant=False, **options)
        torch.rand(3, device="cuda")  # the generator moves on before backward
        return out

    usual, again = (
        _results(rank, WORLD_SIZE, torch.bfloat16, HeadTail(), function, **WAYS["ulysses"])
        for function in (_attend, checkpointed)
    )
    for one, other in zip(usual, again, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_recompute_drops_the_same(gpus: Processes) -> None:
    gpus.run(_recomputed)
