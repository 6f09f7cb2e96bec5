"""Nested ring attention: a ring over an outer axis (across nodes) whose every step is a ring over an inner one.

On the outer axis only ranks with the same inner rank communicate, so K/V enter a node once, not once for each of its
ranks. The next outer hop is in flight under a whole inner ring. Gradients of K/V are summed within the node before they
travel back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import cut, in_order_of, on_device_of, unit_stride
from cp_dtensor.attention.accumulate import Part, gradient_accumulator, output_accumulator
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.merge import with_sinks
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import KvTransfers
from cp_dtensor.engine.autograd import AttentionPlan
from cp_dtensor.engine.ring import KeyValueGradients, RingPlan, keys_and_values
from cp_dtensor.plan.plan import Step


@dataclass(frozen=True)
class NestedRingPlan(AttentionPlan):
    """A ring over the outer axis, each step of which is a ring over the inner one."""

    outer: RingPlan
    """Transfers of the outer axis; its tiles are not computed."""
    inner: tuple[RingPlan | None, ...]
    """For each step of the outer plan; None where no query of the inner axis attends to any of the keys."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool,
        ranks: SequenceRanks, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:  # fmt: skip
        arguments = (q, k, v)
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        outer, plan, group, inner_ranks = self.outer, self.outer.tile_plan, ranks.outer, _inner_ranks(ranks)
        without_sinks = modifiers if modifiers.sinks is None else replace(modifiers, sinks=None)
        with on_device_of(q), outer.abandoned_on_error(group):
            result = output_accumulator(q, modifiers.value_dim(q, v), outer.state_dtype)
            transfers = outer.transport.start_kv(k, v, plan, False, group)
            for step, inner in zip(plan.forward, self.inner, strict=True):
                step_k, step_v = self._keys_and_values(step, transfers, k, v)
                parts = []
                if inner is not None:
                    partial = inner.forward(q, step_k, step_v, without_sinks, True, inner_ranks, scale)[:2]
                    parts.append(_whole_part(q, partial))
                transfers.tiles_launched()
                result.add((0, q.size(1)), parts, step.is_last)
            out, lse = result.result()
        out, lse = with_sinks(out, lse, modifiers.sinks)
        return out, lse, (*arguments, out, lse)

    def backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None,
        ranks: SequenceRanks, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        q, k, v, out, lse = saved
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        outer, plan, group, inner_ranks = self.outer, self.outer.tile_plan, ranks.outer, _inner_ranks(ranks)
        with on_device_of(q), outer.abandoned_on_error(group):
            grad_out = in_order_of(out, grad_out)
            grad_q = gradient_accumulator(q, outer.state_dtype)
            grad_transfers = outer.transport.start_grads(k, v, plan, group)
            grad_kv = KeyValueGradients(k, v, outer.state_dtype, grad_transfers)
            transfers = outer.transport.start_kv(k, v, plan, True, group)
            for step, inner in zip(plan.backward, self.inner, strict=True):
                step_k, step_v = self._keys_and_values(step, transfers, k, v)
                parts_q, parts_k, parts_v = [], [], []
                if inner is not None:
                    step_saved = (q, step_k, step_v, out, lse)
                    grads = inner.backward(grad_out, modifiers, step_saved, grad_bias, inner_ranks, scale)
                    parts_q.append(_whole_part(q, grads[:1]))
                    parts_k.append(_whole_part(step_k, grads[1:2]))
                    parts_v.append(_whole_part(step_k, grads[2:]))
                transfers.tiles_launched()
                grad_kv.add(step, parts_k, parts_v)
                grad_q.add((0, q.size(1)), parts_q, step.is_last)
            return grad_q.result()[0], *grad_kv.result()

    def _keys_and_values(
        self, step: Step, transfers: KvTransfers, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a step. Rows that were not sent are zero: interval-masked tiles may multiply them by zero."""
        step_k, step_v = keys_and_values(step, transfers, k, v)
        plan = self.outer.tile_plan
        if step.transfer is not None and isinstance(self.outer.backend, IntervalAttention):
            (source,) = step.transfer.sources(plan.rank, plan.world_size)
            for part in range(len(plan.rows.lengths[source])):
                if part not in plan.recv_parts[source]:
                    rows = plan.rows.local_span(source, part)
                    for tensor in (step_k, step_v):
                        cut(tensor, None, None, rows).zero_()
        return step_k, step_v


def _whole_part(rows_of: torch.Tensor, tensors: Tensors) -> Part:
    """A part of all batch rows and rows of (B, H, S, D)."""
    return Part((0, rows_of.size(0)), (0, rows_of.size(2)), tensors)


def _inner_ranks(ranks: SequenceRanks) -> SequenceRanks:
    assert ranks.inner is not None
    return SequenceRanks(ranks.inner)
