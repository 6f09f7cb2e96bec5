"""Checks that SDPA on DTensors equals SDPA of their full tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from support.problems import Problem, reference

R = Replicate()
DP, TP, CP = Shard(0), Shard(1), Shard(2)
Placements = tuple[Placement, ...]


def sdpa(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    gqa = problem.q_heads != problem.kv_heads
    return F.scaled_dot_product_attention(q, k, v, is_causal=problem.is_causal, scale=problem.scale, enable_gqa=gqa)


def distributed(tensors: tuple[torch.Tensor, ...], mesh: DeviceMesh, placements: tuple[Placements, ...]) -> list:
    """Distributes full tensors that every rank has; returns leaves that require grad."""
    return [
        distribute_tensor(tensor, mesh, on, src_data_rank=None).requires_grad_()
        for tensor, on in zip(tensors, placements, strict=True)
    ]


torch_before_2_12 = pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="DTensor of torch 2.11 gathers gradients of uneven shards, gathers no empty shards over gloo and cannot "
    "view head shards in math attention",
)


def check_equals_full_tensors(
    rank: int,
    mesh_shape: tuple[int, ...],
    problem: Problem,
    placements: tuple[Placements, Placements, Placements],
    out_placements: Placements | None = None,
    context: AbstractContextManager[None] | None = None,
    mesh: DeviceMesh | None = None,
) -> Placements:
    """Checks a problem on one rank, and the placements of out unless None; returns the placements of out.

    DTensor caches by equality of meshes, so a rank must use one `mesh` for all problems: an equal mesh has other
    groups, and ranks that are threads could use different ones.
    """
    mesh = mesh or init_device_mesh("cpu", mesh_shape)
    *qkv, grad_out = problem.draw(seed=0)
    expected = reference(problem, *qkv, grad_out)
    inputs = distributed(tuple(qkv), mesh, placements)
    with context or nullcontext():
        out = sdpa(problem, *inputs)
        (out * distribute_tensor(grad_out, mesh, out.placements, src_data_rank=None)).sum().backward()
    for name, actual, want in zip(("out", "dq", "dk", "dv"), (out, *(t.grad for t in inputs)), expected, strict=True):
        message = f"{name} on rank {rank} of mesh {mesh_shape}, {placements}, {problem}"
        assert isinstance(actual, DTensor), message
        full = actual.full_tensor()
        torch.testing.assert_close(full, want, rtol=0, atol=1e-10, msg=lambda text, m=message: f"{m}: {text}")
    assert out_placements is None or out.placements == out_placements
    assert [tensor.grad.placements for tensor in inputs] == list(placements), problem
    return out.placements


# Shards are even on meshes of up to 8 ranks for all placements.
SELF = Problem(16, 16, batch=8, q_heads=8, kv_heads=8, head_dim=4)
CAUSAL = Problem(16, 16, batch=8, q_heads=8, kv_heads=8, head_dim=4, is_causal=True, scale=0.7)
GROUPED = Problem(16, 16, batch=8, q_heads=8, kv_heads=4, head_dim=4, is_causal=True)
CROSS = Problem(8, 24, batch=8, q_heads=8, kv_heads=4, head_dim=4)
CROSS_CAUSAL = Problem(24, 8, batch=8, q_heads=8, kv_heads=8, head_dim=4, is_causal=True)
PROBLEMS = {"full": SELF, "causal": CAUSAL, "gqa": GROUPED, "cross": CROSS, "cross causal": CROSS_CAUSAL}


def check_problems(
    rank: int, mesh_shape: tuple[int, ...], problems: list[Problem], inputs: tuple[Placements, ...], out: Placements
) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for problem in problems:
        assert check_equals_full_tensors(rank, mesh_shape, problem, inputs, mesh=mesh) == out


def check_refused(rank: int, error: type[Exception], message: str, body: Callable[..., object], *args: object) -> None:
    """Checks that this rank raises its own error, not only a consequence of another rank's."""
    with pytest.raises(error, match=message):
        body(rank, *args)
