"""LSE merge of partial attention results, sums of partial gradients, and attention sinks.

A partial result is `(out, lse)` over some keys. `lse` is the natural log of the softmax denominator, in one float or
two (`attention.lse`), -inf for a query without keys (its `out` is 0). Merging is commutative and associative, and
`(0, -inf)` is its identity:

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1; Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cp_dtensor._torch.tensors import TRITON_AVAILABLE, on_device
from cp_dtensor.attention.lse import rounded_lse, store_sum
from cp_dtensor.spec.layouts import Span

if TRITON_AVAILABLE:
    from cp_dtensor.attention.triton.merge import launch_merge, launch_sum

MergePart = tuple[Span, Tensor, Tensor]
"""`(rows, out, lse)`: a span of rows of the result, (B, H, rows, D) and (B, H, rows) or (B, H, rows, 2)."""
SumPart = tuple[Span, Tensor]
"""`(rows, stack)`: a span of rows of the result, and (N, B, H, rows, D), N tensors to add there."""


def merge(out: Tensor, lse: Tensor, base_out: Tensor, base_lse: Tensor, parts: Sequence[MergePart]) -> None:
    """Write the merge of a base and some parts to `(out, lse)`; one launch of the Triton kernel on a GPU.

    Args:
        out: (B, H, S, D), any floating dtype: sums are in lse's dtype and rounded once. May be `base_out`.
        lse: (B, H, S), float32 or float64, contiguous along S, as all LSEs here; all are split, or none. May be
            `base_lse`.
        base_out: (B, H, S, D).
        base_lse: as `lse`.
        parts: at most MAX_PARTS.

    >>> out, lse = torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]])
    >>> merge(out, lse, out, lse, [((0, 1), torch.tensor([[[[5.0]]]]), torch.tensor([[[3.0]]]).log())])
    >>> round(out.item(), 4), round(lse.exp().item(), 4)  # (1 * 1 + 3 * 5) / 4, 1 + 3
    (4.0, 4.0)
    """
    if TRITON_AVAILABLE and out.is_cuda and lse.dtype == torch.float32:
        launch_merge(out, lse, base_out, base_lse, parts)
    else:
        merge_reference(out, lse, base_out, base_lse, parts)


def merge_reference(out: Tensor, lse: Tensor, base_out: Tensor, base_lse: Tensor, parts: Sequence[MergePart]) -> None:
    """Compute `merge` in plain torch operations: the reference implementation of the kernel."""
    total, total_lse = base_out.to(lse.dtype, copy=True), base_lse.to(lse, copy=True)
    for (start, stop), part_out, part_lse in parts:
        rows, rows_lse, part_lse = total[:, :, start:stop], total_lse[:, :, start:stop], part_lse.to(lse.dtype)
        largest = torch.maximum(rows_lse, part_lse) if lse.dim() == 3 else rows_lse[..., 0].maximum(part_lse[..., 0])
        seen = largest != float("-inf")  # else both are -inf, and -inf - -inf would be NaN
        # Weights from the difference, not from the merged LSE, whose rounding error does not cancel if LSE is large.
        difference = rows_lse - part_lse
        if lse.dim() == 4:
            difference = difference.sum(-1)
        weight = torch.where(seen, torch.sigmoid(difference), 0)
        part_weight = torch.where(seen, torch.sigmoid(-difference), 0)
        rows.mul_(weight.unsqueeze(-1)).addcmul_(part_out.to(lse.dtype), part_weight.unsqueeze(-1))
        if lse.dim() == 4:
            shift = torch.where(seen, largest, 0.0)
            shares = [(x[..., 0] - shift + x[..., 1]).exp() for x in (rows_lse, part_lse)]
            store_sum(rows_lse, largest, torch.where(seen, (shares[0] + shares[1]).log(), 0.0))
        else:
            rows_lse.copy_(torch.logaddexp(rows_lse, part_lse))
    out.copy_(total)
    lse.copy_(total_lse)


def add_parts(out: Tensor, base: Tensor, parts: Sequence[SumPart], sum_dtype: torch.dtype) -> None:
    """Write a base plus some parts to `out`; one launch of the Triton kernel on a GPU.

    Args:
        out: (B, H, S, D), any floating dtype. May be `base`.
        base: (B, H, S, D).
        parts: at most MAX_PARTS.
        sum_dtype: dtype of the sums, float32 or float64.

    >>> out = torch.tensor([[[[1.0]]]])
    >>> add_parts(out, out, [((0, 1), torch.tensor([2.0, 3.0]).view(2, 1, 1, 1, 1))], torch.float32)
    >>> out.item()
    6.0
    """
    if TRITON_AVAILABLE and out.is_cuda and sum_dtype == torch.float32:
        launch_sum(out, base, parts)
    else:
        add_parts_reference(out, base, parts, sum_dtype)


def add_parts_reference(out: Tensor, base: Tensor, parts: Sequence[SumPart], sum_dtype: torch.dtype) -> None:
    """Compute `add_parts` in plain torch operations: the reference implementation of the kernel."""
    total = base.to(sum_dtype, copy=True)
    for (start, stop), stack in parts:
        for tensor in stack:
            total[:, :, start:stop] += tensor
    out.copy_(total)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the result over all keys with attention sinks, into new tensors.

    A sink is a logit of each query head that counts in the softmax denominator alone: one more partial result, (0,
    sink). Backward of the backends, from the merged out and lse, needs no change.

        lse' = log(exp(lse) + exp(sink)),   out' = exp(lse - lse') out

    Source: gpt-oss (arXiv 2508.10925) learns sinks; StreamingLLM (arXiv 2309.17453) compares with sinks of 0.

    Args:
        out: (B, H, S, Dv).
        lse: (B, H, S) or (B, H, S, 2), float32 or float64; for rows without keys (-inf), lse' is the sink.
        sinks: (H,), any floating dtype.

    >>> out, lse = with_sinks(torch.tensor([[[[4.0]]]]), torch.tensor([[[3.0]]]).log(), torch.zeros(1))
    >>> round(out.item(), 4), round(lse.exp().item(), 4)  # 4 * 3 / (3 + 1), 3 + 1
    (3.0, 4.0)
    """
    if not out.numel():
        return out, lse
    with on_device(out.device):
        merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
        zero = out.new_zeros(out.size(3)).expand(out.shape)
        lse_of_sinks = torch.zeros_like(lse)
        rounded_lse(lse_of_sinks).copy_(sinks[:, None].expand(lse.shape[1:3]))
        merge(merged, merged_lse, out, lse, [((0, out.size(2)), zero, lse_of_sinks)])
    return merged, merged_lse


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return the contribution of some rows to the gradient of the sinks: (H,), in lse's dtype.

        dsink = -sum over rows of exp(sink - lse') delta

    Args:
        sinks: (H,).
        lse: (B, H, S), lse' of `with_sinks`.
        delta: (B, H, S), the sum over the last dim of out' times its gradient.
    """
    weights = torch.where(lse == float("-inf"), 0.0, (sinks.to(lse)[:, None] - lse).exp())
    return -(weights * delta).sum((0, 2))
