"""Merging partial attention results: the softmax over all keys from softmaxes over parts of them.

A partial result is `(out, lse)`; `lse` is the log of the softmax denominator, -inf for a query that saw no key (its
`out` is 0). Merging is commutative and associative, and `(0, -inf)` is its identity:

    lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

Source: FlashAttention-2 (arXiv 2307.08691), section 3.1; Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

import torch

from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.layouts import Span

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.lse_merge import launch_merge


def merge_reference_(out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor) -> None:
    """Merges a tile into `(out, lse)`, in place, in plain torch operations: the oracle of the kernel.

    Args:
        out: (B, H, S, D), float32 or float64, any strides.
        lse: (B, H, S), same dtype as `out`.
        tile_out: (B, H, S, D), any floating dtype.
        tile_lse: (B, H, S).
    """
    tile_lse = tile_lse.to(lse.dtype)
    seen = torch.maximum(lse, tile_lse) > float("-inf")  # elsewhere both are -inf, and -inf - -inf would be NaN
    # Weights from the difference, not from the merged LSE: its rounding error would not cancel where LSE is large.
    weight = torch.where(seen, torch.sigmoid(lse - tile_lse), 0)
    tile_weight = torch.where(seen, torch.sigmoid(tile_lse - lse), 0)
    out.mul_(weight.unsqueeze(-1)).addcmul_(tile_out.to(out.dtype), tile_weight.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, tile_lse))


def merge_(out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor) -> None:
    """As `merge_reference_`; one launch of the Triton kernel for float32 state on a GPU.

    >>> out, lse = torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]])
    >>> merge_(out, lse, torch.tensor([[[[5.0]]]]), torch.tensor([[[3.0]]]).log())
    >>> round(out.item(), 4), round(lse.exp().item(), 4)  # (1 * 1 + 3 * 5) / 4, 1 + 3
    (4.0, 4.0)
    """
    if TRITON_AVAILABLE and out.is_cuda and out.dtype == torch.float32:
        launch_merge(out, lse, tile_out, tile_lse)
    else:
        merge_reference_(out, lse, tile_out, tile_lse)


class Accumulator:
    """The partial result of one call, merged tile by tile; state in float32 (float64 for float64 inputs).

    A call of a single tile that covers all rows passes through untouched.
    """

    def __init__(self, q: torch.Tensor, v_head_dim: int, state_dtype: torch.dtype) -> None:
        self._shape = (*q.shape[:3], v_head_dim)
        self._like = q
        self._state_dtype = state_dtype
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None

    def add(self, batch: Span, rows: Span, tile_out: torch.Tensor, tile_lse: torch.Tensor) -> None:
        """Merges a tile's result into its rows."""
        if self._state is None and self._whole is None and tile_out.shape == self._shape:
            self._whole = (tile_out, tile_lse)
            return
        out, lse = self._materialised()
        merge_(
            out[batch[0] : batch[1], :, rows[0] : rows[1]],
            lse[batch[0] : batch[1], :, rows[0] : rows[1]],
            tile_out,
            tile_lse,
        )

    def result(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """`(out, lse)` of all rows, out cast once to `dtype`; rows that saw nothing are (0, -inf)."""
        out, lse = self._whole if self._state is None and self._whole is not None else self._materialised()
        return out.to(dtype), lse.to(self._state_dtype)

    def _materialised(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._state is None:
            if self._whole is not None:
                out, lse = self._whole
                self._state = (out.to(self._state_dtype, copy=True), lse.to(self._state_dtype, copy=True))
            else:
                out = self._like.new_zeros(self._shape, dtype=self._state_dtype)
                self._state = (out, self._like.new_full(self._shape[:3], float("-inf"), dtype=self._state_dtype))
            self._whole = None
        return self._state
