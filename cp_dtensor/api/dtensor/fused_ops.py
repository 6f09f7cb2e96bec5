"""DTensor handlers and sharding strategies of torch's fused SDPA ops: ring attention of sequence shards.

`F.scaled_dot_product_attention` on DTensors is intercepted above autograd (`dtensor_sdpa`). These handlers serve code
that calls the ops directly, or that runs below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_dtensor import _torch
from cp_dtensor.api.dtensor.attention import from_local, placed_partition
from cp_dtensor.api.dtensor.placements import BATCH_DIM, HEAD_DIM, SEQ_DIM, AttentionPlacements, is_seq_sharded, on_seq
from cp_dtensor.api.interception import intercepted_sdpa
from cp_dtensor.attention.backends.select import backend_by_name
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.autograd import BoundCall
from cp_dtensor.engine.config import checked_mask, refuse_unsupported_sdpa, softmax_scale
from cp_dtensor.engine.planner import call_spec, plan_ring
from cp_dtensor.plan.tiling import Masking

aten = torch.ops.aten
Arguments = dict[str, Any]


def sdpa_handler(_op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler of `scaled_dot_product_attention` itself, which reaches DTensor in inference mode."""
    return intercepted_sdpa(*args, **kwargs)


def fused_forward_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler of a fused forward op. Returns its outputs; out and LSE (B, H, S) are DTensors placed as the query."""
    bound = _torch.bound_arguments(op, args, kwargs)
    _refuse_masks(op, bound)
    info, specs = _torch.propagated(op, args, kwargs)
    if not is_seq_sharded(*(spec.placements for spec in specs[:3])):
        return _torch.run_locally(op, info)
    q, k, v = info.local_args[:3]
    call, placed = _bound_call(op, bound, specs[0], specs[1], q, k, v)
    out, lse, _ = call.plan.forward(q, k, v, NO_MODIFIERS, True, call.ranks, call.scale)
    mesh, shape = specs[0].mesh, bound["query"].shape
    wrapped_lse = from_local(lse, mesh, placed.q, tuple(shape[:3]))
    wrapped_out = from_local(out, mesh, placed.q, (*shape[:3], bound["value"].size(3)))
    return _FORWARD_OUTPUTS[op](wrapped_out, wrapped_lse, shape[2], bound["key"].size(2))


def fused_backward_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handler of a fused backward op. Gradients are placed as inputs; Partial for keys of several ranks' queries."""
    bound = _torch.bound_arguments(op, args, kwargs)
    _refuse_masks(op, bound)
    info, specs = _torch.propagated(op, args, kwargs)
    if not is_seq_sharded(*(spec.placements for spec in specs[:4])):
        return _torch.run_locally(op, info)
    grad_out, q, k, v = info.local_args[:4]
    local = _torch.bound_arguments(op, info.local_args, info.local_kwargs)
    out, lse = local["out"], local["logsumexp"]
    call, placed = _bound_call(op, bound, specs[1], specs[2], q, k, v)
    lse = lse.reshape(lse.shape[:3])[:, :, : q.size(2)]
    grads = call.plan.backward(grad_out, NO_MODIFIERS, (q, k, v, out, lse), None, call.ranks, call.scale)
    wrapped = tuple(
        from_local(grad, specs[0].mesh, placements, tuple(bound[name].shape))
        for grad, placements, name in zip(
            grads, (placed.q, placed.grad_kv, placed.grad_kv), ("query", "key", "value"), strict=True
        )
    )
    return (*wrapped, None) if len(BACKWARD_OPS[op].outputs) == 4 else wrapped


