"""Attention over chosen keys: rows of keys, whose first values are summed, for groups of heads that share them.

Absorbed MLA has one group. With q' = [up_k^T q | rotary q] and rows = [latent | rotary key]:

    out' = softmax(scale q' rows^T) latent,  out = up_v out'

In attention over blocks of keys each key head is a group, with rows = [v | k].

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from cp_dtensor.api.extension import RankFunction, softmax_scale, wide_dtype
from cp_dtensor.layers import block_kernels, chosen_kernels
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.chosen_reference import (
    Chosen,
    Gradients,
    attend_chosen_reference,
    chosen_gradients_reference,
)
from cp_dtensor.layers.exchange import backward_of_layer, whole_rows
from cp_dtensor.layers.layer import Inputs, Result, SequenceLayer
from cp_dtensor.layers.masked import MaskedLayer, Queries
from cp_dtensor.spec.masks import Mask

_PART = 1 << 20
"""Most rows of absorbed queries at a time, one for each query and head; they take 1.1 GiB in DeepSeek-V3.2."""


@dataclass(frozen=True)
class IndexedAttention(SequenceLayer):
    """MLA over chosen keys.

    The tensors are q (B, H, T, Dn + Dr), latent (B, T, R), rotary key (B, T, Dr), indices (B, T, K),
    up (H, Dn + Dv, R), and a sink of each head, (H,) or None.
    """

    dims = "BHTD", "BTR", "BTE", "BTK", "HUR", "H"
    dim = 2
    is_sparse = True
    scale: float | None
    """None for 1 / sqrt(Dn + Dr), which is a symbol where compiled code has dynamic shapes."""

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        q, _, rotary, _, up, *_ = tensors
        made: Tensor = q.new_empty((*q.shape[:3], up.size(1) - q.size(3) + rotary.size(2)))
        return made

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        check_numbers(call, tensors[3], call.length, "tokens")

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, latent, rotary, indices, up, sink, *_ = tensors
        scale, plain = softmax_scale(q.size(3), self.scale), q.size(3) - rotary.size(2)
        rows = torch.cat((latent, rotary), 2)
        keeps = torch.is_grad_enabled()
        return _LatentAttention.apply(q, rows, indices, sink, up, call, plain, scale, keeps), None


@dataclass(frozen=True)
class BlockAttention(MaskedLayer):
    """Attention over chosen blocks of the keys of each key head, and in them over the keys that the mask has.

    The tensors are q (B, H, T, D), k (B, T, G, D), v (B, T, G, Dv), numbers of blocks (B, T, G, N), and a sink of each
    head, (H,) or None; query head h reads key head h // (H / G).
    """

    dims = "BHTD", "BTHE", "BTHF", "BTHC", "H"
    dim = 2
    is_sparse = True
    block_size: int
    mask: Mask | None
    scale: float | None

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        made: Tensor = tensors[0].new_empty((*tensors[0].shape[:3], tensors[2].size(3)))
        return made

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        super().check(call, tensors)
        check_numbers(call, tensors[3], -(-call.length // self.block_size), "blocks")

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, k, v, indices, sink, *_ = tensors
        rows, scale = torch.cat((v, k), 3), softmax_scale(q.size(3), self.scale)
        queries = self.queries(call, q.size(0), q.device)
        out = _BlockAttention.apply(q, rows, indices, sink, call, v.size(3), scale, self.block_size, queries)
        return out, None


def check_numbers(call: SequenceCall, numbers: Tensor | None, count: int, of: str) -> None:
    """Refuse other numbers than -1 to `count` - 1. A GPU is not waited for."""
    if numbers is None or numbers.is_cuda or not numbers.numel():
        return
    if not -1 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(
            f"{call.owner} expects indices from -1 to the last of {count} {of}, got {numbers.min()} to {numbers.max()}"
        )


def attend_chosen(q: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Compute `attend_chosen_reference`, by kernels where they serve."""
    kernels = block_kernels if chosen.queries is not None else chosen_kernels
    return (kernels.forward if kernels.serves("forward", q, chosen) else attend_chosen_reference)(q, chosen)


def chosen_gradients(grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, chosen: Chosen) -> Gradients:
    """Compute `chosen_gradients_reference`, by kernels where they serve."""
    kernels = block_kernels if chosen.queries is not None else chosen_kernels
    gradients = kernels.backward if kernels.serves("backward", q, chosen) else chosen_gradients_reference
    return gradients(grad_out, q, out, lse, chosen)


