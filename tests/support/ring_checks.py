"""Checks of rings on ranks that are threads, against one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import Layout, ring_attention
from support.method_checks import check
from support.problems import Problem, shard

Tensors = tuple[torch.Tensor, ...]


def attend(
    rank: int, world_size: int, tensors: Tensors, problem: Problem, layout: Layout, options: dict[str, Any]
) -> Tensors:
    """Returns (out, dq, dk, dv) of one rank."""
    *qkv, grad_out = (shard(tensor, layout, rank, world_size) for tensor in tensors)
    leaves = [tensor.requires_grad_() for tensor in qkv]
    out: Any = ring_attention(
        *leaves, mesh=dist.group.WORLD, layout=layout, is_causal=problem.is_causal, scale=problem.scale,
        enable_gqa=problem.q_heads != problem.kv_heads, **{"seq_len": (problem.q_len, problem.kv_len), **options},
    )  # fmt: skip
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def check_against_reference(problem: Problem, world_size: int, layout: Layout, seed: int = 0, **options: Any) -> None:
    """Checks out and gradients of all ranks."""
    check(problem, layout, ("cp",), (world_size,), seed, method="ring", **options)
