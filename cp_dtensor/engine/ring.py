"""Ring attention on local shards: forward and backward of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor._torch.autograd import Tensors, cleaned_up_on_error
from cp_dtensor._torch.tensors import cut, in_order_of, on_device_of, unit_stride
from cp_dtensor.attention.accumulate import Part, gradient_accumulator, output_accumulator, place_sums
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.merge import with_sinks
from cp_dtensor.attention.modifiers import Modifiers, bias_part
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import GradTransfers, KvTransfers, KVTransport, unpack_rows
from cp_dtensor.engine.autograd import AttentionPlan
from cp_dtensor.engine.latent import LatentGradients, expanded_steps
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Step, Steps, TilePlan
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.spec.layouts import Span


class KeyValueGradients:
    """Sums of dK and dV of this rank: from its own tiles and, one step later, from other ranks."""

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, state_dtype: torch.dtype, transfers: GradTransfers | None
    ) -> None:
        self._k, self._v = k, v
        self._state_dtype = state_dtype
        self._sum_k, self._sum_v = gradient_accumulator(k, state_dtype), gradient_accumulator(v, state_dtype)
        self._transfers = transfers
        self._in_flight: Step | None = None

    def add(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        """Adds the gradients of a step's tiles, or sends them to the ranks that own these keys."""
        if step.transfer is None:
            self._add_own(step, parts_k, parts_v)
            return
        assert self._transfers is not None
        with label("pack dK/dV"):
            buffer = self._transfers.buffer()
            if step.has_gaps:
                buffer.zero_()
            for rows, parts in zip(unpack_rows(buffer, self._k, self._v, step.heads), (parts_k, parts_v), strict=True):
                place_sums(rows, parts, self._state_dtype)
        parts_k.clear()  # what is received needs the memory
        parts_v.clear()
        self._transfers.send()
        self._receive()
        self._in_flight = step

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV, complete."""
        self._receive()
        return self._sum_k.result()[0], self._sum_v.result()[0]

    def _receive(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return
        assert self._transfers is not None
        batch = (0, self._k.size(0))
        parts_k, parts_v = [], []
        with label("wait for dK/dV"):
            contributions = self._transfers.receive()
        for rows, stack in contributions:
            stack_k, stack_v = unpack_rows(stack, self._k, self._v, step.heads)
            parts_k.append(Part(batch, rows, (stack_k,)))
            parts_v.append(Part(batch, rows, (stack_v,)))
        self._add_own(step, parts_k, parts_v)

    def _add_own(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        with label("sum dK/dV"):
            self._sum_k.add(step.heads, parts_k, step.is_last)
            self._sum_v.add(step.heads, parts_v, step.is_last)


@dataclass(frozen=True)
class RingPlan(AttentionPlan):
    """A ring over one axis, in which queries stay and K/V travel; or attention of a rank that is alone."""

    tile_plan: TilePlan
    spec: CallSpec
    """The call that the plan was made for."""
    transport: KVTransport
    backend: AttentionBackend
    own_backward: AttentionBackend
    """The backend of backward for tiles whose keys are this rank's own."""
    state_dtype: torch.dtype
    """dtype of LSE and of everything that is accumulated: float64 for float64 inputs, else float32."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool,
        ranks: SequenceRanks, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:  # fmt: skip
        arguments = (q, k, v)
        if 0 in q.shape[:2]:  # no batch rows or no heads, as in uneven DTensor shards: the whole ring has none
            out = q.new_empty((*q.shape[:3], modifiers.value_dim(q, v)))
            lse = q.new_empty(q.shape[:3], dtype=self.state_dtype)
            return out, lse, (*arguments, out, lse)
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        plan, backend, group = self.tile_plan, self.backend, self.group(ranks)
        queries_per_key = 1 if modifiers.up is not None else q.size(1) // k.size(1)
        intervals = backend if isinstance(backend, IntervalAttention) else None
        with on_device_of(q), self.abandoned_on_error(group):
            result = output_accumulator(q, modifiers.value_dim(q, v), self.state_dtype)
            transfers = None if group is None else self.transport.start_kv(k, v, plan, False, group)
            for step, step_k, step_v in _steps_with_keys(plan.forward, transfers, q, k, v, modifiers.up):
                heads = step.heads[0] * queries_per_key, step.heads[1] * queries_per_key
                parts = []
                for tile in step.tiles:
                    tile_q = cut(q, tile.batch, heads, tile.q)
                    tile_k, tile_v = cut(step_k, tile.batch, None, tile.kv), cut(step_v, tile.batch, None, tile.kv)
                    if intervals is not None:
                        backend = _with_modifiers(intervals, tile, heads, modifiers, None)
                    with label("tile {} x {}, heads {}", tile.q, tile.kv, heads):
                        partial = backend.forward(tile_q, tile_k, tile_v, tile.mask, scale)
                    parts.append(Part(tile.batch, tile.q, partial))
                    del tile_q, tile_k, tile_v, partial
                del step_k, step_v
                if transfers is not None:
                    transfers.tiles_launched()
                with label("merge"):
                    result.add(heads, parts, step.is_last)
                del parts  # the next step needs the memory
            out, lse = result.result()
        out, lse = with_sinks(out, lse, modifiers.sinks)
        return out, lse, (*arguments, out, lse)

    def backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None,
        ranks: SequenceRanks, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Gradients of this rank's q, k and v; `saved` are q, k, v, out and lse.

        Sums over tiles and ranks are in `state_dtype` and are rounded once. The share of a rank in the dK/dV of another
        travels in the dtype of K/V, in which the kernels produce it.
        """
        q, k, v, out, lse = saved
        if 0 in q.shape[:2]:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
        plan, group = self.tile_plan, self.group(ranks)
        queries_per_key = 1 if modifiers.up is not None else q.size(1) // k.size(1)
        intervals = self.backend if isinstance(self.backend, IntervalAttention) else None
        with on_device_of(q), self.abandoned_on_error(group):
            grad_out = in_order_of(out, grad_out)
            grad_q = gradient_accumulator(q, self.state_dtype)
            grad_transfers = None if group is None else self.transport.start_grads(k, v, plan, group)
            grad_kv = KeyValueGradients(k, v, self.state_dtype, grad_transfers)
            add_gradients = grad_kv.add
            if modifiers.up is not None:
                add_gradients = LatentGradients(modifiers.up, modifiers.grad_up, grad_kv.add, self.state_dtype).add
            transfers = None if group is None else self.transport.start_kv(k, v, plan, True, group)
            # torch's kernels compute delta themselves, for each tile.
            delta = None if intervals is None else attention_delta(grad_out, out)
            for step, step_k, step_v in _steps_with_keys(plan.backward, transfers, q, k, v, modifiers.up):
                heads = step.heads[0] * queries_per_key, step.heads[1] * queries_per_key
                backend = self.own_backward if step.transfer is None else self.backend
                parts_q, parts_k, parts_v = [], [], []
                for tile in step.tiles:
                    batch, rows = tile.batch, tile.q
                    inputs = (
                        cut(grad_out, batch, heads, rows), cut(q, batch, heads, rows),
                        cut(step_k, batch, None, tile.kv), cut(step_v, batch, None, tile.kv),
                        cut(out, batch, heads, rows), cut(lse, batch, heads, rows), tile.mask, scale,
                    )  # fmt: skip
                    if intervals is not None:
                        backend = _with_modifiers(intervals, tile, heads, modifiers, delta)
                    with label("backward of tile {} x {}, heads {}", rows, tile.kv, heads):
                        grads = backend.backward(*inputs)
                        if grad_bias is not None:
                            assert isinstance(backend, IntervalAttention)
                            backend.add_bias_gradient(bias_part(grad_bias, batch, heads, rows), *inputs)
                    parts_q.append(Part(batch, rows, grads[:1]))
                    parts_k.append(Part(batch, tile.kv, grads[1:2]))
                    parts_v.append(Part(batch, tile.kv, grads[2:]))
                    del inputs, grads
                del step_k, step_v
                if transfers is not None:
                    transfers.tiles_launched()
                add_gradients(step, parts_k, parts_v)
                with label("sum dQ"):
                    grad_q.add(heads, parts_q, step.is_last)
                del parts_q, parts_k, parts_v  # the next step needs the memory
            return grad_q.result()[0], *grad_kv.result()

    def group(self, ranks: SequenceRanks) -> dist.ProcessGroup | None:
        """The axis around which K/V travel; None for one rank, whose K/V do not travel."""
        return None if self.tile_plan.world_size == 1 else ranks.outer

    def abandoned_on_error(self, group: dist.ProcessGroup | None) -> AbstractContextManager[None]:
        """Drops the transfers of a call that raises, so that the next call can use the transport."""
        return nullcontext() if group is None else cleaned_up_on_error(lambda: self.transport.abandon(group))


