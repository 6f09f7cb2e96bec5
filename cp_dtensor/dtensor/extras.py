"""Biases and dropout of attention on DTensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
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
        NotImplementedError: dropout in a program that is being captured.
    """
    dropout_p = checked_dropout_p(dropout_p)
    if attn_mask is None and not dropout_p:
        return NO_EXTRAS
    bias = None if attn_mask is None else _local_bias(q, kv_len, attn_mask, plan)
    if not dropout_p:
        return Extras(bias)
    if _torch_private.is_traced(q.to_local()):
        raise NotImplementedError(
            f"dropout_p={dropout_p} on DTensors that are sharded along the sequence cannot be compiled: use plain "
            "shards in a context_parallel region, or 0.0"
        )
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device=q.to_local().device)
    mesh = q.device_mesh
    for axis in range(mesh.ndim):  # ranks that hold the same must drop the same
        dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    first_batch, first_head = (
        local_segment(q.size(dim), plan.q, tuple(mesh.shape), coordinate, dim).start for dim in (BATCH_DIM, HEAD_DIM)
    )
    return Extras(bias, dropout_p, seed, first_batch, first_head)


def _local_bias(q: DTensor, kv_len: int, attn_mask: torch.Tensor, plan: AttentionPlacements) -> torch.Tensor:
    if not isinstance(attn_mask, DTensor) or attn_mask.device_mesh != q.device_mesh:
        kind = f"a DTensor on {attn_mask.device_mesh}" if isinstance(attn_mask, DTensor) else type(attn_mask).__name__
        raise ValueError(
            f"expected attn_mask to be a DTensor on the mesh of q, {q.device_mesh}, got {kind}; "
            "distribute_tensor(attn_mask, mesh, [Replicate()] * mesh.ndim) makes one"
        )
    mask = four_dims_of_mask(attn_mask, q)
    check_bias(q, mask, kv_len)
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in plan.q:
        goes_along = isinstance(placement, Shard) and mask.size(placement.dim) > 1
        placements.append(placement if goes_along else Replicate())
        is_partial = isinstance(placement, Shard) and not goes_along
        of_gradient.append(Partial() if is_partial else placements[-1])
    assert isinstance(mask, DTensor)
    return mask.redistribute(placements=placements).to_local(grad_placements=of_gradient)
