"""Keys and values of all ranks in the order of their positions, for FlexAttention, which takes them whole.

Gradients go to the ranks that own the tokens, where they are summed in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from cp_dtensor.attention_call import Tensors, differentiated_once, refuse_batches
from cp_dtensor.flex_by_index import RowsByIndex
from cp_dtensor.flex_in_place import RowsInPlace, rows_in_place
from cp_dtensor.layouts import Layout
from cp_dtensor.rotation.base import RotationMethod
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.tensors import in_words, on_device_of, unit_stride


@dataclass(frozen=True)
class WholeKeys:
    """The keys of a sequence that is divided over some ranks, and how they come together."""

    ranks: SequenceRanks
    layout: Layout
    seq_len: int
    rows: int
    """How many to return, at least `seq_len`; the further ones are finite, for nobody to look at."""
    method: RotationMethod
    """How K/V are to travel; always all at once, if not by symmetric memory then by all-gather."""

    def gathered(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, H, local S, D) and (B, H, local S, Dv) to (B, H, rows, D) and (B, H, rows, Dv), contiguous.

        A collective, in which every rank takes part.
        """
        if self._is_empty(k):
            return k.new_zeros(*k.shape[:2], self.rows, k.size(3)), v.new_zeros(*v.shape[:2], self.rows, v.size(3))
        with on_device_of(k):
            # FlexAttention reads rows that follow each other 2% faster than such as are a token's K and V apart.
            all_k, all_v = self._way(k, v).gather(in_words(k, v))
            return self._longer(all_k).view(k.dtype), self._longer(all_v).view(v.dtype)

    def _longer(self, x: torch.Tensor) -> torch.Tensor:
        """With zeros behind the last position."""
        return x if self.rows == self.seq_len else F.pad(x, (0, 0, 0, self.rows - self.seq_len))

    def gradients(self, grad_k: torch.Tensor, grad_v: torch.Tensor, local: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shards of the sum over ranks of gradients of what `gathered` returned; a collective too."""
        shapes = [(*x.shape[:2], local, x.size(3)) for x in (grad_k, grad_v)]
        grads = grad_k.new_empty(shapes[0]), grad_v.new_empty(shapes[1])
        with on_device_of(grad_k):
            if not self._is_empty(grad_k):
                whole = self._positions(grad_k), self._positions(grad_v)
                self._way(*whole).bring_home(whole, grads)
        return grads

    def _positions(self, grad: torch.Tensor) -> torch.Tensor:
        return unit_stride(grad.resolve_neg())[:, :, : self.seq_len]

    def _is_empty(self, k: torch.Tensor) -> bool:
        """Whether there is nothing to bring; alike on every rank."""
        return 0 in (*k.shape[:2], self.seq_len)

    def _way(self, k: torch.Tensor, v: torch.Tensor) -> RowsInPlace | RowsByIndex:
        in_place = None
        if self.ranks.inner is None:
            in_place = rows_in_place(k, v, self.layout, self.seq_len, self.ranks.outer, self.method)
        return in_place or RowsByIndex(self.ranks, self.layout, self.seq_len)


class GatheredKeys(torch.autograd.Function):
    """`WholeKeys.gathered`, differentiable."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, keys: WholeKeys) -> tuple[torch.Tensor, torch.Tensor]:
        """As `keys.gathered(k, v)`."""
        ctx.keys, ctx.local = keys, k.size(2)
        return keys.gathered(k, v)

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, _saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """As `keys.gradients`."""
        refuse_batches(grad_k, grad_v)
        return *ctx.keys.gradients(grad_k, grad_v, ctx.local), None
