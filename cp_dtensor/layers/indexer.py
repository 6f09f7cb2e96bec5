"""The indexer of learned sparse attention: the best keys of each query, or the best blocks of keys of each head.

    keys:    score[t, s] = sum over heads h of weights[t, h] * relu(q[t, h] . k[s])
    blocks:  score[t, h, block] = largest q[t, h] . k[s] of the keys s in the block that t sees

Indices are the same for every number of ranks and every layout. In torch operations a float's last bits depend on
where its row and its column are in a matrix product, so each query has a product of its own with blocks of keys that
begin at the same positions on every rank, and all products have one shape. Equal keys are in different columns of it:
their scores differ in the last bits of float64 (in bfloat16 and float16 they do not, since sums are exact) and are
rounded to float32, in which they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.cudnn_indexer import select_by_kernel
from cp_dtensor.layers.exchange import whole_rows
from cp_dtensor.layers.layer import Inputs, Result
from cp_dtensor.layers.masked import MaskedLayer, in_intervals, largest_seen
from cp_dtensor.spec.masks import Mask

_BYTES = 64 << 20
"""Limit for the products of a block, and for its scores unless one query has more; a few of that size exist at once."""
_ROWS = 32
"""Most queries of a block. The last block of a rank is padded to as many."""


@dataclass(frozen=True)
class SelectKeys(MaskedLayer):
    """Numbers of the best keys, (B, T, topk), or without weights of the best blocks of keys, (B, T, H, topk).

    The tensors are q (B, T, H, D), k (B, T, D), and weights (B, T, H) or None.
    """

    dims = "BTHD", "BTE", "BTH"
    is_sparse = True
    topk: int
    mask: Mask | None
    block_size: int = 1
    local_blocks: int = 0
    """Blocks that each query takes in any case: its own, and those before it."""

    def empty_output(self, tensors: Inputs, rows: int) -> Tensor:
        q, _, weights, *_ = tensors
        made: Tensor = q.new_empty((*q.shape[: 3 if weights is None else 2], self.topk), dtype=torch.int32)
        return made

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, k, weights, *_ = tensors
        keys, out = whole_rows(k, call.sequences(q.size(0)), call.ranks), self.empty_output(tensors, -1)
        for row, (positions, seen, on_device) in enumerate(self.queries(call, q.size(0), q.device)):
            if weights is not None:
                select(out[row], q[row], keys[row], weights[row], seen, on_device)
                continue
            for head in range(q.size(2)):
                local = positions // self.block_size, self.local_blocks
                of_head = q[row, :, head : head + 1]
                select_reference(out[row, :, head], of_head, keys[row], None, seen, self.block_size, local)
        return out, None


def select(out: Tensor, q: Tensor, k: Tensor, weights: Tensor, seen: Tensor, on_device: Tensor) -> None:
    """Select keys as `select_reference` does, by kernels where they serve; `on_device` is `seen` on the device of q."""
    if not select_by_kernel(out, q, k, weights, seen, on_device):
        select_reference(out, q, k, weights, seen)


def select_reference(
    out: Tensor, q: Tensor, k: Tensor, weights: Tensor | None, seen: Tensor, block_size: int = 1,
    local: tuple[Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Select keys by torch operations, on any device, in blocks of queries.

    Args:
        out: (T, topk) int32; gets numbers of blocks, of keys if `block_size` is 1, ascending, then -1.
        q: (T, H, D).
        k: (S, D), in the order of positions.
        weights: (T, H); None for scores that are products of a single head.
        seen: the keys that the queries see, of `MaskedLayer.queries`.
        local: each query's own block, (T,) on the CPU, and the number of blocks up to it that are selected first.
    """
    rows, heads, dim = q.shape
    # The shape of a product depends on what is equal on all ranks alone.
    step = max(1, min(_ROWS, _BYTES // (4 * max(k.size(0), 1))))
    columns = max(1, min(k.size(0), _BYTES // (8 * step * heads)))
    key_numbers = torch.arange(k.size(0), dtype=torch.int32, device=q.device)
    for start in range(0, rows, step):
        at = slice(start, min(start + step, rows))
        padding = step - (at.stop - start)
        q_block = F.pad(q[at].double(), (0, 0, 0, 0, 0, padding))
        factors = None if weights is None else F.pad(weights[at].double(), (0, 0, 0, padding)).unsqueeze(1)
        scores = k.new_full((step, k.size(0)), float("-inf"), dtype=torch.float32)
        for first in _blocks_of_keys(seen[:, :, at], columns):
            products = torch.bmm(q_block, k[first : first + columns].double().T.expand(step, dim, -1))
            products = products if factors is None else torch.bmm(factors, products.relu_())
            scores[:, first : first + columns] = products.squeeze(1)
        is_seen, numbers = in_intervals(seen[:, :, at], key_numbers), key_numbers
        scores = scores[: at.stop - start].masked_fill_(~is_seen, float("-inf"))
        if local is not None:
            padding = -k.size(0) % block_size
            scores = F.pad(scores, (0, padding), value=float("-inf")).unflatten(1, (-1, block_size)).amax(2)
            is_seen = F.pad(is_seen, (0, padding)).unflatten(1, (-1, block_size)).any(2)
            numbers, own = key_numbers[: scores.size(1)], local[0][at].to(q.device).unsqueeze(1)
            scores.masked_fill_((numbers <= own) & (numbers > own - local[1]), float("inf"))
        out[at] = largest_seen(scores, is_seen, numbers, out.size(1))


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
