"""Reference implementation of the attention kernels in plain torch operations, and the fallback without Triton.

It works in blocks of rows, each with the columns that its rows attend to: memory does not grow with the square of the
length, and work is proportional to the attended pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.attention.triton.dropout import Dropout, kept_reference
from cp_dtensor.attention.triton.row_mask import RowMask

LOGITS_BYTES = 64 * 2**20
"""Limit for the logits of a block, unless one row has more. A few tensors of that size exist at once."""

_MASKED_ROWS = 256
"""Limit for the rows of a block under a mask: fewer rows skip more columns, more rows make fewer calls."""


def attention_forward_reference(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor | None = None, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """As `launch_attention_forward`, in float32, or in float64 if q is."""
    wide = wide_dtype(q)
    k, v = k.to(wide), v.to(wide)
    for rows, columns in _blocks(q, k, mask):
        logits = _logits(q, k, mask, scale, rows, columns, bias)
        block_lse = logits.logsumexp(-1) if len(columns) else logits.new_full(logits.shape[:3], float("-inf"))
        weights = _weights(logits, block_lse)
        if dropout is not None:
            weights *= _dropout_factors(dropout, q, rows, columns, wide)
        _rows(out, rows).copy_(_by_query_head(_by_kv_head(weights, v) @ _rows(v, columns), q))
        _rows(lse, rows).copy_(block_lse)


def attention_backward_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    mask: RowMask, scale: float, *, bias: Tensor | None = None, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """As `launch_attention_backward`, in float32, or in float64 if q is."""
    k, v = k.to(wide_dtype(q)), v.to(wide_dtype(q))
    sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)
    blocks = _backward_blocks(grad_out, q, k, v, lse, delta, mask, scale, bias, dropout)
    for rows, columns, weights, grad, grad_logits in blocks:
        _rows(sum_v, columns).add_(weights.mT @ grad)
        _rows(sum_k, columns).add_(grad_logits.mT @ _by_kv_head(_rows(q, rows).to(k.dtype), k), alpha=scale)
        _rows(dq, rows).copy_(_by_query_head(grad_logits @ _rows(k, columns), q) * scale)
    dk.copy_(sum_k)
    dv.copy_(sum_v)


def bias_gradient_reference(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor, dropout: Dropout | None = None,
) -> Tensor:  # fmt: skip
    """P * (dO V^T - delta), with dropout's factors at dO V^T, summed to the bias's shape; in float32 or wider.

    The arguments are those of `launch_attention_backward`, with any strides. There is no kernel for this gradient.
    """
    k, v = k.to(wide_dtype(q)), v.to(wide_dtype(q))
    gradient = bias.new_zeros((1,) * (4 - bias.dim()) + bias.shape, dtype=k.dtype)
    summed = [dim for dim in range(4) if gradient.size(dim) == 1]
    for rows, columns, _, _, grad_logits in _backward_blocks(grad_out, q, k, v, lse, delta, mask, scale, bias, dropout):
        share = _by_query_head(grad_logits, q)
        _bias_block(gradient, rows, columns).add_(share.sum(summed, keepdim=True) if summed else share)
    return gradient.view(bias.shape)


def _backward_blocks(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, mask: RowMask, scale: float,
    bias: Tensor | None, dropout: Dropout | None,
) -> Iterator[tuple[range, range, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Yields the rows and columns of each block, P with dropout, dO, and dS = P * (dO V^T - delta).

    The tensors are in the dtype of k and v and in the form of `_by_kv_head`.
    """
    for rows, columns in _blocks(q, k, mask):
        logits = _logits(q, k, mask, scale, rows, columns, bias)
        weights = dropped = _by_kv_head(_weights(logits, _rows(lse, rows)), v)
        grad = _by_kv_head(_rows(grad_out, rows).to(v.dtype), v)
        grad_logits = grad @ _rows(v, columns).mT
        if dropout is not None:
            factors = _by_kv_head(_dropout_factors(dropout, q, rows, columns, v.dtype), v)
            grad_logits *= factors
            dropped = weights * factors
        grad_logits -= _by_kv_head(_rows(delta, rows).to(v.dtype).unsqueeze(-1), v)
        grad_logits *= weights
        yield rows, columns, dropped, grad, grad_logits


