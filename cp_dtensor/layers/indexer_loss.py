"""The loss that trains the indexer of learned sparse attention: its distribution of keys against attention's.

    loss[t] = KL(p[t] || softmax over s of score[t, s]),  p[t, s] = mean over heads of attention's weights

Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import RankFunction, SequenceRanks, wide_dtype
from cp_dtensor.layers.blocks import LayerOfBlocks
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.chosen import check_numbers
from cp_dtensor.layers.exchange import backward_of_layer, whole_rows
from cp_dtensor.layers.layer import Inputs, Result
from cp_dtensor.layers.masked import MaskedLayer, in_intervals
from cp_dtensor.layers.rows import SequenceLayout
from cp_dtensor.spec.layouts import Span
from cp_dtensor.spec.masks import Mask

_BYTES = 64 << 20
"""Limit for the products, the logits and the chosen keys of a block of queries, unless one has more. The keys of a loss
over all of them are in float32 besides."""


@dataclass(frozen=True)
class IndexerLoss(MaskedLayer):
    """The loss of each query, (B, T), over chosen keys, or without indices over all keys that the mask has.

    The tensors are q_index (B, T, H, D), k_index (B, T, D), weights (B, T, H), q (B, T, J, E), k (B, T, G, E), and
    indices (B, T, N) or None. The last three have no gradient.
    """

    dims = "BTHD", "BTE", "BTH", "BTJF", "BTGI", "BTK"
    mask: Mask | None
    scale: float

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        made: Tensor = tensors[0].new_empty(tensors[0].shape[:2], dtype=wide_dtype(tensors[0]))
        return made

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        super().check(call, tensors)
        check_numbers(call, tensors[5], call.length, "tokens")

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q_index, k_index, weights, q, k, indices, *_ = tensors
        seen = [] if indices is not None else [each.on_device for each in self.queries(call, q.size(0), q.device)]
        place = call.sequences(q.size(0)), call.ranks
        return _Loss.apply(q_index, k_index, weights, *place, q, k, indices, self.scale, seen), None


@dataclass(frozen=True)
class PooledIndexerLoss(LayerOfBlocks):
    """The same over pooled keys, of chosen blocks or without indices of all that a query sees.

    The tensors are q_index (B, T, H, D), weights (B, T, H), q (B, T, J, E), indices (B, T, N) or None, and this rank's
    pooled index keys (B, n, D) and pooled keys (B, n, E).
    """

    dims = "BTHD", "BTH", "BTJE", "BTK", "BND", "BNE"
    size: int
    scale: float

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        self.check_pooled(call, tensors[5], tensors[3])

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q_index, weights, q, indices, pooled_index, pooled = tensors
        blocks, tables = self.blocks(call, q.size(0), q.device)
        place = [((0, q.size(0)), blocks)], call.ranks
        seen = [] if indices is not None else [tables.seen] * q.size(0)
        target = q, pooled.unsqueeze(2), indices, self.scale, seen
        return _Loss.apply(q_index, pooled_index, weights, *place, *target), None


class _Loss(RankFunction):
    """Gathers index keys and keys, and sums gradients of index keys over the ranks, in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, q_index: Tensor, k_index: Tensor, weights: Tensor, sequences: Sequence[tuple[Span, SequenceLayout]],
        ranks: SequenceRanks, q: Tensor, k: Tensor, indices: Tensor | None, scale: float, seen: Sequence[Tensor],
    ) -> Tensor:  # fmt: skip
        index_keys, keys = (whole_rows(x, sequences, ranks) for x in (k_index, k))
        ctx.place, ctx.options = (sequences, ranks), (scale, seen)
        ctx.save_for_backward(q_index, index_keys, weights, q, keys, indices)
        loss = q_index.new_empty(q_index.shape[:2], dtype=wide_dtype(q_index))
        for block in _blocks(q_index, index_keys, weights, q, keys, indices, scale, seen):
            wanted = block.attention
            loss[block.at] = (torch.xlogy(wanted, wanted) - wanted * block.log_found).sum(1)
        return loss

    @staticmethod
    @backward_of_layer
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        q_index, index_keys, weights, q, keys, indices = saved
        length, wide = index_keys.size(1), grad_loss.dtype
        dq, d_weights = torch.empty_like(q_index), torch.empty_like(weights)
        d_keys = index_keys.new_zeros((index_keys.size(0), length + 1, index_keys.size(2)), dtype=wide)
        scale, seen = ctx.options
        for block in _blocks(q_index, index_keys, weights, q, keys, indices, scale, seen):
            at = block.at
            of_query, of_head = q_index[at].to(wide), weights[at].to(wide)
            found = block.log_found.exp().masked_fill_(~block.is_key, 0.0)
            d_scores = (found - block.attention) * grad_loss[at].unsqueeze(1)
            d_weights[at] = (block.products.relu() @ d_scores.unsqueeze(2)).squeeze(2)
            d_products = d_scores.unsqueeze(1) * of_head.unsqueeze(2)
            d_products.masked_fill_(block.products <= 0, 0.0)
            keys_d, positions = f"{block.subscripts}d", block.positions
            dq[at] = torch.einsum(f"rhn,{keys_d}->rhd", d_products, block.index_keys)
            of_keys = torch.einsum(f"rhn,rhd->{keys_d}", d_products, of_query)
            d_keys[at[0]].index_add_(0, positions.flatten(), of_keys.flatten(0, -2))
        d_index_keys = None
        if ctx.needs_input_grad[1]:
            d_index_keys = whole_rows(d_keys[:, :-1], *ctx.place, transposed=True).to(q_index.dtype)
        return dq, d_index_keys, d_weights, *[None] * (len(ctx.needs_input_grad) - 3)


