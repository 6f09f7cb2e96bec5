"""`F.scaled_dot_product_attention` of shards in a context, the function that providers call, and SDPA of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.buffers import refuse_shards_of_other_dims
from cp_dtensor.api.dtensor_attention import dtensor_sdpa, local_only_sdpa
from cp_dtensor.api.interception import (
    SdpaArguments,
    SharedInstallation,
    intercepted,
    intercepted_sdpa,
    refuse_torchs_context_parallel,
    refuse_wrapped,
)
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.arguments import check_qkv, refuse_beside, refuse_dtensors, tensors_of
from cp_dtensor.engine.attend import Constants, attend, attend_traced, constants_of
from cp_dtensor.engine.base import OF_HEADS, Tensors
from cp_dtensor.engine.call import call_of, checked_mask, factors_of
from cp_dtensor.engine.contexts import OpenContext, current, innermost, queries_alone, warn_of_other_threads
from cp_dtensor.engine.handles import Parts, made_of, parts_of
from cp_dtensor.spec.masks import Causal, Mask

_MOST_SEEN = 1024
"""Kinds of tensors that a context remembers as checked."""


def sdpa_in_context(arguments: SdpaArguments) -> torch.Tensor | None:
    """Compute SDPA of this rank's shards, or of DTensors; torch's own in `local_sdpa`.

    Return None outside of contexts and where torch has a rule for DTensors.
    """
    if arguments.q.is_meta:
        return None
    context = current()
    if context is None:
        if not isinstance(arguments.q, DTensor):  # those are served in all threads
            warn_of_other_threads()
        return None
    context.seen.add("attention")
    queries_are_shards = queries_alone(context)
    if queries_are_shards is not None:
        if queries_are_shards and arguments.is_causal:
            raise NotImplementedError(
                "is_causal is not supported between sharded queries and keys that every rank has whole: got "
                "is_causal=True, expected False (an attn_mask of the local queries is allowed)"
            )
        return arguments.attend_by_torch()
    if arguments.under_vmap:
        raise NotImplementedError(
            "context_parallel takes no scaled_dot_product_attention under torch.vmap; it takes any number of "
            "leading dims itself: call it on the whole batch"
        )
    if arguments.q.is_nested:
        refuse_nested()
    if isinstance(arguments.q, DTensor) or isinstance(arguments.k, DTensor) or isinstance(arguments.v, DTensor):
        return _sdpa_of_dtensors(context, arguments)
    return sdpa_of_shards(context, arguments)


def _sdpa_of_dtensors(context: OpenContext, arguments: SdpaArguments) -> torch.Tensor | None:
    """Compute SDPA of DTensors in a context; return None where torch has a rule for them.

    Over other ranks than those of the context, such as tensor-parallel ones, their local heads are shards of its
    sequence. Over its ranks they have placements of their own.
    """
    call = context.call
    result = local_only_sdpa(arguments, call.ranks.global_ranks(), partial(sdpa_of_shards, context))
    if result is not None:
        return result
    refuse_beside(context.beside, "scaled_dot_product_attention of DTensors over the ranks of a context")
    result = dtensor_sdpa(arguments, **call.of_dtensors)
    if result is None and call.mask is not None:
        raise NotImplementedError(
            f"the mask of this context ({call.mask}) applies to plain tensors and to DTensors that are "
            "sharded along the sequence: got other DTensors over the ranks of the context"
        )
    return result


def refuse_nested() -> None:
    """Refuse SDPA of nested tensors, unless there is no context."""
    context = current()
    if context is not None and queries_alone(context) is None:
        raise NotImplementedError("context_parallel takes no nested tensors yet, got nested q, k or v")


def sdpa_of_shards(
    context: OpenContext, a: SdpaArguments, mask: Mask | None = None,
    beside: dict[str, torch.Tensor] | None = None, **options: float,
) -> torch.Tensor:  # fmt: skip
    """Compute SDPA of plain tensors, shards of the sequence in the open context.

    Args:
        mask: combined with those of the call and the context.
        beside: tensors of the call beside q, k and v, by the names of `Tensors`; none for those of the context.
        options: of `context_parallel_attention`, which SDPA does not have.
    """
    q, k, v, bias, beside = a.q, a.k, a.v, a.attn_mask, beside or context.beside
    traced = _torch.is_traced(q)
    if traced:
        refuse_beside(context.beside, "scaled_dot_product_attention in compiled code")
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        if len(context.call.layout.batch_groups(2)) > 1:
            raise NotImplementedError(
                f"{context.call.layout} divides batch rows differently, so it needs q of four dims (batch, heads, "
                f"sequence, head_dim); got {tuple(q.shape)}"
            )
        q, k, v, bias = _four_dims(q), _four_dims(k), _four_dims(v), _mask_for_four_dims(a)
    kind = None if traced else (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device)
    if traced or (a.enable_gqa, kind) not in context.seen:
        check_qkv(q, k, v, a.enable_gqa)
        if not traced:
            refuse_shards_of_other_dims(context.buffers, context.call, a.q, a.k)
            if len(context.seen) < _MOST_SEEN:  # lengths may be new in every step
                context.seen.add((a.enable_gqa, kind))
    call = context.inside(mask, a.is_causal, a.first, traced=traced, scale=a.scale, dropout_p=a.dropout_p, **options)
    t = Tensors(q, k, v) if bias is None and not beside else tensors_of(q, k, v, bias, **beside)
    out, _ = attend(call, t)
    return out.view(*a.q.shape[:-1], a.v.size(-1)) if a.q.dim() != 4 else out


def attention_of_shards(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
    is_causal: bool = False, mask: Mask | None = None, scale: float | None = None, dropout_p: float = 0.0,
    **options: Any,
) -> torch.Tensor | None:  # fmt: skip
    """Compute attention in the context of the caller, compiled or not; return None outside of contexts.

    Args:
        q, k, v: (B, H, S, D), (B, Hkv, T, D) and (B, Hkv, T, Dv), this rank's shards; H may be a multiple of Hkv.
        attn_mask: as of SDPA in a context, or the tensor of a mask function of transformers.
        mask: one more mask.
        is_causal, scale, dropout_p, options (tensors and numbers): as for `context_parallel_attention`; `bias` is an
            additive (B or 1, H or 1, S or 1, all keys) beside an `attn_mask` that names a mask.

    Returns:
        out (B, H, S, Dv).

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: a tensor of `options` that the context has, too; in compiled code, a context with any.
    """
    beside: dict[str, torch.Tensor] = {}
    for name in (*OF_HEADS, "bias"):
        tensor = options.pop(name, None)
        if tensor is not None:
            beside[name] = tensor
    if torch.compiler.is_dynamo_compiling():
        constants = _constants_in_context(is_causal, parts_of(mask))
        if constants is None:
            return None
        check_qkv(q, k, v, enable_gqa=True)
        factors = factors_of(q.size(3), scale=scale, dropout_p=dropout_p, **options)
        t = tensors_of(q, k, v, attn_mask, **beside)
        return attend_traced(constants, t, factors, [-1, -1, 0, 0], False)[0]
    context = current()
    if context is None or queries_alone(context) is not None:
        return None
    refuse_dtensors(q=q, k=k, v=v)
    context.seen.add("attention")
    for name in beside:
        if name in context.beside:
            raise NotImplementedError(f"this attention has {name} of its own, and its context has {name}, too")
    call = SdpaArguments(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa=True)
    return sdpa_of_shards(context, call, mask, beside, **options)


@_torch.constant_in_trace
def _constants_in_context(is_causal: bool, mask_parts: Parts | None) -> Constants | None:
    """Return the constants of a call in the context of code that is traced; None outside of contexts."""
    key, mask = _torch.traced_scope(), checked_mask(made_of(mask_parts), is_causal)
    context = innermost() if key is None else OpenContext(call_of(key), is_constant=True)
    if context is None or queries_alone(context) is not None:
        return None
    refuse_beside(context.beside, "attention in compiled code")
    return constants_of(context.inside(mask, traced=True))


def _four_dims(tensor: torch.Tensor) -> torch.Tensor:
    """Return (..., S, D) as (B, H, S, D)."""
    return tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor.flatten(0, -4)


def _mask_for_four_dims(call: SdpaArguments) -> torch.Tensor | None:
    """Return the mask (..., S, T) for queries of (B, H, S, D)."""
    if call.attn_mask is None or call.q.dim() <= 4:
        return call.attn_mask
    if call.attn_mask.dim() > call.q.dim():
        raise ValueError(
            f"expected attn_mask to broadcast to {(*call.q.shape[:-1], 'keys')}, got {call.attn_mask.shape}"
        )
    mask = call.attn_mask[(None,) * (call.q.dim() - call.attn_mask.dim())]
    return mask.expand(*call.q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def lower_right_sdpa(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return SDPA with `causal_lower_right` of unequal lengths; torch calls kernels below SDPA for it.

    In contexts the last query of the whole sequence is at its last key.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        context = current()
        if context is None or queries_alone(context) is not None:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        refuse_wrapped("causal_lower_right of unequal lengths", query, key, value)
        call = SdpaArguments(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
        return sdpa_of_shards(context, call, Causal("bottom_right"))

    return attend


def check_multihead_attention(need_weights: bool, extra_keys: bool) -> None:
    """Refuse `nn.MultiheadAttention` that does not end in SDPA of the shards."""
    if not (need_weights or extra_keys):
        return
    context = current()
    if context is None or queries_alone(context) is not None:
        return
    if extra_keys:
        raise NotImplementedError(
            "nn.MultiheadAttention got add_bias_kv=True or add_zero_attn=True inside of context_parallel, where every "
            "rank would append the extra key to its own shard; build it without"
        )
    if context.call.ranks.size == 1 and context.call.mask is None and not context.beside:
        return  # as without a context
    raise NotImplementedError(
        "nn.MultiheadAttention got need_weights=True (its default) inside of context_parallel, but no rank has the "
        "attention weights of the whole sequence; pass need_weights=False"
    )


# Process-wide switch of SDPA of DTensors that are sharded along the sequence


def _parts_of_dispatcher() -> Iterator[AbstractContextManager[None]]:
    refuse_torchs_context_parallel()
    yield intercepted(dtensor_sdpa)
    yield _torch.dtensor_sdpa_handled(intercepted_sdpa)
    yield _torch.checkpointed_functions_bound(_bound_to_dispatcher)
    yield _torch.compiled_code_kept_apart(_variant_of_dispatcher)


def _bound_to_dispatcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under `torch.utils.checkpoint` that enables the dispatcher around each of its calls.

    Backward calls it again to recompute activations, maybe after the dispatcher was disabled.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with dispatcher_installation.held():
            return function(*args, **kwargs)

    return run


def _variant_of_dispatcher() -> str:
    """Return what compiled code depends on: attention of DTensors is intercepted, with the default transport."""
    return f"cp_dtensor dispatcher, {transport_by_name(None).name}"


dispatcher_installation = SharedInstallation(_parts_of_dispatcher)


_enabled_by_user: list[ExitStack] = []
"""A lease for each call of `enable` without its `disable`."""


def enable_context_parallel_dispatcher() -> ExitStack:
    """Make SDPA on DTensors that are sharded along the sequence attend to the whole of it, from now on.

    Results are those of `F.scaled_dot_product_attention` on the full tensors, whatever the mesh: a ring runs around
    the axis with `Shard(2)`, or Ulysses over it if its name begins with "ulysses", or both over several. `Shard(0)`
    (data) and `Shard(1)` (tensor parallel over heads) on other axes stay local. DTensors that are not sharded along
    the sequence are left to torch, but on the CPU, where torch has no rule for its fused op. Fused ops that are called
    by name are torch's.

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