def seen_reference(mask: RowMask, rows: range, columns: range, device: torch.device) -> Tensor | None:
    """True where a row attends to a column, broadcasts to (B, H, rows, columns); None without a mask.

    >>> seen_reference(RowMask(causal_offset=1), range(2), range(1, 4), torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    column = torch.arange(columns.start, columns.stop, device=device)
    if mask.intervals is not None:
        lo, hi = (x[..., rows.start : rows.stop, None] for x in mask.intervals)
        seen = (lo <= column) & (column < hi)
        return seen if seen.dim() == 2 else seen.unsqueeze(1)
    if mask.causal_offset is None:
        return None
    return column <= torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1) + mask.causal_offset


def _blocks(q: Tensor, k: Tensor, mask: RowMask) -> Iterator[tuple[range, range]]:
    """The rows of each block, with a range that has all columns to which they attend."""
    rows, columns, offset = q.size(2), k.size(2), mask.causal_offset
    column_bytes = max(1, q.size(0) * q.size(1)) * wide_dtype(q).itemsize
    length = rows if offset is None and mask.intervals is None else _MASKED_ROWS
    edges = None if mask.intervals is None else mask.columns_of_rows(columns, length)
    for index, start in enumerate(range(0, rows, max(1, length))):
        stop = min(start + length, rows)
        first, last = (0, columns) if edges is None else edges[index]
        if offset is not None:
            last = max(0, min(stop + offset, columns))
        step = max(1, LOGITS_BYTES // (column_bytes * max(1, last - first)))
        for here in range(start, stop, step):
            there = min(here + step, stop)
            end = last if offset is None else max(0, min(there + offset, columns))
            yield range(here, there), range(first, end)


def _logits(
    q: Tensor, k: Tensor, mask: RowMask, scale: float, rows: range, columns: range, bias: Tensor | None
) -> Tensor:
    """(B, H, rows, columns) in k's dtype, -inf at masked pairs; a new tensor."""
    logits = _by_query_head(_by_kv_head(_rows(q, rows).to(k.dtype), k) * scale @ _rows(k, columns).mT, q)
    if bias is not None:
        block = _bias_block(bias, rows, columns)
        if bias.dtype == torch.bool:
            logits.masked_fill_(~block, float("-inf"))
        else:
            logits += block
    seen = seen_reference(mask, rows, columns, q.device)
    return logits if seen is None else logits.masked_fill_(~seen, float("-inf"))


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """exp(logits - lse), in place; 0 for rows without keys, where -inf - -inf would be NaN."""
    lse = lse.to(logits.dtype)
    return logits.sub_(torch.where(lse > float("-inf"), lse, 0.0).unsqueeze(-1)).exp_()


def _dropout_factors(dropout: Dropout, q: Tensor, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
    """(B, H, rows, columns): the factors of the softmax weights, 0 or `dropout.scale`."""
    return kept_reference(dropout, q.size(0), q.size(1), rows, columns).to(dtype).mul_(dropout.scale)


def _bias_block(bias: Tensor, rows: range, columns: range) -> Tensor:
    """The rows and columns of a bias that broadcasts to (B, H, S, T)."""
    for dim, span in ((-1, columns), (-2, rows)):
        if bias.dim() >= -dim and bias.size(dim) > 1:
            bias = bias.narrow(dim, span.start, len(span))
    return bias


def _by_kv_head(x: Tensor, kv: Tensor) -> Tensor:
    """(B, H, S, D) as (B, Hkv, H / Hkv * S, D), the left operand of products with unexpanded K or V."""
    kv_heads = kv.size(1)
    return x.unflatten(1, (kv_heads, x.size(1) // kv_heads)).flatten(2, 3)


def _by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of `_by_kv_head`."""
    group = q.size(1) // x.size(1)
    return x.unflatten(2, (group, x.size(2) // group)).flatten(1, 2)


def _rows(x: Tensor, rows: range) -> Tensor:
    """Rows of (B, H, S, D) or (B, H, S)."""
    return x[:, :, rows.start : rows.stop]