def _bound_call(
    op: Any, bound: Arguments, q_spec: Any, k_spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[BoundCall, AttentionPlacements]:
    """The call on local shards, and the placements in which it computes."""
    refuse_unsupported_sdpa(None, bound["dropout_p"])
    if bound.get("return_debug_mask"):
        raise NotImplementedError(f"{op}: return_debug_mask is not supported on sequence-sharded inputs")
    placed = _placements(q_spec.placements, k_spec.placements)
    backend = backend_by_name((FORWARD_OPS | BACKWARD_OPS)[op].backend, q.device.type)
    scale = softmax_scale(q, bound["scale"])
    if scale <= 0:
        raise NotImplementedError(f"{op}: expected scale > 0, got {scale}; use F.scaled_dot_product_attention")
    mesh, lengths = q_spec.mesh, (bound["query"].size(2), bound["key"].size(2))
    mask = checked_mask(None, bound["is_causal"])
    # Tiles are masked by shape, whatever SDPA would choose: the op is called by the name of its backend.
    partition = placed_partition(*lengths, q.size(0), placed, mesh)
    spec = call_spec(partition, mask, q.shape, k.shape, v.shape, q.dtype, q.device, masking=Masking.BY_SHAPE)
    # Strategies shard keys and values over one axis at most.
    ranks = SequenceRanks(mesh.get_group(placed.ring_axis or 0))
    group, rank = (None, 0) if placed.ring_axis is None else (ranks.outer, ranks.rank)
    return BoundCall(plan_ring(spec, transport_by_name(None), backend, group, rank), ranks, scale), placed


def _refuse_masks(op: Any, bound: Arguments) -> None:
    """Refuses masks of sequence shards, and every mask of the CPU op, for which torch has no rule."""
    inputs = [bound[name] for name in ("query", "key", "value")]
    if is_seq_sharded(*(tensor.placements for tensor in inputs if isinstance(tensor, DTensor))):
        refuse_unsupported_sdpa(bound.get("attn_mask", bound.get("attn_bias")), 0.0)
    if bound.get("attn_mask") is not None:
        raise NotImplementedError(f"{op}: attn_mask is not supported on DTensors; use F.scaled_dot_product_attention")


def _placements(q: tuple[Placement, ...], kv: tuple[Placement, ...]) -> AttentionPlacements:
    """The placements that a strategy has chosen, from those of q and k."""
    kv_on_seq = list(map(on_seq, kv))
    grad_kv = tuple(
        Partial() if isinstance(on_kv, Replicate) and isinstance(on_q, Shard) else on_kv
        for on_q, on_kv in zip(q, kv, strict=True)
    )
    return AttentionPlacements(q, kv, grad_kv, kv_on_seq.index(True) if any(kv_on_seq) else None)


def _flash_outputs(out: DTensor, lse: DTensor, q_len: int, kv_len: int) -> tuple[Any, ...]:
    mesh, replicated = out.device_mesh, (Replicate(),) * out.device_mesh.ndim
    rng_state = torch.zeros(2, dtype=torch.uint64, device=out.to_local().device)
    debug_mask = torch.empty(0, dtype=out.dtype, device=rng_state.device)
    return (
        out, lse, None, None, q_len, kv_len,
        from_local(rng_state, mesh, replicated, (2,)), rng_state.new_zeros(()),
        from_local(debug_mask, mesh, replicated, (0,)),
    )  # fmt: skip


def _rng_state(out: DTensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=out.to_local().device)


_FORWARD_OUTPUTS: dict[Any, Callable[[DTensor, DTensor, int, int], tuple[Any, ...]]] = {
    aten._scaled_dot_product_flash_attention.default: _flash_outputs,
    aten._scaled_dot_product_efficient_attention.default: lambda out, lse, q_len, kv_len: (
        out, lse, _rng_state(out), _rng_state(out),
    ),
    aten._scaled_dot_product_cudnn_attention.default: lambda out, lse, q_len, kv_len: (
        out, lse, None, None, q_len, kv_len, _rng_state(out), _rng_state(out), None,
    ),
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda out, lse, q_len, kv_len: (out, lse),
}  # fmt: skip


# Sharding strategies

# Roles of the tensors of an op: query-like (B, H, S, ...), key-like (B, Hkv, T, ...), gradient of a key-like one, equal
# on every rank, no tensor.
Q, KV, GRAD_KV, SAME, NONE = "q", "kv", "grad_kv", "same", "none"


class FusedOp(NamedTuple):
    """A fused SDPA op: its backend, and the roles of its outputs and tensor inputs."""

    backend: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...] = (Q, KV, KV)


