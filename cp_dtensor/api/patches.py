"""Entry of contexts and of `local_sdpa`, and all patches of torch that hold while one is open.

The first context that is entered in the process installs the patches and the last one that is left removes them, also
after an exception. Each patch looks up the context of its thread and does nothing where there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.active_context import (
    LOCAL_SDPA,
    ActiveContext,
    current_context,
    innermost_context,
    listed_if_unseen,
    open_local_sdpa,
    refuse_sinks,
)
from cp_dtensor.api.buffers import is_shard_now
from cp_dtensor.api.dtensor_attention import dtensor_sdpa, local_only_sdpa
from cp_dtensor.api.dtensor_dispatcher import dispatcher_installation
from cp_dtensor.api.flex_attention import flex_redirection
from cp_dtensor.api.interception import SdpaArguments, SharedInstallation, intercepted
from cp_dtensor.api.varlen import refuse_varlen_attn_out, varlen_attn_in_context
from cp_dtensor.engine.attend import attend, modifiers_of
from cp_dtensor.engine.compiled_spec import CONTEXT_STATE
from cp_dtensor.engine.config import check_batch_size
from cp_dtensor.engine.validation import check_qkv, checked_mask
from cp_dtensor.spec.masks import Causal, Mask


@contextmanager
def entered(context: ActiveContext) -> Iterator[None]:
    """Makes this the context of the current thread, and its buffers their shards, while open.

    Contexts nest. One may be entered again later, for a recompute.
    """
    with ExitStack() as stack:  # takes everything back if a part fails
        stack.enter_context(_installation.held())
        stack.enter_context(listed_if_unseen(context))
        for buffer in context.buffers:
            stack.enter_context(buffer.in_place())
        stack.enter_context(_torch.thread_state(CONTEXT_STATE, (context, _torch.current_backward())))
        for buffer in context.buffers:
            buffer.release_whole()  # last, since it cannot be undone
        yield


def _patches() -> Iterator[AbstractContextManager[None]]:
    """The patches, in the order of their installation."""
    yield dispatcher_installation.held()
    yield intercepted(sdpa_in_context)
    yield _torch.checkpointed_functions_bound(_bound_to_context)
    yield _torch.compiled_code_kept_apart(_variant_of_compiled_code)
    yield _torch.lower_right_bias_redirected(_lower_right_sdpa)
    yield flex_redirection.held()
    yield _torch.varlen_attn_overridden(varlen_attn_in_context, refuse_varlen_attn_out)
    yield _torch.multihead_attention_ends_in_sdpa(_check_multihead_attention)
    yield _torch.module_buffers_broadcast_but(is_shard_now)


_installation = SharedInstallation(_patches)


def _bound_to_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpointed function, run in the present context whenever it runs: also when recomputed after exit."""
    context = current_context()
    if context is None:
        return function
    queries_are_shards = open_local_sdpa(context)

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            stack.enter_context(entered(context))
            if queries_are_shards is not None:
                stack.enter_context(local_sdpa(queries_are_shards=queries_are_shards))
            return function(*args, **kwargs)

    return run


def _variant_of_compiled_code() -> str:
    """Encodes the context of this thread for Dynamo, which reuses compiled code only where this string is equal."""
    context = innermost_context()
    if context is None:
        return ""
    sinks, is_alone = context.sinks is not None, open_local_sdpa(context) is not None
    return f"cp_dtensor: {context.key}{', sinks' * sinks}{', each rank alone' * is_alone}"


# SDPA in contexts


def sdpa_in_context(call: SdpaArguments) -> torch.Tensor | None:
    """SDPA of this rank's shards, or of DTensors; torch's own in `local_sdpa`.

    None outside of contexts and where torch has a rule for DTensors.
    """
    if call.q.is_meta:
        return None
    context = current_context()
    if context is None:
        return None
    queries_are_shards = open_local_sdpa(context)
    if queries_are_shards is not None:
        if queries_are_shards and call.is_causal:
            raise NotImplementedError(
                "is_causal is not supported between sharded queries and keys that every rank has whole: got "
                "is_causal=True, expected False (an attn_mask of the local queries is allowed)"
            )
        return call.attend_by_torch()
    if call.under_vmap:
        raise NotImplementedError(
            "context_parallel takes no scaled_dot_product_attention under torch.vmap; it takes any number of "
            "leading dims itself: call it on the whole batch"
        )
    if call.q.is_nested:
        raise NotImplementedError("context_parallel takes no nested tensors yet, got nested q, k or v")
    if isinstance(call.q, DTensor) or isinstance(call.k, DTensor) or isinstance(call.v, DTensor):
        # DTensors over other ranks, such as tensor-parallel ones: their local heads are plain shards of the sequence.
        # DTensors over the ranks of the context have their own placements.
        result = local_only_sdpa(call, context.config.ranks.global_ranks(), partial(sdpa_of_shards, context))
        if result is not None:
            return result
        if context.sinks is not None:
            raise NotImplementedError(
                "the sinks of this context can be applied to plain tensors only: got DTensors over the ranks of the "
                "context; pass their local shards, or call context_parallel_attention(..., sinks=sinks) with DTensors"
            )
        result = dtensor_sdpa(call, context.config.mask, context.config.deterministic)
        if result is None and context.config.mask is not None:
            raise NotImplementedError(
                f"the mask of this context ({context.config.mask}) applies to plain tensors and to DTensors that are "
                "sharded along the sequence: got other DTensors over the ranks of the context"
            )
        return result
    return sdpa_of_shards(context, call)


