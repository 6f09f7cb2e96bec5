"""Process-wide switch of SDPA, and of torch's fused SDPA ops, of DTensors that are sharded along the sequence.

`F.scaled_dot_product_attention` on DTensors is intercepted above autograd (`dtensor_sdpa`). Op handlers of DTensor
serve code that calls the fused ops by name, or that runs below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import no_autocast
from cp_dtensor.api.dtensor_attention import (
    dtensor_sdpa,
    from_local,
    is_seq_sharded,
    on_one_mesh,
    placed_call,
    to_local,
)
from cp_dtensor.api.interception import (
    SharedInstallation,
    intercepted,
    intercepted_sdpa,
    refuse_torchs_context_parallel,
)
from cp_dtensor.attention.backends.select import only_backend
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.arguments import check_qkv, refuse_beside, refuse_unsupported_sdpa
from cp_dtensor.engine.call import checked_mask, softmax_scale
from cp_dtensor.engine.contexts import innermost
from cp_dtensor.engine.planner import planned
from cp_dtensor.engine.run import run, run_backward

aten = torch.ops.aten

# Torch's fused SDPA ops


def _fused_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a fused op of DTensors. `out`, LSE (B, H, S) and the gradient of the query are placed as the query.

    Gradients of keys and values are placed as these; Partial where ranks with different queries hold the same keys.
    """
    # A redistribution below autograd calls detach_ on a result that requires grad, and torch 2.11 has no rule for that.
    bound = _torch.bound_arguments(op, args, kwargs)
    arguments: dict[str, Any] = {
        name: value.detach() if isinstance(value, DTensor) else value for name, value in bound.items()
    }
    backend, outputs = _FUSED_OPS[op]
    inputs = [arguments[name] for name in ("query", "key", "value")]
    on_seq = is_seq_sharded(*(x.placements for x in inputs if isinstance(x, DTensor)))
    attn_mask = arguments.get("attn_mask", arguments.get("attn_bias"))
    if not on_seq and inputs[0].device.type != "cpu":
        return _torch.dispatched_by_default(op, args, kwargs)
    if not on_seq and attn_mask is not None:
        raise NotImplementedError(f"{op}: attn_mask is not supported on DTensors; use F.scaled_dot_product_attention")
    q, k, v = on_one_mesh(*inputs)
    check_qkv(q, k, v, enable_gqa=True)
    scale, is_causal = softmax_scale(q.size(3), arguments["scale"]), arguments["is_causal"]
    if on_seq:
        refuse_unsupported_sdpa(attn_mask, arguments["dropout_p"])
        if arguments.get("return_debug_mask"):
            raise NotImplementedError(f"{op}: return_debug_mask is not supported on sequence-sharded inputs")
        if scale <= 0:
            raise NotImplementedError(f"{op}: expected scale > 0, got {scale}; use F.scaled_dot_product_attention")
        context = innermost() if callable(outputs) else None
        if context is not None:
            changed = [name for name, value in context.call.of_dtensors.items() if value not in (None, False)]
            refuse_beside((*changed, *context.beside), f"{op} on DTensors")
    with torch.no_grad(), no_autocast(q):
        local = placed_call(q, k, v, checked_mask(None, is_causal), scale=scale)
        call = replace(local.call, backends=only_backend(backend))
        qkv = local.t[:3]
        if callable(outputs):
            if on_seq:
                out, lse, _, _ = run(call, local.t, True)
            else:  # on a CPU, where torch has no rule for the op
                out, lse = op(*qkv, arguments["dropout_p"], is_causal, scale=scale)
            return outputs(local.wrapped(out, q), local.wrapped(lse, q), q.size(2), k.size(2))
        of_queries = (next(iter(arguments.values())), arguments["out"], arguments["logsumexp"])
        grad_out, out, lse = (to_local(x, local.placed.q) for x in of_queries)
        if on_seq:
            lse = lse.reshape(lse.shape[:3])[:, :, : local.t.q.size(2)].contiguous()
            grads = run_backward(planned(call, local.t), local.t, (), grad_out, (out, lse))[:3]
        else:
            grads = op(grad_out, *qkv, out, lse, arguments["dropout_p"], is_causal, scale=scale)
    placements = (local.placed.q, local.placed.grad_kv, local.placed.grad_kv)
    shapes = (tuple(x.shape) for x in (q, k, v))
    wrapped = (from_local(*each) for each in zip(grads, [q.device_mesh] * 3, placements, shapes, strict=True))
    return (*wrapped, *outputs)


def _outputs(name: str, out: DTensor, lse: DTensor, q_len: int, kv_len: int) -> tuple[Any, ...]:
    """Return the outputs of a forward op; random states are those of a call without dropout."""
    if name == "cpu":
        return out, lse
    shape, dtype = ((2,), torch.uint64) if name == "flash" else ((), torch.int64)
    state = torch.zeros(shape, dtype=dtype, device=out.device)
    lengths = () if name == "efficient" else (None, None, q_len, kv_len)
    debug_mask = {"efficient": (), "cudnn": (None,)}.get(name, (torch.empty(0, dtype=out.dtype, device=out.device),))
    return out, lse, *lengths, state, state.new_zeros(()), *debug_mask


