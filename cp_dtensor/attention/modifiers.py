"""What an attention call has besides q, k, v and a mask by positions: a bias, dropout, and sinks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import torch

from cp_dtensor._torch.tensors import cut
from cp_dtensor.spec.layouts import Span


@dataclass(frozen=True, eq=False)
class Modifiers:
    """What belongs to the local queries and all keys.

    Where batch rows and heads are cut, `first_batch` and `first_head` say where they stood: dropout depends on it.
    """

    bias: torch.Tensor | None = None
    """(B or 1, H or 1, S or 1, key positions or 1): added to the scaled logits, or (boolean) what may be seen."""
    dropout_p: float = 0.0
    seed: torch.Tensor | None = None
    """() int64, of dropout; None until it is drawn."""
    first_batch: int = 0
    first_head: int = 0
    """Of the query heads."""
    sinks: torch.Tensor | None = None
    """(H,), any floating dtype: logits that count in the softmax denominator alone."""

    @classmethod
    def of(
        cls, bias: torch.Tensor | None, dropout_p: float, seed: torch.Tensor | None, first_batch: int,
        first_head: int, sinks: torch.Tensor | None,
    ) -> Modifiers:  # fmt: skip
        """Of these; `NO_MODIFIERS` itself where there are none, which is all that most calls need to see."""
        if bias is None and not dropout_p and sinks is None:
            return NO_MODIFIERS
        return cls(bias, dropout_p, seed, first_batch, first_head, sinks)

    @property
    def concern_tiles(self) -> bool:
        """Whether tiles are computed otherwise because of them. Sinks are of whole rows."""
        return self.bias is not None or bool(self.dropout_p)

    @property
    def need_lse(self) -> bool:
        """Whether backward reads the lse of this rank's own rows."""
        return self.sinks is not None and self.sinks.requires_grad and torch.is_grad_enabled()

    def drawn(self, device: torch.device) -> Modifiers:
        """With a seed, if there is dropout and no seed yet.

        Drawn on the device, as torch's kernels do: so checkpoints restore it, and CUDA graphs draw another each time.
        """
        if not self.dropout_p or self.seed is not None:
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

    @property
    def has_rows(self) -> bool:
        """Whether there is a bias with rows of its own for each query; of a single one it cannot be seen."""
        return self.bias is not None and self.bias.size(2) != 1

    def described_sinks(self, values: bool) -> str:
        """The sinks in words that must be the same on every rank; with `values`, which waits for their device."""
        if self.sinks is None:
            return "none"
        kind = f"{str(self.sinks.dtype).removeprefix('torch.')} {tuple(self.sinks.shape)}{' grad' * self.need_lse}"
        if not values:
            return kind
        elements = self.sinks.detach().cpu().contiguous().view(torch.uint8)
        return f"{kind} {zlib.crc32(bytes(elements.tolist())):08x}"

    def part(self, batch: Span, heads: Span, rows: Span | None = None) -> Modifiers:
        """Of some batch rows, query heads and queries."""
        return replace(
            self,
            bias=None if self.bias is None else bias_part(self.bias, batch, heads, rows),
            sinks=None if self.sinks is None else self.sinks[heads[0] : heads[1]],
            first_batch=self.first_batch + batch[0],
            first_head=self.first_head + heads[0],
        )


NO_MODIFIERS = Modifiers()


def bias_part(bias: torch.Tensor, batch: Span, heads: Span, rows: Span | None) -> torch.Tensor:
    """Some batch rows, query heads and queries of a bias that may be the same for all."""
    return cut(
        bias,
        batch if bias.size(0) > 1 else None,
        heads if bias.size(1) > 1 else None,
        rows if bias.size(2) > 1 else None,
    )
