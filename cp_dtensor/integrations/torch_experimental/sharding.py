"""`_context_parallel_shard` and `context_parallel_unshard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import _torch
from cp_dtensor._torch.experimental import flatten_tree
from cp_dtensor.api.sharding import context_parallel_shard
from cp_dtensor.api.sharding import context_parallel_unshard as unshard
from cp_dtensor.integrations.torch_experimental.block_masks import shard_of_block_mask
from cp_dtensor.integrations.torch_experimental.load_balancers import balancer_indices, balancer_layout
from cp_dtensor.integrations.torch_experimental.options import _cp_options, assumed_layout, axis_group
from cp_dtensor.spec.layouts import Contiguous


def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Any,
    seq_dims: Any,
    load_balancer: Any = None,
    batch_and_seq: tuple[int, int] | None = None,
) -> Any:
    """This rank's shards, in the structure of `buffers`.

    Args:
        mesh: the context-parallel axis.
        buffers: tensors that every rank has whole, and `BlockMask`s, in lists, tuples and dicts.
        seq_dims: the sequence dim of each, in a structure with as many leaves; those of masks are not read.
        load_balancer: the order of the tokens; contiguous if None.
        batch_and_seq: taken for the sake of torch 2.14 and newer, and not read.

    Returns:
        new tensors, differentiable, and masks for this rank's queries and the keys of all ranks.

    Raises:
        TypeError, ValueError: arguments that do not fit; without a layout for the order, a length that the ranks do
            not divide evenly.
        NotImplementedError: masks of which ranks would not have whole blocks, nor whole ones of 128 queries.

    It changes no setting. It is noted in which order sequences of this length are, for `context_parallel_unshard` and
    `_ContextParallel`, which have to know.
    """
    flat_buffers, rebuild = flatten_tree(buffers, lambda leaf: isinstance(leaf, BlockMask))
    flat_dims, _ = flatten_tree(seq_dims, lambda leaf: False)
    if len(flat_buffers) != len(flat_dims):
        raise ValueError(
            f"expected one sequence dim per buffer, got {len(flat_buffers)} buffers and {len(flat_dims)} dims"
        )
    return rebuild(
        [
            _shard_one(mesh, index, buffer, dim, load_balancer)
            for index, (buffer, dim) in enumerate(zip(flat_buffers, flat_dims, strict=True))
        ]
    )


def _shard_one(mesh: DeviceMesh, index: int, buffer: Any, dim: int, balancer: Any) -> Any:
    if isinstance(buffer, BlockMask):
        q_len = buffer.seq_lengths[0]
        _note(mesh, q_len, balancer)
        return shard_of_block_mask(buffer, mesh, None if balancer is None else balancer_indices(balancer, q_len))
    if not isinstance(buffer, torch.Tensor):
        raise TypeError(f"buffer {index}: expected a torch.Tensor or a BlockMask, got {type(buffer).__name__}")
    if not -buffer.dim() <= dim < buffer.dim():
        raise ValueError(f"buffer {index}: sequence dim {dim} is out of range for shape {tuple(buffer.shape)}")
    dim %= buffer.dim()
    length = buffer.size(dim)
    group = axis_group(mesh)
    layout = _note(mesh, length, balancer)
    if layout is not None:
        return context_parallel_shard(mesh, [buffer], [dim], layout)[0]
    if length % group.size():
        raise ValueError(
            f"buffer {index}: expected a length that {group.size()} ranks divide evenly in the order of "
            f"{type(balancer).__name__}, got {length}"
        )
    indices = balancer_indices(balancer, length)
    assert indices is not None  # that would be a layout
    local = indices.chunk(group.size(), dim=1)[group.rank()]
    return _permuted(buffer, dim, local, f"buffer {index}")


def _note(mesh: DeviceMesh, length: int, balancer: Any) -> Any:
    group = axis_group(mesh)
    layout = balancer_layout(balancer, length, group.size())
    _cp_options.orders.note(group, length, layout)
    return layout


def _permuted(tensor: torch.Tensor, dim: int, indices: torch.Tensor, what: str) -> torch.Tensor:
    """Tokens (along `dim`) in the order of (1, tokens) or, row by row, of (B, tokens)."""
    indices = indices.to(tensor.device)
    if indices.size(0) == 1:
        return tensor.index_select(dim, indices[0])
    if dim == 0 or tensor.size(0) != indices.size(0):
        raise ValueError(
            f"{what}: expected {indices.size(0)} batch rows in dim 0, each of which has an order of its own, got shape "
            f"{tuple(tensor.shape)} with sequence dim {dim}"
        )
    rows = [row.index_select(dim - 1, order) for row, order in zip(tensor, indices, strict=True)]
    return torch.stack(rows)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], load_balancer: Any = None
) -> list[torch.Tensor]:
    """Whole tensors, on every rank, from the ranks' shards.

    Args:
        mesh: the context-parallel axis.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each.
        load_balancer: the order of the tokens. None: that in which sequences of this length have been sharded, by
            `context_parallel` or `_context_parallel_shard`; if none has, as `_cp_options.enable_load_balance` says.

    Returns:
        new tensors in the order of the sequence, without gradients.

    Raises:
        TypeError, ValueError: arguments that do not fit; shards that are in an order that cannot be known.
    """
    group = axis_group(mesh)
    if len(buffers) != len(seq_dims):
        raise ValueError(f"expected one sequence dim per buffer, got {len(buffers)} buffers and {len(seq_dims)} dims")
    lengths = _global_lengths(group, [buffer.size(dim) for buffer, dim in zip(buffers, seq_dims, strict=True)], buffers)
    whole = []
    for buffer, dim, length in zip(buffers, seq_dims, lengths, strict=True):
        layout = (
            assumed_layout(group, length)
            if load_balancer is None
            else balancer_layout(load_balancer, length, group.size())
        )
        (tensor,) = unshard(mesh, [buffer], [dim], layout if layout is not None else Contiguous())
        if layout is None:
            indices = balancer_indices(load_balancer, length, restore=True)
            assert indices is not None
            tensor = _permuted(tensor, dim % tensor.dim(), indices, "unsharding")
        whole.append(tensor)
    return whole


def _global_lengths(group: dist.ProcessGroup, local: list[int], buffers: Sequence[torch.Tensor]) -> list[int]:
    """The sums of the ranks' lengths; one collective, on the host where the group has a CPU backend."""
    if not local:
        return []
    device = torch.device("cpu") if _torch.has_cpu_backend(group) else buffers[0].device
    total = torch.tensor(local, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()
