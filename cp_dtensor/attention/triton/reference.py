"""What the attention kernels compute, in plain torch operations: their oracle, and what runs where Triton does not.

In blocks of rows, each with the columns that its rows see: memory does not grow with the square of the length, and work
is that of what is seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cp_dtensor.attention.triton.dropout import Dropout, kept_reference
from cp_dtensor.attention.triton.intervals import Intervals

LOGITS_BYTES = 64 * 2**20
"""Of the logits of a block, at most, unless one row has more: a few tensors of that size exist at once."""

_MASKED_ROWS = 256
"""Of a block, at most, if rows see different columns: fewer rows leave more out, more rows make fewer calls."""


def attention_forward_reference(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal_offset: int | None = None,
    intervals: Intervals | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    state: tuple[torch.Tensor, torch.Tensor] | None = None,
    dropout: Dropout | None = None,
) -> None:
    """As `launch_attention_forward`, in float32, or in float64 if q is."""
    wide = _wide(q)
    k, v = k.to(wide), v.to(wide)
    nothing = q.new_full((), float("-inf"), dtype=wide)
    sink = nothing if sinks is None else sinks.to(wide)[:, None]
    for rows, columns in blocks_reference(q, k, causal_offset, intervals):
        logits = logits_reference(q, k, scale, rows, columns, causal_offset, intervals, bias)
        before = nothing if state is None else _rows(state[1], rows).to(wide)
        tile_lse = logits.logsumexp(-1) if len(columns) else nothing.expand(logits.shape[:3])
        total = torch.logaddexp(torch.logaddexp(before, sink), tile_lse)
        shift = _finite(total)
        weights = logits.sub_(shift.unsqueeze(-1)).exp_()
        if dropout is not None:
            weights *= factors_reference(dropout, q, rows, columns, wide)
        result = of_query_heads(by_kv_head(weights, v) @ _rows(v, columns), q)
        if state is not None:
            # What there is in the result of rows that have seen nothing may be anything.
            weight = (before - shift).exp().unsqueeze(-1)
            result += torch.where(weight > 0, _rows(state[0], rows).to(wide), 0.0) * weight
        _rows(out, rows).copy_(result)
        _rows(lse, rows).copy_(total)


def attention_backward_reference(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    *,
    causal_offset: int | None = None,
    intervals: Intervals | None = None,
    bias: torch.Tensor | None = None,
    dropout: Dropout | None = None,
) -> None:
    """As `launch_attention_backward`, in float32, or in float64 if q is."""
    wide = _wide(q)
    k, v = k.to(wide), v.to(wide)
    sum_k, sum_v = torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in blocks_reference(q, k, causal_offset, intervals):
        logits = logits_reference(q, k, scale, rows, columns, causal_offset, intervals, bias)
        weights = dropped = by_kv_head(weights_reference(logits, _rows(lse, rows)), v)
        grad = by_kv_head(_rows(grad_out, rows).to(wide), v)
        grad_logits = grad @ _rows(v, columns).mT
        if dropout is not None:
            factors = by_kv_head(factors_reference(dropout, q, rows, columns, wide), v)
            grad_logits *= factors
            dropped = weights * factors
        grad_logits -= by_kv_head(_rows(delta, rows).to(wide).unsqueeze(-1), v)
        grad_logits *= weights
        _rows(sum_v, columns).add_(dropped.mT @ grad)
        _rows(sum_k, columns).add_(grad_logits.mT @ by_kv_head(_rows(q, rows).to(wide), k), alpha=scale)
        _rows(dq, rows).copy_(of_query_heads(grad_logits @ _rows(k, columns), q) * scale)
    dk.copy_(sum_k)
    dv.copy_(sum_v)


def blocks_reference(
    q: torch.Tensor, k: torch.Tensor, causal_offset: int | None, intervals: Intervals | None
) -> Iterator[tuple[range, range]]:
    """Rows of each block, and columns among which are all that these see."""
    rows, columns = q.size(2), k.size(2)
    column_bytes = max(1, q.size(0) * q.size(1)) * _wide(q).itemsize
    full = causal_offset is None and intervals is None
    length = rows if full else _MASKED_ROWS
    edges = None if intervals is None else intervals.columns_of_rows(columns, length)
    for index, start in enumerate(range(0, rows, max(1, length))):
        stop = min(start + length, rows)
        first, last = (0, columns) if edges is None else edges[index]
        if causal_offset is not None:
            last = max(0, min(stop + causal_offset, columns))
        step = max(1, LOGITS_BYTES // (column_bytes * max(1, last - first)))
        for here in range(start, stop, step):
            there = min(here + step, stop)
            end = last if causal_offset is None else max(0, min(there + causal_offset, columns))
            yield range(here, there), range(first, end)


def logits_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    rows: range,
    columns: range,
    causal_offset: int | None,
    intervals: Intervals | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(B, H, rows, columns) in k's dtype, -inf where nothing is seen; a new tensor."""
    folded = by_kv_head(_rows(q, rows).to(k.dtype), k) * scale
    logits = of_query_heads(folded @ _rows(k, columns).mT, q)
    if bias is not None:
        block = part_of_bias(bias, rows, columns)
        if bias.dtype == torch.bool:
            logits.masked_fill_(~block, float("-inf"))
        else:
            logits += block
    seen = seen_reference(rows, columns, q.device, causal_offset, intervals)
    return logits if seen is None else logits.masked_fill_(~seen, float("-inf"))


