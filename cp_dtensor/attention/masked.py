"""Attention of one tile under a mask that is an interval of columns for each row, with gradients, bias and dropout.

    forward:  out = softmax(cap(scale q k^T) + bias) v over the columns that a row attends to, lse = log of the sum
    backward: dq, dk and dv from the out and lse of all tiles of these rows

Triton kernels on GPUs, elsewhere their reference implementation in plain torch operations (`uses_triton`). It works in
blocks of rows, each with the columns that its rows attend to: memory does not grow with the square of the length, and
work is proportional to the attended pairs. Nothing here is differentiable by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor._torch.tensors import TRITON_AVAILABLE, aligned, empty_in_order_of, unit_stride, wide_dtype
from cp_dtensor.attention.lse import empty_lse, store_sum, without
from cp_dtensor.attention.triton.configs import has_tensor_cores
from cp_dtensor.attention.triton.dropout import Dropout, kept_reference
from cp_dtensor.attention.triton.row_mask import RowMask
from cp_dtensor.spec.intervals import IntervalSet
from cp_dtensor.spec.layouts import Segment

if TRITON_AVAILABLE:
    from cp_dtensor.attention.triton.backward import launch_attention_backward, launch_attention_delta
    from cp_dtensor.attention.triton.forward import launch_attention_forward

MAX_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
"""Largest head dim of the Triton kernels, for each dtype that they take."""
LOGITS_BYTES = 64 * 2**20
"""Limit for the logits of a block, unless one row has more. A few tensors of that size exist at once."""
_ROW_BYTES = 16
"""Rows of tensors that kernels read are multiples of this and begin at multiples of this."""
_MASKED_ROWS = 256
"""Limit for the rows of a block under a mask: fewer rows skip more columns, more rows make fewer calls."""


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, *, bias: Tensor | None = None,
    dropout: Dropout | None = None, softcap: float = 0.0, split_lse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the partial result `(out, lse)` of a tile.

    Args:
        q: (B, H, S, D), any floating dtype.
        k: (B, Hkv, T, D), Hkv divides H; query head h reads key head h // (H / Hkv).
        v: (B, Hkv, T, Dv).
        mask: the columns that each row attends to.
        scale: of the logits, > 0.
        bias: broadcasts to (B, H, S, T) and is not expanded in memory: added to the scaled logits (floating), or False
            where a row does not attend (boolean).
        dropout: of the softmax weights, by global positions; the lse is without dropout.
        softcap: 0.0, or c > 0: scaled logits x become cap(x) = c tanh(x / c), before the bias is added.
        split_lse: True for an lse of two floats, for biases with large finite numbers (`attention.lse`); the bias is
            floating then.

    Returns:
        out: (B, H, S, Dv), in q's dtype; 0 for rows that attend to nothing.
        lse: (B, H, S) or (B, H, S, 2), float32 (float64 for float64 inputs); -inf for such rows.
    """
    v_dim, forward = v.size(3), attention_forward_reference
    if uses_triton(q, v):
        q, k, v = (_in_whole_rows(x) for x in (q, k, v))
        forward = launch_attention_forward
    out = empty_in_order_of(q, v.size(3))
    lse = empty_lse(q, q.shape[:3], wide_dtype(q), split_lse)
    forward(out, lse, q, k, v, mask, scale, bias=bias, dropout=dropout, softcap=softcap)
    return out[..., :v_dim], lse


def attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor | None = None, delta: Tensor | None = None, dropout: Dropout | None = None,
    softcap: float = 0.0, grad_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return this tile's share of `(dq, dk, dv)`, from the out and lse of all tiles of its rows. Deterministic.

    Args:
        grad_out: (B, H, S, Dv), in the dtype of q.
        q, k, v, mask, scale, bias, dropout, softcap: as in `attention_forward`.
        out: (B, H, S, Dv); not read if `delta` is passed.
        lse: (B, H, S) or (B, H, S, 2).
        delta: (B, H, S), the result of `attention_delta`, minus the gradient of lse if it has one; None: computed here.
        grad_dtype: of dq, dk and dv; None: the dtype of q, k and v.

    Returns:
        dq: (B, H, S, D), dk: (B, Hkv, T, D), dv: (B, Hkv, T, Dv); 0 for rows and columns without attended pairs.
    """
    delta = attention_delta(grad_out, out) if delta is None else delta
    dim, v_dim, backward = q.size(3), v.size(3), attention_backward_reference
    if uses_triton(q, v):
        grad_out, q, k, v = (_in_whole_rows(x) for x in (grad_out, q, k, v))
        backward = launch_attention_backward
    dq, dk = empty_in_order_of(q, q.size(3), grad_dtype), empty_in_order_of(k, k.size(3), grad_dtype)
    dv = empty_in_order_of(v, v.size(3), grad_dtype)
    backward(dq, dk, dv, grad_out, q, k, v, lse, delta, mask, scale, bias=bias, dropout=dropout, softcap=softcap)
    return dq[..., :dim], dk[..., :dim], dv[..., :v_dim]


def attention_bias_gradient(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, mask: RowMask, scale: float, *, bias: Tensor,
    delta: Tensor, dropout: Dropout | None = None, softcap: float = 0.0, grad_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Return this tile's share of an additive bias's gradient, in the bias's shape: summed over dims that broadcast.

    It is P * (dO V^T - delta), with dropout's factors at dO V^T. Uses torch operations on every device, with bounded
    memory; slower than `attention_backward`.

    Args:
        grad_out, q, k, v, lse, mask, scale, delta, dropout, softcap: as in `attention_backward`.
        bias: as in `attention_forward`, floating.
        grad_dtype: of the result; None: the bias's. float32 to sum over tiles.
    """
    k, v = k.to(wide_dtype(q)), v.to(wide_dtype(q))
    gradient = bias.new_zeros((1,) * (4 - bias.dim()) + bias.shape, dtype=k.dtype)
    summed = [dim for dim in range(4) if gradient.size(dim) == 1]
    blocks = _backward_blocks(grad_out, q, k, v, lse, delta, mask, scale, bias, dropout, softcap)
    for rows, columns, _, _, grad_logits, _ in blocks:
        share = _by_query_head(grad_logits, q)
        _bias_block(gradient, rows, columns).add_(share.sum(summed, keepdim=True) if summed else share)
    return gradient.view(bias.shape).to(grad_dtype or bias.dtype)


def attention_delta(grad_out: Tensor, out: Tensor) -> Tensor:
    """Return (B, H, S): sum(out * grad_out) over the last dim, in float32 or wider; all tiles of a row share it."""
    if not uses_triton(grad_out, out):
        return (grad_out.to(wide_dtype(grad_out)) * out).sum(-1)
    delta = grad_out.new_empty(grad_out.shape[:3], dtype=torch.float32)
    launch_attention_delta(delta, unit_stride(grad_out), unit_stride(out))
    return delta


