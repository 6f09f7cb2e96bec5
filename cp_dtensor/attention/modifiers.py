"""Modifiers of an attention call: bias, dropout, sinks, softcap, and the up-projection of latents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from cp_dtensor._torch.tensors import cut, wide_dtype
from cp_dtensor.attention.lse import empty_lse
from cp_dtensor.attention.merge import with_sinks
from cp_dtensor.spec.layouts import Span


@dataclass(frozen=True, eq=False)
class Modifiers:
    """Bias, dropout, sinks and softcap of the local queries and all keys, and the up-projection of latents."""

    bias: Tensor | None = None
    """(B or 1, H or 1, S or 1, key positions or 1): added to the scaled logits, or boolean, False masks."""
    dropout_p: float = 0.0
    seed: Tensor | None = None
    """() int64, of dropout."""
    first_batch: int = 0
    """Index of the first batch row among all, on which dropout depends."""
    first_head: int = 0
    """Index of the first query head among all, on which dropout depends."""
    sinks: Tensor | None = None
    """(H,), any floating dtype: a logit of each query head that counts in the softmax denominator alone."""
    softcap: float = 0.0
    """c > 0: scaled logits x become c tanh(x / c), before a bias is added. 0.0: they are not capped."""
    up: Tensor | None = None
    """(H, Dn + Dv, R): k and v of the call are latents (B, 1, T, R) and rotary keys (B, 1, T, Dr), which this expands
    to keys and values of each query head (`attention.latent`)."""
    grad_up: Tensor | None = None
    """Like `up`, in float32 or wider: the sum to which backward adds its gradient."""

    @cached_property
    def concern_tiles(self) -> bool:
        """True if the computation of tiles depends on the modifiers. Sinks concern only the merged rows."""
        return self.bias is not None or bool(self.dropout_p) or bool(self.softcap)

    @cached_property
    def split_lse(self) -> bool:
        """True if the LSE of rows has two floats (`attention.lse`): a bias may have large finite numbers."""
        return self.bias is not None and self.bias.is_floating_point()

    @cached_property
    def of_tiles(self) -> Modifiers:
        """Those that tiles and partial results read: without sinks, which concern merged rows only."""
        return self if self.sinks is None else replace(self, sinks=None)

    def completed(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return a result over all keys with what counts in the softmax denominator besides them."""
        return (out, lse) if self.sinks is None else with_sinks(out, lse, self.sinks)

    def value_dim(self, q: Tensor, v: Tensor) -> int:
        """Return the head dim of the output."""
        return v.size(3) if self.up is None else self.up.size(1) + v.size(3) - q.size(3)

    def empty_results(self, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return uninitialised `out` (B, H, S, Dv) and `lse` of a call."""
        out = q.new_empty(*q.shape[:3], self.value_dim(q, v))
        return out, empty_lse(q, q.shape[:3], wide_dtype(q), self.split_lse)

    def part(self, batch: Span, heads: Span, rows: Span | None = None) -> Modifiers:
        """Return the modifiers of some batch rows, query heads and queries."""
        return replace(
            self,
            bias=None if self.bias is None else bias_part(self.bias, batch, heads, rows),
            sinks=None if self.sinks is None else self.sinks[heads[0] : heads[1]],
            first_batch=self.first_batch + batch[0],
            first_head=self.first_head + heads[0],
            up=None if self.up is None else self.up[heads[0] : heads[1]],
            grad_up=None if self.grad_up is None else self.grad_up[heads[0] : heads[1]],
        )

    def of_tile(self, bias: Tensor | None, dropout: object) -> dict[str, Any]:
        """Return the arguments of kernels (`attention.masked`) for a tile with this bias and dropout."""
        return {"bias": bias, "dropout": dropout, "softcap": self.softcap}


NO_MODIFIERS = Modifiers()


def bias_part(bias: Tensor, batch: Span, heads: Span, rows: Span | None) -> Tensor:
    """Return some batch rows, query heads and queries of a bias, whose dims may broadcast."""
    spans = (batch, heads, rows)
    return cut(bias, *[span if size > 1 else None for span, size in zip(spans, bias.shape[:3], strict=True)])
