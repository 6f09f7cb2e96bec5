"""Attention sinks: a logit of each query head that counts in the softmax denominator alone.

A sink is one more partial result, (0, sink), merged once with that of all keys of a row. What backends compute in
backward from the merged out and lse is right as it is, and the gradient of the sinks follows from these rows alone:

    lse' = log(exp(lse) + exp(sink)),   out' = exp(lse - lse') out,   dsink = -sum(exp(sink - lse') sum(dout' out'))

Source: gpt-oss (arXiv 2508.10925) learns them; StreamingLLM (arXiv 2309.17453) compares such with sinks of 0.
"""

from __future__ import annotations

import torch

from cp_dtensor.merge import merge
from cp_dtensor.tensors import on_device_of


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of all keys, merged with the sinks; new tensors if there are any.

    Args:
        out: (B, H, S, Dv).
        lse: (B, H, S), float32 or float64; -inf for rows that see no key, which then have the sink's.
        sinks: (H,), any floating dtype, or None.

    >>> out, lse = with_sinks(torch.tensor([[[[4.0]]]]), torch.tensor([[[3.0]]]).log(), torch.zeros(1))
    >>> round(out.item(), 4), round(lse.exp().item(), 4)  # 4 * 3 / (3 + 1), 3 + 1
    (3.0, 4.0)
    """
    if sinks is None or not out.numel():
        return out, lse
    with on_device_of(out):
        merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
        nothing = out.new_zeros(out.size(3)).expand(out.shape)
        of_rows = sinks.to(lse)[:, None].expand(lse.shape[1:]).contiguous().expand(lse.shape)
        merge(merged, merged_lse, out, lse, [((0, out.size(2)), nothing, of_rows)])
    return merged, merged_lse


def sinks_gradient(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """What some rows contribute to the gradient of the sinks: (H,), in lse's dtype.

    Args:
        sinks: (H,).
        lse: (B, H, S), merged with the sinks.
        delta: (B, H, S), the sum over the last dim of out and its gradient.
    """
    weights = torch.where(lse > float("-inf"), (sinks.to(lse)[:, None] - lse).exp(), 0.0)
    return -(weights * delta).sum((0, 2))
