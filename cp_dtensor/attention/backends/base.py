"""Interface of attention backends: one tile in, a partial result or gradients out."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import TileMask


class AttentionBackend(ABC):
    """Attention of one tile on one device.

    Shapes: q (B, H, S, D), k (B, Hkv, T, D), v (B, Hkv, T, Dv), Hkv divides H; query head h reads key head
    h // (H / Hkv). S, T >= 1; scale > 0, since kernels mask before they scale. The last dim is contiguous; other
    strides are free. Implementations are stateless and do not inherit from each other.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in messages: of torch's backends, the name in `torch.nn.attention.SDPBackend`."""

    @abstractmethod
    def refusal(self, spec: CallSpec) -> str | None:
        """Why this backend cannot compute the tiles of a call, or None if it can."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial result `(out, lse)` of the tile.

        Returns:
            out: (B, H, S, Dv), softmax(scale q k^T) v, in the inputs' dtype or wider.
            lse: (B, H, S), natural log of the softmax denominator of the scaled logits, float32 (float64 for float64).
        """

    @abstractmethod
    def backward(
        self, grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, mask: TileMask, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """This tile's share of (dq, dk, dv), given the *final* out and lse of its rows, merged over all tiles.

        With P = exp(scale q k^T - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K,
        dK = scale dS^T Q. Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
        """


def expand_kv_heads(kv: torch.Tensor, q_heads: int) -> torch.Tensor:
    """(B, Hkv, T, D) repeated over the query heads of each group: (B, H, T, D)."""
    return kv if kv.size(1) == q_heads else kv.repeat_interleave(q_heads // kv.size(1), dim=1)


def reduce_kv_heads(grad: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The adjoint of `expand_kv_heads`: sums gradients (B, H, T, D) over each group, in float32 or wider."""
    if grad.size(1) == kv_heads:
        return grad
    wide = torch.promote_types(grad.dtype, torch.float32)
    return grad.unflatten(1, (kv_heads, -1)).sum(dim=2, dtype=wide)
