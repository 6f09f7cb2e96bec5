"""Ring attention on local shards: the loop over a plan's steps, rings over one axis, and nested rings over several.

A nested ring is a ring over an outer axis (across nodes), each step of which is a ring over an inner one, which may be
nested itself. On the outer axis only ranks with the same inner rank communicate, so K/V enter a node once, not once for
each of its ranks. The next outer hops, of some heads, are in flight under a whole inner ring. Gradients of K/V are
summed within the node before they travel back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor._torch import label
from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import NO_LABEL, cut, cut_all, in_order_of, is_profiled, on_device, unit_stride
from cp_dtensor.attention.accumulate import Accumulator, Part, place_sums
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers, bias_part
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import GradTransfers, KvTransfers, KVTransport, unpack_rows
from cp_dtensor.engine.base import Gradients, Plan, Result, Values
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Step, Steps, TilePlan
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Span

GradientParts = tuple[list[Part], list[Part], list[Part]]
"""Shares of dq, dk and dv."""


class KeyValueGradients:
    """Sums of dK and dV of this rank: from its own tiles and, one step later, from other ranks."""

    def __init__(self, k: Tensor, v: Tensor, state_dtype: torch.dtype, transfers: GradTransfers | None) -> None:
        self._k, self._v = k, v
        self.state_dtype = state_dtype
        self._sum_k, self._sum_v = Accumulator(k, state_dtype), Accumulator(v, state_dtype)
        self._transfers = transfers
        self._in_flight: Step | None = None

    def add(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        """Add the gradients of a step's tiles, or send them to the ranks that own these keys."""
        if step.transfer is None:
            if step.is_last:  # gradients of these heads that others have sent before
                self._receive()
            self._add_own(step, parts_k, parts_v)
            return
        assert self._transfers is not None
        with label("pack dK/dV") if is_profiled() else NO_LABEL:
            buffer = self._transfers.buffer()
            if step.has_gaps:
                buffer.zero_()
            rows_k, rows_v = unpack_rows(buffer, (self._k, self._v), step.heads[1] - step.heads[0])
            place_sums(rows_k, parts_k, self.state_dtype)
            place_sums(rows_v, parts_v, self.state_dtype)
        parts_k.clear()  # what is received needs the memory
        parts_v.clear()
        self._transfers.send()
        self._receive()
        self._in_flight = step

    def result(self) -> tuple[Tensor, Tensor]:
        """Return dK and dV, complete."""
        self._receive()
        return self._sum_k.result()[0], self._sum_v.result()[0]

    def _receive(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        assert self._transfers is not None
        batch = (0, self._k.size(0))
        parts_k, parts_v = [], []
        with label("wait for dK/dV") if is_profiled() else NO_LABEL:
            contributions = self._transfers.receive()
        for rows, stack in contributions:
            stack_k, stack_v = unpack_rows(stack, (self._k, self._v), step.heads[1] - step.heads[0])
            parts_k.append(Part(batch, rows, (stack_k,)))
            parts_v.append(Part(batch, rows, (stack_v,)))
        self._add_own(step, parts_k, parts_v)

    def _add_own(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        with label("sum dK/dV") if is_profiled() else NO_LABEL:
            self._sum_k.add(step.heads, parts_k, step.is_last)
            self._sum_v.add(step.heads, parts_v, step.is_last)


class Pass(NamedTuple):
    """Values that all tiles of a forward or backward share. Tensors: (B, H, S, ...), this rank's query rows."""

    q: Tensor
    values: Values
    rows: Tensors = ()
    """Of backward: grad_out, out and lse."""
    delta: Tensor | None = None
    """Of backward, if backends of tiles take it: torch's kernels compute it themselves, for each tile."""
    grad_bias: Tensor | None = None
    """Of backward: the gradient of the bias is added to it, unless it is None."""


@dataclass(frozen=True)
class Ring(Plan):
    """The loop over the steps of a ring: transfers, merges and sums. Subclasses compute a step."""

    tile_plan: TilePlan
    spec: CallSpec
    """The call that the plan was made for."""
    transport: KVTransport
    backend: AttentionBackend
    state_dtype: torch.dtype
    """dtype of LSE and of everything that is accumulated: float64 for float64 inputs, else float32."""

    @cached_property
    def queries_per_key(self) -> int:
        """Number of query heads for each head of a step."""
        return self.spec.q_heads // self.spec.kv_heads

    @property
    def computes_delta(self) -> bool:
        """True if `gradients` takes the delta of all rows."""
        return False

    @abstractmethod
    def results(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> list[Part]:
        """Compute partial results `(out, lse)` of a step of forward, for some query heads and the step's k and v."""

    @abstractmethod
    def gradients(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> GradientParts:
        """Compute shares of dq, dk and dv of a step of backward, for some query heads and the step's k and v."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, values: Values, needs_lse: bool) -> Result:
        """Compute `out`, `lse` and what `backward` takes as `saved`. Rings always have lse: they merge tiles by it."""
        arguments, modifiers = (q, k, v), values.modifiers  # saved as they are given, not as copied below
        if 0 in q.shape[:2]:  # no batch rows or no heads, as in uneven DTensor shards: the whole ring has none
            out, lse = modifiers.empty_results(q, v)
            return out, lse, (*arguments, out, lse)
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        plan, group = self.tile_plan, self.group(values.ranks)
        with on_device(q.device):
            result = Accumulator(q, self.state_dtype, self.spec.v_head_dim, floats_of_lse=1 + modifiers.split_lse)
            transfers = None if group is None else self.transport.start_kv(k, v, plan, False, group)
            shared = Pass(q, values)
            for step in self.steps(plan.forward, transfers, k, v, modifiers):
                heads = step.heads[0] * self.queries_per_key, step.heads[1] * self.queries_per_key
                step_k, step_v = self.keys_and_values(step, transfers, k, v)
                parts = self.results(step, heads, step_k, step_v, shared)
                del step_k, step_v
                if transfers is not None:
                    transfers.tiles_launched()
                with label("merge") if is_profiled() else NO_LABEL:
                    result.add(heads, parts, step.is_last)
                del parts  # the next step needs the memory
            out, lse = result.result()
        out, lse = modifiers.completed(out, lse)
        return out, lse, (*arguments, out, lse)

    def backward(self, grad_out: Tensor, saved: Tensors, values: Values, grad_bias: Tensor | None) -> Gradients:
        """Compute the gradients of this rank's q, k and v; `saved` are q, k, v, out and lse.

        Sums over tiles and ranks are in `state_dtype` and are rounded once, in a nested ring once by each of its rings.
        The share of a rank in the dK/dV of another travels in the dtype of K/V, in which the kernels produce it.
        """
        q, k, v, out, lse = saved
        if 0 in q.shape[:2]:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        plan, group, modifiers = self.tile_plan, self.group(values.ranks), values.modifiers
        with on_device(q.device):
            grad_out = in_order_of(out, grad_out)
            grad_q = Accumulator(q, self.state_dtype)
            grad_transfers = None if group is None else self.transport.start_grads(k, v, plan, group)
            grad_kv = self.key_value_gradients(k, v, modifiers, grad_transfers)
            transfers = None if group is None else self.transport.start_kv(k, v, plan, True, group)
            delta = attention_delta(grad_out, out) if self.computes_delta else None
            shared = Pass(q, values, (grad_out, out, lse), delta, grad_bias)
            for step in self.steps(plan.backward, transfers, k, v, modifiers):
                heads = step.heads[0] * self.queries_per_key, step.heads[1] * self.queries_per_key
                step_k, step_v = self.keys_and_values(step, transfers, k, v)
                parts_q, parts_k, parts_v = self.gradients(step, heads, step_k, step_v, shared)
                del step_k, step_v
                if transfers is not None:
                    transfers.tiles_launched()
                grad_kv.add(step, parts_k, parts_v)
                with label("sum dQ") if is_profiled() else NO_LABEL:
                    grad_q.add(heads, parts_q, step.is_last)
                del parts_q, parts_k, parts_v  # the next step needs the memory
            return grad_q.result()[0], *grad_kv.result()

    def steps(
        self, planned: Steps, transfers: KvTransfers | None, k: Tensor, v: Tensor, modifiers: Modifiers
    ) -> Iterable[Step]:
        """Return the steps to compute, one after the other, in place of those of the plan."""
        return planned

    def key_value_gradients(
        self, k: Tensor, v: Tensor, modifiers: Modifiers, transfers: GradTransfers | None
    ) -> KeyValueGradients:
        """Return the sums to which backward adds the shares of dK and dV of each step."""
        return KeyValueGradients(k, v, self.state_dtype, transfers)

    def keys_and_values(self, step: Step, transfers: KvTransfers | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V of a step's tiles: its heads of the own shard, or what its transfer brings, once received."""
        if step.transfer is None:
            k, v = cut_all((k, v), None, step.heads, None)
            return k, v
        assert transfers is not None
        with label("wait for K/V") if is_profiled() else NO_LABEL:
            rows = transfers.receive()
        k, v = unpack_rows(rows, (k, v), step.heads[1] - step.heads[0])
        return k, v

    def group(self, ranks: SequenceRanks) -> dist.ProcessGroup | None:
        """Return the axis around which K/V travel; None for one rank, whose K/V do not travel."""
        return None if self.tile_plan.world_size == 1 else ranks.outer


@dataclass(frozen=True)
class RingPlan(Ring):
    """A ring over one axis, in which queries stay and K/V travel; or attention of a rank that is alone."""

    own_backward: AttentionBackend
    """The backend of backward for tiles whose keys are this rank's own."""

    @property
    def computes_delta(self) -> bool:
        return self.backend.takes_modifiers

    def results(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> list[Part]:
        backend, parts = self.backend, []
        for tile in step.tiles:
            tile_q = cut(shared.q, tile.batch, heads, tile.q)
            tile_k, tile_v = cut_all((k, v), tile.batch, None, tile.kv)
            if shared.values.modifiers is not NO_MODIFIERS and self.backend.takes_modifiers:
                backend = _with_modifiers(self.backend, tile, heads, shared)
            with label("tile {} x {}, heads {}", tile.q, tile.kv, heads) if is_profiled() else NO_LABEL:
                partial = backend.forward(tile_q, tile_k, tile_v, tile.mask, shared.values.scale)
            parts.append(Part(tile.batch, tile.q, partial))
        return parts

    def gradients(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> GradientParts:
        grad_out, out, lse = shared.rows
        backend = self.own_backward if step.transfer is None else self.backend
        parts_q, parts_k, parts_v = [], [], []
        for tile in step.tiles:
            batch, span = tile.batch, tile.q
            tile_grad, tile_q, tile_out, tile_lse = cut_all((grad_out, shared.q, out, lse), batch, heads, span)
            tile_k, tile_v = cut_all((k, v), batch, None, tile.kv)
            inputs = (tile_grad, tile_q, tile_k, tile_v, tile_out, tile_lse, tile.mask, shared.values.scale)
            if self.backend.takes_modifiers:
                backend = _with_modifiers(self.backend, tile, heads, shared)
            with label("backward of tile {} x {}, heads {}", span, tile.kv, heads) if is_profiled() else NO_LABEL:
                grads = backend.backward(*inputs)
                if shared.grad_bias is not None:
                    backend.add_bias_gradient(bias_part(shared.grad_bias, batch, heads, span), *inputs)
            parts_q.append(Part(batch, span, grads[:1]))
            parts_k.append(Part(batch, tile.kv, grads[1:2]))
            parts_v.append(Part(batch, tile.kv, grads[2:]))
        return parts_q, parts_k, parts_v


def _with_modifiers(backend: AttentionBackend, tile: Tile, heads: Span, shared: Pass) -> AttentionBackend:
    """Return the backend with the modifiers and the delta of one tile."""
    modifiers = shared.values.modifiers
    if modifiers.concern_tiles:
        modifiers = modifiers.part(tile.batch, heads, tile.q)
    delta = None if shared.delta is None else cut(shared.delta, tile.batch, heads, tile.q)
    return backend.with_modifiers(modifiers, delta)


@dataclass(frozen=True)
class NestedRingPlan(Ring):
    """A ring over the outer axis, each step of which is a ring over the inner ones; its own tiles are not computed."""

    inner: Mapping[tuple[int, int], Ring | None]
    """For each hop and number of key heads of the outer plan; None where no query of the inner axes attends to any of
    the keys."""

    def results(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> list[Part]:
        inner = self.inner[step.hop, k.size(1)]
        if inner is None:
            return []
        q = cut(shared.q, None, heads, None)
        partial = inner.forward(q, k, v, _within(shared.values, q.size(0), heads), True)[:2]
        return [_whole_part(q, partial)]

    def gradients(self, step: Step, heads: Span, k: Tensor, v: Tensor, shared: Pass) -> GradientParts:
        inner, grad_bias = self.inner[step.hop, k.size(1)], shared.grad_bias
        if inner is None:
            return [], [], []
        grad_out, q, out, lse = cut_all((shared.rows[0], shared.q, *shared.rows[1:]), None, heads, None)
        if grad_bias is not None:
            grad_bias = bias_part(grad_bias, (0, q.size(0)), heads, None)
        values = _within(shared.values, q.size(0), heads)
        grads = inner.backward(grad_out, (q, k, v, out, lse), values, grad_bias)
        return [_whole_part(q, grads[:1])], [_whole_part(k, grads[1:2])], [_whole_part(k, grads[2:])]

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


def _within(values: Values, batch: int, heads: Span) -> Values:
    """Return the values of a ring over the inner axes, of some query heads."""
    modifiers = values.modifiers.of_tiles
    if modifiers.concern_tiles:
        modifiers = modifiers.part((0, batch), heads)
    assert values.ranks.inner is not None
    return Values(modifiers, values.ranks.inner, values.scale)
