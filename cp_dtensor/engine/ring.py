"""Executes a plan: forward and backward of ring attention on local shards.

All state of a call is in its `RingCall`, which the autograd node keeps: backward reads nothing else, so it is right
after a context has been left, in other threads, and whatever the settings are by then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor._torch.autograd import cleaned_up_on_error
from cp_dtensor._torch.tensors import cut, in_order_of, on_device_of, unit_stride
from cp_dtensor.attention.accumulate import Part, gradient_accumulator, output_accumulator, place_sums
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.attention.merge import with_sinks
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers, bias_part
from cp_dtensor.comm.transport import GradTransfers, KvTransfers, KVTransport, unpack_rows
from cp_dtensor.engine.autograd import AttentionCall
from cp_dtensor.plan.plan import Plan, Step
from cp_dtensor.plan.tiles import Tile
from cp_dtensor.spec.layouts import Span

# Where the gradients of a ring are summed: of what tiles give on this rank, and what other ranks contribute.


class KeyValueGradients:
    """dK and dV of this rank: from its own tiles, and, one step later, what the other ranks contribute."""

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, state_dtype: torch.dtype, transfers: GradTransfers | None
    ) -> None:
        self._k, self._v = k, v
        self._state_dtype = state_dtype
        self._sums = [gradient_accumulator(x, state_dtype) for x in (k, v)]
        self._transfers = transfers
        self._in_flight: Step | None = None

    def add(self, step: Step, parts_k: list[Part], parts_v: list[Part]) -> None:
        """Adds what the tiles of a step give, or sends it home."""
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
        parts_k.clear()  # the memory is needed for what comes home
        parts_v.clear()
        self._transfers.send()
        self._take_home()
        self._in_flight = step

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """dK and dV, complete."""
        self._take_home()
        return self._sums[0].result()[0], self._sums[1].result()[0]

    def _take_home(self) -> None:
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
            self._sums[0].add(step.heads, parts_k, step.is_last)
            self._sums[1].add(step.heads, parts_v, step.is_last)


@dataclass(frozen=True)
class RingCall(AttentionCall):
    """A ring: queries stay, K/V travel."""

    plan: Plan
    group: dist.ProcessGroup | None
    """None where nothing travels."""
    transport: KVTransport
    backend: AttentionBackend
    own_backward: AttentionBackend
    """The backend of those tiles, in backward, whose keys are this rank's own."""
    scale: float
    state_dtype: torch.dtype

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        out, lse = with_sinks(*ring_forward(q, k, v, self, modifiers), modifiers.sinks)
        return out, lse, (q, k, v, out, lse)

    def backward(
        self,
        grad_out: torch.Tensor,
        modifiers: Modifiers,
        saved: tuple[torch.Tensor, ...],
        grad_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, out, lse = saved
        return ring_backward(grad_out, q, k, v, out, lse, self, modifiers, grad_bias)

    @property
    def saves_rows_of_others(self) -> bool:
        return False

    def start_grads(self, k: torch.Tensor, v: torch.Tensor) -> GradTransfers | None:
        """The transfers of dK and dV; None where nothing travels."""
        return None if self.group is None else self.transport.start_grads(k, v, self.plan, self.group)

    def saved_again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return q, k, v, out, lse


def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingCall, modifiers: Modifiers = NO_MODIFIERS
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: (B, H, S, D), this rank's shard.
        k: (B, Hkv, T, D), this rank's shard.
        v: (B, Hkv, T, Dv), this rank's shard.
        call: everything else that was decided.
        extras: of this rank's queries, for calls that mask by row; sinks are left to the caller.

    Returns:
        out: (B, H, S, Dv) in q's dtype.
        lse: (B, H, S), natural log of the softmax denominator over all keys, in `call.state_dtype`.
    """
    if nothing_to_do(q):
        return q.new_empty((*q.shape[:3], v.size(3))), q.new_empty(q.shape[:3], dtype=call.state_dtype)
    with on_device_of(q), abandoned_on_error(call):
        return _forward(unit_stride(q), unit_stride(k), unit_stride(v), call, modifiers)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingCall, modifiers: Modifiers
) -> tuple[torch.Tensor, torch.Tensor]:
    result = output_accumulator(q, v.size(3), call.state_dtype)
    transfers = None if call.group is None else call.transport.start_kv(k, v, call.plan, False, call.group)
    for step in call.plan.forward:
        heads = _query_heads(step.heads, q, k)
        parts = _forward_step(step, heads, transfers, q, k, v, call, modifiers)
        with label("merge"):
            result.add(heads, parts, step.is_last)
        del parts  # the memory is needed for the next step
    out, lse = result.result()
    return out, lse


def _forward_step(
    step: Step,
    heads: Span,
    transfers: KvTransfers | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: RingCall,
    modifiers: Modifiers,
) -> list[Part]:
    """The partial results of a step's tiles. A function of its own, so that nothing else of the step lives on."""
    step_k, step_v = keys_and_values(step, transfers, k, v)
    parts = []
    for tile in step.tiles:
        tile_q = cut(q, tile.batch, heads, tile.q)
        tile_k, tile_v = (cut(x, tile.batch, None, tile.kv) for x in (step_k, step_v))
        with label("tile {} x {}, heads {}", tile.q, tile.kv, heads):
            backend = _with_modifiers(call.backend, tile, heads, modifiers)
            partial = backend.forward(tile_q, tile_k, tile_v, tile.mask, call.scale)
        parts.append(Part(tile.batch, tile.q, partial))
    if transfers is not None:
        transfers.tiles_launched()
    return parts


def ring_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
    modifiers: Modifiers = NO_MODIFIERS,
    grad_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v, from `ring_forward`'s results and the gradient of out.

    That of the bias is added to `grad_bias`, unless that is None.

    Sums over tiles and ranks are in `call.state_dtype` and are rounded once. What a rank contributes to another's dK/dV
    travels in the dtype of K/V, in which the kernels produce it.
    """
    if nothing_to_do(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    with on_device_of(q), abandoned_on_error(call):
        grad_out = in_order_of(out, grad_out)
        return _backward(grad_out, unit_stride(q), unit_stride(k), unit_stride(v), out, lse, call, modifiers, grad_bias)


def _backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
    modifiers: Modifiers,
    grad_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_q = gradient_accumulator(q, call.state_dtype)
    grad_kv = KeyValueGradients(k, v, call.state_dtype, call.start_grads(k, v))
    transfers = None if call.group is None else call.transport.start_kv(k, v, call.plan, True, call.group)
    delta = None
    if isinstance(call.backend, IntervalAttention):  # torch's kernels compute it themselves, for each tile
        delta = attention_delta(grad_out, out)
    for step in call.plan.backward:
        heads = _query_heads(step.heads, q, k)
        of_queries = (grad_out, q, out, lse)
        parts_q, parts_k, parts_v = _backward_step(
            step, heads, transfers, of_queries, delta, k, v, call, modifiers, grad_bias
        )
        grad_kv.add(step, parts_k, parts_v)
        with label("sum dQ"):
            grad_q.add(heads, parts_q, step.is_last)
        del parts_q, parts_k, parts_v  # the memory is needed for the next step
    return grad_q.result()[0], *grad_kv.result()


def _backward_step(
    step: Step,
    heads: Span,
    transfers: KvTransfers | None,
    of_queries: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    delta: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    call: RingCall,
    modifiers: Modifiers,
    grad_bias: torch.Tensor | None,
) -> tuple[list[Part], list[Part], list[Part]]:
    """What a step's tiles contribute to dQ, dK and dV; `of_queries` are grad_out, q, out and lse."""
    step_k, step_v = keys_and_values(step, transfers, k, v)
    parts_q, parts_k, parts_v = [], [], []
    for tile in step.tiles:
        tile_grad_out, tile_q, tile_out, tile_lse = (cut(x, tile.batch, heads, tile.q) for x in of_queries)
        tile_k, tile_v = (cut(x, tile.batch, None, tile.kv) for x in (step_k, step_v))
        with label("backward of tile {} x {}, heads {}", tile.q, tile.kv, heads):
            backend = call.own_backward if step.transfer is None else call.backend
            backend = _with_modifiers(backend, tile, heads, modifiers, delta)
            inputs = (tile_grad_out, tile_q, tile_k, tile_v, tile_out, tile_lse, tile.mask, call.scale)
            grads = backend.backward(*inputs)
            if grad_bias is not None:
                assert isinstance(backend, IntervalAttention)
                backend.add_bias_gradient(bias_part(grad_bias, tile.batch, heads, tile.q), *inputs)
        parts_q.append(Part(tile.batch, tile.q, grads[:1]))
        parts_k.append(Part(tile.batch, tile.kv, grads[1:2]))
        parts_v.append(Part(tile.batch, tile.kv, grads[2:]))
    if transfers is not None:
        transfers.tiles_launched()
    return parts_q, parts_k, parts_v


def _with_modifiers(
    backend: AttentionBackend, tile: Tile, heads: Span, modifiers: Modifiers, delta: torch.Tensor | None = None
) -> AttentionBackend:
    """The backend, with what a tile has besides its mask."""
    if not isinstance(backend, IntervalAttention):
        assert not modifiers.concern_tiles, "calls with a bias or dropout mask by row"
        return backend
    return replace(
        backend,
        modifiers=modifiers.part(tile.batch, heads, tile.q) if modifiers.concern_tiles else modifiers,
        delta=None if delta is None else cut(delta, tile.batch, heads, tile.q),
    )


def keys_and_values(
    step: Step, transfers: KvTransfers | None, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a step's tiles read: its heads of the own shard, or, once they have come, of what its transfer brings."""
    if step.transfer is None:
        return cut(k, None, step.heads, None), cut(v, None, step.heads, None)
    assert transfers is not None
    with label("wait for K/V"):
        rows = transfers.receive()
    return unpack_rows(rows, k, v, step.heads)


def _query_heads(kv_heads: Span, q: torch.Tensor, k: torch.Tensor) -> Span:
    """The query heads that read some key/value heads."""
    group = q.size(1) // k.size(1)
    return kv_heads[0] * group, kv_heads[1] * group


def abandoned_on_error(call: RingCall) -> AbstractContextManager[None]:
    """Forgets the transfers of a call that raises."""
    group = call.group
    return nullcontext() if group is None else cleaned_up_on_error(lambda: call.transport.abandon(group))


def nothing_to_do(q: torch.Tensor) -> bool:
    """Whether this rank has no batch rows or no heads, as uneven DTensor shards may; its whole ring has none then."""
    return 0 in q.shape[:2]
