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
    """() int64, of dropout; None until it is drawn."""
    first_batch: int = 0
    first_head: int = 0
    """Of the query heads."""

    @property
    def are_none(self) -> bool:
        """Whether there is nothing."""
        return self.bias is None and not self.dropout_p

    def drawn(self, device: torch.device) -> Extras:
        """With a seed, if there is dropout.

        Drawn on the device, as torch's kernels do: so checkpoints restore it, and CUDA graphs draw another each time.
        """
        if not self.dropout_p:
            return self
        return replace(self, seed=torch.randint(1 << 62, (), dtype=torch.int64, device=device))

    def described(self, q: torch.Tensor) -> str:
        """The bias in words that must be the same on every rank, whatever its share of the queries q."""
        if self.bias is None:
            return "none"
        # Of a single local query it cannot be seen whether there are rows, so these are not described.
        full = zip("BH", self.bias.shape[:2], q.shape[:2], strict=True)
        dims = [dim if size != 1 or of_q == 1 else "1" for dim, size, of_q in full]
        grad = " grad" * (self.bias.requires_grad and torch.is_grad_enabled())
        return f"{str(self.bias.dtype).removeprefix('torch.')} ({', '.join(dims)}, :, {self.bias.size(3)}){grad}"

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
