"""Nested ring attention: a ring over an outer axis (across nodes) whose every step is a ring over an inner one.

On the outer axis only ranks with the same inner rank communicate, so K/V enter a node once, not once for each of its
ranks. The next outer hop is in flight under a whole inner ring. Gradients of K/V are summed within the node before they
travel back.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import cut
from cp_dtensor.attention.accumulate import Part
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import KvTransfers
from cp_dtensor.engine.base import Values
from cp_dtensor.engine.ring import GradientParts, Pass, Ring, RingPlan
from cp_dtensor.plan.plan import Step
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Span


@dataclass(frozen=True)
class NestedRingPlan(Ring):
    """A ring over the outer axis, each step of which is a ring over the inner one; its own tiles are not computed."""

    inner: tuple[RingPlan | None, ...]
    """For each hop of the outer plan; None where no query of the inner axis attends to any of the keys."""

    def results(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> list[Part]:
        inner, values = self.inner[step.hop], _within(shared.values)
        if inner is None:
            return []
        if (of_tiles := values.modifiers.of_tiles) is not values.modifiers:
            values = values._replace(modifiers=of_tiles)
        partial = inner.forward(shared.q, k, v, values, True)[:2]
        return [_whole_part(shared.q, partial)]

    def gradients(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> GradientParts:
        inner, (grad_out, out, lse) = self.inner[step.hop], shared.rows
        if inner is None:
            return [], [], []
        saved = (shared.q, k, v, out, lse)
        grads = inner.backward(grad_out, saved, _within(shared.values), shared.grad_bias)
        return [_whole_part(shared.q, grads[:1])], [_whole_part(k, grads[1:2])], [_whole_part(k, grads[2:])]

    def keys_and_values(self, step: Step, transfers: KvTransfers | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of a step, with zeros for rows that were not sent: masked tiles may multiply them by zero."""
        step_k, step_v = super().keys_and_values(step, transfers, k, v)
        plan = self.tile_plan
        if step.transfer is not None and self.spec.masking is not Masking.BY_SHAPE:
            (source,) = step.transfer.sources(plan.rank, plan.world_size)
            for part in range(len(plan.rows.lengths[source])):
                if part not in plan.recv_parts[source]:
                    rows = plan.rows.local_span(source, part)
                    for tensor in (step_k, step_v):
                        cut(tensor, None, None, rows).zero_()
        return step_k, step_v


def _whole_part(rows_of: Tensor, tensors: Tensors) -> Part:
    """Return a part of all batch rows and rows of (B, H, S, D)."""
    return Part((0, rows_of.size(0)), (0, rows_of.size(2)), tensors)


def _within(values: Values) -> Values:
    """Return the values of a ring over the inner axis."""
    return values._replace(ranks=_inner_ranks(values.ranks))


def _inner_ranks(ranks: SequenceRanks) -> SequenceRanks:
    assert ranks.inner is not None
    return SequenceRanks(ranks.inner)
