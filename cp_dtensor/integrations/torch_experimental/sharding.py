"""Shards of tensors and of block masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor import Contiguous, Layout, context_parallel_shard
from cp_dtensor import context_parallel_unshard as unshard
from cp_dtensor.api.extension import sequence_ranks
from cp_dtensor.integrations.torch_experimental.load_balancers import (
    balancer_indices,
    balancer_layout,
    layout_positions,
)
from cp_dtensor.integrations.torch_experimental.options import _cp_options, assumed_layout, axis_group
from cp_dtensor.integrations.torch_experimental.private import flatten_tree

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_BLOCKS = (128, 128)


def _context_parallel_shard(
    mesh: DeviceMesh,
    buffers: Any,
    seq_dims: Any,
    load_balancer: Any = None,
    batch_and_seq: tuple[int, int] | None = None,
) -> Any:
    """Returns this rank's shards, in the structure of `buffers`.

    It changes no setting; it records the order of sequences of this length for `context_parallel_unshard` and
    `_ContextParallel`.

    Args:
        mesh: the context-parallel axis.
        buffers: tensors that every rank has whole, and `BlockMask`s, in lists, tuples and dicts.
        seq_dims: the sequence dim of each, in a structure with as many leaves; those of masks are ignored.
        load_balancer: the order of the tokens; contiguous if None.
        batch_and_seq: ignored; torch 2.14 and newer have it.

    Returns:
        new tensors, differentiable, and masks of this rank's queries and the keys of all ranks.

    Raises:
        TypeError, ValueError: arguments that do not fit; for an order that no layout has, a length that is not a
            multiple of the number of ranks.
        NotImplementedError: masks that the ranks cannot divide into whole blocks, neither their own nor of 128 queries.
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
        return _shard_of_block_mask(buffer, mesh, None if balancer is None else balancer_indices(balancer, q_len))
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
    assert indices is not None  # balancer_layout returns Contiguous() for None
    local = indices.chunk(group.size(), dim=1)[group.rank()]
    return _permuted(buffer, dim, local, f"buffer {index}")


def _note(mesh: DeviceMesh, length: int, balancer: Any) -> Layout | None:
    group = axis_group(mesh)
    layout = balancer_layout(balancer, length, group.size())
    _cp_options.orders.note(group, length, layout)
    return layout


def _permuted(tensor: torch.Tensor, dim: int, indices: torch.Tensor, what: str) -> torch.Tensor:
    """Returns tokens (along `dim`) in the order of `indices`: (1, tokens), or (B, tokens) for each batch row."""
    indices = indices.to(tensor.device)
    if indices.size(0) == 1:
        return tensor.index_select(dim, indices[0])
    if dim == 0 or tensor.size(0) != indices.size(0):
        raise ValueError(
            f"{what}: expected {indices.size(0)} batch rows in dim 0, since each has its own order; got shape "
            f"{tuple(tensor.shape)} with sequence dim {dim}"
        )
    rows = [row.index_select(dim - 1, order) for row, order in zip(tensor, indices, strict=True)]
    return torch.stack(rows)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], load_balancer: Any = None
) -> list[torch.Tensor]:
    """Returns whole tensors on every rank from the ranks' shards.

    Args:
        mesh: the context-parallel axis.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each.
        load_balancer: the order of the tokens. If None, the order in which `context_parallel` or
            `_context_parallel_shard` sharded sequences of this length; if neither did, as
            `_cp_options.enable_load_balance` says.

    Returns:
        new tensors in the order of the sequence, without gradients.

    Raises:
        TypeError, ValueError: arguments that do not fit; sequences of this length were sharded in several orders.
    """
    group = axis_group(mesh)
    if len(buffers) != len(seq_dims):
        raise ValueError(f"expected one sequence dim per buffer, got {len(buffers)} buffers and {len(seq_dims)} dims")
    local = [buffer.size(dim) for buffer, dim in zip(buffers, seq_dims, strict=True)]
    by_rank = sequence_ranks(group).gather_integers(local, buffers[0].device) if local else []
    lengths = [sum(lengths) for lengths in zip(*by_rank, strict=True)]
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


# Block masks


