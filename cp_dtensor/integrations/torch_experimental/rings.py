"""Causal attention of DTensors whose shards are not in the order of the sequence.

A DTensor knows nothing of a load balancer: that its shards are reordered is what `_context_parallel_shard` noted.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_dtensor.api.functional import ring_attention
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.engine.validation import refuse_unsupported_sdpa
from cp_dtensor.integrations.torch_experimental.options import Mesh, _cp_options, assumed_layout, axis_group
from cp_dtensor.integrations.torch_experimental.ring_ops import (
    Part,
    Shipment,
    _SDPAMerger,
    as_aten_op,
    keys_and_values,
    part_of,
    refuse_different_shapes,
)
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout

# `_templated_ring_attention` and its backward: ring attention by an op that the program brings. Torch's own ops
# only say which backend is to compute: forward is `ring_attention`, tiles in backward are that backend's. Any other
# op is called as torch calls it: once for each rank's keys, the own ones first.


class _AttentionOp(Protocol):
    """An attention of local tensors that returns out, lse and whatever else."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: object
    ) -> tuple[torch.Tensor, ...]: ...


def _templated_ring_attention(
    group: Mesh,
    seq_dim: int,
    op: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool = False,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Attention of this rank's queries to the keys of all ranks, by `op`.

    Args:
        group: the context-parallel axis.
        seq_dim: the sequence dim. It matters for causal attention in head-tail order only, where it must be 2;
            otherwise whole tensors go to the op, and any number will do.
        op: `op(query, key, value, is_causal=..., **kwargs)` returns `(out, lse, ...)` of local tensors: lse is the
            natural log of the softmax denominator, out without its last dim, or with a last dim of 1. Or a fused SDPA
            op of torch's, which names the backend.
        query: (B, H, S, D), this rank's queries.
        key: (B, Hkv, T, D), this rank's keys, of equal shape on all ranks (checked where the group has a CPU backend).
        value: (B, Hkv, T, Dv), this rank's values.
        is_causal: by global position. The order of the tokens is that in which sequences of this length have been
            sharded; if none has, as `_cp_options.enable_load_balance` says.
        **kwargs: for the op.

    Returns:
        (out, lse, *what else the op's last call returned). With torch's ops, out is differentiable; with others,
        backward is refused.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: dropout; with torch's ops also masks; causal attention of different lengths.
    """
    group = axis_group(group)
    layout = _causal_layout(group, seq_dim, query, key) if is_causal else None
    aten_op = as_aten_op(op)
    if aten_op is not None:
        refuse_different_shapes([query, key, value], group)
        return aten_op.forward(group, layout, query, key, value, kwargs)
    refuse_unsupported_sdpa(None, kwargs.get("dropout_p") or 0.0)
    refuse_different_shapes([key, value], group)
    inputs = [tensor for tensor in (query, key, value) if tensor.requires_grad]
    with torch.no_grad():
        out, lse, *rest = _by_op(op, group, seq_dim, layout, query, key, value, kwargs)
    if inputs and torch.is_grad_enabled():
        out = _WithoutBackward.apply(out, *inputs)
    return (out, lse, *rest)


def _by_op(
    op: Any,
    group: dist.ProcessGroup,
    seq_dim: int,
    layout: Layout | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
) -> tuple[Any, ...]:
    merger = _SDPAMerger(_cp_options.convert_to_f32, seq_dim if layout is None else 2)
    rest: list[Any] = []
    length = query.size(2) * group.size()
    for source, source_key, source_value in keys_and_values(key, value, group):
        part = part_of(group.rank(), source, length, layout, group.size())
        if part is None:
            continue
        q, k, v = _rows(part, query), _columns(part, source_key), _columns(part, source_value)
        out, lse, *rest = op(q, k, v, is_causal=part.is_causal, **kwargs)
        merger.step(out, lse, part.first_query > 0)
    return (*merger.results(), *rest)


def _templated_ring_attention_backward(
    group: Mesh,
    seq_dim: int,
    op: Any,
    grad_out: torch.Tensor,
    grad_out_name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    **kwargs: Any,
) -> tuple[Any, ...]:
    """Gradients of what `_templated_ring_attention` computed.

    Args:
        group, seq_dim, query, key, value, is_causal: as there.
        op: returns `(dq, dk, dv, ...)` of local tensors, called by the names `query`, `key`, `value`, `out`,
            `logsumexp`, `is_causal`, the name in `grad_out_name`, and those in `kwargs`. Out and logsumexp are those
            over all keys. Or the backward of a fused SDPA op of torch's.
        grad_out: (B, H, S, Dv).
        grad_out_name: what `op` calls it.
        out, logsumexp: what `_templated_ring_attention` returned.
        **kwargs: for the op.

    Returns:
        (dq, dk, dv, *what else the op's last call returned), in the dtypes of query, key and value; sums over ranks
        are in float32 (float64 for float64).

    Raises:
        as `_templated_ring_attention`.
    """
    group = axis_group(group)
    rank, world_size = group.rank(), group.size()
    layout = _causal_layout(group, seq_dim, query, key) if is_causal else None
    aten_op = as_aten_op(op)
    if aten_op is not None:
        refuse_different_shapes([query, key, value], group)
        return aten_op.backward(group, layout, grad_out, query, key, value, out, logsumexp, kwargs)
    refuse_unsupported_sdpa(None, kwargs.get("dropout_p") or 0.0)
    refuse_different_shapes([key, value], group)
    length = query.size(2) * world_size
    sum_dtype = torch.promote_types(query.dtype, torch.float32)
    grad_q, grad_k, grad_v = (torch.zeros_like(x, dtype=sum_dtype) for x in (query, key, value))
    coming_home: list[Shipment] = []
    rest: list[Any] = []
    with torch.no_grad():
        for hop, (source, source_key, source_value) in enumerate(keys_and_values(key, value, group)):
            part = part_of(rank, source, length, layout, world_size)
            contribution: list[torch.Tensor] = []
            if part is not None:
                rows = {"query": query, "out": out, grad_out_name: grad_out}
                part_q, *grads = op(
                    **{name: _rows(part, tensor) for name, tensor in rows.items()},
                    key=_columns(part, source_key),
                    value=_columns(part, source_value),
                    logsumexp=_rows(part, logsumexp).contiguous(),
                    is_causal=part.is_causal,
                    **kwargs,
                )
                contribution, rest = [grad.to(sum_dtype) for grad in grads[:2]], grads[2:]
                grad_q.narrow(2, part.first_query, part_q.size(2)).add_(part_q)
            if hop == 0:
                _add_columns((grad_k, grad_v), contribution)
                continue
            reader = (rank + hop) % world_size
            theirs = part_of(reader, rank, length, layout, world_size)
            like = [] if theirs is None else [_columns(theirs, grad_k), _columns(theirs, grad_v)]
            coming_home.append(
                Shipment(
                    contribution, source if contribution else None, like or [grad_k], reader if like else None, group
                )
            )
        for shipment in coming_home:
            _add_columns((grad_k, grad_v), shipment.arrived())
    return grad_q.to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype), *rest


def _causal_layout(group: dist.ProcessGroup, seq_dim: int, query: torch.Tensor, key: torch.Tensor) -> Layout:
    if query.size(2) != key.size(2):
        raise NotImplementedError(
            f"causal ring attention expects as many queries as keys on each rank, got {query.size(2)} and {key.size(2)}"
        )
    length = query.size(2) * group.size()
    layout = assumed_layout(group, length)
    if layout == HeadTail() and group.size() > 1 and seq_dim % query.dim() != 2:
        raise NotImplementedError(
            f"causal attention in head-tail order expects the sequence in dim 2, got seq_dim={seq_dim}; set "
            "_cp_options.enable_load_balance = False if the ranks' shards are contiguous"
        )
    return layout


def _rows(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.narrow(2, part.first_query, tensor.size(2) - part.first_query) if part.first_query else tensor


def _columns(part: Part, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if part.keys is None else tensor.narrow(2, 0, part.keys)


def _add_columns(totals: tuple[torch.Tensor, ...], grads: list[torch.Tensor]) -> None:
    for total, grad in zip(totals, grads, strict=False):
        total.narrow(2, 0, grad.size(2)).add_(grad)


class _WithoutBackward(torch.autograd.Function):
    """Out of an op of which nobody has said how to differentiate it around the ring."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            "_templated_ring_attention cannot be differentiated with an op of the program's own: call it in the "
            "forward of a torch.autograd.Function, and _templated_ring_attention_backward in its backward"
        )


# Keys and values of one rank after the other, for attention ops that programs bring themselves.


# `_SDPAMerger`: attention results over parts of the keys, merged one after the other.


# Torch's fused SDPA ops, as names of backends and forms of results.


# Notices that a program has replaced parts of torch's ring: they are here for who calls them, and no context does.


_PARTS: dict[str, object] = {
    "_SDPAMerger": _SDPAMerger,
    "_templated_ring_attention": _templated_ring_attention,
    "_templated_ring_attention_backward": _templated_ring_attention_backward,
}
_METHODS = dict(vars(_SDPAMerger))


class _Watched:
    """The modules in which a program finds our names."""

    def __init__(self) -> None:
        self.redirected: list[ModuleType] = []

    def modules(self) -> list[ModuleType]:
        ours = sys.modules.get(__package__ or "")
        return [*self.redirected, *([] if ours is None else [ours])]


watched = _Watched()


def refuse_patched_rings() -> None:
    """Refuses to compute attention that would leave out what a program has put in.

    Raises:
        NotImplementedError: names what has been replaced.
    """
    replaced = [
        f"{module.__name__}.{name}"
        for module in watched.modules()
        for name, ours in _PARTS.items()
        if vars(module).get(name, ours) is not ours
    ]
    replaced += [f"_SDPAMerger.{name}" for name in ("step", "results") if vars(_SDPAMerger)[name] is not _METHODS[name]]
    if replaced:
        raise NotImplementedError(
            f"{', '.join(replaced)} have been replaced, which would have no effect: attention in contexts and modules "
            "does not call them. Call _templated_ring_attention with an op of your own, or stay with torch's "
            "context parallel for this model"
        )


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
