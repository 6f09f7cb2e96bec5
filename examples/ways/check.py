"""Shared parts of the examples: a small problem, its result on one device, and the error of an example."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import context_parallel_shard

RANKS = 4
LARGEST_ERROR = 1e-10  # in float64


def make_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of 4 ranks: GPUs if this machine has 4, otherwise CPUs over gloo."""
    world_size = int(os.environ.get("WORLD_SIZE", RANKS))
    if world_size != RANKS:
        raise SystemExit(f"expected {RANKS} ranks, got {world_size}: torchrun --nproc-per-node {RANKS} ...")
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    return init_device_mesh(device, shape, mesh_dim_names=names)


def problem(device: str) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, equal on every rank: 50 tokens, 8 query heads and 4 key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, 50, 16) for heads in (8, 4, 4, 8)]  # (batch, heads, tokens, head dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]


def one_device(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor) -> list[torch.Tensor]:
    """Out, dq, dk and dv of causal attention on one device."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out)]


def compare(
    mesh: DeviceMesh, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
) -> tuple[float, str]:
    """The largest error of causal attention to this rank's shards, and the type of its device."""
    whole = problem(mesh.device_type)
    q, k, v, grad_out = context_parallel_shard(mesh, whole, [2] * 4)  # tokens in HeadTail(), over all axes
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out = attend(q, k, v)
    assert isinstance(out, torch.Tensor)  # with return_lse=True the result is a pair
    out.backward(grad_out)
    expected = context_parallel_shard(mesh, one_device(*whole), [2] * 4)
    return error([out.detach(), q.grad, k.grad, v.grad], expected), mesh.device_type


def error(got: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference; infinite for NaN and for missing gradients."""
    largest = 0.0
    for tensor, wanted in zip(got, expected, strict=True):
        difference = math.inf if tensor is None else (tensor - wanted).abs().max().item()
        largest = max(largest, math.inf if math.isnan(difference) else difference)
    return largest


def report(name: str, largest: float, device: str) -> None:
    """Prints the largest error of all ranks, and exits with 1 if it is too large."""
    of_all = torch.tensor(largest, dtype=torch.float64, device=device)
    dist.all_reduce(of_all, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"{name}: largest error of out and gradients {of_all.item():.1e}", flush=True)
    if of_all.item() > LARGEST_ERROR:
        sys.exit(1)


def run(name: str, example: Callable[[], tuple[float, str]]) -> None:
    """Runs an example and reports the error that it returns with the type of its device."""
    if "RANK" not in os.environ:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node {RANKS} {sys.argv[0]}")
    report(name, *example())
    dist.barrier()  # a rank that ends closes connections that others may still use
    dist.destroy_process_group()
