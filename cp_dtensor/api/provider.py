"""Attention of a provider: a function that a model calls in a context or in a module with `ContextParallel`."""

from __future__ import annotations

import torch

from cp_dtensor import _torch
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.api.sdpa import sdpa_of_shards
from cp_dtensor.engine.arguments import check_qkv, refuse_dtensors, refuse_sinks, tensors_of
from cp_dtensor.engine.call import call_of, checked_mask, factors_of
from cp_dtensor.engine.compiled import Constants, attend_traced, constants_of
from cp_dtensor.engine.contexts import OpenContext, current, innermost, queries_alone
from cp_dtensor.engine.handles import Parts, made_of, parts_of
from cp_dtensor.spec.masks import Mask


def attention_of_shards(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, attn_mask: torch.Tensor | None = None,
    is_causal: bool = False, mask: Mask | None = None, sinks: torch.Tensor | None = None, scale: float | None = None,
    dropout_p: float = 0.0, **options: float,
) -> torch.Tensor | None:  # fmt: skip
    """Attention in the context of the caller, compiled or not; None outside of contexts.

    Args:
        q, k, v: (B, H, S, D), (B, Hkv, T, D) and (B, Hkv, T, Dv), this rank's shards; H may be a multiple of Hkv.
        attn_mask: as of SDPA in a context, or the tensor of a mask function of transformers.
        mask: one more mask.
        is_causal, sinks, scale, dropout_p, options: as for `context_parallel_attention`.

    Returns:
        out (B, H, S, Dv).

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: sinks besides those of the context; in compiled code, any context with sinks.
    """
    if torch.compiler.is_dynamo_compiling():
        constants = _constants_in_context(is_causal, parts_of(mask))
        if constants is None:
            return None
        check_qkv(q, k, v, enable_gqa=True)
        factors = factors_of(q.size(3), scale=scale, dropout_p=dropout_p, **options)
        t = tensors_of(q, k, v, attn_mask, sinks)
        return attend_traced(constants, t, factors, [-1, -1, 0, 0], False)[0]
    context = current()
    if context is None or queries_alone(context) is not None:
        return None
    refuse_dtensors(q=q, k=k, v=v)
    context.seen.add("attention")
    if sinks is not None and context.sinks is not None:
        raise NotImplementedError("this attention has sinks of its own, and its context has sinks, too")
    call = SdpaArguments(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa=True)
    return sdpa_of_shards(context, call, mask, sinks, **options)


@_torch.constant_in_trace
def _constants_in_context(is_causal: bool, mask_parts: Parts | None) -> Constants | None:
    """Return the constants of a call in the context of code that is traced; None outside of contexts."""
    key, mask = _torch.traced_scope(), checked_mask(made_of(mask_parts), is_causal)
    context = innermost() if key is None else OpenContext(call_of(key), is_constant=True)
    if context is None or queries_alone(context) is not None:
        return None
    refuse_sinks(context.sinks is not None, "attention in compiled code")
    return constants_of(context.inside(mask, traced=True))
