"""`_templated_ring_attention` and its backward: ring attention by an op that the program brings.

Torch's own ops only say which backend is to compute: forward is `ring_attention`, tiles in backward are that backend's.
Any other op is called as torch calls it: once for each rank's keys, the own ones first.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist

from cp_dtensor.integrations.torch_experimental.aten_ops import as_aten_op
from cp_dtensor.integrations.torch_experimental.merger import _SDPAMerger
from cp_dtensor.integrations.torch_experimental.options import Mesh, _cp_options, assumed_layout, axis_group
from cp_dtensor.integrations.torch_experimental.shard_ring import (
    Part,
    Shipment,
    keys_and_values,
    part_of,
    refuse_different_shapes,
)
from cp_dtensor.layouts import HeadTail, Layout
from cp_dtensor.mask_arguments import refuse_unsupported_sdpa


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
