"""torch's memory-efficient attention on CUDA: float32, and masks that flash and cuDNN cannot do."""

from __future__ import annotations

import torch

from cp_dtensor.local_attention.base import LocalAttention, Problem, additive_mask, expand_kv_heads, reduce_kv_heads
from cp_dtensor.local_attention.flash import no_dropout_state
from cp_dtensor.tile_masks import TileMask

aten = torch.ops.aten

# The kernels read LSE and bias rows in groups of this many elements.
_LSE_ALIGNMENT = 32
_BIAS_ALIGNMENT = 16


class EfficientAttention(LocalAttention):
    """float32, bfloat16 and float16; K/V are expanded for GQA, here only, after they have travelled."""

    @property
    def name(self) -> str:
        return "EFFICIENT_ATTENTION"

    def refusal(self, problem: Problem) -> str | None:
        if problem.device_type != "cuda":
            return f"the tensors are on {problem.device_type}, not cuda"
        if problem.dtype == torch.float64:
            return "it does not compute in float64"
        alignment = 4 if problem.dtype == torch.float32 else 8
        if problem.head_dim % alignment or problem.v_head_dim % alignment:
            return (
                f"it needs head dims that are multiples of {alignment}, got {problem.head_dim} and {problem.v_head_dim}"
            )
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, _stairs(mask, q, k), True, 0.0, mask.is_causal, scale=scale
        )
        return out, lse[:, :, : q.size(2)]

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
        kv_heads = k.size(1)
        k, v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
        padding = -lse.size(2) % _LSE_ALIGNMENT
        lse = torch.nn.functional.pad(lse, (0, padding), value=float("inf")) if padding else lse.contiguous()
        if out.stride()[1:] != (out.size(3), out.size(1) * out.size(3), 1):  # the kernel computes out's row pitch so
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        seed, offset = no_dropout_state(q.device)
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, _stairs(mask, q, k), out, lse, seed, offset, 0.0,
            [True, True, True, False], mask.is_causal, scale=scale,
        )  # fmt: skip
        return grad_q, reduce_kv_heads(grad_k, kv_heads), reduce_kv_heads(grad_v, kv_heads)


def _stairs(mask: TileMask, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """The bias of a staircase tile, expanded over batch and heads, in rows of aligned pitch."""
    if mask.is_full or mask.is_causal:
        return None
    columns = k.size(2)
    bias = additive_mask(mask, q.size(2), columns + -columns % _BIAS_ALIGNMENT, q)
    assert bias is not None
    return bias[:, :columns].expand(q.size(0), q.size(1), -1, -1)
