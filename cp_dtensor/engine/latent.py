"""Compressed latents in place of keys and values: ranks expand what they receive, or expand before they send.

In a ring, a step of a plan has the latents of all heads. It becomes a step for each group of heads, whose keys and
values are expanded, used and dropped, so that memory does not grow with the number of heads. Backward expands them
again, and sums the gradients of latents over the groups before they travel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from cp_dtensor._torch import label
from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import cut, on_device
from cp_dtensor.attention.accumulate import Part, place_sums
from cp_dtensor.attention.latent import contract_gradients, expand_latents
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.transport import GradTransfers, KvTransfers
from cp_dtensor.engine.base import Gradients, Plan, Result, Values
from cp_dtensor.engine.ring import KeyValueGradients, RingPlan
from cp_dtensor.plan.cost import rows_read
from cp_dtensor.plan.plan import Step, Steps, head_spans
from cp_dtensor.spec.layouts import Span

EXPANDED_BYTES = 256 << 20
"""Most bytes of the keys and values of a group of heads, unless a single head has more."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpandedStep(Step):
    """Tiles of a group of query heads, each with its own key head, in a step of latents."""

    whole: Step
    """The step of all heads."""
    rows: list[Span]
    """The rows of the step that tiles read. Tiles of this step refer to these rows, one range after the other."""
    latent: Tensor
    """(B, 1, T, R), the latents of these rows."""
    rotary: Tensor
    """(B, 1, T, Dr), their rotary keys."""
    up: Tensor
    """(h, Dn + Dv, R), of these heads."""


