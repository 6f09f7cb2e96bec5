"""torch's cuDNN attention, the fastest on Hopper."""

from __future__ import annotations

import torch

from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.local_attention.flash import FlashAttention, half_precision_refusal
from cp_dtensor.tensors import laid_out_after
from cp_dtensor.tile_masks import TileMask

aten = torch.ops.aten


class CudnnAttention(LocalAttention):
    """bfloat16 and float16, head dims that are multiples of 8 up to 128, GQA natively.

    Causal is aligned top-left; tiles are square, so it does not matter. Tiles of one query or one key, which uneven
    shards may have and which cuDNN crashes on, go to the flash kernel; it takes whatever else cuDNN takes.
    """

    _for_single_rows = FlashAttention()

    @property
    def name(self) -> str:
        return "CUDNN_ATTENTION"

    def refusal(self, problem: Problem) -> str | None:
        return half_precision_refusal(problem, max_head_dim=128)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _has_single_row(q, k):
            return self._for_single_rows.forward(q, k, v, mask, scale)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, mask.is_causal, False, scale=scale
        )
        return out, lse.view(out.shape[:3])

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: TileMask,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if _has_single_row(q, k):
            return self._for_single_rows.backward(grad_out, q, k, v, out, lse, mask, scale)
        # torch 2.13 and older look up cuDNN's plans by the strides of q, k and v alone, and would run one that was made
        # for other strides of out; so those must follow from q's. (Those of grad_out must be those of out.)
        grad_out, out = laid_out_after(q, grad_out), laid_out_after(q, out)
        state = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout: not read
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1), state, state, None, None, None,
            q.size(2), k.size(2), 0.0, mask.is_causal, scale=scale,
        )  # fmt: skip


def _has_single_row(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.size(2) == 1 or k.size(2) == 1
