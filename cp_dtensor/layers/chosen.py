"""Attention over chosen keys: rows of keys, whose first values are summed, for groups of heads that share them.

Absorbed MLA has one group. With q' = [up_k^T q | rotary q] and rows = [latent | rotary key]:

    out' = softmax(scale q' rows^T) latent,  out = up_v out'

In attention over blocks of keys each key head is a group, with rows = [v | k] and q' = [0 | q].

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import RankFunction, differentiated_once, refuse_batches, softmax_scale, wide_dtype
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.exchange import whole_rows
from cp_dtensor.layers.layer import Inputs, Result, SequenceLayer
from cp_dtensor.layers.masked import MaskedLayer, in_intervals
from cp_dtensor.spec.masks import Mask

_BYTES = 64 << 20
"""Limit for the chosen rows and for the logits of a block of queries, unless one has more; a few of each exist."""


@dataclass(frozen=True)
class IndexedAttention(SequenceLayer):
    """MLA over chosen keys.

    The tensors are q (B, H, T, Dn + Dr), latent (B, T, R), rotary key (B, T, Dr), indices (B, T, K),
    up (H, Dn + Dv, R), and a sink of each head, (H,) or None.
    """

    of_tokens = 4
    dim = 2
    scale: float | None
    """None for 1 / sqrt(Dn + Dr), which is a symbol where compiled code has dynamic shapes."""

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        q, _, rotary, _, up, *_ = tensors
        made: Tensor = q.new_empty((*q.shape[:3], up.size(1) - q.size(3) + rotary.size(2)))
        return made

    def check_length(self, tensors: Inputs, seq_len: int) -> None:
        check_numbers("indexed_attention", tensors[3], f"the last of {seq_len} tokens", seq_len)

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, latent, rotary, indices, up, sink, *_ = tensors
        scale, plain = softmax_scale(q.size(3), self.scale), q.size(3) - rotary.size(2)
        up_k, up_v = up.split((plain, up.size(1) - plain), 1)
        absorbed = torch.cat((q[..., :plain] @ up_k, q[..., plain:]), 3)
        rows = torch.cat((latent, rotary), 2).unsqueeze(2)
        out = _Attention.apply(absorbed, rows, indices.unsqueeze(2), sink, call, latent.size(2), scale)
        return out @ up_v.mT, None


@dataclass(frozen=True)
class BlockAttention(MaskedLayer):
    """Attention over chosen blocks of the keys of each key head, and in them over the keys that the mask has.

    The tensors are q (B, H, T, D), k (B, T, G, D), v (B, T, G, Dv), numbers of blocks (B, T, G, N), and a sink of each
    head, (H,) or None; query head h reads key head h // (H / G).
    """

    of_tokens = 4
    dim = 2
    block_size: int
    mask: Mask | None
    scale: float | None

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        made: Tensor = tensors[0].new_empty((*tensors[0].shape[:3], tensors[2].size(3)))
        return made

    def check_length(self, tensors: Inputs, seq_len: int) -> None:
        super().check_length(tensors, seq_len)
        blocks = -(-seq_len // self.block_size)
        check_numbers("block_attention", tensors[3], f"the last of {blocks} blocks", blocks)

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, k, v, indices, sink, *_ = tensors
        padded, rows = F.pad(q, (v.size(3), 0)), torch.cat((v, k), 3)
        seen = [each.to(q.device) for _, each in self.queries(call, q.size(0))]
        scale = softmax_scale(q.size(3), self.scale)
        out = _Attention.apply(padded, rows, indices, sink, call, v.size(3), scale, self.block_size, seen)
        return out, None


def check_numbers(owner: str, numbers: Tensor, last: str, count: int) -> None:
    """Refuse other numbers than -1 to `count` - 1. A GPU is not waited for."""
    if not numbers.is_cuda and numbers.numel() and not -1 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(f"{owner} expects indices from -1 to {last}, got {numbers.min()} to {numbers.max()}")


class _Attention(RankFunction):
    """Gathers the rows of all keys, attends, and sums gradients of rows over the ranks, in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, call: SequenceCall, value_dim: int,
        scale: float, block_size: int = 1, seen: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        whole = whole_rows(rows, call.sequences(q.size(0)), call.ranks)
        ctx.call, ctx.options = call, (scale, block_size, seen)
        out, lse = attend_chosen_reference(q, whole, indices, sink, value_dim, *ctx.options)
        ctx.save_for_backward(q, whole, indices, sink, out, lse)
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batches(grad_out)
        q, whole, indices, sink, out, lse = saved
        dq, d_whole, d_sink = chosen_gradients_reference(grad_out, q, whole, indices, sink, out, lse, *ctx.options)
        d_rows = None
        if ctx.needs_input_grad[1]:
            sequences = ctx.call.sequences(q.size(0))
            d_rows = whole_rows(d_whole, sequences, ctx.call.ranks, transposed=True).to(whole.dtype)
        return dq, d_rows, None, d_sink, *[None] * (len(ctx.needs_input_grad) - 4)


