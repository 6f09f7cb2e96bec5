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
from cp_dtensor.layouts import Contiguous

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_BLOCK = 128


def _create_cp_block_mask(
    mask_mod: MaskMod,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: DeviceMesh,
    load_balancer: Any = None,
) -> BlockMask:
    """The mask of this rank's queries against the keys of all ranks, which stand rank after rank.

    Args:
        mask_mod: of global positions, as `create_block_mask` takes it.
        B: batch rows of the mask.
        H: heads of the mask.
        Q_LEN: global number of queries.
        KV_LEN: global number of keys.
        device_mesh: the context-parallel axis.
        load_balancer: the order of the tokens. None: that in which sequences of this length have been sharded; if
            none has, as `_cp_options.enable_load_balance` says.

    Raises:
        NotImplementedError: Q_LEN is not a multiple of 128 times the number of ranks.
        ValueError: reordered tokens and KV_LEN other than Q_LEN; an order that cannot be known.
    """
    order = token_order(load_balancer, device_mesh, Q_LEN)
    return shard_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device_mesh, order)


def shard_block_mask(
    mask_mod: MaskMod,
    B: int,
    H: int,
    Q_LEN: int,
    KV_LEN: int,
    device_mesh: DeviceMesh,
    order: torch.Tensor | None,
) -> BlockMask:
    """The same, with (1 or B, S) the global position of each token, rank after rank; None for that of the sequence."""
    group = axis_group(device_mesh)
    world_size = group.size()
    if Q_LEN % (world_size * _BLOCK):
        raise NotImplementedError(
            f"block masks of shards are supported where every rank has whole blocks of {_BLOCK} queries; got "
            f"Q_LEN={Q_LEN} on {world_size} ranks"
        )
    if order is not None and KV_LEN != Q_LEN:
        raise ValueError(f"expected as many keys as queries in a reordered sequence, got {Q_LEN} and {KV_LEN}")
    device = device_mesh.device_type
    order = None if order is None else order.to(device)
    first = group.rank() * (Q_LEN // world_size)

    def of_shard(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        if order is None:
            return mask_mod(b, h, q_idx + first, kv_idx)
        row = b if order.size(0) > 1 else b * 0
        return mask_mod(b, h, order[row, q_idx + first], order[row, kv_idx])

    create = _compiled() if device == "cuda" else create_block_mask
    return create(of_shard, B, H, Q_LEN // world_size, KV_LEN, device=device, BLOCK_SIZE=(_BLOCK, _BLOCK))


def token_order(balancer: Any, mesh: DeviceMesh, length: int) -> torch.Tensor | None:
    """What `shard_block_mask` takes as `order`, for a load balancer; for None, the order that shards are in."""
    if balancer is not None:
        return balancer_indices(balancer, length)
    group = axis_group(mesh)
    layout = assumed_layout(group, length)
    return None if layout == Contiguous() else layout_positions(layout, length, group.size(), mesh.device_type)[None]


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., BlockMask]:
    # Uncompiled, every element of the mask takes a byte.
    return torch.compile(create_block_mask, dynamic=False, fullgraph=True)