def sdpa_of_shards(context: ActiveContext, call: SdpaArguments, mask: Mask | None = None) -> torch.Tensor:
    """SDPA of plain tensors, shards of the sequence; `mask` is combined with those of the call and the context."""
    if call.q.dim() != 4 and len(context.config.layout.batch_groups(2)) > 1:
        raise NotImplementedError(
            f"{context.config.layout} divides batch rows differently, so it needs q of four dims (batch, heads, "
            f"sequence, head_dim); got {tuple(call.q.shape)}"
        )
    if _torch.is_traced(call.q):
        refuse_sinks(context.sinks is not None, "scaled_dot_product_attention in compiled code")
    else:  # compiled code checks it when it runs
        check_batch_size(call.q, context.config)
    q, k, v = _four_dims(call.q), _four_dims(call.k), _four_dims(call.v)
    check_qkv(q, k, v, call.enable_gqa)
    out, _ = attend(
        q, k, v, context.config, mask=checked_mask(mask, call.is_causal), scale=call.scale,
        modifiers=modifiers_of(q, _mask_for_four_dims(call), call.dropout_p, context.sinks, first=call.first),
    )  # fmt: skip
    return out.view(*call.q.shape[:-1], call.v.size(-1)) if call.q.dim() != 4 else out


def _four_dims(tensor: torch.Tensor) -> torch.Tensor:
    """(..., S, D) as (B, H, S, D)."""
    return tensor[(None,) * (4 - tensor.dim())] if tensor.dim() < 4 else tensor.flatten(0, -4)


def _mask_for_four_dims(call: SdpaArguments) -> torch.Tensor | None:
    """The mask (..., S, T) for queries of (B, H, S, D)."""
    if call.attn_mask is None or call.q.dim() <= 4:
        return call.attn_mask
    if call.attn_mask.dim() > call.q.dim():
        raise ValueError(
            f"expected attn_mask to broadcast to {(*call.q.shape[:-1], 'keys')}, got {call.attn_mask.shape}"
        )
    mask = call.attn_mask[(None,) * (call.q.dim() - call.attn_mask.dim())]
    return mask.expand(*call.q.shape[:-3], *mask.shape[-3:]).flatten(0, -4)


def _lower_right_sdpa(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """SDPA with `causal_lower_right` of unequal lengths; torch calls kernels below SDPA for it.

    In contexts the last query of the whole sequence is at its last key.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        context = current_context()
        if context is None or open_local_sdpa(context) is not None:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
            raise NotImplementedError(
                "causal_lower_right of unequal lengths takes plain tensors inside of context_parallel, this rank's "
                "shards; got DTensors"
            )
        call = SdpaArguments(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
        return sdpa_of_shards(context, call, Causal("bottom_right"))

    return attend


def _check_multihead_attention(need_weights: bool, extra_keys: bool) -> None:
    """Refuses `nn.MultiheadAttention` that does not end in SDPA of the shards."""
    if not (need_weights or extra_keys) or current_context() is None:
        return
    if extra_keys:
        raise NotImplementedError(
            "nn.MultiheadAttention got add_bias_kv=True or add_zero_attn=True inside of context_parallel, where every "
            "rank would append the extra key to its own shard; build it without"
        )
    raise NotImplementedError(
        "nn.MultiheadAttention got need_weights=True (its default) inside of context_parallel, but no rank has the "
        "attention weights of the whole sequence; pass need_weights=False"
    )


# SDPA of local tensors inside an active context


@contextmanager
def local_sdpa(*, queries_are_shards: bool) -> Iterator[None]:
    """Context manager in which SDPA of this thread is torch's own, although a context is active.

    Without an active context it changes nothing. Functions under `torch.utils.checkpoint` are recomputed under it.
    FlexAttention inside is refused. Contexts that are entered inside are not affected.

    Args:
        queries_are_shards: True if q is this rank's shard while k and v are whole on every rank (cross-attention to a
            text prompt); `is_causal=True` is refused then, because the positions of the queries are not known. False
            if q is whole too.
    """
    context = innermost_context()
    if context is None:
        yield
        return
    with _torch.thread_state(LOCAL_SDPA, (context, queries_are_shards)):
        yield
