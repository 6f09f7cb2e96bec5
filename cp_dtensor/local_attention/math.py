"""Attention in plain torch operations: any device, dtype and head dim. The oracle of the other backends."""

from __future__ import annotations

import torch

from cp_dtensor.local_attention.base import LocalAttention, Problem, additive_mask, expand_kv_heads, reduce_kv_heads
from cp_dtensor.tile_masks import TileMask


class MathAttention(LocalAttention):
    """Computes in float32 (float64 for float64 inputs) and holds the S x T matrix of one tile in memory."""

    @property
    def name(self) -> str:
        return "MATH"

    def refusal(self, problem: Problem) -> str | None:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = _widened(q, k, v)
        logits = _logits(q, k, mask, scale)
        lse = torch.logsumexp(logits, dim=-1)
        return torch.exp(logits - lse.unsqueeze(-1)) @ expand_kv_heads(v, q.size(1)), lse

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
        q, k, v, grad_out, out = _widened(q, k, v, grad_out, out)
        k, v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
        weights = torch.exp(_logits(q, k, mask, scale) - lse.unsqueeze(-1))
        delta = (grad_out * out).sum(dim=-1, keepdim=True)
        grad_logits = weights * (grad_out @ v.mT - delta) * scale
        grad_k = reduce_kv_heads(grad_logits.mT @ q, kv_heads)
        grad_v = reduce_kv_heads(weights.mT @ grad_out, kv_heads)
        return grad_logits @ k, grad_k, grad_v


def _widened(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def _logits(q: torch.Tensor, k: torch.Tensor, mask: TileMask, scale: float) -> torch.Tensor:
    logits = q @ expand_kv_heads(k, q.size(1)).mT * scale
    bias = additive_mask(mask, q.size(2), k.size(2), logits)
    return logits if bias is None else logits + bias