class _Block(NamedTuple):
    """r queries of a batch row, and n keys: all, or those chosen by each query."""

    at: tuple[int, slice]
    """The batch row and the queries."""
    subscripts: str
    """Of keys in einsum: "n" if all queries have the same, else "rn"."""
    positions: Tensor
    """Of keys, (n,) or (r, n); no key stands for a row of zeros behind the others."""
    is_key: Tensor
    """(r, n), False for keys that the query does not see."""
    index_keys: Tensor
    """(n, D) or (r, n, D)."""
    products: Tensor
    """(r, H, n) of the indexer."""
    log_found: Tensor
    """(r, n), the logarithm of the indexer's distribution; 0 for no key."""
    attention: Tensor
    """(r, n), attention's distribution; 0 for no key."""


def _blocks(
    q_index: Tensor, index_keys: Tensor, weights: Tensor, q: Tensor, keys: Tensor, indices: Tensor | None,
    scale: float, seen: Sequence[Tensor],
) -> Iterator[_Block]:  # fmt: skip
    """Yield blocks of queries, whose numbers are computed in float32 or wider."""
    (batch_size, count, index_heads, dim), (length, groups, width) = q_index.shape, keys.shape[1:]
    wide, chosen_values = wide_dtype(q_index), () if indices is None else (dim, groups * width)
    of_key = max(index_heads, q.size(2), *chosen_values)
    keys_of_query = length if indices is None else indices.size(2)
    step = max(1, _BYTES // (max(1, keys_of_query) * of_key * wide.itemsize))
    everything = torch.arange(length, device=q.device)
    padded = F.pad(index_keys, (0, 0, 0, 1)), F.pad(keys, (0, 0, 0, 0, 0, 1))
    for batch, start in product(range(batch_size), range(0, count, step)):
        at = batch, slice(start, min(start + step, count))
        if indices is None:
            subscripts, positions = "n", everything
            is_key = in_intervals(seen[batch][:, :, at[1]], positions)
        else:
            subscripts, is_key = "rn", indices[at] >= 0
            positions = indices[at].long().masked_fill(~is_key, length)
        of_index, of_attention = (
            x[batch].index_select(0, positions.flatten()).unflatten(0, positions.shape).to(wide) for x in padded
        )
        products = torch.einsum(f"rhd,{subscripts}d->rhn", q_index[at].to(wide), of_index)
        scores = (weights[at].to(wide).unsqueeze(1) @ products.relu()).squeeze(1)
        log_found = scores.masked_fill_(~is_key, float("-inf")).log_softmax(1).masked_fill_(~is_key, 0.0)
        q_block = q[at].to(wide).unflatten(1, (groups, -1))
        logits = torch.einsum(f"rghd,{subscripts}gd->rghn", q_block, of_attention).flatten(1, 2).mul_(scale)
        attention = logits.masked_fill_(~is_key.unsqueeze(1), float("-inf")).softmax(2).mean(1)
        attention.masked_fill_(~is_key, 0.0)
        yield _Block(at, subscripts, positions, is_key, of_index, products, log_found, attention)
