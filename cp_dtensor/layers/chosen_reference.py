"""Attention over chosen keys and its gradients by torch operations, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import wide_dtype
from cp_dtensor.layers.masked import in_intervals

_BYTES = 64 << 20
"""Limit for the chosen rows and for the logits of a block of queries, unless one has more; a few of each exist."""


def attend_chosen_reference(
    q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, value_dim: int, scale: float, block_size: int = 1,
    seen: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the log-sum-exp of the logits of keys, without the sink, in blocks of queries.

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
        of_keys = logits.logsumexp(2)
        total = of_keys if sink is None else torch.logaddexp(of_keys, sink[heads].to(of_keys.dtype))
        out[batch, heads, at] = (_weights(logits, total) @ keys[..., :value_dim]).transpose(0, 1)
        lse[batch, heads, at] = of_keys.T
    return out, lse


def chosen_gradients_reference(
    grad_out: Tensor, q: Tensor, rows: Tensor, indices: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor,
    scale: float, block_size: int = 1, seen: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return the gradients of q, of rows (in float32 or wider) and of the sink; arguments are those of the forward."""
    wide, value_dim, dq = wide_dtype(q), out.size(3), torch.empty_like(q)
    d_rows = rows.new_zeros((rows.size(0), rows.size(1) + 1, *rows.shape[2:]), dtype=wide)  # the last one is of no key
    delta = (grad_out.to(wide) * out).sum(3)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(1))
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
