"""Attention of a provider: a function that a model calls in a context or in a module with `ContextParallel`."""

from __future__ import annotations

import torch

from cp_dtensor import _torch
from cp_dtensor.api.active_context import current_context, innermost_context, open_local_sdpa, refuse_sinks
from cp_dtensor.api.context import sdpa_of_shards
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.engine.attend import attend_traced, modifiers_of
from cp_dtensor.engine.compiled_spec import CallKeys, Parts, compiled_spec_of, keys_of, made_of, parts_of
from cp_dtensor.engine.config import check_qkv, checked_mask, refuse_dtensors
from cp_dtensor.engine.named_masks import is_name
from cp_dtensor.spec.masks import Mask


def attention_of_shards(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
    is_causal: bool = False, mask: Mask | None = None, dropout_p: float = 0.0, scale: float | None = None,
    sinks: torch.Tensor | None = None, softcap: float = 0.0,
) -> torch.Tensor | None:  # fmt: skip
    """Attention in the context of the caller, compiled or not; None outside of contexts.

    Args:
        q, k, v: (B, H, S, D), (B, Hkv, T, D) and (B, Hkv, T, Dv), this rank's shards; H may be a multiple of Hkv.
        attn_mask: as of SDPA in a context, or the tensor of a mask function of transformers.
        is_causal, dropout_p, scale, sinks, softcap: as for `context_parallel_attention`.
        mask: one more mask.

    Returns:
        out (B, H, S, Dv).

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: sinks besides those of the context; in compiled code, any context with sinks.
    """
    if _torch.is_traced(q):
        keys = _keys_in_context(is_causal, parts_of(mask))
        if keys is None:
            return None
        check_qkv(q, k, v, enable_gqa=True)
        mask_name, bias = (attn_mask, None) if is_name(attn_mask) else (None, attn_mask)
        modifiers = modifiers_of(q, bias, dropout_p, sinks, softcap=softcap)
        return attend_traced(q, k, v, keys, scale=scale, modifiers=modifiers, mask_name=mask_name)[0]
    context = current_context()
    if context is None or open_local_sdpa(context) is not None:
        return None
    refuse_dtensors(q=q, k=k, v=v)
    context.seen.add("attention")
    if sinks is not None and context.sinks is not None:
        raise NotImplementedError("this attention has sinks of its own, and its context has sinks, too")
    call = SdpaArguments(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa=True)
    return sdpa_of_shards(context, call, mask, sinks, softcap)


@_torch.constant_in_trace
def _keys_in_context(is_causal: bool, mask_parts: Parts | None) -> CallKeys | None:
    """Keys of the call in the context of code that is traced; None outside of contexts."""
    of_module, mask = _torch.traced_scope(), checked_mask(made_of(mask_parts), is_causal)
    if of_module is not None:
        return keys_of(compiled_spec_of(of_module).config(), mask)
    context = innermost_context()
    if context is None or open_local_sdpa(context) is not None:
        return None
    refuse_sinks(context.sinks is not None, "attention in compiled code")
    return keys_of(context.config, mask)
