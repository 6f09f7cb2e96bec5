"""Executes a schedule: forward and backward of context-parallel attention on local shards.

All state of a call is in its `RingCall`, which the autograd node keeps: backward reads nothing else, so it is right
after a context has been left, in other threads, and whatever the settings are by then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cp_dtensor.layouts import Span
from cp_dtensor.local_attention.base import LocalAttention
from cp_dtensor.merge import Accumulator
from cp_dtensor.rotation.base import Rotation, Route
from cp_dtensor.schedule import Steps


@dataclass(frozen=True)
class RingCall:
    """One attention call, fully decided: integers, the group, and which implementations do the work."""

    steps: Steps
    route: Route
    rotation: Rotation
    backend: LocalAttention
    scale: float
    state_dtype: torch.dtype


class RingAttention(torch.autograd.Function):
    """Autograd node of `RingCall`. Second derivatives are not defined."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with _no_autocast(q):
            out, lse = ring_forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor, _grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        with _no_autocast(q):
            return (*ring_backward(grad_out, q, k, v, out, lse, ctx.call), None)


def ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: RingCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks.

    Args:
        q: (B, H, S, D), this rank's shard.
        k: (B, Hkv, T, D), this rank's shard.
        v: (B, Hkv, T, Dv), this rank's shard.
        call: everything else.

    Returns:
        out: (B, H, S, Dv) in q's dtype.
        lse: (B, H, S), natural log of the softmax denominator over all keys, in `call.state_dtype`.
    """
    if _nothing_to_do(q):
        return q.new_empty((*q.shape[:3], v.size(3))), q.new_empty(q.shape[:3], dtype=call.state_dtype)
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    result = Accumulator(q, v.size(3), call.state_dtype)
    transfer = call.rotation.start_kv(pack_rows(k, v), call.route)
    for step, tiles in enumerate(call.steps):
        rows = transfer.receive(step)
        step_k, step_v = (k, v) if rows is None else unpack_rows(rows, k, v)
        for tile in tiles:
            tile_out, tile_lse = call.backend.forward(
                _cut(q, tile.batch, tile.q),
                _cut(step_k, tile.batch, tile.kv),
                _cut(step_v, tile.batch, tile.kv),
                tile.mask,
                call.scale,
            )
            result.add(tile.batch, tile.q, tile_out, tile_lse)
    return result.result(q.dtype)


def ring_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: RingCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of this rank's q, k and v, from `ring_forward`'s results and the gradient of out.

    Sums over tiles and ranks are in `call.state_dtype` and are cast once, at the end.
    """
    if _nothing_to_do(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    grad_out, q, k, v = _unit_stride(grad_out), _unit_stride(q), _unit_stride(k), _unit_stride(v)
    grad_q = torch.zeros_like(q, dtype=call.state_dtype)
    kv_rows = pack_rows(k, v)
    transfer = call.rotation.start_kv(kv_rows, call.route)
    home = call.rotation.start_grads(kv_rows.size(1), call.state_dtype, q.device, call.route)
    for step, tiles in enumerate(call.steps):
        rows = transfer.receive(step)
        step_k, step_v = (k, v) if rows is None else unpack_rows(rows, k, v)
        step_grad_k, step_grad_v = unpack_rows(home.buffer(step), k, v)
        for tile in tiles:
            tile_grads = call.backend.backward(
                _cut(grad_out, tile.batch, tile.q),
                _cut(q, tile.batch, tile.q),
                _cut(step_k, tile.batch, tile.kv),
                _cut(step_v, tile.batch, tile.kv),
                _cut(out, tile.batch, tile.q),
                _cut(lse, tile.batch, tile.q),
                tile.mask,
                call.scale,
            )
            _cut(grad_q, tile.batch, tile.q).add_(tile_grads[0])
            _cut(step_grad_k, tile.batch, tile.kv).add_(tile_grads[1])
            _cut(step_grad_v, tile.batch, tile.kv).add_(tile_grads[2])
        home.send(step)
    grad_k, grad_v = unpack_rows(home.finish(), k, v)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def pack_rows(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """K and V, (B, Hkv, T, D) and (B, Hkv, T, Dv), as one row per token: (T, B Hkv (D + Dv)), contiguous."""
    batch, heads, length, _ = k.shape
    k_width, v_width = batch * heads * k.size(3), batch * heads * v.size(3)
    rows = k.new_empty(length, k_width + v_width)
    packed_k, packed_v = unpack_rows(rows, k, v)
    packed_k.copy_(k)
    packed_v.copy_(v)
    return rows


def unpack_rows(rows: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of packed rows as K (B, Hkv, rows, D) and V (B, Hkv, rows, Dv); sizes other than rows as in `like_*`."""
    batch, heads = like_k.shape[:2]
    k_width = batch * heads * like_k.size(3)
    k = rows[:, :k_width].view(rows.size(0), batch, heads, like_k.size(3))
    v = rows[:, k_width:].view(rows.size(0), batch, heads, like_v.size(3))
    return k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)


def _nothing_to_do(q: torch.Tensor) -> bool:
    """Whether this rank has no batch rows or no heads, as uneven DTensor shards may; so have all of its ring."""
    return 0 in q.shape[:2]


def _cut(tensor: torch.Tensor, batch: Span, rows: Span) -> torch.Tensor:
    """(B, H, S, ...) to the given batch rows and sequence rows, a view."""
    return tensor[batch[0] : batch[1], :, rows[0] : rows[1]]


def _unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _no_autocast(like: torch.Tensor) -> AbstractContextManager[None]:
    """Casting has happened before the call; inside, dtypes are chosen with care."""
    device_type = like.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
