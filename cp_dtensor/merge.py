"""Merging partial attention results: the softmax over all keys from softmaxes over parts of them.

A partial result is `(out, lse)`; `lse` is the log of the softmax denominator, -inf for a query that saw no key (its
`out` is 0). Merging is commutative and associative, and `(0, -inf)` is its identity:

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1; Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.layouts import Span

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.lse_merge import launch_merge

MergePart = tuple[Span, torch.Tensor, torch.Tensor]
"""`(rows, out, lse)`: the rows of the result that it concerns, (B, H, rows, D) and (B, H, rows)."""


def merge(
    out: torch.Tensor,
    lse: torch.Tensor,
    base_out: torch.Tensor,
    base_lse: torch.Tensor,
    parts: Sequence[MergePart],
) -> None:
    """Writes the merge of a base and some parts to `(out, lse)`; one launch of the Triton kernel on a GPU.

    Args:
        out: (B, H, S, D), any floating dtype: sums are in lse's dtype and rounded once. May be `base_out`.
        lse: (B, H, S), float32 or float64; the last dim contiguous, as in all LSEs here. May be `base_lse`.
        base_out: (B, H, S, D).
        base_lse: (B, H, S).
        parts: at most MAX_PARTS; each concerns the rows that it names.

    >>> out, lse = torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]])
    >>> merge(out, lse, out, lse, [((0, 1), torch.tensor([[[[5.0]]]]), torch.tensor([[[3.0]]]).log())])
    >>> round(out.item(), 4), round(lse.exp().item(), 4)  # (1 * 1 + 3 * 5) / 4, 1 + 3
    (4.0, 4.0)
    """
    if TRITON_AVAILABLE and out.is_cuda and lse.dtype == torch.float32:
        launch_merge(out, lse, base_out, base_lse, parts)
    else:
        merge_reference(out, lse, base_out, base_lse, parts)


def merge_reference(
    out: torch.Tensor,
    lse: torch.Tensor,
    base_out: torch.Tensor,
    base_lse: torch.Tensor,
    parts: Sequence[MergePart],
) -> None:
    """As `merge`, in plain torch operations: the oracle of the kernel."""
    in_place = out is base_out and out.dtype == lse.dtype
    total, total_lse = (out, lse) if in_place else (base_out.to(lse.dtype, copy=True), base_lse.to(lse, copy=True))
    for (start, stop), part_out, part_lse in parts:
        _merge_pair_(total[:, :, start:stop], total_lse[:, :, start:stop], part_out, part_lse)
    if not in_place:
        out.copy_(total)
        lse.copy_(total_lse)


def _merge_pair_(out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor) -> None:
    part_lse = part_lse.to(lse.dtype)
    seen = torch.maximum(lse, part_lse) > float("-inf")  # elsewhere both are -inf, and -inf - -inf would be NaN
    # Weights from the difference, not from the merged LSE: its rounding error would not cancel where LSE is large.
    weight = torch.where(seen, torch.sigmoid(lse - part_lse), 0)
    part_weight = torch.where(seen, torch.sigmoid(part_lse - lse), 0)
    out.mul_(weight.unsqueeze(-1)).addcmul_(part_out.to(out.dtype), part_weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))
