"""Causal attention of DTensors whose shards are not in the order of the sequence.

A DTensor knows nothing of a load balancer: that its shards are reordered is what `_context_parallel_shard` noted.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_dtensor.functional import ring_attention
from cp_dtensor.integrations.torch_experimental.options import _cp_options
from cp_dtensor.interception import SdpaArguments
from cp_dtensor.layouts import Contiguous
from cp_dtensor.mask_arguments import refuse_unsupported_sdpa

_SEQUENCE = Shard(2)


def reordered_dtensor_sdpa(call: SdpaArguments) -> torch.Tensor | None:
    """Ring attention of reordered shards; None for everything that does not depend on an order.

    Raises:
        NotImplementedError: an order that no layout describes; placements that are not alike, or more than one axis
            over the sequence.
    """
    tensors = [tensor for tensor in (call.q, call.k, call.v) if isinstance(tensor, DTensor)]
    if not call.is_causal or not tensors or any(tensor.dim() != 4 for tensor in (call.q, call.k, call.v)):
        return None
    reordered = []
    for tensor in tensors:
        for axis, placement in enumerate(tensor.placements):
            if placement == _SEQUENCE and tensor.device_mesh.size(axis) > 1:
                orders = _cp_options.orders.of_length(tensor.device_mesh.get_group(axis), tensor.size(2))
                reordered += [(axis, orders[-1])] if orders and orders[-1] != Contiguous() else []
    if not reordered:
        return None
    q, k, v = call.q, call.k, call.v
    axis, layout = reordered[0]
    if layout is None:
        raise NotImplementedError(
            "causal attention in this load balancer's order is not supported yet: shard with a _HeadTailLoadBalancer "
            "or with none"
        )
    if not (
        len(tensors) == 3
        and all(isinstance(x, DTensor) and x.device_mesh == tensors[0].device_mesh for x in (q, k, v))
        and all(x.placements == tensors[0].placements for x in tensors)
        and q.size(2) == k.size(2)
        and all(
            isinstance(p, (Replicate, Shard)) and (p != _SEQUENCE or place == axis)
            for place, p in enumerate(tensors[0].placements)
        )
    ):
        raise NotImplementedError(
            f"causal attention of shards in {layout} order expects q, k and v of one length, placed alike on one mesh, "
            f"sharded over the sequence on one axis; got "
            + ", ".join(
                f"{name} {tuple(x.shape)} {x.placements if isinstance(x, DTensor) else 'torch.Tensor'}"
                for name, x in zip("qkv", (q, k, v), strict=True)
            )
        )
    refuse_unsupported_sdpa(call.attn_mask, call.dropout_p)
    first = tensors[0]
    local = [tensor.to_local() for tensor in tensors]
    out = ring_attention(
        local[0],
        local[1],
        local[2],
        mesh=first.device_mesh.get_group(axis),
        is_causal=True,
        scale=call.scale,
        enable_gqa=call.enable_gqa,
        layout=layout,
        seq_len=first.size(2),
    )
    assert isinstance(out, torch.Tensor)
    return DTensor.from_local(out, first.device_mesh, first.placements, run_check=False)