def _with_modifiers(
    backend: IntervalAttention, tile: Tile, heads: Span, modifiers: Modifiers, delta: torch.Tensor | None
) -> IntervalAttention:
    """The backend of interval-masked tiles, with the modifiers and the delta of one tile."""
    return replace(
        backend,
        modifiers=modifiers.part(tile.batch, heads, tile.q) if modifiers.concern_tiles else modifiers,
        delta=None if delta is None else cut(delta, tile.batch, heads, tile.q),
    )


def _steps_with_keys(
    steps: Steps, transfers: KvTransfers | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    up: torch.Tensor | None,
) -> Iterator[tuple[Step, torch.Tensor, torch.Tensor]]:  # fmt: skip
    """Each step with its K and V. With `up`, k and v are latents: each group of heads is a step of its own."""
    if up is not None:
        yield from expanded_steps(steps, lambda step: keys_and_values(step, transfers, k, v), up, q.size(3))
        return
    for step in steps:
        yield step, *keys_and_values(step, transfers, k, v)


def keys_and_values(
    step: Step, transfers: KvTransfers | None, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a step's tiles: its heads of the own shard, or what its transfer brings, once received."""
    if step.transfer is None:
        return cut(k, None, step.heads, None), cut(v, None, step.heads, None)
    assert transfers is not None
    with label("wait for K/V"):
        rows = transfers.receive()
    return unpack_rows(rows, k, v, step.heads)
