"""Biases and dropout of attention on DTensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_dtensor import _torch_private
from cp_dtensor.dtensor.placements import BATCH_DIM, HEAD_DIM, AttentionPlacements, local_segment
from cp_dtensor.extras import NO_EXTRAS, Extras
from cp_dtensor.mask_arguments import check_bias, checked_dropout_p, four_dims_of_mask


def local_extras(
    q: DTensor, kv_len: int, attn_mask: torch.Tensor | None, dropout_p: float, plan: AttentionPlacements
) -> Extras:
    """What a rank's queries have besides the mask by positions. With dropout, a collective of the whole mesh.

    Args:
        q: (B, H, S, D).
        kv_len: keys of the whole sequence.
        attn_mask: a DTensor on the same mesh that broadcasts to (B, H, S, kv_len), placed in any way.
        dropout_p: the pattern is that of all batch rows, heads and positions together, however they are placed.
        plan: where the computation is placed.

    Raises:
        ValueError, TypeError: a mask that does not fit, or is no DTensor on the mesh of q.
    """
    dropout_p = checked_dropout_p(dropout_p)
    if attn_mask is None and not dropout_p:
        return NO_EXTRAS
    bias = None if attn_mask is None else local_bias(q, attn_mask, plan)
    check_bias(q, bias, (q.size(2), kv_len))
    if not dropout_p:
        return Extras(bias)
    return Extras(bias, dropout_p, _seed_of_all(q.to_local(), q.device_mesh), *first_of(q, plan))


def _seed_of_all(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The first rank's: ranks that hold the same must drop the same."""
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device=local.device)
    for axis in range(mesh.ndim):
        if _torch_private.is_traced(local):
            seed = _torch_private.traced_broadcast(seed, mesh.get_group(axis))
        else:
            dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    return seed


def first_of(q: DTensor, plan: AttentionPlacements) -> tuple[int, int]:
    """Where a rank's batch rows and query heads begin."""
    coordinate = q.device_mesh.get_coordinate()
    assert coordinate is not None
    batch, head = (
        local_segment(q.size(dim), plan.q, tuple(q.device_mesh.shape), coordinate, dim).start
        for dim in (BATCH_DIM, HEAD_DIM)
    )
    return batch, head


def local_bias(q: DTensor, attn_mask: torch.Tensor, plan: AttentionPlacements) -> torch.Tensor:
    """The part of an attn_mask that a rank's queries have, (B or 1, H or 1, S or 1, key positions or 1).

    Raises:
        ValueError, TypeError: a mask that does not fit, or is no DTensor on the mesh of q.
    """
    if not isinstance(attn_mask, DTensor) or attn_mask.device_mesh != q.device_mesh:
        kind = f"a DTensor on {attn_mask.device_mesh}" if isinstance(attn_mask, DTensor) else type(attn_mask).__name__
        raise ValueError(
            f"expected attn_mask to be a DTensor on the mesh of q, {q.device_mesh}, got {kind}; "
            "distribute_tensor(attn_mask, mesh, [Replicate()] * mesh.ndim) makes one"
        )
    mask = four_dims_of_mask(attn_mask, q)
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in plan.q:
        goes_along = isinstance(placement, Shard) and mask.size(placement.dim) > 1
        placements.append(placement if goes_along else Replicate())
        is_partial = isinstance(placement, Shard) and not goes_along
        of_gradient.append(Partial() if is_partial else placements[-1])
    assert isinstance(mask, DTensor)
    return mask.redistribute(placements=placements).to_local(grad_placements=of_gradient)
