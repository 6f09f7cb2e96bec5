"""What the attention kernels compute, in plain torch operations: their oracle, and what runs where Triton does not."""

from __future__ import annotations

import torch

from cp_dtensor.kernels.attention_intervals import Intervals


def attention_forward_twin(
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
) -> None:
    """As `launch_attention_forward`, in float32, or in float64 if q is, and with the (S, T) logits in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = _logits(q, k, scale, causal_offset, intervals, bias)
    nothing = logits.new_full((), float("-inf"))
    before = nothing if state is None else state[1].to(wide)
    sink = nothing if sinks is None else sinks.to(wide)[:, None]
    tile_lse = logits.logsumexp(-1) if k.size(2) else nothing.expand(q.shape[:3])
    total = torch.logaddexp(torch.logaddexp(before, sink), tile_lse)
    shift = _finite(total)
    result = (logits - shift.unsqueeze(-1)).exp() @ _of_query_heads(v, q).to(wide)
    if state is not None:
        weight = (before - shift).exp().unsqueeze(-1)
        # What there is in the result of rows that have seen nothing may be anything.
        result = result + torch.where(weight > 0, state[0].to(wide), 0.0) * weight
    out.copy_(result)
    lse.copy_(total)


def attention_backward_twin(
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
) -> None:
    """As `launch_attention_backward`, in float32, or in float64 if q is, and with the (S, T) logits in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    kv_heads = k.size(1)
    grad_out = grad_out.to(wide)
    logits = _logits(q, k, scale, causal_offset, intervals, bias)
    weights = (logits - _finite(lse.to(wide)).unsqueeze(-1)).exp()
    grad_weights = grad_out @ _of_query_heads(v, q).to(wide).mT
    grad_logits = weights * (grad_weights - delta.to(wide).unsqueeze(-1)) * scale
    dq.copy_(grad_logits @ _of_query_heads(k, q).to(wide))
    dk.copy_((grad_logits.mT @ q.to(wide)).unflatten(1, (kv_heads, -1)).sum(2))
    dv.copy_((weights.mT @ grad_out).unflatten(1, (kv_heads, -1)).sum(2))


def seen_twin(
    rows: int,
    columns: int,
    device: torch.device,
    causal_offset: int | None,
    intervals: Intervals | None,
) -> torch.Tensor | None:
    """Whether row i sees column j: boolean, broadcasts to (B, H, rows, columns); None if every row sees every column.

    >>> seen_twin(2, 3, torch.device("cpu"), 1, None).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    column = torch.arange(columns, device=device)
    if intervals is not None:
        lo, hi = intervals.lo.unsqueeze(-1), intervals.hi.unsqueeze(-1)
        seen = (lo <= column) & (column < hi)
        return seen if seen.dim() == 2 else seen.unsqueeze(1)
    if causal_offset is None:
        return None
    return column <= torch.arange(rows, device=device).unsqueeze(-1) + causal_offset


def _logits(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    causal_offset: int | None,
    intervals: Intervals | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """(B, H, S, T), -inf where nothing is seen."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits = q.to(wide) @ _of_query_heads(k, q).to(wide).mT * scale
    if bias is not None and bias.dtype != torch.bool:
        logits += bias
    elif bias is not None:
        logits.masked_fill_(~bias, float("-inf"))
    seen = seen_twin(q.size(2), k.size(2), q.device, causal_offset, intervals)
    return logits if seen is None else logits.masked_fill_(~seen, float("-inf"))


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 for rows that see nothing, whose logits are all -inf: -inf - -inf would be NaN."""
    return torch.where(lse > float("-inf"), lse, 0.0)


def _of_query_heads(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(B, Hkv, T, D) repeated over the query heads of each group: (B, H, T, D)."""
    return kv.repeat_interleave(q.size(1) // kv.size(1), dim=1)