def _create_cp_block_mask(
    mask_mod: MaskMod,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    BLOCK_SIZE: Any = _BLOCKS,
    device_mesh: Any = None,
    load_balancer: Any = None,
) -> BlockMask:
    """Returns the mask of this rank's queries and the keys of all ranks, rank after rank.

    Before torch 2.15 there is no `BLOCK_SIZE`, and `device_mesh` is the sixth argument; both ways of calling work here.

    Args:
        mask_mod: of global positions, as `create_block_mask` takes it.
        B: batch rows of the mask.
        H: heads of the mask.
        Q_LEN: global number of queries.
        KV_LEN: global number of keys.
        BLOCK_SIZE: queries and keys of a block.
        device_mesh: the context-parallel axis.
        load_balancer: the order of the tokens. If None, the order in which sequences of this length were sharded; if
            none was, as `_cp_options.enable_load_balance` says.

    Raises:
        NotImplementedError: Q_LEN is not a multiple of a block's queries times the number of ranks.
        TypeError: device_mesh is not a DeviceMesh.
        ValueError: reordered tokens and KV_LEN other than Q_LEN; sequences of this length were sharded in several
            orders.
    """
    if isinstance(BLOCK_SIZE, DeviceMesh):  # the older order of arguments
        load_balancer = device_mesh if load_balancer is None else load_balancer
        BLOCK_SIZE, device_mesh = _BLOCKS, BLOCK_SIZE
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"_create_cp_block_mask expects device_mesh to be a DeviceMesh, got {device_mesh!r}")
    if load_balancer is not None:
        order = balancer_indices(load_balancer, Q_LEN)
    else:
        group = axis_group(device_mesh)
        layout = assumed_layout(group, Q_LEN)
        positions = layout_positions(layout, Q_LEN, group.size(), device_mesh.device_type)
        order = None if layout == Contiguous() else positions[None]
    return _create(mask_mod, (B, H, Q_LEN, KV_LEN), BLOCK_SIZE, device_mesh, order)


def _shard_of_block_mask(mask: BlockMask, mesh: DeviceMesh, order: torch.Tensor | None) -> BlockMask:
    """Returns this rank's rows of a mask, in blocks of the mask's size if every rank has whole ones, else of 128."""
    batch, heads = mask.kv_num_blocks.shape[:2]
    q_len, kv_len = mask.seq_lengths
    fits = q_len % (axis_group(mesh).size() * mask.BLOCK_SIZE[0]) == 0
    blocks = mask.BLOCK_SIZE if fits else _BLOCKS
    return _create(mask.mask_mod, (batch, heads, q_len, kv_len), blocks, mesh, order)


def _create(
    mask_mod: MaskMod,
    shape: tuple[int, int, int, int],
    blocks: tuple[int, int],
    mesh: DeviceMesh,
    order: torch.Tensor | None,
) -> BlockMask:
    """Returns this rank's rows of a mask of `shape` (batch rows, heads, queries, keys).

    Args:
        order: (1 or B, S), the global position of each token, rank after rank; None for contiguous shards.
    """
    batch, heads, q_len, kv_len = shape
    group = axis_group(mesh)
    world_size = group.size()
    if q_len % (world_size * blocks[0]):
        raise NotImplementedError(
            f"block masks of shards are supported where every rank has whole blocks of {blocks[0]} queries; got "
            f"Q_LEN={q_len} on {world_size} ranks"
        )
    if order is not None and kv_len != q_len:
        raise ValueError(f"expected as many keys as queries in a reordered sequence, got {q_len} and {kv_len}")
    device = mesh.device_type
    order = None if order is None else order.to(device)
    first = group.rank() * (q_len // world_size)

    def of_shard(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        if order is None:
            return mask_mod(b, h, q_idx + first, kv_idx)
        row = b if order.size(0) > 1 else b * 0
        return mask_mod(b, h, order[row, q_idx + first], order[row, kv_idx])

    create = _compiled() if device == "cuda" else create_block_mask
    return create(of_shard, batch, heads, q_len // world_size, kv_len, device=device, BLOCK_SIZE=blocks)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., BlockMask]:
    # Without compilation every element of the mask takes a byte.
    return torch.compile(create_block_mask, dynamic=False, fullgraph=True)
