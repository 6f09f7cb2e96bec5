"""Compressed latents in place of keys and values: ranks expand what they receive, or expand before they send.

In a ring, a step of a plan has the latents of all heads. It becomes a step for each group of heads, whose keys and
values are expanded, used and dropped, so that memory does not grow with the number of heads. Backward expands them
again, and sums the gradients of latents over the groups before they travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from cp_dtensor._torch import label
from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import cut, on_device_of
from cp_dtensor.attention.accumulate import Part, place_sums
from cp_dtensor.attention.latent import contract_gradients, expand_latents
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.autograd import AttentionPlan
from cp_dtensor.plan.plan import Step, Steps, head_spans
from cp_dtensor.spec.layouts import Span, joined_spans

EXPANDED_BYTES = 256 << 20
"""Most bytes of the keys and values of a group of heads, unless a single head has more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpandedStep(Step):
    """Tiles of a group of query heads, each with its own key head, in a step of latents."""

    whole: Step
    """The step of all heads."""
    latent: torch.Tensor
    """(B, 1, T, R), the latents of the step."""
    rows: tuple[Span, ...]
    """The rows of the step that its tiles read. Others may be uninitialised."""


def rows_of_tiles(step: Step) -> tuple[Span, ...]:
    """Returns the ranges of key rows that the tiles of a step read."""
    return tuple(joined_spans(tile.kv for tile in step.tiles))


def expanded_steps(
    steps: Steps, latents_of: Callable[[Step], tuple[torch.Tensor, torch.Tensor]], up: torch.Tensor, head_dim: int
) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:
    """Yields each step of each group of heads with its keys and values.

    Args:
        steps: steps of one key/value head, whose rows are latents.
        latents_of: brings the latents and rotary keys of a step, in the order of steps.
        up: (H, Dn + Dv, R).
        head_dim: Dn + Dr.
    """
    by_step = [rows_of_tiles(step) for step in steps]
    most_rows = max((sum(stop - start for start, stop in rows) for rows in by_step), default=0)
    for step, rows in zip(steps, by_step, strict=True):
        latent, rotary = latents_of(step)
        value_dim = up.size(1) - head_dim + rotary.size(3)
        width = latent.size(0) * (head_dim + value_dim) * latent.itemsize
        # Equal groups in every step, as accumulators need them.
        for heads in head_spans(up.size(0), -(-most_rows * up.size(0) * width // EXPANDED_BYTES)):
            of_heads = ExpandedStep(
                heads, step.transfer, step.tiles, step.is_last, step.has_gaps, whole=step, latent=latent, rows=rows
            )
            # No name holds keys and values, since the next group needs the memory.
            yield of_heads, *_expanded(latent, rotary, rows, up[heads[0] : heads[1]], head_dim, value_dim)


def _expanded(
    latent: torch.Tensor, rotary: torch.Tensor, rows: tuple[Span, ...], up: torch.Tensor, head_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of some rows, at their places among all; other rows are uninitialised."""
    with label("expand latents, {} heads", up.size(0)):
        if rows == ((0, latent.size(2)),):
            return expand_latents(latent, rotary, up, head_dim)
        batch, _, length, _ = latent.shape
        k, v = (latent.new_empty(batch, length, up.size(0), dim).transpose(1, 2) for dim in (head_dim, value_dim))
        for span in rows:
            parts = expand_latents(cut(latent, None, None, span), cut(rotary, None, None, span), up, head_dim)
            for whole, part in zip((k, v), parts, strict=True):
                cut(whole, None, None, span).copy_(part)
        return k, v


class LatentGradients:
    """Gradients of latents and rotary keys, from those of the keys and values of each group of heads."""

    def __init__(
        self, up: torch.Tensor, grad_up: torch.Tensor | None, add: Callable[[Step, list[Part], list[Part]], None],
        state_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`add` takes the gradients of a whole step, once they have those of all heads."""
        self._up, self._grad_up, self._add, self._state_dtype = up, grad_up, add, state_dtype
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        """Adds the gradients of a step of a group of heads."""
        assert isinstance(step, ExpandedStep)
        first, last = step.heads
        up, grad_up = self._up[first:last], None if self._grad_up is None else self._grad_up[first:last]
        with label("contract dK/dV, heads {}", step.heads):
            for index, rows in enumerate(step.rows):
                latent = cut(step.latent, None, None, rows)
                grad_k, grad_v = (self._whole(parts, rows, latent) for parts in (parts_k, parts_v))
                grads = contract_gradients(grad_k, grad_v, latent, up, grad_up)
                if first == 0:
                    self._sums.append(grads)
                else:
                    sums = self._sums[index]
                    self._sums[index] = tuple(  # type: ignore[assignment]
                        total.to(self._state_dtype).add_(grad) for total, grad in zip(sums, grads, strict=True)
                    )
        parts_k.clear()
        parts_v.clear()
        if last < self._up.size(0):
            return
        batch = (0, step.latent.size(0))
        of_latent, of_rotary = (
            [Part(batch, rows, sums[index : index + 1]) for rows, sums in zip(step.rows, self._sums, strict=True)]
            for index in (0, 1)
        )
        self._sums = []
        self._add(step.whole, of_latent, of_rotary)

    def _whole(self, parts: list[Part], rows: Span, latent: torch.Tensor) -> torch.Tensor:
        """The sum of the parts in some rows, of all batch rows; zero where there are none."""
        inside = [part for part in parts if rows[0] <= part.rows[0] and part.rows[1] <= rows[1]]
        batch = latent.size(0)
        (tensor, *_) = inside[0].tensors
        if len(inside) == 1 and (inside[0].batch, inside[0].rows) == ((0, batch), rows):
            return tensor
        total = latent.new_zeros(batch, rows[1] - rows[0], tensor.size(1), tensor.size(3)).transpose(1, 2)
        moved = [part._replace(rows=(part.rows[0] - rows[0], part.rows[1] - rows[0])) for part in inside]
        place_sums(total, moved, self._state_dtype)
        return total


@dataclass(frozen=True)
class ExpandedPlan(AttentionPlan):
    """Each rank expands its own latents, and the ranks attend to keys and values by another plan."""

    inner: AttentionPlan
    saves_rows_of_others: bool
    """As that of `inner`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool,
        ranks: SequenceRanks, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:  # fmt: skip
        expanded = self._expanded(q, k, v, modifiers)
        out, lse, saved = self.inner.forward(q, *expanded, _of_expanded(modifiers), needs_lse, ranks, scale)
        return out, lse, (k, *saved)

    def backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None,
        ranks: SequenceRanks, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        latent, *of_inner = saved
        up = modifiers.up
        assert up is not None
        grad_q, grad_k, grad_v = self.inner.backward(
            grad_out, _of_expanded(modifiers), tuple(of_inner), grad_bias, ranks, scale
        )
        with on_device_of(grad_q):
            of_latent, of_rotary = contract_gradients(grad_k, grad_v, latent, up, modifiers.grad_up)
        return grad_q, of_latent, of_rotary.to(up.dtype)

    def remake_saved(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
        modifiers: Modifiers, ranks: SequenceRanks,
    ) -> Tensors:  # fmt: skip
        return k, *self.inner.remake_saved(q, *self._expanded(q, k, v, modifiers), out, lse, modifiers, ranks)

    def _expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert modifiers.up is not None
        with on_device_of(q):
            return expand_latents(k, v, modifiers.up, q.size(3))


def _of_expanded(modifiers: Modifiers) -> Modifiers:
    return replace(modifiers, up=None, grad_up=None)
