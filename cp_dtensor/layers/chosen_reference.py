"""Attention over chosen keys and its gradients by torch operations, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import wide_dtype, wrong_result
from cp_dtensor.layers.masked import Queries, in_intervals

_BYTES = 64 << 20
"""Limit for the chosen rows and for the logits of a block of queries, unless one has more; a few of each exist."""
Gradients = tuple[Tensor, Tensor, Tensor | None]
"""Of q, of rows (in float32 or wider) and of the sink."""


class Chosen(NamedTuple):
    """The keys that queries (B, H, T, D) have chosen. Query head h reads group h // (H / G)."""

    rows: Tensor
    """(B, S, G, R) of all keys: the first `value_dim` values are those that are summed, the last D are the key."""
    indices: Tensor
    """(B, T, G, N), of keys or of blocks of them, -1 for none."""
    sink: Tensor | None
    """(H,), a logit of each head that counts in the softmax denominator alone."""
    value_dim: int
    scale: float
    """Factor of the logits."""
    block_size: int = 1
    queries: Sequence[Queries] | None = None
    """For each batch row, the keys that its queries see; None if they see all that are chosen."""


def attend_chosen_reference(q: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the logits of keys, without the sink, in blocks of queries.

    Returns:
        out: (B, H, T, value_dim) in q's dtype; 0 for a query without keys.
        lse: (B, H, T), float32 or wider; -inf for such a query.
    """
    out = q.new_empty((*q.shape[:3], chosen.value_dim))
    lse = q.new_empty(q.shape[:3], dtype=wide_dtype(q))
    for at, _, keys, _q_block, logits in _blocks(q, chosen):
        lse[at] = logits.logsumexp(2).T
        total = with_sink(lse[at], None if chosen.sink is None else chosen.sink[at[1]])
        weights = logits.sub_(total.T.unsqueeze(2)).exp_()
        out[at] = (weights @ keys[..., : chosen.value_dim]).transpose(0, 1)
    return out, lse


def chosen_gradients_reference(grad_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, chosen: Chosen) -> Gradients:
    """Return the gradients, given the results of the forward."""
    rows, value_dim, dim = chosen.rows, chosen.value_dim, q.size(3)
    wide, dq, total = wide_dtype(q), torch.empty_like(q), with_sink(lse, chosen.sink)
    d_rows = rows.new_zeros((rows.size(0), rows.size(1) + 1, *rows.shape[2:]), dtype=wide)  # the last one is of no key
    delta = (grad_out.to(wide) * out).sum(3)
    for at, index, keys, q_block, logits in _blocks(q, chosen):
        weights = logits.sub_(total[at].T.unsqueeze(2)).exp_()
        grad = grad_out[at].transpose(0, 1).to(wide)
        d_logits = grad @ keys[..., :value_dim].mT
        d_logits.sub_(delta[at].T.unsqueeze(2)).mul_(weights).mul_(chosen.scale)
        dq[at] = (d_logits @ keys[..., -dim:]).transpose(0, 1)
        d_keys = F.pad(d_logits.mT @ q_block, (rows.size(3) - dim, 0))
        d_keys[..., :value_dim] += weights.mT @ grad
        group = at[1].start * rows.size(2) // q.size(1)
        d_rows[at[0], :, group].index_add_(0, index.flatten(), d_keys.flatten(0, 1))
    return dq, d_rows[:, :-1], sink_gradient(chosen.sink, total, grad_out, out)


def with_sink(lse: Tensor, sink: Tensor | None) -> Tensor:
    """Return the log-sum-exp (..., H, T) with the sink; 0 instead of -inf, so that weights of no keys are 0."""
    total = lse if sink is None else torch.logaddexp(lse, sink.to(lse.dtype).unsqueeze(1))
    return total.masked_fill(total == float("-inf"), 0.0)


def sink_gradient(sink: Tensor | None, total: Tensor, grad_out: Tensor, out: Tensor) -> Tensor | None:
    """Return the gradient of the sink, given the result of `with_sink`."""
    if sink is None:
        return None
    delta = (grad_out.to(total.dtype) * out).sum(3)
    return -((sink.to(total.dtype).unsqueeze(1) - total).exp() * delta).sum((0, 2)).to(sink.dtype)


def error_of_kernels(
    direction: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Gradients], q: Tensor,
    grad_out: Tensor, chosen: Chosen,
) -> str:  # fmt: skip
    """Compare the results of kernels in a direction with float64; "" if they are right."""
    sink = None if chosen.sink is None else chosen.sink.double()
    wide = chosen._replace(rows=chosen.rows.double(), sink=sink)
    out, lse = attend_chosen_reference(q.double(), wide)
    if direction == "forward":
        return wrong_result(("out", "lse"), forward(q, chosen), (out, lse))
    got = backward(grad_out, q, out.to(q.dtype), lse.float(), chosen)
    expected = chosen_gradients_reference(grad_out.double(), q.double(), out, lse, wide)
    names = ("dq", "d_rows", "d_sink")[: 2 if chosen.sink is None else 3]
    return wrong_result(names, got[: len(names)], expected[: len(names)])  # type: ignore[arg-type]


def _blocks(q: Tensor, chosen: Chosen) -> Iterator[tuple[tuple[int, slice, slice], Tensor, Tensor, Tensor, Tensor]]:
    """Yield for blocks of r queries: (batch row, heads, queries), indices (r, K), keys (r, K, R), q (r, h, D), logits.

    No key stands for a row of zeros behind the others: what is not finite in other rows must not reach it.
    """
    rows, indices, block_size = chosen.rows, chosen.indices, chosen.block_size
    (batch_size, heads, count, dim), (length, groups, width) = q.shape, rows.shape[1:]
    padded, wide, of_group = F.pad(rows, (0, 0, 0, 0, 0, 1)), wide_dtype(q), heads // groups
    in_block = torch.arange(block_size, device=q.device)
    step = max(1, _BYTES // (max(1, indices.size(3)) * block_size * max(width, of_group) * wide.itemsize))
    for batch, group in product(range(batch_size), range(groups)):
        for start in range(0, count, step):
            some = slice(start, min(start + step, count))
            at = batch, slice(group * of_group, (group + 1) * of_group), some
            index = indices[batch, some, group].long().unsqueeze(2) * block_size + in_block  # < 0 for none
            index = index.flatten(1)
            is_key = index >= 0
            if chosen.queries is not None:
                is_key &= in_intervals(chosen.queries[batch].on_device[:, :, some], index)
            index = torch.where(is_key, index, length)
            keys = padded[batch, :, group].index_select(0, index.flatten()).unflatten(0, index.shape).to(wide)
            q_block = q[at].transpose(0, 1).to(wide)
            logits = (q_block @ keys[..., -dim:].mT).mul_(chosen.scale)
            yield at, index, keys, q_block, logits.masked_fill_(~is_key.unsqueeze(1), float("-inf"))
