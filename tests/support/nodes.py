"""Calls over two nodes: each way of splitting, on each mask, beside dense attention in float64."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Causal, Documents, HeadTail, Mask, SlidingWindow, context_parallel_attention
from support.masked_problems import shown
from support.problems import Problem, assert_close, dense, shard

NODES = 2
WAYS: dict[str, tuple[int, dict[str, str]]] = {
    "ring by alltoall": (1, {"method": "ring", "rotate_method": "alltoall"}),
    "ring by allgather": (1, {"method": "ring", "rotate_method": "allgather"}),
    "ulysses": (1, {"method": "ulysses"}),
    "nested ring": (2, {"method": "ring"}),
    "hybrid": (2, {"method": "hybrid"}),
}
"""Number of mesh axes and options of a call; those of one axis are over all ranks of all nodes."""


def masks(length: int) -> dict[str, Mask]:
    """Masks that need keys of other nodes in different amounts."""
    edges = [0, length // 3, length // 2, length // 2 + 3, length]
    return {
        "causal": Causal(), "documents": Documents(edges, within=Causal()), "window": SlidingWindow(length // 9, 0),
    }  # fmt: skip


def mesh_over_nodes(axes: int, device: str, nodes: int = NODES) -> DeviceMesh:
    """Returns the mesh of all ranks, with an axis across nodes and one inside of them if there are two."""
    shape = (dist.get_world_size(),) if axes == 1 else (nodes, dist.get_world_size() // nodes)
    return init_device_mesh(device, shape, mesh_dim_names=("ring_out", "ring_in")[-axes:])


def attend(inputs: list[torch.Tensor], mesh: DeviceMesh, mask: Mask, length: int, **options: Any) -> list[torch.Tensor]:
    """Returns out, dq, dk and dv of this rank's q, k, v and gradient of out."""
    *qkv, grad_out = inputs
    leaves = [each.detach().requires_grad_() for each in qkv]
    out = context_parallel_attention(
        *leaves, mesh=mesh, mask=mask, seq_len=length, layout=HeadTail(), enable_gqa=True, **options
    )
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def check_all_ways(rank: int, device: str, length: int, seed: int) -> int:
    """Compares out and gradients of all ways and masks with dense attention; returns the number of comparisons."""
    problem, size, checked = Problem(length, length, 1, 4, 2, 16), dist.get_world_size(), 0
    whole = [each.to(device) for each in problem.draw(seed)]
    shards = [shard(each, HeadTail(), rank, size) for each in whole]
    for name, mask in masks(length).items():
        leaves = [each.detach().requires_grad_() for each in whole[:3]]
        out, _ = dense(*leaves, shown(mask, length, length, 1).to(device))
        expected = [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]
        for way, (axes, options) in WAYS.items():
            found = attend(shards, mesh_over_nodes(axes, device), mask, length, **options)
            for what, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
                assert_close(one, shard(other, HeadTail(), rank, size), f"{way}, {name}, {what}")
                checked += 1
    return checked
