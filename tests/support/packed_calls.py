"""Calls of torch's `varlen_attn` with packed batch rows, as in training code."""

from __future__ import annotations

import inspect
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from cp_dtensor import Batched, Documents, Mask

_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def edges_of(mask: Mask, batch: int, lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws `cu_seq_q` and `cu_seq_k` of documents that cover rows of (q, kv) `lengths`."""
    masks = mask.masks if isinstance(mask, Batched) else (mask,) * batch
    edges = []
    for which, name in enumerate(("cu_seqlens", "cu_seqlens_k")):
        documents = [end - begin for each in masks for begin, end in pairwise(getattr(each, name))]
        assert sum(documents) == batch * lengths[which]
        edges.append(torch.tensor([0, *accumulate(documents)], dtype=torch.int32))
    return edges[0], edges[1]


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    window: tuple[int, int] = (-1, -1), scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Packs q, k and v (B, H, S, D) for the call; returns out (B, H, S, Dv) and lse (B, H, S)."""
    batch = q.size(0)
    packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    out, lse = varlen_attn(
        *packed, cu_seq_q, cu_seq_k, 1 << 20, 1 << 20, return_aux=AuxRequest(lse=True), scale=scale,
        window_size=window, **_GQA,
    )  # fmt: skip
    return out.unflatten(0, (batch, -1)).transpose(1, 2), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def documents(*rows: list[int], within: Mask) -> Mask:
    """Returns the mask of documents with these edges in each batch row."""
    masks = [Documents(edges, within=within) for edges in rows]
    return masks[0] if len(masks) == 1 else Batched(masks)
