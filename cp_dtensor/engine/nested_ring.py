"""A ring of rings: K/V travel around an outer axis (across nodes), and from there around an inner one (within a node).

Over the outer axis only ranks with the same place in their inner axes talk to each other, so K/V come into a node once
and not once for each of its ranks; the next hop of the outer ring is in flight under a whole inner ring. Gradients of
K/V are summed within the node before they go home.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import cut, in_order_of, on_device_of, unit_stride
from cp_dtensor.attention.accumulate import Part, gradient_accumulator, output_accumulator
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.merge import with_sinks
from cp_dtensor.attention.modifiers import Modifiers
from cp_dtensor.comm.transport import KvTransfers
from cp_dtensor.engine.autograd import AttentionCall
from cp_dtensor.engine.ring import (
    KeyValueGradients,
    RingCall,
    abandoned_on_error,
    keys_and_values,
    ring_backward,
    ring_forward,
)
from cp_dtensor.plan.plan import Step


@dataclass(frozen=True)
class NestedRingCall(AttentionCall):
    """Each step of the outer ring is a call of the inner one."""

    outer: RingCall
    """Its tiles are not computed: they say what travels."""
    inner: tuple[RingCall | None, ...]
    """For each step of the outer plan; None where no query of the inner axis sees any of the keys."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        outer = self.outer
        assert outer.group is not None
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        everything = (0, q.size(0)), (0, q.size(2))
        with on_device_of(q), abandoned_on_error(outer):
            result = output_accumulator(q, v.size(3), outer.state_dtype)
            transfers = outer.transport.start_kv(k, v, outer.plan, False, outer.group)
            for step, inner in zip(outer.plan.forward, self.inner, strict=True):
                step_k, step_v = self._keys_and_values(step, transfers, k, v)
                parts = [] if inner is None else [Part(*everything, ring_forward(q, step_k, step_v, inner, modifiers))]
                transfers.tiles_launched()
                result.add((0, q.size(1)), parts, step.is_last)
            out, lse = result.result()
        out, lse = with_sinks(out, lse, modifiers.sinks)
        return out, lse, (q, k, v, out, lse)

    def backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = saved
        outer = self.outer
        assert outer.group is not None
        everything = (0, q.size(0)), (0, q.size(2))
        with on_device_of(q), abandoned_on_error(outer):
            grad_out = in_order_of(out, grad_out)
            grad_q = gradient_accumulator(q, outer.state_dtype)
            grad_kv = KeyValueGradients(k, v, outer.state_dtype, outer.start_grads(k, v))
            transfers = outer.transport.start_kv(k, v, outer.plan, True, outer.group)
            for step, inner in zip(outer.plan.backward, self.inner, strict=True):
                step_k, step_v = self._keys_and_values(step, transfers, k, v)
                parts_q, parts_k, parts_v = [], [], []
                if inner is not None:
                    step_grads = ring_backward(grad_out, q, step_k, step_v, out, lse, inner, modifiers, grad_bias)
                    rows = (0, q.size(0)), (0, step_k.size(2))
                    parts_q.append(Part(*everything, step_grads[:1]))
                    parts_k.append(Part(*rows, step_grads[1:2]))
                    parts_v.append(Part(*rows, step_grads[2:]))
                transfers.tiles_launched()
                grad_kv.add(step, parts_k, parts_v)
                grad_q.add((0, q.size(1)), parts_q, step.is_last)
            return grad_q.result()[0], *grad_kv.result()

    @property
    def saves_rows_of_others(self) -> bool:
        return False

    def saved_again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        return unit_stride(q), unit_stride(k), unit_stride(v), out, lse

    def _keys_and_values(
        self, step: Step, transfers: KvTransfers, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The K/V of a step. Zeros where nobody of the inner axis looks: tiles by row may multiply it by zero."""
        step_k, step_v = keys_and_values(step, transfers, k, v)
        plan = self.outer.plan
        if step.transfer is not None and isinstance(self.outer.backend, IntervalAttention):
            (source,) = step.transfer.sources(plan.rank, plan.world_size)
            for part in range(len(plan.rows.lengths[source])):
                if part not in plan.recv_parts[source]:
                    rows = plan.rows.local_span(source, part)
                    for tensor in (step_k, step_v):
                        cut(tensor, None, None, rows).zero_()
        return step_k, step_v
