"""What DTensor does for torch's fused SDPA ops: ring attention where the strategies shard the sequence.

`F.scaled_dot_product_attention` on DTensors is caught one level higher (`dtensor_sdpa`), where a call's settings can
live in its autograd node. These handlers serve code that calls the ops themselves, or that runs below autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_dtensor import _torch_private
from cp_dtensor.dtensor.attention import dtensor_sdpa, from_local, plan_dtensor_call
from cp_dtensor.dtensor.placements import AttentionPlacements, is_seq_sharded, on_seq
from cp_dtensor.dtensor.strategies import BACKWARD_OPS
from cp_dtensor.interception import SdpaArguments
from cp_dtensor.local_attention.policy import backend_by_name
from cp_dtensor.mask_arguments import refuse_unsupported_sdpa
from cp_dtensor.ring import RingCall, ring_backward, ring_forward
from cp_dtensor.shard_attention import softmax_scale

aten = torch.ops.aten
Arguments = dict[str, Any]

_BACKEND_NAMES = {
    aten._scaled_dot_product_flash_attention.default: "FLASH_ATTENTION",
    aten._scaled_dot_product_flash_attention_backward.default: "FLASH_ATTENTION",
    aten._scaled_dot_product_efficient_attention.default: "EFFICIENT_ATTENTION",
    aten._scaled_dot_product_efficient_attention_backward.default: "EFFICIENT_ATTENTION",
    aten._scaled_dot_product_cudnn_attention.default: "CUDNN_ATTENTION",
    aten._scaled_dot_product_cudnn_attention_backward.default: "CUDNN_ATTENTION",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "FLASH_ATTENTION",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "FLASH_ATTENTION",
}


def sdpa_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`scaled_dot_product_attention` itself, which reaches DTensor in inference mode."""
    call = _torch_private.bound_arguments(op, args, kwargs)
    call["q"], call["k"], call["v"] = call.pop("query"), call.pop("key"), call.pop("value")
    result = dtensor_sdpa(SdpaArguments(**call))
    return _torch_private.original_sdpa(*args, **kwargs) if result is None else result


def fused_forward_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused forward op: its tuple of outputs, with DTensor output and LSE (B, H, S) placed as the query."""
    bound = _torch_private.bound_arguments(op, args, kwargs)
    _refuse_masks(op, bound)
    info, specs = _torch_private.propagated(op, args, kwargs)
    if not is_seq_sharded(*(spec.placements for spec in specs[:3])):
        return _torch_private.run_locally(op, info)
    q, k, v = info.local_args[:3]
    call, plan = _plan(op, bound, specs[0], specs[1], q, k, v)
    out, lse = ring_forward(q, k, v, call)
    mesh, shape = specs[0].mesh, bound["query"].shape
    wrapped_lse = from_local(lse, mesh, plan.q, tuple(shape[:3]))
    wrapped_out = from_local(out, mesh, plan.q, (*shape[:3], bound["value"].size(3)))
    return _FORWARD_OUTPUTS[op](wrapped_out, wrapped_lse, shape[2], bound["key"].size(2))


def fused_backward_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused backward op: gradients placed as their inputs, Partial for keys that meet queries of several ranks."""
    bound = _torch_private.bound_arguments(op, args, kwargs)
    _refuse_masks(op, bound)
    info, specs = _torch_private.propagated(op, args, kwargs)
    if not is_seq_sharded(*(spec.placements for spec in specs[:4])):
        return _torch_private.run_locally(op, info)
    grad_out, q, k, v = info.local_args[:4]
    local = _torch_private.bound_arguments(op, info.local_args, info.local_kwargs)
    out, lse = local["out"], local["logsumexp"]
    call, plan = _plan(op, bound, specs[1], specs[2], q, k, v)
    lse = lse.reshape(lse.shape[:3])[:, :, : q.size(2)]
    grads = ring_backward(grad_out, q, k, v, out, lse, call)
    wrapped = tuple(
        from_local(grad, specs[0].mesh, placements, tuple(bound[name].shape))
        for grad, placements, name in zip(
            grads, (plan.q, plan.grad_kv, plan.grad_kv), ("query", "key", "value"), strict=True
        )
    )
    return (*wrapped, None) if len(BACKWARD_OPS[op][0]) == 4 else wrapped


def _plan(
    op: Any, bound: Arguments, q_spec: Any, k_spec: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[RingCall, AttentionPlacements]:
    refuse_unsupported_sdpa(None, bound["dropout_p"])
    if bound.get("return_debug_mask"):
        raise NotImplementedError(f"{op}: return_debug_mask is not supported on sequence-sharded inputs")
    plan = _placements(q_spec.placements, k_spec.placements)
    backend = backend_by_name(_BACKEND_NAMES[op], q.device.type)
    scale = softmax_scale(q, bound["scale"])
    if scale <= 0:
        raise NotImplementedError(f"{op}: expected scale > 0, got {scale}; use F.scaled_dot_product_attention")
    lengths = (bound["query"].size(2), bound["key"].size(2))
    call = plan_dtensor_call(q, k, v, *lengths, q_spec.mesh, plan, bound["is_causal"], scale, backend)
    assert isinstance(call, RingCall)  # strategies shard keys and values over one axis only
    return call, plan


def _refuse_masks(op: Any, bound: Arguments) -> None:
    """Refuses masks where ours would be the rule for them: along the sequence, and of the CPU op altogether."""
    inputs = [bound[name] for name in ("query", "key", "value")]
    if is_seq_sharded(*(tensor.placements for tensor in inputs if isinstance(tensor, DTensor))):
        refuse_unsupported_sdpa(bound.get("attn_mask", bound.get("attn_bias")), 0.0)
    if bound.get("attn_mask") is not None:
        raise NotImplementedError(f"{op}: attn_mask is not supported on DTensors; use F.scaled_dot_product_attention")


def _placements(q: tuple[Placement, ...], kv: tuple[Placement, ...]) -> AttentionPlacements:
    """The plan that a strategy has chosen, read off the placements of q and k."""
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


def _efficient_outputs(out: DTensor, lse: DTensor, q_len: int, kv_len: int) -> tuple[Any, ...]:
    state = torch.zeros((), dtype=torch.int64, device=out.to_local().device)
    return out, lse, state, state


def _cudnn_outputs(out: DTensor, lse: DTensor, q_len: int, kv_len: int) -> tuple[Any, ...]:
    state = torch.zeros((), dtype=torch.int64, device=out.to_local().device)
    return out, lse, None, None, q_len, kv_len, state, state, None


_FORWARD_OUTPUTS: dict[Any, Callable[[DTensor, DTensor, int, int], tuple[Any, ...]]] = {
    aten._scaled_dot_product_flash_attention.default: _flash_outputs,
    aten._scaled_dot_product_efficient_attention.default: _efficient_outputs,
    aten._scaled_dot_product_cudnn_attention.default: _cudnn_outputs,
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda out, lse, q_len, kv_len: (out, lse),
}
