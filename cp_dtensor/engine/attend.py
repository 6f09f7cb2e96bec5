"""Entry of the engine: attention of checked local shards, which every front end calls exactly once."""

from __future__ import annotations

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import joined_rows, split_rows
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.engine.autograd import Attention
from cp_dtensor.engine.compiled_spec import CompiledCallSpec
from cp_dtensor.engine.config import (
    AttentionConfig,
    check_batch_size,
    check_bias,
    checked_dropout_p,
    checked_sinks,
    four_dims_of_mask,
    positive_scale,
    softmax_scale,
)
from cp_dtensor.engine.custom_op import CuSeqlens, keys_of, traced_attention
from cp_dtensor.engine.lengths import global_lengths
from cp_dtensor.engine.named_masks import named_mask
from cp_dtensor.engine.planner import bound_call
from cp_dtensor.spec.documents import PackedEdges, checked_lengths, packed_mask
from cp_dtensor.spec.masks import Mask, mask_intersection


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: AttentionConfig,
    *,
    mask: Mask,
    scale: float | None,
    modifiers: Modifiers = NO_MODIFIERS,
    lengths: tuple[int, int] | None = None,
    needs_lse: bool = False,
    mask_name: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)` of checked local shards.

    Args:
        q, k, v: (B, H, S, D), (B, Hkv, T, D) and (B, Hkv, T, Dv).
        mask: the mask of the call, besides that of `config`.
        scale: factor of the logits; None for 1 / sqrt(D).
        modifiers: of the local queries.
        lengths: global (queries, keys); None if they have to be found.
        needs_lse: False if lse may be empty.
        mask_name: names one more mask (`named_masks`), which is found when the call runs.
    """
    q, scale = positive_scale(q, softmax_scale(q, scale))
    if _torch.is_traced(q):
        call_spec = CompiledCallSpec.of(config)
        if config.mask is not None and not call_spec.reads_context:
            mask = mask_intersection(config.mask, mask)
        keys = keys_of(call_spec, mask)
        found = None if mask_name is None else (mask_name, None)
        return traced_attention(q, k, v, modifiers.drawn(q.device), keys, scale, lengths, needs_lse, found)
    if mask_name is not None:
        mask = mask_intersection(named_mask(mask_name).mask_for(config), mask)
    if config.mask is not None:
        mask = mask_intersection(config.mask, mask)
    needs_lse = needs_lse or modifiers.need_lse
    if lengths is None or config.placed is None:
        lengths = global_lengths(q, k, v, config, mask, modifiers, scale, lengths, gives_lse=needs_lse)
        check_bias(q, modifiers.bias, lengths, config.layout, config.ranks)
    call = bound_call(q, k, v, config, lengths, mask, modifiers, scale)
    # Nothing can be refused from here on.
    out, lse, _ = Attention.apply(
        q, k, v, modifiers.bias, modifiers.sinks, modifiers.drawn(q.device), call, needs_lse, modifiers.up
    )
    return out, lse


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    config: AttentionConfig,
    cu_seqlens: CuSeqlens,
    *,
    within: Mask,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(out, lse)`, (1, H, T, Dv) and (1, H, T), of packed documents.

    Args:
        q, k, v: (1, H, T, D), checked local shards of batch rows, one after the other.
        config: has the lengths that whole sequences of rows may have.
        cu_seqlens: the edges of documents in whole sequences, row after row.
        within: the mask inside of each document.
    """
    if _torch.is_traced(q):
        checked_lengths(config.declared_lengths)
        keys = keys_of(CompiledCallSpec.of(config), within)
        q, scale = positive_scale(q, softmax_scale(q, scale))
        return traced_attention(q, k, v, NO_MODIFIERS, keys, scale, None, True, cu_seqlens)
    edges = PackedEdges.of(*cu_seqlens)
    rows, lengths = edges.rows_and_lengths(config.declared_lengths)
    q, k, v = (split_rows(x, rows) for x in (q, k, v))
    check_batch_size(q, config)
    mask = packed_mask(edges, rows, lengths, within)
    out, lse = attend(q, k, v, config, mask=mask, scale=scale, lengths=lengths, needs_lse=True)
    return joined_rows(out, rows), joined_rows(lse, rows)


def modifiers_of(
    q: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    sinks: torch.Tensor | None = None,
    first: tuple[int, int] = (0, 0),
    up: torch.Tensor | None = None,
) -> Modifiers:
    """The checked modifiers of a call, as far as one rank can check them; no seed is drawn.

    Args:
        first: global index of this rank's first batch row and first query head.
        up: (H, Dn + Dv, R) of latents, checked.
    """
    dropout_p = checked_dropout_p(dropout_p)
    if attn_mask is None and not dropout_p and sinks is None and up is None:
        return NO_MODIFIERS
    bias = None if attn_mask is None else four_dims_of_mask(attn_mask, q)
    return Modifiers(bias, dropout_p, None, *first, None if sinks is None else checked_sinks(sinks, q), up)
