"""Interface of attention backends: one tile in, a partial result or gradients out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import TileMask


class AttentionBackend(ABC):
    """Attention of one tile on one device.

    Shapes: q (B, H, S, D), k (B, Hkv, T, D), v (B, Hkv, T, Dv), Hkv divides H; query head h reads key head
    h // (H / Hkv). S, T >= 1; scale > 0, since kernels mask before they scale. The last dim is contiguous; other
    strides are free. Implementations are stateless and do not inherit from each other.
    """

    takes_intervals = False
    """True if tiles may be masked by intervals; of backends that are registered, others get full and causal ones."""
    takes_modifiers = False
    """True if tiles may have modifiers; the ring then calls `with_modifiers` for each tile."""

    @property
    def joins_intervals(self) -> bool:
        """True if plans for this backend have tiles whose rows see several intervals."""
        return False

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in messages: of torch's backends, the name in `torch.nn.attention.SDPBackend`."""

    @abstractmethod
    def refusal(self, spec: CallSpec) -> str | None:
        """Return the reason why this backend cannot compute a call, None if it can."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        """Compute the partial result `(out, lse)` of the tile.

        Returns:
            out: (B, H, S, Dv), softmax(scale q k^T) v, in the inputs' dtype or wider.
            lse: (B, H, S), natural log of the softmax denominator of the scaled logits, float32 (float64 for float64).
        """

    @abstractmethod
    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this tile's share of (dq, dk, dv), given the *final* out and lse of its rows, merged over all tiles.

        With P = exp(scale q k^T - lse): dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = scale dS K,
        dK = scale dS^T Q. Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
        """

    def with_modifiers(self, modifiers: Modifiers, delta: Tensor | None) -> AttentionBackend:
        """Return this backend with the modifiers of one tile; `delta` (B, H, S) is that of its rows, in backward."""
        raise NotImplementedError(f"{self.name} does not take modifiers")

    def add_bias_gradient(
        self, total: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: TileMask, scale: float,
    ) -> None:  # fmt: skip
        """Add this tile's share of the bias gradient to `total`, which has the shape of the bias."""
        raise NotImplementedError(f"{self.name} does not take modifiers")


def expand_kv_heads(kv: Tensor, q_heads: int) -> Tensor:
    """Return (B, Hkv, T, D) repeated over the query heads of each group: (B, H, T, D)."""
    return kv if kv.size(1) == q_heads else kv.repeat_interleave(q_heads // kv.size(1), dim=1)


def reduce_kv_heads(grad: Tensor, kv_heads: int) -> Tensor:
    """Return the adjoint of `expand_kv_heads`: sums gradients (B, H, T, D) over each group, in float32 or wider."""
    if grad.size(1) == kv_heads:
        return grad
    return grad.unflatten(1, (kv_heads, -1)).sum(dim=2, dtype=wide_dtype(grad))
