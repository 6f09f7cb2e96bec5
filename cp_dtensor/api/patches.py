"""torch's causal biases inside of regions: `causal_lower_right(...)` as the `attn_mask` of SDPA.

With one of unequal lengths torch calls kernels below SDPA, which interception does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch
from cp_dtensor.api.active_context import (
    CONTEXT_STATE,
    ActiveContext,
    attends_alone,
    current_context,
    innermost_context,
    sdpa_in_context,
    sdpa_of_shards,
    unseen_contexts,
)
from cp_dtensor.api.buffers import is_shard_now
from cp_dtensor.api.dtensor.dispatcher import dispatcher_installation
from cp_dtensor.api.flex.frontend import flex_replacements
from cp_dtensor.api.interception import SdpaArguments, SharedInstallation, intercepted
from cp_dtensor.api.varlen_attn import varlen_replacements
from cp_dtensor.engine.compiled_spec import ACTIVE_CONFIG
from cp_dtensor.spec.masks import Causal


def _redirected(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """SDPA with a causal bias whose last query stands at the last key: of the whole sequences, in regions."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        context = current_context()
        if context is None or attends_alone(context):
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if any(isinstance(tensor, DTensor) for tensor in (query, key, value)):
            raise NotImplementedError(
                "causal_lower_right of unequal lengths takes plain tensors inside of a context-parallel region, this "
                "rank's shards; got DTensors"
            )
        call = SdpaArguments(query, key, value, None, dropout_p, is_causal, scale, enable_gqa)
        return sdpa_of_shards(context, call, Causal("bottom_right"))

    return attend


def _replacements() -> Iterator[AbstractContextManager[None]]:

    yield dispatcher_installation.held()
    yield intercepted(sdpa_in_context)
    yield _torch.checkpointed_functions_bound(_bound_to_context)
    yield _torch.compiled_code_kept_apart(_variant_of_compiled_code)
    yield _torch.lower_right_bias_redirected(_redirected)
    yield from flex_replacements()
    yield from varlen_replacements()
    yield _torch.multihead_attention_ends_in_sdpa(_check_multihead_attention)
    yield _torch.module_buffers_broadcast_but(is_shard_now)


_installation = SharedInstallation(_replacements)


@contextmanager
def entered(context: ActiveContext) -> Iterator[None]:
    """Makes this the region of the current thread, and its buffers their shards, while open.

    Regions nest, and may be entered again later, for a recompute.
    """
    with ExitStack() as stack:  # takes everything back if a part fails
        stack.enter_context(_installation.held())
        stack.enter_context(unseen_contexts.counted())
        for buffer in context.buffers:
            stack.enter_context(buffer.standing_in())
        entered_in = _torch.current_backward()
        stack.enter_context(_torch.thread_state(CONTEXT_STATE, (context, entered_in)))
        stack.enter_context(_torch.thread_state(ACTIVE_CONFIG, (context.ambient, entered_in)))
        for buffer in context.buffers:
            buffer.release_whole()  # last, since it cannot be undone
        yield


def _bound_to_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpointed function that runs in the present region whenever it runs: also recomputed after exit."""
    context = current_context()
    if context is None:
        return function

    def in_context(*args: Any, **kwargs: Any) -> Any:
        with entered(context):
            return function(*args, **kwargs)

    return in_context


def _variant_of_compiled_code() -> str:
    """What functions are compiled for in this thread: attention over local shards only would be wrong in a region."""
    context = innermost_context()
    return "" if context is None else f"cp_dtensor: {context.ambient.key}{', each rank alone' * attends_alone(context)}"


def _check_multihead_attention(need_weights: bool, extra_keys: bool) -> None:
    if not (need_weights or extra_keys) or current_context() is None:
        return
    if extra_keys:
        raise NotImplementedError(
            "nn.MultiheadAttention got add_bias_kv=True or add_zero_attn=True inside of a context-parallel region, "
            "where every rank would append the extra key to its own shard; build it without"
        )
    raise NotImplementedError(
        "nn.MultiheadAttention got need_weights=True (its default) inside of a context-parallel region, but no "
        "rank has the attention weights of the whole sequence; pass need_weights=False"
    )
