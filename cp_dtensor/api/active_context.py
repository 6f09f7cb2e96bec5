"""The active context of a thread, and SDPA of plain tensors inside of it.

A context belongs to the thread that entered it. Functions under `torch.utils.checkpoint` are bound to their context, so
that recomputing them is right at any time and in any thread. Other attention in a backward around which a context is
open is refused, since it may or may not belong to the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.buffers import InPlaceShard
from cp_dtensor.api.dtensor.attention import dtensor_sdpa, local_only_sdpa
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.engine.attend import attend, modifiers_of
from cp_dtensor.engine.compiled_spec import CONTEXT_STATE, ActiveConfig
from cp_dtensor.engine.config import check_batch_size, check_qkv, checked_mask, refuse_dtensors
from cp_dtensor.spec.masks import Mask

LOCAL_SDPA = "cp_dtensor_local_sdpa"
"""Key of the thread state of `local_sdpa`: the active context on entry, and True if queries are shards."""
CAPTURED_BEFORE = "cp_dtensor_captured_before"
"""Key of the context that `ContextParallel` has entered around code which Dynamo captured outside of the context."""
_AMBIGUOUS = (
    "attention was called in a backward while a context_parallel context is open around it, and it is ambiguous "
    "whether the call belongs to the context: checkpoint with torch.utils.checkpoint inside of the context, or use the "
    "module form, parallelize_module(attention, mesh, ContextParallel()), which is right at any time"
)


@dataclass(frozen=True, eq=False)
class ActiveContext(ActiveConfig):
    """An open context."""

    buffers: tuple[InPlaceShard, ...] = ()
    sinks: torch.Tensor | None = None
    """(query heads,), logits of all SDPA inside."""


def attends_alone(context: ActiveContext) -> bool:
    """True if `local_sdpa` is open in this context: each rank then attends to its own keys."""
    state = _torch.get_thread_state(LOCAL_SDPA)
    return state is not None and state[0] is context


def innermost_context() -> ActiveContext | None:
    """The context that was entered last in this thread and is still open, also in a backward that runs inside."""
    state = _torch.get_thread_state(CONTEXT_STATE)
    return None if state is None else state[0]


def current_context() -> ActiveContext | None:
    """The innermost open context of this thread.

    Raises:
        RuntimeError: this is a backward, and the context was entered outside of it. The caller is a recompute that is
            not torch.utils.checkpoint's, or one of a checkpoint made outside of the context.
    """
    state = _torch.get_thread_state(CONTEXT_STATE)
    if state is None:
        if _unseen_contexts and _torch.in_autograd_thread():
            raise RuntimeError(_AMBIGUOUS)
        return None
    context, entered_in = state
    if entered_in != _torch.current_backward():
        raise RuntimeError(_AMBIGUOUS)
    return context


def sdpa_in_context(call: SdpaArguments) -> torch.Tensor | None:
    """SDPA of this rank's shards, or of DTensors; None outside of contexts and where torch has a rule for DTensors."""
    if call.q.is_meta:
        return None
    context = current_context()
    if context is None:
        return None
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


def checked_context_sinks(sinks: Any) -> torch.Tensor:
    """The sinks of a context, checked as far as possible without queries: a plain floating tensor of one dim."""
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"expected sinks to be a torch.Tensor of one logit per query head, got {type(sinks).__name__}")
    refuse_dtensors(sinks=sinks)
    if not sinks.is_floating_point() or sinks.dim() != 1:
        raise ValueError(
            f"expected sinks of a floating dtype and shape (query heads,), got {sinks.dtype} {tuple(sinks.shape)}"
        )
    return sinks


def checked_deterministic(deterministic: Any) -> bool:
    """Returns `deterministic`, which must be a bool."""
    if not isinstance(deterministic, bool):
        raise TypeError(f"expected deterministic to be True or False, got {deterministic!r}")
    return deterministic


def refuse_sinks(has_sinks: bool, attention: str, function: str = "context_parallel_attention") -> None:
    """Refuses `attention`, which cannot have the sinks of its context; `function` can."""
    if has_sinks:
        raise NotImplementedError(
            f"{attention} does not take the sinks of its context: call {function}(..., sinks=...) instead"
        )


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


_unseen_contexts: list[ActiveContext] = []
"""Open contexts of threads other than the main one, whose state autograd's threads cannot read."""


@contextmanager
def listed_if_unseen(context: ActiveContext) -> Iterator[None]:
    """Lists a context while open, if this is such a thread."""
    if _torch.in_main_thread() or _torch.in_autograd_thread():
        yield
        return
    _unseen_contexts.append(context)
    try:
        yield
    finally:
        _unseen_contexts.remove(context)
