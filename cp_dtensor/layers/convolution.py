"""Causal depthwise convolution of one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.spec.layouts import Span

ACTIVATIONS = (None, "silu", "swish")


def causal_convolution(
    extended: Tensor, tokens: list[Span], weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return act(bias + sum_k weight[:, k] x[t - K + 1 + k]) of some rows t.

    Args:
        extended: (B, E, C), rows with at least K - 1 rows before each of `tokens`.
        tokens: ranges of rows of `extended`.
        weight: (C, K).
        bias: (C,) or None.
        activation: one of `ACTIVATIONS`; "swish" is "silu".

    Returns:
        (B, rows of all ranges, C).
    """
    before = weight.size(1) - 1
    count = sum(stop - start for start, stop in tokens)
    if not count:  # torch refuses fewer rows than K; the gradients are zeros
        out = extended[:, :0] * weight[:, 0]
        out = out if bias is None else out + bias
        return out * out  # saves a tensor: a checkpoint recomputes up to here, past the exchange
    out = F.conv1d(extended.transpose(1, 2), weight.unsqueeze(1), bias, groups=weight.size(0)).transpose(1, 2)
    if out.size(1) > count:
        out = torch.cat([out[:, start - before : stop - before] for start, stop in tokens], 1)
    return out if activation is None else F.silu(out)