def weights_reference(logits: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """exp(logits - lse), 0 for rows that see nothing; in place."""
    return logits.sub_(_finite(lse.to(logits.dtype)).unsqueeze(-1)).exp_()


def factors_reference(
    dropout: Dropout, q: torch.Tensor, rows: range, columns: range, dtype: torch.dtype
) -> torch.Tensor:
    """(B, H, rows, columns): what dropout multiplies the softmax with."""
    return kept_reference(dropout, q.size(0), q.size(1), rows, columns).to(dtype).mul_(dropout.scale)


def seen_reference(
    rows: range, columns: range, device: torch.device, causal_offset: int | None, intervals: Intervals | None
) -> torch.Tensor | None:
    """Whether a row sees a column: boolean, broadcasts to (B, H, rows, columns); None if every row sees every column.

    >>> seen_reference(range(2), range(1, 4), torch.device("cpu"), 1, None).int().tolist()
    [[1, 0, 0], [1, 1, 0]]
    """
    column = torch.arange(columns.start, columns.stop, device=device)
    if intervals is not None:
        lo, hi = (x[..., rows.start : rows.stop, None] for x in (intervals.lo, intervals.hi))
        seen = (lo <= column) & (column < hi)
        return seen if seen.dim() == 2 else seen.unsqueeze(1)
    if causal_offset is None:
        return None
    return column <= torch.arange(rows.start, rows.stop, device=device).unsqueeze(-1) + causal_offset


def part_of_bias(bias: torch.Tensor, rows: range, columns: range) -> torch.Tensor:
    """The part of a bias that broadcasts to (B, H, S, T) which broadcasts to (B, H, rows, columns)."""
    if bias.dim() > 0 and bias.size(-1) > 1:
        bias = bias[..., columns.start : columns.stop]
    if bias.dim() > 1 and bias.size(-2) > 1:
        bias = bias[..., rows.start : rows.stop, :]
    return bias


def by_kv_head(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as (B, Hkv, H / Hkv * S, D): all that is multiplied with a kv head, which is not repeated then."""
    kv_heads = kv.size(1)
    return x.unflatten(1, (kv_heads, x.size(1) // kv_heads)).flatten(2, 3)


def of_query_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What `by_kv_head` was given."""
    group = q.size(1) // x.size(1)
    return x.unflatten(2, (group, x.size(2) // group)).flatten(1, 2)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: torch.Tensor, rows: range) -> torch.Tensor:
    """Of (B, H, S, D) or (B, H, S)."""
    return x[:, :, rows.start : rows.stop]


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 for rows that see nothing, whose logits are all -inf: -inf - -inf would be NaN."""
    return torch.where(lse > float("-inf"), lse, 0.0)
