"""torch's FlashAttention-2 kernels on CUDA."""

from __future__ import annotations

import torch

from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.tile_masks import TileMask

aten = torch.ops.aten


class FlashAttention(LocalAttention):
    """bfloat16 and float16, head dims that are multiples of 8 up to 256, GQA natively.

    Causal tiles are square, so the kernel's bottom-right alignment is also top-left.
    """

    @property
    def name(self) -> str:
        return "FLASH_ATTENTION"

    def refusal(self, problem: Problem) -> str | None:
        return half_precision_refusal(problem, max_head_dim=256)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, mask.is_causal, False, scale=scale)
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
        rng_state, unused = no_dropout_state(q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2),
            0.0, mask.is_causal, rng_state, unused, scale=scale,
        )  # fmt: skip


def half_precision_refusal(problem: Problem, max_head_dim: int) -> str | None:
    """What the flash and cuDNN kernels refuse alike."""
    if problem.device_type != "cuda":
        return f"the tensors are on {problem.device_type}, not cuda"
    if problem.capability is not None and problem.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, this device has {problem.capability}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, got {problem.dtype}"
    if problem.head_dim != problem.v_head_dim:
        return f"head dims of q and v differ ({problem.head_dim} and {problem.v_head_dim})"
    if problem.head_dim % 8 or problem.head_dim > max_head_dim:
        return f"it needs a head dim that is a multiple of 8 up to {max_head_dim}, got {problem.head_dim}"
    if problem.staircase:
        return "it cannot mask the staircase tiles of this layout (Striped with block > 1)"
    return None


def no_dropout_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The two random-state arguments of fused backward kernels, which are not read without dropout."""
    return (torch.zeros((2,), dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device))
