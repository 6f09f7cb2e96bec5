"""What attention of one tile refuses, whoever computes it."""

from __future__ import annotations

import torch

from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.intervals import Intervals


def check_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    intervals: Intervals | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout: Dropout | None,
) -> None:
    """Raises ValueError if these do not fit each other."""
    batch, heads, rows, head_dim = q.shape
    kv_heads, columns = k.shape[1:3]
    if k.shape != (batch, kv_heads, columns, head_dim) or v.shape[:3] != k.shape[:3] or heads % kv_heads:
        raise ValueError(f"q, k and v do not fit: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, got {scale}: masks are applied before it")
    if intervals is not None:
        lo, hi = intervals.lo, intervals.hi
        if not lo.dtype == hi.dtype == torch.int32 or lo.shape != hi.shape or lo.shape not in ((rows,), (batch, rows)):
            raise ValueError(
                f"lo and hi must both be int32 of ({rows},) or ({batch}, {rows}), "
                f"got {lo.dtype} {tuple(lo.shape)} and {hi.dtype} {tuple(hi.shape)}"
            )
    shape = (batch, heads, rows, columns)
    if bias is not None and (
        bias.dim() > 4 or any(size not in (1, full) for size, full in zip(bias.shape[::-1], shape[::-1], strict=False))
    ):
        raise ValueError(f"bias {tuple(bias.shape)} does not broadcast to {shape}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must be ({heads},), got {tuple(sinks.shape)}")
    if dropout is None:
        return
    for x, length in ((dropout.q_positions, rows), (dropout.kv_positions, columns)):
        if x.shape not in ((length,), (1, length), (batch, length)):
            raise ValueError(f"positions must be ({length},) or ({batch}, {length}), got {tuple(x.shape)}")
    if dropout.seed.device != q.device:
        raise ValueError(f"the seed of dropout must be on {q.device}, got {dropout.seed.device}")
