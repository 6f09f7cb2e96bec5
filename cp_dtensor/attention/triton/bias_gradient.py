"""Gradient of an additive bias, in plain torch operations on any device: in blocks of rows, as the twin works."""

from __future__ import annotations

import torch

from cp_dtensor.attention.triton.dropout import Dropout
from cp_dtensor.attention.triton.intervals import Intervals
from cp_dtensor.attention.triton.reference import (
    blocks_reference,
    by_kv_head,
    factors_reference,
    logits_reference,
    of_query_heads,
    part_of_bias,
    weights_reference,
)


def bias_gradient_reference(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    *,
    bias: torch.Tensor,
    causal_offset: int | None = None,
    intervals: Intervals | None = None,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """P * (dO V^T - delta), with dropout's factors at dO V^T, summed to the bias's shape; in float32 or wider.

    Arguments as of `launch_attention_backward`, on tensors of any strides.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(wide), v.to(wide)
    gradient = bias.new_zeros((1,) * (4 - bias.dim()) + bias.shape, dtype=wide)
    summed = [dim for dim in range(4) if gradient.size(dim) == 1]
    for rows, columns in blocks_reference(q, k, causal_offset, intervals):
        if not len(columns):
            continue
        here, there = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        weights = weights_reference(
            logits_reference(q, k, scale, rows, columns, causal_offset, intervals, bias), lse[:, :, here]
        )
        grad = by_kv_head(grad_out[:, :, here].to(wide), v)
        grad_logits = of_query_heads(grad @ v[:, :, there].mT, q)
        if dropout is not None:
            grad_logits *= factors_reference(dropout, q, rows, columns, wide)
        grad_logits -= delta[:, :, here].to(wide).unsqueeze(-1)
        grad_logits *= weights
        part_of_bias(gradient, rows, columns).add_(grad_logits.sum(summed, keepdim=True) if summed else grad_logits)
    return gradient.view(bias.shape)
