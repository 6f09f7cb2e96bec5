"""Block masks of a rank's queries, for FlexAttention over keys that have been gathered."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor.integrations.torch_experimental.load_balancers import balancer_indices, layout_positions
from cp_dtensor.integrations.torch_experimental.options import assumed_layout, axis_group
from cp_dtensor.spec.layouts import Contiguous

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_BLOCKS = (128, 128)


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
    """The mask of this rank's queries against the keys of all ranks, which stand rank after rank.

    Until torch 2.14 there is no `BLOCK_SIZE`, and `device_mesh` is the sixth argument; both ways of calling work here.

    Args:
        mask_mod: of global positions, as `create_block_mask` takes it.
        B: batch rows of the mask.
        H: heads of the mask.
        Q_LEN: global number of queries.
        KV_LEN: global number of keys.
        BLOCK_SIZE: queries and keys of a block.
        device_mesh: the context-parallel axis.
        load_balancer: the order of the tokens. None: that in which sequences of this length have been sharded; if
            none has, as `_cp_options.enable_load_balance` says.

    Raises:
        NotImplementedError: Q_LEN is not a multiple of a block's queries times the number of ranks.
        TypeError: no mesh.
        ValueError: reordered tokens and KV_LEN other than Q_LEN; an order that cannot be known.
    """
    if isinstance(BLOCK_SIZE, DeviceMesh):  # the sixth argument, and what may follow
        load_balancer = device_mesh if load_balancer is None else load_balancer
        BLOCK_SIZE, device_mesh = _BLOCKS, BLOCK_SIZE
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"_create_cp_block_mask expects device_mesh to be a DeviceMesh, got {device_mesh!r}")
    order = token_order(load_balancer, device_mesh, Q_LEN)
    return _create(mask_mod, (B, H, Q_LEN, KV_LEN), BLOCK_SIZE, device_mesh, order)


def shard_of_block_mask(mask: BlockMask, mesh: DeviceMesh, order: torch.Tensor | None) -> BlockMask:
    """This rank's rows of a mask: in the blocks of the mask if every rank has whole ones, else in blocks of 128."""
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
    """This rank's rows of a mask of `shape` (batch rows, heads, queries, keys).

    Args:
        order: of `token_order`; None for that of the sequence.
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


def token_order(balancer: Any, mesh: DeviceMesh, length: int) -> torch.Tensor | None:
    """(1 or B, S): the global position of each token, rank after rank, as a load balancer has it.

    None: the order that shards are in; as a result, that of the sequence.
    """
    if balancer is not None:
        return balancer_indices(balancer, length)
    group = axis_group(mesh)
    layout = assumed_layout(group, length)
    return None if layout == Contiguous() else layout_positions(layout, length, group.size(), mesh.device_type)[None]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., BlockMask]:
    # Uncompiled, every element of the mask takes a byte.
    return torch.compile(create_block_mask, dynamic=False, fullgraph=True)