class _LatentAttention(RankFunction):
    """Absorbed MLA: gathers the rows of all keys, attends, and sums gradients of rows over the ranks.

    Absorbed queries and their outputs have R values a head, several times those of q and out. They exist for a part of
    the queries at a time; the outputs are kept for backward, where queries are absorbed again.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, up: Tensor, call: SequenceCall,
        plain: int, scale: float, keeps: bool,
    ) -> Tensor:  # fmt: skip
        whole, up_v = whole_rows(rows, call.sequences(q.size(0)), call.ranks), up[:, plain:]
        # In memory (B, T, H, D), as the projection after attention reads it.
        out = q.new_empty(q.size(0), q.size(2), q.size(1), up_v.size(1)).transpose(1, 2)
        kept: list[Tensor] = []
        for at, chosen in _parts(q, Chosen(whole, indices, sink, up.size(2), scale)):
            part, lse = attend_chosen(_absorbed(q[at], up, plain), chosen)
            torch.bmm(part[0], up_v.mT, out=out[at])
            kept += [part, lse] * keeps
        ctx.call, ctx.plain, ctx.scale = call, plain, scale
        ctx.save_for_backward(q, whole, indices, sink, up, *kept)
        return out

    @staticmethod
    @backward_of_layer
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, whole, indices, sink, up, *kept = saved
        plain, rank, dq = ctx.plain, up.size(2), torch.empty_like(q)
        up_k, up_v = up.split((plain, up.size(1) - plain), 1)
        d_whole, d_up = (torch.zeros_like(x, dtype=wide_dtype(x)) for x in (whole, up))
        d_sink: Any = None if sink is None else torch.zeros_like(sink, dtype=wide_dtype(sink))
        parts = _parts(q, Chosen(whole, indices, sink, rank, ctx.scale))
        for (at, chosen), part, lse in zip(parts, kept[::2], kept[1::2], strict=True):
            x, grad = q[at], grad_out[at]
            absorbed, d_part = _absorbed(x, up, plain), _heads_last(x, rank)
            torch.bmm(grad, up_v, out=d_part)
            (d_absorbed,), d_keys, of_sink = chosen_gradients(d_part.unsqueeze(0), absorbed, part, lse, chosen)
            d_whole[at[0]] += d_keys[0, :, 0]
            d_latent = d_absorbed[..., :rank]
            torch.bmm(d_latent, up_k.mT, out=dq[at][..., :plain])
            dq[at][..., plain:] = d_absorbed[..., rank:]
            if ctx.needs_input_grad[4]:
                d_up[:, :plain] += x[..., :plain].mT @ d_latent
                d_up[:, plain:] += grad.mT @ part[0]
            if d_sink is not None:
                d_sink += of_sink
        d_sink = d_sink if sink is None else d_sink.to(sink.dtype)
        return dq, _rows_gradient(ctx, d_whole, whole), None, d_sink, d_up.to(up.dtype), *[None] * 4


def _parts(q: Tensor, chosen: Chosen) -> Iterator[tuple[tuple[int, slice, slice], Chosen]]:
    """Yield (batch row, all heads, some queries), and what these have chosen, of rows (B, S, R), indices (B, T, K)."""
    batch_size, heads, count, _ = q.shape
    step = max(1, _PART // heads)
    for row, start in product(range(batch_size), range(0, count, step)):
        one, some = slice(row, row + 1), slice(start, min(start + step, count))
        rows, indices = chosen.rows[one].unsqueeze(2), chosen.indices[one, some].unsqueeze(2)
        yield (row, slice(None), some), chosen._replace(rows=rows, indices=indices)


def _heads_last(x: Tensor, dim: int) -> Tensor:
    """Return an empty (H, T, dim) in memory (T, H, dim), as kernels take it, for x (H, T, D)."""
    return x.new_empty(x.size(1), x.size(0), dim).transpose(0, 1)


def _absorbed(q: Tensor, up: Tensor, plain: int) -> Tensor:
    """Return the queries [up_k^T q | rotary q], (1, H, T, R + Dr), of q (H, T, Dn + Dr)."""
    made = _heads_last(q, up.size(2) + q.size(2) - plain)
    torch.bmm(q[..., :plain], up[:, :plain], out=made[..., : up.size(2)])
    made[..., up.size(2) :] = q[..., plain:]
    return made.unsqueeze(0)


class _BlockAttention(RankFunction):
    """Gathers the rows [v | k] of all keys, attends, and sums gradients of rows over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, call: SequenceCall, value_dim: int,
        scale: float, block_size: int, queries: Sequence[Queries],
    ) -> Tensor:  # fmt: skip
        whole = whole_rows(rows, call.sequences(q.size(0)), call.ranks)
        ctx.call, ctx.options = call, (scale, block_size, queries)
        out, lse = attend_chosen(q, Chosen(whole, indices, sink, value_dim, *ctx.options))
        ctx.save_for_backward(q, whole, indices, sink, out, lse)
        return out

    @staticmethod
    @backward_of_layer
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, whole, indices, sink, out, lse = saved
        chosen = Chosen(whole, indices, sink, out.size(3), *ctx.options)
        dq, d_whole, d_sink = chosen_gradients(grad_out, q, out, lse, chosen)
        return dq, _rows_gradient(ctx, d_whole, whole), None, d_sink, *[None] * 5


def _rows_gradient(ctx: Any, d_whole: Tensor, whole: Tensor) -> Tensor | None:
    """Return the gradient of this rank's rows, summed over the ranks in float32 or wider; None if it is not needed."""
    if not ctx.needs_input_grad[1]:
        return None
    wide, sequences = d_whole.to(wide_dtype(whole)), ctx.call.sequences(whole.size(0))
    return whole_rows(wide, sequences, ctx.call.ranks, transposed=True).to(whole.dtype)
