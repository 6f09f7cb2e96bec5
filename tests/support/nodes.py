"""Calls over nodes: each way of splitting them, beside dense attention in float64."""

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
WAYS_OF_PODS: dict[str, tuple[int, dict[str, str]]] = {
    "nested ring of pods": (3, {"method": "ring"}),
    "hybrid of pods": (3, {"method": "hybrid"}),
}


def masks(length: int) -> dict[str, Mask]:
    """Masks that need keys of other nodes in different amounts."""
    edges = [0, length // 3, length // 2, length // 2 + 3, length]
    return {
        "causal": Causal(), "documents": Documents(edges, within=Causal()), "window": SlidingWindow(length // 9, 0),
    }  # fmt: skip


def mesh_over_nodes(axes: int, device: str, nodes: int = NODES) -> DeviceMesh:
    """Returns the mesh of all ranks, with axes of two pods if there are three, of nodes, and of ranks of a node."""
    size = dist.get_world_size()
    shapes = (size,), (nodes, size // nodes), (2, nodes // 2, size // nodes)
    return init_device_mesh(device, shapes[axes - 1], mesh_dim_names=("ring_pod", "ring_out", "ring_in")[-axes:])


def attend(inputs: list[torch.Tensor], mesh: DeviceMesh, mask: Mask, length: int, **options: Any) -> list[torch.Tensor]:
    """Returns out, dq, dk and dv of this rank's q, k, v and gradient of out."""
    *qkv, grad_out = inputs
    leaves = [each.detach().requires_grad_() for each in qkv]
    out = context_parallel_attention(
        *leaves, mesh=mesh, mask=mask, seq_len=length, layout=HeadTail(), enable_gqa=True, **options
    )
    assert isinstance(out, torch.Tensor)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def check(rank: int, device: str, way: str, mask: Mask, problem: Problem, nodes: int = NODES, mesh: Any = None) -> None:
    """Compares out and gradients of a way with dense attention, on this rank's rows."""
    whole, size = [each.to(device) for each in problem.draw(seed=7)], dist.get_world_size()
    leaves = [each.detach().requires_grad_() for each in whole[:3]]
    out, _ = dense(*leaves, shown(mask, problem.q_len, problem.q_len, 1).to(device))
    expected = [out.detach(), *torch.autograd.grad(out, leaves, whole[3])]
    (axes, options), shards = {**WAYS, **WAYS_OF_PODS}[way], [shard(each, HeadTail(), rank, size) for each in whole]
    found = attend(shards, mesh or mesh_over_nodes(axes, device, nodes), mask, problem.q_len, **options)
    for what, one, other in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        assert_close(one, shard(other, HeadTail(), rank, size), f"{way}, {mask}, {what}")
