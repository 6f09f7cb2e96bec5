"""Attention over chosen keys of latents: absorbed MLA, in which all heads share one row of a key, its latent first.

With q' = [up_k^T q | rotary q], rows = [latent | rotary key] and the chosen keys of each query:

    out' = softmax(scale q' rows^T) latent,  out = up_v out'

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; DeepSeek-V3.2 (arXiv 2512.02556).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import RankFunction, differentiated_once, refuse_batches, softmax_scale, wide_dtype
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.exchange import whole_rows
from cp_dtensor.layers.layer import Inputs, Result, SequenceLayer

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
        indices = tensors[3]
        if not indices.is_cuda and indices.numel() and not -1 <= int(indices.min()) <= int(indices.max()) < seq_len:
            raise ValueError(
                f"indexed_attention expects indices from -1 to the last of {seq_len} tokens, got {indices.min()} to "
                f"{indices.max()}"
            )

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, latent, rotary, indices, up, sink, *_ = tensors
        scale, plain = softmax_scale(q.size(3), self.scale), q.size(3) - rotary.size(2)
        up_k, up_v = up.split((plain, up.size(1) - plain), 1)
        absorbed = torch.cat((q[..., :plain] @ up_k, q[..., plain:]), 3)
        rows = torch.cat((latent, rotary), 2)
        out = _Attention.apply(absorbed, rows, indices, sink, call, latent.size(2), scale)
        return out @ up_v.mT, None


class _Attention(RankFunction):
    """Gathers the rows of all keys, attends, and sums gradients of rows over the ranks, in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, call: SequenceCall, latent_dim: int,
        scale: float,
    ) -> Tensor:  # fmt: skip
        whole = whole_rows(rows, call.sequences(q.size(0)), call.ranks)
        out, lse = attend_chosen_reference(q, whole, indices, sink, latent_dim, scale)
        ctx.call, ctx.scale = call, scale
        ctx.save_for_backward(q, whole, indices, sink, out, lse)
        return out

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batches(grad_out)
        q, whole, indices, sink, out, lse = saved
        dq, d_whole, d_sink = chosen_gradients_reference(grad_out, q, whole, indices, sink, out, lse, ctx.scale)
        d_rows = None
        if ctx.needs_input_grad[1]:
            sequences = ctx.call.sequences(q.size(0))
            d_rows = whole_rows(d_whole, sequences, ctx.call.ranks, transposed=True).to(whole.dtype)
        return dq, d_rows, None, d_sink, None, None, None


# Kernels of packages, such as sgl-flash-mla's forward and cuDNN's backward, can stand for these two functions.


def attend_chosen_reference(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp, by torch operations on any device, in blocks of queries.

    Args:
        q: (B, H, T, D).
        rows: (B, S, D) of all keys; the first `latent_dim` values are those that are summed.
        indices: (B, T, K), -1 for none.
        sink: (H,), a logit of each head that counts in the softmax denominator alone, or None.
        scale: factor of the logits.

    Returns:
        out: (B, H, T, latent_dim) in q's dtype; 0 for a query without keys.
        lse: (B, H, T), float32 or wider; -inf for such a query.
    """
    out = q.new_empty((*q.shape[:3], latent_dim))
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for batch, at, _, keys, _q_block, logits in _blocks(q, rows, indices, scale):
        total = logits.logsumexp(2)
        if sink is not None:
            total = torch.logaddexp(total, sink.to(total.dtype))
        out[batch, :, at] = (_weights(logits, total) @ keys[..., :latent_dim]).transpose(0, 1)
        lse[batch, :, at] = total.T
    return out, lse


def chosen_gradients_reference(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, of rows (in float32 or wider) and of the sink; arguments are those of the forward."""
    wide, latent_dim = wide_dtype(q), out.size(3)
    dq = torch.empty_like(q)
    d_rows = rows.new_zeros((rows.size(0), rows.size(1) + 1, rows.size(2)), dtype=wide)  # the last one is of index -1
    delta = (grad_out.to(wide) * out).sum(3)
    for batch, at, index, keys, q_block, logits in _blocks(q, rows, indices, scale):
        weights = _weights(logits, lse[batch, :, at].T)
        grad = grad_out[batch, :, at].transpose(0, 1).to(wide)
        d_logits = grad @ keys[..., :latent_dim].mT
        d_logits.sub_(delta[batch, :, at].T.unsqueeze(2)).mul_(weights).mul_(scale)
        dq[batch, :, at] = (d_logits @ keys).transpose(0, 1)
        d_keys = d_logits.mT @ q_block
        d_keys[..., :latent_dim] += weights.mT @ grad
        d_rows[batch].index_add_(0, index.flatten(), d_keys.flatten(0, 1))
    d_sink = None
    if sink is not None:
        d_sink = -((sink.to(wide).unsqueeze(1) - lse).exp() * delta).sum((0, 2)).to(sink.dtype)
    return dq, d_rows[:, :-1], d_sink


def _blocks(
    q: Tensor, rows: Tensor, indices: Tensor, scale: float
) -> Iterator[tuple[int, slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield for each block of r queries: batch row, queries, indices (r, K), keys (r, K, D), q (r, H, D), logits.

    Index -1 stands for a row of zeros behind the others: what is not finite in other rows must not reach it.
    """
    (batch_size, heads, count, dim), chosen, wide = q.shape, indices.size(2), wide_dtype(q)
    padded = F.pad(rows, (0, 0, 0, 1))
    step = max(1, _BYTES // (max(1, chosen) * max(dim, heads) * wide.itemsize))
    for batch in range(batch_size):
        for start in range(0, count, step):
            at = slice(start, min(start + step, count))
            index = indices[batch, at].long()
            index = torch.where(index < 0, rows.size(1), index)
            keys = padded[batch].index_select(0, index.flatten()).unflatten(0, index.shape).to(wide)
            q_block = q[batch, :, at].transpose(0, 1).to(wide)
            logits = (q_block @ keys.mT).mul_(scale)
            logits.masked_fill_((index == rows.size(1)).unsqueeze(1), float("-inf"))
            yield batch, at, index, keys, q_block, logits


def _weights(logits: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax weights, 0 for queries without keys, whose lse is -inf; logits are overwritten."""
    return logits.sub_(lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(2)).exp_()
