"""Splits of a call over ranks that are threads, and its results on each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Layout, context_parallel_attention
from support.masked_checks import place
from support.problems import shard
from support.ranks import run_ranks

Tensors = tuple[torch.Tensor, ...]
Split = tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]
"""Sizes and names of the axes, and options of the call."""

ALONE: Split = ((1,), ("cp",), {})
SPLITS: dict[str, Split] = {
    "allgather": ((2,), ("cp",), {"method": "ring", "rotate_method": "allgather"}),
    "alltoall": ((3,), ("cp",), {"method": "ring", "rotate_method": "alltoall"}),
    "ulysses": ((2,), ("cp",), {"method": "ulysses"}),
    "nested": ((2, 2), ("cp_node", "cp_gpu"), {"method": "ring"}),
    "hybrid": ((2, 2), ("ring", "ulysses"), {"method": "hybrid"}),
}


def size_of(split: Split) -> int:
    return torch.Size(split[0]).numel()


def over_ranks(
    split: Split, tensors: Tensors, layout: Layout, bias: torch.Tensor | None = None, **options: Any
) -> dict[int, Tensors]:
    """Returns out, lse and gradients of q, k, v and the bias on each rank, by its place in the sequence."""
    shape, names, of_split = split
    length = tensors[0].size(2), tensors[1].size(2)

    def attend(_rank: int) -> tuple[int, Tensors]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        here = place(list(mesh.get_coordinate() or ()), names, shape)
        q, k, v, grad_out = (shard(x, layout, here, mesh.size()) for x in tensors)
        own = [] if bias is None else [bias if bias.size(2) == 1 else shard(bias, layout, here, mesh.size())]
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *own)]
        out, lse = context_parallel_attention(
            *leaves[:3], mesh=mesh, attn_mask=leaves[3] if own else None, layout=layout, enable_gqa=True,
            return_lse=True, seq_len=length, **of_split, **options,
        )  # fmt: skip
        out.backward(grad_out)
        return here, (out.detach(), lse, *(x.grad for x in leaves if x.grad is not None))

    return dict(run_ranks(size_of(split), attend))
