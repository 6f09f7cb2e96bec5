"""The LSE of rows: the log of the softmax denominator as one float, or as two floats whose sum it is.

Many models hide keys by an additive bias of -1e9 or `finfo.min`. A row that sees n such keys and no other has the LSE
-1e9 + log(n), and float32 has no digits for log(n) beside 1e9: weights exp(logit - lse) would be 1 instead of 1/n.
With an additive bias an LSE is therefore split: (B, H, S, 2), of which [..., 0] is the rounded LSE and [..., 1] what
rounding lost. Other LSEs are (B, H, S). Each of the two floats is contiguous along S, in memory (2, B, H, S).

Source: Dekker, "A floating-point technique for extending the available precision" (1971), Fast2Sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_lse(like: Tensor, shape: Sequence[int], dtype: torch.dtype, is_split: bool) -> Tensor:
    """Return an uninitialised LSE of rows of `shape` (B, H, S)."""
    return like.new_empty((2, *shape), dtype=dtype).movedim(0, -1) if is_split else like.new_empty(shape, dtype=dtype)


def rounded_lse(lse: Tensor) -> Tensor:
    """Return the LSE as one float, (B, H, S)."""
    return lse[..., 0] if lse.dim() == 4 else lse


def store_sum(lse: Tensor, large: Tensor, small: Tensor) -> None:
    """Write large + small to an LSE; |large| >= |small|, or a split LSE is less precise. Both are (B, H, S).

    >>> lse = torch.empty(1, 1, 1, 2)
    >>> store_sum(lse, torch.full((1, 1, 1), -1e9), torch.full((1, 1, 1), 3.0))
    >>> lse.tolist()
    [[[[-1000000000.0, 3.0]]]]
    """
    total = large + small
    rounded_lse(lse).copy_(total)
    if lse.dim() == 4:
        lse[..., 1].copy_(torch.where(total.isinf(), 0.0, (large - total) + small))


def without(lse: Tensor, of: Tensor) -> Tensor:
    """Return `of` - lse for `of` (B, H, S, T), in its dtype and in place; `of` for rows without keys.

    >>> without(torch.tensor([[[-1e9, 3.0]]]).unsqueeze(0), torch.full((1, 1, 1, 2), -1e9))
    tensor([[[[-3., -3.]]]])
    """
    lse = lse.to(of.dtype)
    rounded = rounded_lse(lse)
    of.sub_(torch.where(rounded == float("-inf"), 0.0, rounded).unsqueeze(-1))
    return of.sub_(lse[..., 1].unsqueeze(-1)) if lse.dim() == 4 else of


def with_gradient_of_lse(out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return an `out` and `grad_out` whose backward adds the gradient of lse.

    Of out, backward reads nothing but delta, the sum of grad_out * out over the head dim, and the gradient of logits is
    P * (grad_out v^T - delta). That of lse adds P * grad_lse. So out becomes out - x, where grad_out * x has the sum
    grad_lse. Rows whose grad_out is too small for that get a tiny one.

    Args:
        out, grad_out: (B, H, S, Dv).
        lse, grad_lse: (B, H, S).
    """
    grad_lse = grad_lse.to(lse.dtype).masked_fill(lse == float("-inf"), 0).unsqueeze(-1)  # rows without keys
    # x must not overflow, nor what is put into grad_out vanish: limits of an element of x, and of grad_out.
    most, least = (4096.0, 2.0**-24) if out.dtype == torch.float16 else (1e30, 1e-19)
    least_of_row = (grad_lse.abs() / (most * out.size(3))).clamp(min=least)
    is_small = (grad_out.abs().amax(-1, keepdim=True) < least_of_row) & (grad_lse != 0)
    grad_out = torch.where(is_small, least_of_row.to(grad_out.dtype), grad_out)
    largest = grad_out.abs().amax(-1, keepdim=True).to(lse.dtype).clamp(min=torch.finfo(lse.dtype).tiny)
    direction = grad_out / largest
    factor = grad_lse / largest / direction.square().sum(-1, keepdim=True).clamp(min=1)
    # Where grad_out is made up, out itself must not count in delta.
    return (out.to(lse.dtype).masked_fill(is_small, 0) - factor * direction).to(out.dtype), grad_out


def dense_lse(lse: Tensor) -> Tensor:
    """Return the LSE in the memory order of `empty_lse`, without a copy if it has that order."""
    return lse.movedim(-1, 0).contiguous().movedim(0, -1) if lse.dim() == 4 else lse.contiguous()
