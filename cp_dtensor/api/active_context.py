"""Regions: stretches of a program in which SDPA on plain tensors means "these are my shards".

A region belongs to the thread that opened it. Functions under `torch.utils.checkpoint` are bound to their region, so
recomputing them is right at any time and in any thread; other attention in a backward, around which a region is open,
is refused, since it may or may not belong to it. While any region is open, in any thread, a few entries of torch are
replaced (`_replacements`); when the last one closes, all are put back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.buffers import LocalContents
from cp_dtensor.api.dtensor.attention import dtensor_sdpa, local_only_sdpa
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.engine.attend import attend, modifiers_of
from cp_dtensor.engine.compiled_spec import ActiveConfig
from cp_dtensor.engine.config import AttentionConfig, check_batch_size
from cp_dtensor.engine.validation import check_qkv, checked_mask
from cp_dtensor.spec.masks import Mask

CONTEXT_STATE = "cp_dtensor_region"
LOCAL_STRETCH = "cp_dtensor_local_sdpa"
"""Where `local_sdpa`, further up, leaves the stretch of this thread; its `region` is that in which it was opened."""
CAPTURED_BEFORE = "cp_dtensor_captured_before"
"""Where `ContextParallel` leaves the region that it has opened around code which Dynamo captured outside of it."""
_AMBIGUOUS = (
    "attention was called in a backward while a context_parallel region is open around it, and it cannot be told "
    "whether the call belongs to the region: checkpoint with torch.utils.checkpoint inside of the region, or use the "
    "module form, parallelize_module(attention, mesh, ContextParallel()), which is right at any time"
)


@dataclass(frozen=True)
class ActiveContext:
    """The settings of an open region."""

    settings: AttentionConfig
    buffers: tuple[LocalContents, ...] = ()

    @cached_property
    def ambient(self) -> ActiveConfig:
        """What code that was compiled in such a region finds when it runs."""
        return ActiveConfig(self.settings)


def attends_alone(context: ActiveContext) -> bool:
    """Whether attention that belongs to the region is left to each rank alone in this thread."""
    stretch = _torch.get_thread_state(LOCAL_STRETCH)
    return stretch is not None and stretch.context is context


def innermost_context() -> ActiveContext | None:
    """The region that was opened last in this thread and is still open, whether or not calls here belong to it."""
    state = _torch.get_thread_state(CONTEXT_STATE)
    return None if state is None else state[0]


def current_context() -> ActiveContext | None:
    """The innermost open region of this thread.

    Raises:
        RuntimeError: this is a backward, and the region was opened outside of it. What runs here is a recompute that is
            not torch.utils.checkpoint's, or of a checkpoint made outside of the region: it cannot be told which.
    """
    state = _torch.get_thread_state(CONTEXT_STATE)
    if state is None:
        if unseen_contexts and _torch.in_autograd_thread():
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
            "context-parallel regions take no scaled_dot_product_attention under torch.vmap; it takes any number of "
            "leading dims itself: call it on the whole batch"
        )
    if call.q.is_nested:
        raise NotImplementedError("context-parallel regions take no nested tensors yet, got nested q, k or v")
    if isinstance(call.q, DTensor) or isinstance(call.k, DTensor) or isinstance(call.v, DTensor):
        # A tensor-parallel DTensor, say, over ranks that all have the same sequence shard: its local heads are plain
        # shards. A DTensor over the region's own ranks knows by itself how it is sharded; the dispatcher has it.
        result = local_only_sdpa(call, context.settings.ranks.global_ranks(), partial(sdpa_of_shards, context))
        if result is not None:
            return result
        result = dtensor_sdpa(call, context.settings.mask, context.settings.deterministic)
        if result is None and context.settings.mask is not None:
            raise NotImplementedError(
                f"the mask of this context ({context.settings.mask}) is for plain tensors, and for DTensors that are "
                "sharded along the sequence: got other DTensors over the ranks of the context"
            )
        return result
    return sdpa_of_shards(context, call)


def sdpa_of_shards(context: ActiveContext, call: SdpaArguments, mask: Mask | None = None) -> torch.Tensor:
    """SDPA of plain tensors, which are shards of the region; with `mask`, besides what the call masks."""
    if call.q.dim() != 4 and len(context.settings.layout.batch_groups(2)) > 1:
        raise NotImplementedError(
            f"{context.settings.layout} divides batch rows differently, so it needs q of four dims (batch, heads, "
            f"sequence, head_dim); got {tuple(call.q.shape)}"
        )
    if not _torch.is_traced(call.q):  # checked at run time in compiled code
        check_batch_size(call.q, context.settings)
    q, k, v = _four_dims(call.q), _four_dims(call.k), _four_dims(call.v)
    check_qkv(q, k, v, call.enable_gqa)
    out, _ = attend(
        q, k, v, context.settings, mask=checked_mask(mask, call.is_causal), scale=call.scale,
        modifiers=modifiers_of(q, _mask_for_four_dims(call), call.dropout_p, first=call.first),
    )  # fmt: skip
    return out.view(*call.q.shape[:-1], call.v.size(-1)) if call.q.dim() != 4 else out


def _four_dims(tensor: torch.Tensor) -> torch.Tensor:
    """(..., S, D) as (B, H, S, D); F.scaled_dot_product_attention takes any number of leading dims."""
    if tensor.dim() < 4:
        return tensor[(None,) * (4 - tensor.dim())]
    return tensor.flatten(0, -4)


def _mask_for_four_dims(call: SdpaArguments) -> torch.Tensor | None:
    """The mask of (..., S, T) for queries that `_four_dims` has flattened."""
    if call.attn_mask is None or call.q.dim() <= 4:
        return call.attn_mask
    lead = call.q.shape[:-3]
    if call.attn_mask.dim() > call.q.dim():
        raise ValueError(
            f"expected attn_mask to broadcast to {(*call.q.shape[:-1], 'keys')}, got {call.attn_mask.shape}"
        )
    mask = call.attn_mask[(None,) * (call.q.dim() - call.attn_mask.dim())]
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)


class _UnseenContexts:
    """Counts open regions of threads whose state autograd does not carry over to its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0

    def __bool__(self) -> bool:
        return self._open > 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts one while open, if this is such a thread."""
        unseen = not _torch.in_main_thread() and not _torch.in_autograd_thread()
        with self._lock:
            self._open += unseen
        try:
            yield
        finally:
            with self._lock:
                self._open -= unseen


unseen_contexts = _UnseenContexts()
