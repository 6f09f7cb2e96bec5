"""Reference implementation of the attention kernels in plain torch operations, and the fallback without Triton.

It works in blocks of rows, each with the columns that its rows attend to: memory does not grow with the square of the
length, and work is proportional to the attended pairs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cp_dtensor.attention.triton.dropout import Dropout, kept_reference
from cp_dtensor.attention.triton.row_mask import RowMask

LOGITS_BYTES = 64 * 2**20
"""Limit for the logits of a block, unless one row has more. A few tensors of that size exist at once."""

_MASKED_ROWS = 256
"""Limit for the rows of a block under a mask: fewer rows skip more columns, more rows make fewer calls."""


def attention_forward_reference(
    out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: RowMask,
    scale: float, *, bias: torch.Tensor | None = None, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """As `launch_attention_forward`, in float32, or in float64 if q is."""
    wide = _wide(q)
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
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, mask: RowMask, scale: float, *,
    bias: torch.Tensor | None = None, dropout: Dropout | None = None,
) -> None:  # fmt: skip
    """As `launch_attention_backward`, in float32, or in float64 if q is."""
    wide = _wide(q)
    k, v = k.to(wide), v.to(wide)
    sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in _blocks(q, k, mask):
        logits = _logits(q, k, mask, scale, rows, columns, bias)
        weights = dropped = _by_kv_head(_weights(logits, _rows(lse, rows)), v)
        grad = _by_kv_head(_rows(grad_out, rows).to(wide), v)
        grad_logits = grad @ _rows(v, columns).mT
        if dropout is not None:
            factors = _by_kv_head(_dropout_factors(dropout, q, rows, columns, wide), v)
            grad_logits *= factors
            dropped = weights * factors
        grad_logits -= _by_kv_head(_rows(delta, rows).to(wide).unsqueeze(-1), v)
        grad_logits *= weights
        _rows(sum_v, columns).add_(dropped.mT @ grad)
        _rows(sum_k, columns).add_(grad_logits.mT @ _by_kv_head(_rows(q, rows).to(wide), k), alpha=scale)
        _rows(dq, rows).copy_(_by_query_head(grad_logits @ _rows(k, columns), q) * scale)
    dk.copy_(sum_k)
    dv.copy_(sum_v)


def bias_gradient_reference(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor,
    mask: RowMask, scale: float, *, bias: torch.Tensor, dropout: Dropout | None = None,
) -> torch.Tensor:  # fmt: skip
    """P * (dO V^T - delta), with dropout's factors at dO V^T, summed to the bias's shape; in float32 or wider.

    The arguments are those of `launch_attention_backward`, with any strides. There is no kernel for this gradient.
    """
    wide = _wide(q)
    k, v = k.to(wide), v.to(wide)
    gradient = bias.new_zeros((1,) * (4 - bias.dim()) + bias.shape, dtype=wide)
    summed = [dim for dim in range(4) if gradient.size(dim) == 1]
    for rows, columns in _blocks(q, k, mask):
        if not len(columns):
            continue
        weights = _weights(_logits(q, k, mask, scale, rows, columns, bias), _rows(lse, rows))
        grad = _by_kv_head(_rows(grad_out, rows).to(wide), v)
        grad_logits = _by_query_head(grad @ _rows(v, columns).mT, q)
        if dropout is not None:
            grad_logits *= _dropout_factors(dropout, q, rows, columns, wide)
        grad_logits -= _rows(delta, rows).to(wide).unsqueeze(-1)
        grad_logits *= weights
        _bias_block(gradient, rows, columns).add_(grad_logits.sum(summed, keepdim=True) if summed else grad_logits)
    return gradient.view(bias.shape)


def seen_reference(mask: RowMask, rows: range, columns: range, device: torch.device) -> torch.Tensor | None:
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


def _blocks(q: torch.Tensor, k: torch.Tensor, mask: RowMask) -> Iterator[tuple[range, range]]:
    """The rows of each block, with a range that has all columns to which they attend."""
    rows, columns, offset = q.size(2), k.size(2), mask.causal_offset
    column_bytes = max(1, q.size(0) * q.size(1)) * _wide(q).itemsize
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
    q: torch.Tensor, k: torch.Tensor, mask: RowMask, scale: float, rows: range, columns: range,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
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


def _weights(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(logits - lse), in place; 0 for rows without keys, where -inf - -inf would be NaN."""
    lse = lse.to(logits.dtype)
    return logits.sub_(torch.where(lse > float("-inf"), lse, 0.0).unsqueeze(-1)).exp_()


def _dropout_factors(
    dropout: Dropout, q: torch.Tensor, rows: range, columns: range, dtype: torch.dtype
) -> torch.Tensor:
    """(B, H, rows, columns): the factors of the softmax weights, 0 or `dropout.scale`."""
    return kept_reference(dropout, q.size(0), q.size(1), rows, columns).to(dtype).mul_(dropout.scale)


def _bias_block(bias: torch.Tensor, rows: range, columns: range) -> torch.Tensor:
    """The rows and columns of a bias that broadcasts to (B, H, S, T)."""
    if bias.dim() > 0 and bias.size(-1) > 1:
        bias = bias[..., columns.start : columns.stop]
    if bias.dim() > 1 and bias.size(-2) > 1:
        bias = bias[..., rows.start : rows.stop, :]
    return bias


def _by_kv_head(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as (B, Hkv, H / Hkv * S, D), the left operand of products with unexpanded K or V."""
    kv_heads = kv.size(1)
    return x.unflatten(1, (kv_heads, x.size(1) // kv_heads)).flatten(2, 3)


def _by_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The inverse of `_by_kv_head`."""
    group = q.size(1) // x.size(1)
    return x.unflatten(2, (group, x.size(2) // group)).flatten(1, 2)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: torch.Tensor, rows: range) -> torch.Tensor:
    """Rows of (B, H, S, D) or (B, H, S)."""
    return x[:, :, rows.start : rows.stop]
