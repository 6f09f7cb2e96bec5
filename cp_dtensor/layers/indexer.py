"""The lightning indexer of learned sparse attention: the best keys of each query, by scores of index heads.

    score[t, s] = sum over heads h of weights[t, h] * relu(q[t, h] . k[s])

Indices are the same for every number of ranks and every layout. A float's last bits depend on where its row and its
column are in a matrix product, so each query has a product of its own with blocks of keys that begin at the same
positions on every rank, and all products have one shape. Equal keys are in different columns of it: their scores
differ in the last bits of float64 (in bfloat16 and float16 they do not, since sums are exact) and are rounded to
float32, in which they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.api.extension import positions_of
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.exchange import whole_rows
from cp_dtensor.layers.layer import Inputs, Result, SequenceLayer
from cp_dtensor.spec.intervals import IntervalSets
from cp_dtensor.spec.masks import Full, Mask, interval_sets_of

_BYTES = 64 << 20
"""Limit for the products of a block, and for its scores unless one query has more; a few of that size exist at once."""
_ROWS = 32
"""Most queries of a block. The last block of a rank is padded to as many."""


@dataclass(frozen=True)
class SelectKeys(SequenceLayer):
    """Positions of the best keys, (B, T, topk). Tensors: q (B, T, H, D), k (B, T, D) and weights (B, T, H)."""

    takes_mask = True
    of_tokens = 3
    topk: int
    mask: Mask | None

    def check_length(self, tensors: Inputs, seq_len: int) -> None:
        self._intervals(tensors[0].size(0), seq_len)

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        q: Tensor = tensors[0]
        return q.new_empty((*q.shape[:2], self.topk), dtype=torch.int32)

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, k, weights, *_ = tensors
        sequences = call.sequences(q.size(0))
        keys, out = whole_rows(k, sequences, call.ranks), self.empty_output(tensors, -1)
        intervals = self._intervals(q.size(0), keys.size(1))
        for (start, stop), sequence in sequences:
            segments = sequence.layout.segments(sequence.seq_len, call.ranks.rank, call.ranks.size, sequence.group)
            positions = positions_of(segments, "cpu")  # the masks of blocks decide what is launched
            for row in range(start, stop):
                ends = _ends_of(intervals[row % len(intervals)], positions)
                select_keys_reference(out[row], q[row], keys[row], weights[row], ends)
        return out, None

    def _intervals(self, batch_size: int, seq_len: int) -> tuple[IntervalSets, ...]:
        return interval_sets_of(self.mask or Full(), seq_len, seq_len, batch_size)


def _ends_of(sets: IntervalSets, positions: Tensor) -> Tensor:
    """Return (intervals, 2, T): first key and end of the intervals of keys that the queries at some positions see.

    >>> from cp_dtensor.spec.masks import Causal
    >>> _ends_of(Causal().interval_sets(4, 4), torch.tensor([0, 3])).tolist()
    [[[0, 0], [1, 4]]]
    """
    ends = torch.zeros(len(sets), 2, len(positions), dtype=torch.int64, device="cpu")
    for (lo, hi), bands in zip(ends, sets, strict=True):
        table = torch.tensor(bands, dtype=torch.int64, device="cpu")
        index = torch.searchsorted(table[:, 0].contiguous(), positions, right=True) - 1
        first, last, least, most, left, right = table[index.clamp(min=0)].unbind(1)
        is_inside = (first <= positions) & (positions < last)
        lo.copy_(torch.where(is_inside, torch.maximum(least, positions - left), 0))
        hi.copy_(torch.where(is_inside, torch.minimum(most, positions + right + 1), 0))
    return ends


def select_keys_reference(out: Tensor, q: Tensor, k: Tensor, weights: Tensor, ends: Tensor) -> None:
    """Select keys by torch operations, on any device, in blocks of queries. A kernel of a package can stand here.

    Args:
        out: (T, topk) int32; gets positions of keys, ascending, then -1.
        q: (T, H, D).
        k: (S, D), in the order of positions.
        weights: (T, H).
        ends: (intervals, 2, T), on the CPU: the keys that each query sees.
    """
    rows, heads, dim = q.shape
    block, columns = _block_shape(heads, k.size(0))
    key_numbers = torch.arange(k.size(0), dtype=torch.int32, device=q.device)
    for start in range(0, rows, block):
        at = slice(start, min(start + block, rows))
        padding = block - (at.stop - start)
        q_block = F.pad(q[at].double(), (0, 0, 0, 0, 0, padding))
        weights_block = F.pad(weights[at].double(), (0, 0, 0, padding)).unsqueeze(1)
        scores = k.new_full((block, k.size(0)), float("-inf"), dtype=torch.float32)
        for first in _blocks_of_keys(ends[:, :, at], columns):
            some = k[first : first + columns].double().T.expand(block, dim, -1)
            scores[:, first : first + columns] = torch.bmm(weights_block, torch.bmm(q_block, some).relu_()).squeeze(1)
        lo, hi = ends[:, :, at].to(q.device).unsqueeze(-1).unbind(1)
        seen = ((lo <= key_numbers) & (key_numbers < hi)).any(0)
        out[at] = _largest(scores[: at.stop - start], seen, key_numbers, out.size(1))


def _block_shape(heads: int, keys: int) -> tuple[int, int]:
    """Return the numbers of queries and of keys in a product, which depend on what is equal on all ranks alone."""
    block = max(1, min(_ROWS, _BYTES // (4 * max(keys, 1))))
    return block, max(1, min(keys, _BYTES // (8 * block * heads)))


def _blocks_of_keys(ends: Tensor, columns: int) -> Sequence[int]:
    """Return the first keys of the blocks of `columns` keys that some query sees.

    >>> _blocks_of_keys(torch.tensor([[[5, 6], [7, 9]]]), columns=4)
    range(4, 9, 4)
    """
    lo, hi = ends.flatten(2).unbind(1)
    is_seen = lo < hi
    if not is_seen.any():
        return ()
    return range(int(lo[is_seen].min()) // columns * columns, int(hi[is_seen].max()), columns)


def _largest(scores: Tensor, seen: Tensor, key_numbers: Tensor, topk: int) -> Tensor:
    """Return (rows, topk): the seen keys of the largest scores, ascending, then -1; of equal scores the first keys.

    >>> scores, seen = torch.tensor([[2.0, 1.0, 2.0, 2.0, 9.0]]), torch.tensor([[True, True, True, True, False]])
    >>> [_largest(scores, seen, torch.arange(5, dtype=torch.int32), topk).tolist() for topk in (2, 5)]
    [[[0, 2]], [[0, 1, 2, 3, -1]]]
    """
    count = min(topk, scores.size(1))
    # A key of a NaN score is the first to be selected, so that the NaN is seen in the output of attention.
    scores = scores.masked_fill(scores.isnan(), float("inf")).masked_fill_(~seen, float("-inf"))
    least = scores.topk(count, 1).values[:, -1:]
    is_above, is_equal = scores > least, (scores == least) & seen
    missing = count - is_above.sum(1, keepdim=True)
    taken = is_above | (is_equal & (is_equal.cumsum(1) <= missing))
    place = torch.where(taken, taken.cumsum(1) - 1, topk)  # those that are not taken go to a column that is dropped
    out = key_numbers.new_full((scores.size(0), topk + 1), -1)
    return out.scatter_(1, place, key_numbers.expand(scores.shape))[:, :topk]
