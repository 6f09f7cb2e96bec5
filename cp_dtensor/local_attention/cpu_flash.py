"""torch's blocked CPU attention (`SDPBackend.FLASH_ATTENTION` on CPU tensors)."""

from __future__ import annotations

import torch

from cp_dtensor.local_attention.base import LocalAttention, Problem, additive_mask
from cp_dtensor.tile_masks import TileMask

aten = torch.ops.aten


class CpuFlashAttention(LocalAttention):
    """float64, float32, bfloat16 and float16; GQA and every tile mask natively."""

    @property
    def name(self) -> str:
        return "FLASH_ATTENTION"

    def refusal(self, problem: Problem) -> str | None:
        if problem.device_type != "cpu":
            return f"the tensors are on {problem.device_type}, not cpu"
        if problem.head_dim != problem.v_head_dim:
            return f"head dims of q and v differ ({problem.head_dim} and {problem.v_head_dim})"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask.is_causal, attn_mask=_stairs(mask, q, k), scale=scale
        )
        return out, lse

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
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, k, v, out, lse, 0.0, mask.is_causal, attn_mask=_stairs(mask, q, k), scale=scale
        )


def _stairs(mask: TileMask, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    return None if mask.is_causal else additive_mask(mask, q.size(2), k.size(2), q)
