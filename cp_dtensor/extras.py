"""What an attention call has besides q, k, v and a mask by positions: a bias, and dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cp_dtensor.layouts import Span
from cp_dtensor.tensors import cut


@dataclass(frozen=True, eq=False)
class Extras:
    """Of the local queries and all keys. Where batch rows and heads are cut, the rest says where they stood."""

    bias: torch.Tensor | None = None
    """(B or 1, H or 1, S or 1, key positions or 1): added to the scaled logits, or (boolean) what may be seen."""
    dropout_p: float = 0.0
    seed: torch.Tensor | None = None
    """() int64, of dropout."""
    first_batch: int = 0
    first_head: int = 0
    """Of the query heads."""

    @property
    def are_none(self) -> bool:
        """Whether there is nothing."""
        return self.bias is None and self.seed is None

    def part(self, batch: Span, heads: Span, rows: Span | None = None) -> Extras:
        """Of some batch rows, query heads and queries."""
        return replace(
            self,
            bias=None if self.bias is None else bias_part(self.bias, batch, heads, rows),
            first_batch=self.first_batch + batch[0],
            first_head=self.first_head + heads[0],
        )


NO_EXTRAS = Extras()


def bias_part(bias: torch.Tensor, batch: Span, heads: Span, rows: Span | None) -> torch.Tensor:
    """Some batch rows, query heads and queries of a bias that may be the same for all."""
    return cut(
        bias,
        batch if bias.size(0) > 1 else None,
        heads if bias.size(1) > 1 else None,
        rows if bias.size(2) > 1 else None,
    )