def _in_whole_rows(x: Tensor) -> Tensor:
    """Return x, or a copy that tensor descriptors can read: aligned, rows padded by zeros to a multiple of 16 bytes.

    Kernels that read rows of head dims 68 and 5 by pointers gave wrong results on Hopper (bfloat16, Triton 3.6, 3.7).
    """
    missing = -x.size(3) % (_ROW_BYTES // x.itemsize)
    return aligned(F.pad(x, (0, missing)) if missing else unit_stride(x), _ROW_BYTES)


def uses_triton(q: Tensor, v: Tensor) -> bool:
    """Return True if the Triton kernels compute this, False if the reference implementation does."""
    head_dim = max(q.size(3), v.size(3))
    return TRITON_AVAILABLE and q.is_cuda and head_dim <= MAX_HEAD_DIM.get(q.dtype, 0) and has_tensor_cores(q.device)


def positions_of(segments: Iterable[Segment], device: torch.device | str | None = None) -> Tensor:
    """Return the global positions of the tokens of some segments, in local order: (tokens,) int64.

    >>> positions_of([Segment(start=2, length=5, block=2, period=8)]).tolist()
    [2, 3, 10, 11, 18]
    """
    parts: list[Any] = []
    for segment in segments:
        tokens: Any = torch.arange(segment.length, device=device)
        parts.append(segment.position(tokens))
    return torch.cat(parts)


def seen_positions(bands: IntervalSet, queries: Tensor) -> Tensor:
    """Return (2, S): the first key position that queries at some positions see, and the end of those that they see.

    >>> from cp_dtensor.spec.masks import Causal
    >>> seen_positions(Causal().interval_sets(4, 4)[0], torch.tensor([0, 3])).tolist()
    [[0, 0], [1, 4]]
    """
    facts = torch.tensor([(0, 0, 0, 0, 0, 0), *bands], dtype=torch.int64, device="cpu").t().contiguous()
    index = torch.searchsorted(facts[0, 1:], queries, right=True)  # before the first band there is an empty one
    _, last, lo, hi, left, right = facts.index_select(1, index)
    seen = torch.stack([torch.maximum(lo, queries - left), torch.minimum(hi, queries + (right + 1))])
    return torch.where(queries < last, seen, 0)


# The reference implementation


def attention_forward_reference(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: RowMask, scale: float, *,
    bias: Tensor | None = None, dropout: Dropout | None = None, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Compute `launch_attention_forward` in float32, or in float64 if q is."""
    wide = wide_dtype(q)
    k, v = k.to(wide), v.to(wide)
    for rows, columns in _blocks(q, k, mask):
        at, to = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        logits = _logits(q, k, scale, softcap, at, to)
        _add_bias_and_mask(logits, mask, rows, columns, bias)
        largest = logits.amax(-1) if len(columns) else logits.new_full(logits.shape[:3], float("-inf"))
        weights = without(largest, logits).exp_()
        total = weights.sum(-1)
        total.masked_fill_(total == 0, 1.0)  # of rows without keys
        weights /= total.unsqueeze(-1)
        if dropout is not None:
            weights *= kept_reference(dropout, q.size(0), q.size(1), rows, columns).to(wide) * dropout.scale
        out[:, :, at].copy_(_by_query_head(_by_kv_head(weights, v) @ v[:, :, to], q))
        store_sum(lse[:, :, at], largest, total.log())


def attention_backward_reference(
    dq: Tensor, dk: Tensor, dv: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor,
    mask: RowMask, scale: float, *, bias: Tensor | None = None, dropout: Dropout | None = None, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Compute `launch_attention_backward` in float32, or in float64 if q is."""
    wide = wide_dtype(q)
    k, v = k.to(wide), v.to(wide)
    sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)
    blocks = _backward_blocks(grad_out, q, k, v, lse, delta, mask, scale, bias, dropout, softcap)
    for rows, columns, weights, grad, grad_logits, slope in blocks:
        if slope is not None:
            grad_logits *= slope
        at, to = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        sum_v[:, :, to].add_(weights.mT @ grad)
        sum_k[:, :, to].add_(grad_logits.mT @ _by_kv_head(q[:, :, at].to(k.dtype), k), alpha=scale)
        dq[:, :, at].copy_(_by_query_head(grad_logits @ k[:, :, to], q) * scale)
    dk.copy_(sum_k)
    dv.copy_(sum_v)


def _backward_blocks(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, mask: RowMask, scale: float,
    bias: Tensor | None, dropout: Dropout | None, softcap: float,
) -> Iterator[tuple[range, range, Tensor, Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """Yield the rows and columns of each block, P with dropout, dO, dS = P * (dO V^T - delta), and the cap's slope.

    The tensors are in the dtype of k and v and in the form of `_by_kv_head`.
    """
    for rows, columns in _blocks(q, k, mask):
        at, to = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        logits = _logits(q, k, scale, softcap, at, to)
        slope = _by_kv_head(1 - (logits / softcap).square(), k) if softcap else None
        _add_bias_and_mask(logits, mask, rows, columns, bias)
        weights = dropped = _by_kv_head(without(lse[:, :, at], logits).exp_(), v)
        grad = _by_kv_head(grad_out[:, :, at].to(v.dtype), v)
        grad_logits = grad @ v[:, :, to].mT
        if dropout is not None:
            kept = kept_reference(dropout, q.size(0), q.size(1), rows, columns)
            factors = _by_kv_head(kept.to(v.dtype) * dropout.scale, v)
            grad_logits *= factors
            dropped = weights * factors
        grad_logits -= _by_kv_head(delta[:, :, at].to(v.dtype).unsqueeze(-1), v)
        grad_logits *= weights
        yield rows, columns, dropped, grad, grad_logits, slope


def seen_reference(mask: RowMask, rows: range, columns: range, device: torch.device) -> Tensor | None:
    """Return True where a row attends to a column, broadcasts to (B, H, rows, columns); None without a mask.

    >>> seen_reference(RowMask(causal_offset=1), range(2), range(1, 4), torch.device("cpu")).int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    column = torch.arange(columns.start, columns.stop, device=device)
    if mask.intervals is not None:
        lo, hi = mask.intervals
        span = slice(rows.start, rows.stop)
        seen = (lo[..., span, None] <= column) & (column < hi[..., span, None])
        return seen if seen.dim() == 2 else seen.unsqueeze(1)
    if mask.causal_offset is None:
        return None
    return column <= torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1) + mask.causal_offset


def _blocks(q: Tensor, k: Tensor, mask: RowMask) -> Iterator[tuple[range, range]]:
    """Yield the rows of each block, with a range that has all columns to which they attend."""
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


def _logits(q: Tensor, k: Tensor, scale: float, softcap: float, at: slice, to: slice) -> Tensor:
    """Return (B, H, rows, columns) in k's dtype: scaled and capped logits of rows `at`, columns `to`; a new tensor."""
    logits = _by_query_head(_by_kv_head(q[:, :, at].to(k.dtype), k) * scale @ k[:, :, to].mT, q)
    return logits.div_(softcap).tanh_().mul_(softcap) if softcap else logits


def _add_bias_and_mask(logits: Tensor, mask: RowMask, rows: range, columns: range, bias: Tensor | None) -> None:
    """Add the bias, in place; masked pairs become -inf."""
    if bias is not None:
        block = _bias_block(bias, rows, columns)
        if bias.dtype == torch.bool:
            logits.masked_fill_(~block, float("-inf"))
        else:
            logits += block
    seen = seen_reference(mask, rows, columns, logits.device)
    if seen is not None:
        logits.masked_fill_(~seen, float("-inf"))


def _bias_block(bias: Tensor, rows: range, columns: range) -> Tensor:
    """Return the rows and columns of a bias that broadcasts to (B, H, S, T)."""
    for dim, span in ((-1, columns), (-2, rows)):
        if bias.dim() >= -dim and bias.size(dim) > 1:
            bias = bias.narrow(dim, span.start, len(span))
    return bias


def _by_kv_head(x: Tensor, kv: Tensor) -> Tensor:
    """Return (B, H, S, D) as (B, Hkv, H / Hkv * S, D), the left operand of products with unexpanded K or V."""
    kv_heads = kv.size(1)
    return x.unflatten(1, (kv_heads, x.size(1) // kv_heads)).flatten(2, 3)


def _by_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return the inverse of `_by_kv_head`."""
    group = q.size(1) // x.size(1)
    return x.unflatten(2, (group, x.size(2) // group)).flatten(1, 2)
