"""Rows, the form in which keys and values travel: one row per token, `[K of some heads | V of the same heads]`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_dtensor.layouts import Span


def row_width(k: torch.Tensor, v: torch.Tensor, heads: Span) -> int:
    """Elements of a row: batch rows x heads x (D + Dv)."""
    return k.size(0) * (heads[1] - heads[0]) * (k.size(3) + v.size(3))


def pack_rows(k: torch.Tensor, v: torch.Tensor, heads: Span, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Some heads of K (B, Hkv, T, D) and V (B, Hkv, T, Dv) as rows (T, width), into `rows` if given."""
    if rows is None:
        rows = k.new_empty(k.size(2), row_width(k, v, heads))
    packed_k, packed_v = unpack_rows(rows, k, v, heads)
    packed_k.copy_(k[:, heads[0] : heads[1]])
    packed_v.copy_(v[:, heads[0] : heads[1]])
    return rows


def pack_stages(
    k: torch.Tensor, v: torch.Tensor, stages: Sequence[Span], rows: torch.Tensor, pitch: int, first_row: int = 0
) -> None:
    """Groups of heads as `pack_rows` has them, one after the other in `rows` (flat), `pitch` rows from one to the next.

    Groups of equal size are packed at once. The last dim of k and v is contiguous. Each group begins at `first_row`.
    """
    sizes = {stop - start for start, stop in stages}
    if len(sizes) == 1:
        (count,) = sizes
        width = row_width(k, v, stages[0])
        start = rows.storage_offset() + first_row * width
        for tensor in (k, v):
            batch, _, length, dim = tensor.shape
            by_stage = (batch, len(stages), count, length, dim)
            stride_b, stride_h, stride_s, _ = tensor.stride()
            source = tensor.as_strided(
                by_stage, (stride_b, count * stride_h, stride_h, stride_s, 1), tensor.storage_offset()
            )
            rows.as_strided(by_stage, (count * dim, pitch * width, dim, width, 1), start).copy_(source)
            start += batch * count * dim
        return
    start = 0
    for heads in stages:
        width = row_width(k, v, heads)
        first = start + first_row * width
        pack_rows(k, v, heads, rows[first : first + k.size(2) * width].view(-1, width))
        start += pitch * width


def unpack_rows(
    rows: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, heads: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of (..., T, width) rows as K (..., B, heads, T, D) and V (..., B, heads, T, Dv).

    Batch and head dims are those of `like_*`, (B, Hkv, any, D or Dv).
    """
    batch, count, dim_k, dim_v = like_k.size(0), heads[1] - heads[0], like_k.size(3), like_v.size(3)
    lead, (row, _), start = rows.shape[:-2], rows.stride()[-2:], rows.storage_offset()
    strides = rows.stride()[:-2]
    # One view each: chains of view operations cost more than the attention of a short sequence.
    k = rows.as_strided((*lead, batch, count, rows.size(-2), dim_k), (*strides, count * dim_k, dim_k, row, 1), start)
    start += batch * count * dim_k
    v = rows.as_strided((*lead, batch, count, rows.size(-2), dim_v), (*strides, count * dim_v, dim_v, row, 1), start)
    return k, v
