"""Row masks of one device for tests of kernels; the library makes its own from `spec.masks`."""

from __future__ import annotations

import torch

from cp_dtensor.attention.masked import RowMask


def window(position: torch.Tensor, left: int | None, right: int | None) -> RowMask:
    """Returns a window: a row at `position` (S,) or (B, S) sees `left` columns before and `right` after it; None: all.

    >>> mask = window(torch.arange(4), left=1, right=0)
    >>> mask.lo.tolist(), mask.hi.tolist()
    ([-1, 0, 1, 2], [1, 2, 3, 4])
    """
    position = position.to(torch.int32)
    lo = torch.zeros_like(position) if left is None else position - left
    hi = torch.full_like(position, 2**31 - 1) if right is None else position + right + 1
    return RowMask(lo=lo, hi=hi)


def documents(position: torch.Tensor, cu_seqlens: torch.Tensor, is_causal: bool = False) -> RowMask:
    """Returns a document mask: a row sees the columns of its document, with `is_causal` up to its own position.

    Document n has positions cu_seqlens[n] to cu_seqlens[n + 1].

    >>> mask = documents(torch.arange(5), torch.tensor([0, 3, 5]))
    >>> mask.lo.tolist(), mask.hi.tolist()
    ([0, 0, 0, 3, 3], [3, 3, 3, 5, 5])
    """
    edges = cu_seqlens.to(position)
    following = torch.searchsorted(edges, position.contiguous(), right=True)
    outside = (following == 0) | (following == edges.numel())  # such a row sees no column
    hi = edges[following.clamp(max=edges.numel() - 1)].to(torch.int32)
    lo = edges[(following - 1).clamp(min=0)].to(torch.int32)
    lo = torch.where(outside, hi, lo)
    return RowMask(lo=lo, hi=torch.minimum(hi, position.to(torch.int32) + 1) if is_causal else hi)


def prefix(position: torch.Tensor, length: int | torch.Tensor) -> RowMask:
    """Returns a causal mask in which every row also sees the first `length` columns; (B, 1) lengths: by batch row.

    >>> prefix(torch.arange(4), 2).hi.tolist()
    [2, 2, 3, 4]
    """
    hi = (position + 1).clamp(min=length).to(torch.int32)
    return RowMask(lo=torch.zeros_like(hi), hi=hi)