def expanded_steps(steps: Steps, latents: Iterable[tuple[Tensor, Tensor]], up: Tensor) -> Iterator[ExpandedStep]:
    """Yield a step for each group of heads in each of the `steps`, which have these latents and rotary keys."""
    most_rows = max(map(rows_read, steps), default=0)
    for step, (latent, rotary) in zip(steps, latents, strict=True):
        rows = step.spans_read
        width = latent.size(0) * (up.size(1) + rotary.size(3)) * latent.itemsize
        tiles = step.tiles
        if rows != [(0, latent.size(2))]:
            tiles = tuple(replace(tile, kv=_place(tile.kv, rows)) for tile in tiles)
            latent, rotary = (
                torch.cat([cut(x, None, None, span) for span in rows or ((0, 0),)], dim=2) for x in (latent, rotary)
            )
        # Equal groups in every step, as accumulators need them.
        for heads in head_spans(up.size(0), -(-most_rows * up.size(0) * width // EXPANDED_BYTES)):
            yield ExpandedStep(
                heads, step.transfer, tiles, step.is_last, step.has_gaps, whole=step, rows=rows, latent=latent,
                rotary=rotary, up=up[heads[0] : heads[1]],
            )  # fmt: skip


def _place(span: Span, rows: list[Span]) -> Span:
    """Return the place of a span among some rows, one of which contains it.

    >>> _place((6, 8), [(0, 2), (5, 9)])
    (3, 5)
    """
    before = 0
    for start, stop in rows:
        if start <= span[0] and span[1] <= stop:
            return before + span[0] - start, before + span[1] - start
        before += stop - start
    raise AssertionError(f"{span} is not in {rows}")


class LatentGradients(KeyValueGradients):
    """Sums of the gradients of latents and rotary keys, from those of the keys and values of each group of heads."""

    def __init__(
        self, latent: Tensor, rotary: Tensor, state_dtype: torch.dtype, transfers: GradTransfers | None,
        heads: int, grad_up: Tensor | None,
    ) -> None:  # fmt: skip
        super().__init__(latent, rotary, state_dtype, transfers)
        self._heads, self._grad_up = heads, grad_up
        self._sums: Tensors = ()

    def add(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        """Contract the gradients of a group of heads; those of the whole step are added with its last group."""
        assert isinstance(step, ExpandedStep)
        first, last = step.heads
        grad_up = None if self._grad_up is None else self._grad_up[first:last]
        if step.rows:
            with label("contract dK/dV, heads {}", step.heads):
                grad_k, grad_v = (self._whole(parts, step.latent) for parts in (parts_k, parts_v))
                grads: Tensors = contract_gradients(grad_k, grad_v, step.latent, step.up, grad_up)
                if first:
                    sums = zip(self._sums, grads, strict=True)
                    grads = tuple(total.to(self.state_dtype).add_(grad) for total, grad in sums)
                self._sums = grads
        parts_k.clear()
        parts_v.clear()
        if last < self._heads:
            return
        of_whole: tuple[list[Part], list[Part]] = ([], [])
        for of_span, parts in zip(self._sums, of_whole, strict=False):
            for span in step.rows:
                rows = cut(of_span, None, None, _place(span, step.rows))
                parts.append(Part((0, rows.size(0)), span, (rows,)))
        self._sums = ()
        super().add(step.whole, *of_whole)

    def _whole(self, parts: list[Part], latent: Tensor) -> Tensor:
        """Return the sum of the parts, of all batch rows and all rows; zero where there are none."""
        batch, _, length, _ = latent.shape
        (tensor, *_) = parts[0].tensors
        if len(parts) == 1 and parts[0][:2] == ((0, batch), (0, length)):
            return tensor
        total = latent.new_zeros(batch, length, tensor.size(1), tensor.size(3)).transpose(1, 2)
        place_sums(total, parts, self.state_dtype)
        return total


@dataclass(frozen=True)
class LatentRingPlan(RingPlan):
    """A ring in which latents travel: each step is one of each group of heads, which are expanded after arrival."""

    @cached_property
    def queries_per_key(self) -> int:
        return 1

    def steps(
        self, planned: Steps, transfers: KvTransfers | None, k: Tensor, v: Tensor, modifiers: Modifiers
    ) -> Iterable[Step]:
        assert modifiers.up is not None
        received = super().keys_and_values
        return expanded_steps(planned, (received(step, transfers, k, v) for step in planned), modifiers.up)

    def keys_and_values(self, step: Step, transfers: KvTransfers | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(step, ExpandedStep)
        with label("expand latents, heads {}", step.heads):
            return expand_latents(step.latent, step.rotary, step.up, self.spec.head_dim)

    def key_value_gradients(
        self, k: Tensor, v: Tensor, modifiers: Modifiers, transfers: GradTransfers | None
    ) -> KeyValueGradients:
        assert modifiers.up is not None
        return LatentGradients(k, v, self.state_dtype, transfers, modifiers.up.size(0), modifiers.grad_up)


@dataclass(frozen=True)
class ExpandedPlan(Plan):
    """Each rank expands its own latents, and the ranks attend to keys and values by another plan."""

    inner: Plan
    saves_rows_of_others: bool
    """As that of `inner`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, values: Values, needs_lse: bool) -> Result:
        expanded = self._expanded(q, k, v, values.modifiers)
        out, lse, saved = self.inner.forward(q, *expanded, _of_expanded(values), needs_lse)
        return out, lse, (k, *saved)

    def backward(self, grad_out: Tensor, saved: Tensors, values: Values, grad_bias: Tensor | None) -> Gradients:
        latent, *of_inner = saved
        up = values.modifiers.up
        assert up is not None
        grad_q, grad_k, grad_v = self.inner.backward(grad_out, tuple(of_inner), _of_expanded(values), grad_bias)
        with on_device(grad_q.device):
            of_latent, of_rotary = contract_gradients(grad_k, grad_v, latent, up, values.modifiers.grad_up)
        return grad_q, of_latent, of_rotary.to(up.dtype)

    def remake_saved(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, values: Values) -> Tensors:
        return k, *self.inner.remake_saved(q, *self._expanded(q, k, v, values.modifiers), out, lse, values)

    def _expanded(self, q: Tensor, k: Tensor, v: Tensor, modifiers: Modifiers) -> tuple[Tensor, Tensor]:
        assert modifiers.up is not None
        with on_device(q.device):
            return expand_latents(k, v, modifiers.up, q.size(3))


def _of_expanded(values: Values) -> Values:
    return values._replace(modifiers=replace(values.modifiers, up=None, grad_up=None))
