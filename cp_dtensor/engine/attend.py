"""Entries of the engine, one of which each front end calls once: attention of checked local shards, eager or traced."""

from __future__ import annotations

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import refuse_traced_transforms, refuse_transforms
from cp_dtensor._torch.tensors import joined_rows, split_rows
from cp_dtensor.attention.lse import rounded_lse
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.engine.agreement import warn_of_zeros_and_ones
from cp_dtensor.engine.autograd import Attention
from cp_dtensor.engine.compiled_spec import CallKeys, keys_of
from cp_dtensor.engine.config import (
    AttentionConfig,
    check_batch_size,
    check_bias,
    checked_dropout_p,
    checked_sinks,
    checked_softcap,
    four_dims_of_mask,
    positive_scale,
)
from cp_dtensor.engine.lengths import global_lengths
from cp_dtensor.engine.named_masks import named_mask
from cp_dtensor.engine.operators import CuSeqlens
from cp_dtensor.engine.planner import bound_call
from cp_dtensor.engine.replay import refuse_unreplayable
from cp_dtensor.spec.documents import PackedEdges, checked_lengths, packed_mask
from cp_dtensor.spec.masks import Mask, mask_intersection


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: AttentionConfig, *, mask: Mask, scale: float | None,
    modifiers: Modifiers = NO_MODIFIERS, lengths: tuple[int, int] | None = None, needs_lse: bool = False,
    mask_name: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
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
    if _torch.is_traced(q):
        return attend_traced(
            q, k, v, keys_of(config, mask), scale=scale, modifiers=modifiers, lengths=lengths, needs_lse=needs_lse,
            mask_name=mask_name,
        )  # fmt: skip
    q, scale = positive_scale(q, scale)
    if mask_name is not None:
        mask = mask_intersection(named_mask(mask_name).mask_for(config), mask)
    if config.mask is not None:
        mask = mask_intersection(config.mask, mask)
    needs_lse = needs_lse or modifiers.need_lse
    if lengths is None or config.placed is None:
        lengths = global_lengths(q, k, v, config, mask, modifiers, scale, lengths, gives_lse=needs_lse)
        check_bias(q, modifiers.bias, lengths, config.layout, config.ranks)
    if modifiers.bias is not None:
        warn_of_zeros_and_ones(modifiers.bias, config.ranks)
    if config.replay:
        refuse_unreplayable(q, mask, modifiers)
    call = bound_call(q, k, v, config, lengths, mask, modifiers, scale)
    # Nothing can be refused from here on.
    try:
        out, lse, _ = Attention.apply(
            q, k, v, modifiers.bias, modifiers.sinks, modifiers.drawn(q.device), call, needs_lse, modifiers.up
        )
    except RuntimeError:
        refuse_transforms()  # torch refuses them by the names of its internals; a check before would take time
        raise
    return out, lse


def attend_traced(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: CallKeys, *, scale: float | None,
    modifiers: Modifiers = NO_MODIFIERS, lengths: tuple[int, int] | None = None, needs_lse: bool = False,
    mask_name: torch.Tensor | None = None, cu_seqlens: CuSeqlens | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`attend` in a program that is being captured, as one operator whose constants are `keys`.

    With `cu_seqlens`, q, k and v are packed (see `attend_packed`). Other arguments are those of `attend`.
    """
    refuse_traced_transforms()
    q, scale = positive_scale(q, scale)
    modifiers = modifiers.drawn(q.device)
    spec_key, backends, mask, reads_more = keys
    overloads = torch.ops.cp_dtensor.attention
    out, lse, _ = (overloads.found if lengths is None or reads_more else overloads.default)(
        q, k, v, modifiers.bias, modifiers.seed, modifiers.sinks, modifiers.up, *(cu_seqlens or (mask_name, None)),
        spec_key, backends, mask, modifiers.dropout_p, modifiers.softcap, modifiers.first_batch, modifiers.first_head,
        scale, *(lengths or (-1, -1)), needs_lse or modifiers.need_lse, torch.is_grad_enabled(),
    )  # fmt: skip
    return out, rounded_lse(lse)


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: AttentionConfig, cu_seqlens: CuSeqlens, *, within: Mask,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`(out, lse)`, (1, H, T, Dv) and (1, H, T), of packed documents.

    Args:
        q, k, v: (1, H, T, D), checked local shards of batch rows, one after the other.
        config: has the lengths that whole sequences of rows may have.
        cu_seqlens: the edges of documents in whole sequences, row after row.
        within: the mask inside of each document.
    """
    if _torch.is_traced(q):
        checked_lengths(config.declared_lengths)
        return attend_traced(q, k, v, keys_of(config, within), scale=scale, needs_lse=True, cu_seqlens=cu_seqlens)
    edges = PackedEdges.of(*cu_seqlens)
    rows, lengths = edges.rows_and_lengths(config.declared_lengths)
    q, k, v = (split_rows(x, rows) for x in (q, k, v))
    check_batch_size(q, config)
    mask = packed_mask(edges, rows, lengths, within)
    out, lse = attend(q, k, v, config, mask=mask, scale=scale, lengths=lengths, needs_lse=True)
    return joined_rows(out, rows), joined_rows(lse, rows)


def modifiers_of(
    q: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float, sinks: torch.Tensor | None = None,
    first: tuple[int, int] = (0, 0), up: torch.Tensor | None = None, softcap: float = 0.0,
) -> Modifiers:  # fmt: skip
    """The checked modifiers of a call, as far as one rank can check them; no seed is drawn.

    Args:
        first: global index of this rank's first batch row and first query head.
        up: (H, Dn + Dv, R) of latents, checked.
    """
    dropout_p, softcap = checked_dropout_p(dropout_p), checked_softcap(softcap)
    bias = None if attn_mask is None else four_dims_of_mask(attn_mask, q)
    return Modifiers.of(bias, dropout_p, None, *first, None if sinks is None else checked_sinks(sinks, q), softcap, up)