_FUSED_OPS: dict[Any, tuple[str, Callable[..., tuple[Any, ...]] | tuple[None, ...]]] = {
    aten._scaled_dot_product_flash_attention.default: ("FLASH_ATTENTION", partial(_outputs, "flash")),
    aten._scaled_dot_product_flash_attention_backward.default: ("FLASH_ATTENTION", ()),
    aten._scaled_dot_product_efficient_attention.default: ("EFFICIENT_ATTENTION", partial(_outputs, "efficient")),
    aten._scaled_dot_product_efficient_attention_backward.default: ("EFFICIENT_ATTENTION", (None,)),
    aten._scaled_dot_product_cudnn_attention.default: ("CUDNN_ATTENTION", partial(_outputs, "cudnn")),
    aten._scaled_dot_product_cudnn_attention_backward.default: ("CUDNN_ATTENTION", ()),
    aten._scaled_dot_product_flash_attention_for_cpu.default: ("FLASH_ATTENTION", partial(_outputs, "cpu")),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: ("FLASH_ATTENTION", ()),
}
"""Backends of the fused ops; outputs of a forward op as a function, further outputs of a backward op as they are."""

# The switch


def _parts() -> Iterator[AbstractContextManager[None]]:
    refuse_torchs_context_parallel()
    yield intercepted(dtensor_sdpa)
    handlers: dict[Any, Any] = dict.fromkeys(_FUSED_OPS, _fused_handler)
    # In inference mode, SDPA itself reaches DTensor.
    handlers[aten.scaled_dot_product_attention.default] = lambda _op, args, kwargs: intercepted_sdpa(*args, **kwargs)
    yield _torch.dtensor_ops_handled(handlers)
    yield _torch.checkpointed_functions_bound(_bound_to_dispatcher)
    yield _torch.compiled_code_kept_apart(_variant_of_compiled_code)


def _bound_to_dispatcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under `torch.utils.checkpoint` that enables the dispatcher around each of its calls.

    Backward calls it again to recompute activations, maybe after the dispatcher was disabled.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with dispatcher_installation.held():
            return function(*args, **kwargs)

    return run


def _variant_of_compiled_code() -> str:
    """Return what compiled code depends on: attention of DTensors is intercepted, with the default transport."""
    return f"cp_dtensor dispatcher, {transport_by_name(None).name}"


dispatcher_installation = SharedInstallation(_parts)


_enabled_by_user: list[ExitStack] = []
"""A lease for each call of `enable` without its `disable`."""


def enable_context_parallel_dispatcher() -> ExitStack:
    """Make SDPA on DTensors that are sharded along the sequence attend to the whole of it, from now on.

    Results are those of `F.scaled_dot_product_attention` on the full tensors, whatever the mesh: a ring runs around
    the axis with `Shard(2)`, or Ulysses over it if its name begins with "ulysses", or both over several. `Shard(0)`
    (data) and `Shard(1)` (tensor parallel over heads) on other axes stay local. DTensors that are not sharded along
    the sequence are left to torch, except that on the CPU, where torch has no rule for its fused op, batch and head
    shards are computed locally. Torch's fused SDPA ops (flash, efficient, cuDNN, CPU flash; forward and backward), when
    called by name on DTensors, attend to the whole sequence as well, by the backend of the op. They take no masks and
    no dropout there, and refuse contexts with a mask or other options that change results.

    May be called several times; each call needs its own `disable_context_parallel_dispatcher`. Or use it as
    `with enable_context_parallel_dispatcher(): ...`. Inside of `context_parallel` it is enabled anyway. Functions under
    `torch.utils.checkpoint` are recomputed under it, also after it was disabled.

    K/V travel by the process default of `set_rotate_method`, inside of `context_parallel` as well.

    DTensor's sequence shards are contiguous (`torch.chunk`), so a causal mask loads the ranks unevenly; for training
    prefer `context_parallel` or `ContextParallel`, which balance the load.

    Raises:
        RuntimeError: inside of a `torch.compile`d function, or while torch's own context parallelism is open.
    """
    _torch.refuse_in_compiled_function("enable_context_parallel_dispatcher")
    refuse_torchs_context_parallel()
    _enabled_by_user.append(dispatcher_installation.held())
    lease = ExitStack()
    lease.callback(disable_context_parallel_dispatcher)
    return lease


def disable_context_parallel_dispatcher() -> None:
    """Revert one `enable_context_parallel_dispatcher`; without one, do nothing.

    After the last one, DTensor's tables and torch's dispatcher are as before.
    """
    with suppress(IndexError):
        _enabled_by_user.pop().close()