def _backward(backend: str, *more_outputs: str) -> FusedOp:
    return FusedOp(backend, (Q, GRAD_KV, GRAD_KV, *more_outputs), (Q, Q, KV, KV, Q, Q))


_FLASH, _EFFICIENT, _CUDNN = "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"
FORWARD_OPS: dict[Any, FusedOp] = {
    aten._scaled_dot_product_flash_attention.default: FusedOp(_FLASH, (Q, Q, *[NONE] * 4, SAME, NONE, SAME)),
    aten._scaled_dot_product_efficient_attention.default: FusedOp(_EFFICIENT, (Q, Q, NONE, NONE)),
    aten._scaled_dot_product_cudnn_attention.default: FusedOp(_CUDNN, (Q, Q, *[NONE] * 7)),
    aten._scaled_dot_product_flash_attention_for_cpu.default: FusedOp(_FLASH, (Q, Q)),
}
BACKWARD_OPS: dict[Any, FusedOp] = {
    aten._scaled_dot_product_flash_attention_backward.default: _backward(_FLASH),
    aten._scaled_dot_product_efficient_attention_backward.default: _backward(_EFFICIENT, NONE),
    aten._scaled_dot_product_cudnn_attention_backward.default: _backward(_CUDNN),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _backward(_FLASH),
}

Strategy = Callable[[Any], Any]


def with_sequence_sharding(op: Any) -> Callable[[Strategy | None], Strategy]:
    """Returns a function that makes the new strategy of `op` from torch's (None if torch has none)."""
    _, outputs, inputs = (FORWARD_OPS | BACKWARD_OPS)[op]
    first_kv = inputs.index(KV)

    def make(original: Strategy | None) -> Strategy:
        def strategy(op_schema: Any) -> Any:
            tensors = _torch.tensor_inputs(op_schema)
            if original is not None and not is_seq_sharded(*(placements for placements, _ in tensors)):
                return original(op_schema)
            q_heads, kv_heads = (tensors[index][1][HEAD_DIM] for index in (inputs.index(Q), first_kv))
            roles = (*outputs, *inputs, *([SAME] * (len(tensors) - len(inputs))))
            return _torch.expand_strategies(
                op_schema,
                _one_axis_strategies(roles, q_heads, kv_heads, _torch.mesh_of(op_schema).size()),
                len(outputs),
                lambda placements: sum(map(on_seq, placements[first_kv])) <= 1,  # K/V travel around one axis
            )

        return strategy

    return make


def _one_axis_strategies(
    roles: Sequence[str], q_heads: int, kv_heads: int, mesh_size: int
) -> list[list[Placement | None]]:
    """Placements on one mesh axis: replicated, or sharded by batch, sequence (of all, or of queries), or heads."""
    shardings: list[tuple[Placement, Placement, Placement]] = [
        (Replicate(), Replicate(), Replicate()),
        (Shard(BATCH_DIM), Shard(BATCH_DIM), Shard(BATCH_DIM)),
        (Shard(SEQ_DIM), Shard(SEQ_DIM), Shard(SEQ_DIM)),
        (Shard(SEQ_DIM), Replicate(), Partial()),
    ]
    if q_heads == kv_heads or (q_heads % mesh_size == 0 and kv_heads % mesh_size == 0):
        shardings.append((Shard(HEAD_DIM), Shard(HEAD_DIM), Shard(HEAD_DIM)))
    return [
        [{Q: q, KV: kv, GRAD_KV: grad_kv, SAME: Replicate(), NONE: None}[role] for role in roles]
        for q, kv, grad_kv in shardings
    ]