# Kernels of packages, such as sgl-flash-mla's forward and cuDNN's backward, can stand for these two functions.


def attend_chosen_reference(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int, scale: float, block_size: int = 1,
    seen: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the log-sum-exp, by torch operations on any device, in blocks of queries.

    Args:
        q: (B, H, T, D); query head h reads group h // (H / G).
        rows: (B, S, G, D) of all keys; the first `value_dim` values are those that are summed.
        indices: (B, T, G, N), of keys or of blocks of them, -1 for none.
        sink: (H,), a logit of each head that counts in the softmax denominator alone, or None.
        scale: factor of the logits.
        seen: for each batch row, the keys that its queries see; () if they see all that are chosen.

    Returns:
        out: (B, H, T, value_dim) in q's dtype; 0 for a query without keys.
        lse: (B, H, T), float32 or wider; -inf for such a query.
    """
    out = q.new_empty((*q.shape[:3], value_dim))
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for batch, heads, at, _, keys, _q_block, logits in _blocks(q, rows, indices, scale, block_size, seen):
        total = logits.logsumexp(2)
        if sink is not None:
            total = torch.logaddexp(total, sink[heads].to(total.dtype))
        out[batch, heads, at] = (_weights(logits, total) @ keys[..., :value_dim]).transpose(0, 1)
        lse[batch, heads, at] = total.T
    return out, lse


def chosen_gradients_reference(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, block_size: int = 1, seen: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, of rows (in float32 or wider) and of the sink; arguments are those of the forward."""
    wide, value_dim, dq = wide_dtype(q), out.size(3), torch.empty_like(q)
    d_rows = rows.new_zeros((rows.size(0), rows.size(1) + 1, *rows.shape[2:]), dtype=wide)  # the last one is of no key
    delta = (grad_out.to(wide) * out).sum(3)
    for batch, heads, at, index, keys, q_block, logits in _blocks(q, rows, indices, scale, block_size, seen):
        weights = _weights(logits, lse[batch, heads, at].T)
        grad = grad_out[batch, heads, at].transpose(0, 1).to(wide)
        d_logits = grad @ keys[..., :value_dim].mT
        d_logits.sub_(delta[batch, heads, at].T.unsqueeze(2)).mul_(weights).mul_(scale)
        dq[batch, heads, at] = (d_logits @ keys).transpose(0, 1)
        d_keys = d_logits.mT @ q_block
        d_keys[..., :value_dim] += weights.mT @ grad
        d_rows[batch, :, heads.start * rows.size(2) // q.size(1)].index_add_(0, index.flatten(), d_keys.flatten(0, 1))
    d_sink = None
    if sink is not None:
        weights = (sink.to(wide).unsqueeze(1) - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
        d_sink = -(weights * delta).sum((0, 2)).to(sink.dtype)
    return dq, d_rows[:, :-1], d_sink


def _blocks(
    q: Tensor, rows: Tensor, indices: Tensor, scale: float, block_size: int, seen: Sequence[Tensor]
) -> Iterator[tuple[int, slice, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield for blocks of r queries: batch row, heads, queries, indices (r, K), keys (r, K, D), q (r, h, D), logits.

    No key stands for a row of zeros behind the others: what is not finite in other rows must not reach it.
    """
    (batch_size, heads, count, dim), (length, groups) = q.shape, rows.shape[1:3]
    padded, wide, of_group = F.pad(rows, (0, 0, 0, 0, 0, 1)), wide_dtype(q), heads // groups
    in_block = torch.arange(block_size, device=q.device)
    step = max(1, _BYTES // (max(1, indices.size(3)) * block_size * max(dim, of_group) * wide.itemsize))
    for batch, group in product(range(batch_size), range(groups)):
        for start in range(0, count, step):
            at, of_q = slice(start, min(start + step, count)), slice(group * of_group, (group + 1) * of_group)
            index = indices[batch, at, group].long().unsqueeze(2) * block_size + in_block  # < 0 for none
            index = index.flatten(1)
            is_key = index >= 0
            if seen:
                is_key &= in_intervals(seen[batch][:, :, at], index)
            index = torch.where(is_key, index, length)
            keys = padded[batch, :, group].index_select(0, index.flatten()).unflatten(0, index.shape).to(wide)
            q_block = q[batch, of_q, at].transpose(0, 1).to(wide)
            logits = (q_block @ keys.mT).mul_(scale).masked_fill_(~is_key.unsqueeze(1), float("-inf"))
            yield batch, of_q, at, index, keys, q_block, logits


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax weights, 0 for queries without keys, whose lse is -inf; logits are overwritten."""
    return logits.sub_(lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(2)).exp_()
