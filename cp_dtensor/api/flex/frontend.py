"""FlexAttention inside an active context: `flex_attention` of this rank's shards attends to the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.active_context import (
    CAPTURED_BEFORE,
    attends_alone,
    current_context,
    innermost_context,
    refuse_sinks,
)
from cp_dtensor.api.flex.attention import FlexCall, flex_of_shards, traced_flex
from cp_dtensor.api.flex.custom_ops import check_context_mask
from cp_dtensor.api.interception import SharedInstallation
from cp_dtensor.engine.compiled_spec import call_spec_of


def _flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """FlexAttention of this rank's shards; torch's own outside of contexts."""
    token = _context_token()
    options = {"return_lse": return_lse, "kernel_options": kernel_options, "return_aux": return_aux}
    call = FlexCall(
        query, key, value, score_mod, block_mask, scale, enable_gqa, _torch.original_flex_attention, options
    )
    if not token or query.is_meta:
        return call.attend(key, value, score_mod, block_mask)
    if any(tensor.is_nested or isinstance(tensor, DTensor) for tensor in (query, key, value)):
        raise NotImplementedError(
            "FlexAttention takes plain tensors inside context_parallel, this rank's shards; got nested tensors or "
            "DTensors"
        )
    if _torch.is_traced(query):
        return traced_flex(call, token)
    context = current_context()
    assert context is not None
    return flex_of_shards(call, context.config)


@_torch.constant_in_trace
def _context_token() -> str:
    """The token of the settings of the context that the call is in, "" outside of any; a constant of compiled code."""
    of_module = _torch.traced_scope()
    if of_module is not None:
        check_context_mask(call_spec_of(of_module).config().mask)
        return of_module
    context = current_context()
    if context is None:
        return ""
    check_context_mask(context.config.mask)
    refuse_sinks(context, "FlexAttention", "context_parallel_attention")
    if attends_alone(context):
        raise NotImplementedError(
            "FlexAttention is not supported where attention is left to each rank alone, inside context_parallel: use "
            "F.scaled_dot_product_attention"
        )
    return context.key


def _check_captured() -> None:
    """Refuses FlexAttention of local shards in captured code that is run or traced further inside a context."""
    context = innermost_context()
    if context is None:
        return
    if not _torch.FLEX_ATTENTION_IS_KNOWN:
        raise NotImplementedError(
            f"FlexAttention of torch {torch.__version__} is not supported inside context_parallel: its parameters "
            "differ from those of the supported versions"
        )
    if _torch.get_thread_state(CAPTURED_BEFORE) is context and not _torch.flex_attention_is_redirected():
        raise NotImplementedError(
            "a compiled module with ContextParallel calls FlexAttention, whose code another package has replaced: it "
            "would attend to the local shard only. Call context_parallel_flex_attention instead"
        )


def _replacements() -> Iterator[AbstractContextManager[None]]:
    yield _torch.flex_attention_redirected(_flex_attention)
    yield _torch.captured_flex_attention_checked(_check_captured)


flex_redirection = SharedInstallation(_replacements)
"""Redirects FlexAttention: held by open contexts and by modules with `ContextParallel`."""
