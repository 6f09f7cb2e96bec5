"""Attention of checked local shards: what every entry point calls."""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import joined_rows, split_rows
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.engine.autograd import Attention
from cp_dtensor.engine.compiled_spec import ShardCallSpec, token_of
from cp_dtensor.engine.config import AttentionConfig, check_batch_size, with_context_mask
from cp_dtensor.engine.custom_op import CuSeqlens, backends_token, traced_attention
from cp_dtensor.engine.lengths import global_lengths
from cp_dtensor.engine.planner import decide_call
from cp_dtensor.engine.validation import (
    check_bias,
    checked_dropout_p,
    checked_sinks,
    four_dims_of_mask,
    positive_scale,
    softmax_scale,
)
from cp_dtensor.spec.documents import PackedEdges, checked_lengths
from cp_dtensor.spec.masks import Mask


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionConfig,
    *,
    mask: Mask,
    scale: float | None,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    lengths: tuple[int, int] | None = None,
    needs_lse: bool = False,
    first: tuple[int, int] = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of checked local shards; `lengths` are the global (q, kv) lengths if the caller knows them.

    Without `needs_lse`, lse may be empty. `first` is where this rank's batch rows and query heads stand in the whole.
    """
    ranks = settings.ranks
    q, scale = positive_scale(q, softmax_scale(q, scale))
    modifiers = modifiers_of(q, attn_mask, dropout_p, sinks)
    if any(first):
        modifiers = replace(modifiers, first_batch=first[0], first_head=first[1])
    if _torch.is_traced(q):
        call_spec = ShardCallSpec.of(settings)
        mask = mask if call_spec.finds_mask else with_context_mask(settings.mask, mask)
        modifiers = modifiers.drawn(q.device)
        return traced_attention(
            q, k, v, modifiers, token_of(call_spec), backends_token(), mask, scale, lengths, needs_lse
        )
    mask = with_context_mask(settings.mask, mask)
    needs_lse = needs_lse or modifiers.need_lse
    lengths = global_lengths(q, k, v, settings, mask, modifiers, scale, lengths, gives_lse=needs_lse)
    check_bias(q, modifiers.bias, lengths, settings.layout, ranks.size)
    call = decide_call(q, k, v, settings.splitting, lengths, mask, modifiers, scale, ranks)
    # Nothing can be refused now.
    out, lse, _ = Attention.apply(q, k, v, modifiers.bias, modifiers.sinks, modifiers.drawn(q.device), call, needs_lse)
    return out, lse


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    settings: AttentionConfig,
    cu_seqlens: CuSeqlens,
    *,
    within: Mask,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)`, (1, H, T, Dv) and (1, H, T), of packed documents.

    Args:
        q, k, v: (1, H, T, D), checked local shards of batch rows, one after the other.
        settings: know the lengths that whole sequences of rows may have.
        cu_seqlens: where documents begin and end in whole sequences, row after row.
        within: what is seen inside of each.
    """
    if _torch.is_traced(q):
        checked_lengths(settings.declared_lengths)
        token = token_of(ShardCallSpec.of(settings))
        q, scale = positive_scale(q, softmax_scale(q, scale))
        return traced_attention(
            q, k, v, NO_MODIFIERS, token, backends_token(), within, scale, None, needs_lse=True, cu_seqlens=cu_seqlens
        )
    packed = PackedEdges.of(*cu_seqlens).in_rows(settings.declared_lengths)
    q, k, v = (split_rows(x, packed.rows) for x in (q, k, v))
    check_batch_size(q, settings)
    out, lse = attend(q, k, v, settings, mask=packed.mask(within), scale=scale, lengths=packed.lengths, needs_lse=True)
    return joined_rows(out, packed.rows), joined_rows(lse, packed.rows)


def modifiers_of(
    q: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float, sinks: torch.Tensor | None = None
) -> Modifiers:
    """What a call has besides q, k, v and a mask by positions, as far as a rank can check it; no seed is drawn."""
    dropout_p = checked_dropout_p(dropout_p)
    if attn_mask is None and not dropout_p and sinks is None:
        return NO_MODIFIERS
    bias = None if attn_mask is None else four_dims_of_mask(attn_mask, q)
    return Modifiers(bias, dropout_p, sinks=None if sinks is None else checked_sinks(sinks, q))
