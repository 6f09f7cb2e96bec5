"""Attention of checked local shards: what every entry point calls."""

from __future__ import annotations

import math

import torch

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import Attention
from cp_dtensor.compiled_op import backends_token, token_of, traced_attention
from cp_dtensor.global_lengths import global_lengths
from cp_dtensor.settings import AttentionSettings
from cp_dtensor.shard_recipe import ShardRecipe
from cp_dtensor.splitting import decide_call


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionSettings,
    *,
    is_causal: bool,
    scale: float | None,
    lengths: tuple[int, int] | None = None,
    needs_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of checked local shards; `lengths` are the global (q, kv) lengths if the caller knows them.

    Without `needs_lse`, lse may be empty.
    """
    ranks = settings.ranks
    q, scale = positive_scale(q, softmax_scale(q, scale))
    if _torch_private.is_traced(q):
        token = token_of(ShardRecipe.of(settings))
        return traced_attention(q, k, v, token, backends_token(), bool(is_causal), scale, lengths, needs_lse)
    lengths = global_lengths(q, k, v, settings, is_causal, scale, lengths)
    call = decide_call(q, k, v, settings.splitting, lengths, is_causal, scale, ranks)
    return Attention.apply(q, k, v, call, needs_lse)


def softmax_scale(q: torch.Tensor, scale: float | None) -> float:
    """The factor of the logits; 1 / sqrt(D) if None."""
    return 1.0 / math.sqrt(q.size(3)) if scale is None else float(scale)


def positive_scale(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """`(q, scale)` of equal logits with a positive scale: kernels mask before they scale, and -inf times 0 is NaN."""
    if scale < 0:
        return q * -1, -scale
    return (q * 0, 1.0) if scale == 0 else (q, scale)
