"""Checks of context-parallel attention on ranks that are threads, against one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import Layout, ring_attention
from support.problems import Problem, reference, shard
from support.ranks import run_ranks

Tensors = tuple[torch.Tensor, ...]


def attend(
    rank: int, world_size: int, tensors: Tensors, problem: Problem, layout: Layout, options: dict[str, Any]
) -> Tensors:
    """Returns (out, dq, dk, dv) of one rank."""
    q, k, v, grad_out = (shard(tensor, layout, rank, world_size) for tensor in tensors)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = ring_attention(
        q,
        k,
        v,
        mesh=dist.group.WORLD,
        layout=layout,
        is_causal=problem.is_causal,
        scale=problem.scale,
        enable_gqa=problem.q_heads != problem.kv_heads,
        **{"seq_len": (problem.q_len, problem.kv_len), **options},
    )
    out.backward(grad_out)
    return out.detach(), q.grad, k.grad, v.grad


def check_against_reference(problem: Problem, world_size: int, layout: Layout, seed: int = 0, **options: Any) -> None:
    tensors = problem.draw(seed)
    expected = reference(problem, *tensors)
    results = run_ranks(world_size, attend, world_size, tensors, problem, layout, options)
    for rank, result in enumerate(results):
        for name, got, whole in zip(("out", "dq", "dk", "dv"), result, expected, strict=True):
            wanted = shard(whole, layout, rank, world_size)
            torch.testing.assert_close(
                got, wanted, rtol=1e-10, atol=1e-10, msg=lambda text, what=f"{name} of rank {rank}": f"{what}: {text}"
            )
