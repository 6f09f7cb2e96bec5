"""Summing partial gradients: what tiles and ranks contribute, added in float32 or wider and rounded once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.layouts import Span

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.part_sum import launch_sum

SumPart = tuple[Span, torch.Tensor]
"""`(rows, stack)`: the rows of the result that it concerns, and (N, B, H, rows, D): N tensors to add there."""


def add_parts(out: torch.Tensor, base: torch.Tensor, parts: Sequence[SumPart], sum_dtype: torch.dtype) -> None:
    """Writes a base plus some parts to `out`; one launch of the Triton kernel on a GPU.

    Args:
        out: (B, H, S, D), any floating dtype. May be `base`.
        base: (B, H, S, D).
        parts: at most `kernels.MAX_PARTS`; each concerns the rows that it names.
        sum_dtype: in what to add, float32 or float64.

    >>> out = torch.tensor([[[[1.0]]]])
    >>> add_parts(out, out, [((0, 1), torch.tensor([2.0, 3.0]).view(2, 1, 1, 1, 1))], torch.float32)
    >>> out.item()
    6.0
    """
    if TRITON_AVAILABLE and out.is_cuda and sum_dtype == torch.float32:
        launch_sum(out, base, parts)
    else:
        add_parts_reference(out, base, parts, sum_dtype)


def add_parts_reference(
    out: torch.Tensor, base: torch.Tensor, parts: Sequence[SumPart], sum_dtype: torch.dtype
) -> None:
    """As `add_parts`, in plain torch operations: the oracle of the kernel."""
    in_place = out is base and out.dtype == sum_dtype
    total = out if in_place else base.to(sum_dtype, copy=True)
    for (start, stop), stack in parts:
        for tensor in stack:
            total[:, :, start:stop] += tensor
    if not in_place:
        out.copy_(total)
