"""Blocks of consecutive tokens, each pooled to one key, and attention over them and a window, as in DeepSeek-V4.

Blocks begin with documents. A block that its document does not fill is none: its tokens are in the window alone. Each
block is pooled by the rank that has its last token, which fetches the others. The pooled keys of all ranks are a
sequence of their own. Attention has one list of keys, the window's and then pooled ones, as kernels of packages take
it; two attentions merged by their log-sum-exp would need the gradients of both.

Source: DeepSeek-V4, sections 2.3.1 and 2.3.2.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_dtensor.api.extension import RankFunction, SequenceRanks, positions_of, softmax_scale, wide_dtype
from cp_dtensor.layers.call import SequenceCall
from cp_dtensor.layers.chosen import attend_chosen, check_numbers, chosen_gradients
from cp_dtensor.layers.chosen_reference import Chosen
from cp_dtensor.layers.exchange import backward_of_layer, rows_of, tables_on
from cp_dtensor.layers.indexer import select
from cp_dtensor.layers.layer import Inputs, Result, SequenceLayer
from cp_dtensor.layers.masked import in_intervals
from cp_dtensor.layers.rows import Extended, RowMap, SequenceLayout, Whole, rows_before
from cp_dtensor.spec.layouts import Span

_BYTES = 256 << 20
"""Limit for the indices of a part of the queries."""


@dataclass(frozen=True, kw_only=True)
class Blocks(SequenceLayout):
    """The whole blocks of all documents, in the order of positions; each belongs to the rank of its last token.

    >>> from cp_dtensor.spec.layouts import Contiguous
    >>> blocks = Blocks.of(SequenceLayout(Contiguous(), 12, 2, edges=(0, 5, 12)), size=2)
    >>> blocks.seq_len, [blocks.runs(rank) for rank in range(2)]
    (5, [[(0, 2), (2, 2)], [(2, 5)]])
    """

    tokens: SequenceLayout
    size: int

    @classmethod
    def of(cls, tokens: SequenceLayout, size: int) -> Blocks:
        """Return the blocks of a sequence of tokens."""
        made = cls(tokens.layout, 0, tokens.world_size, tokens.group, tokens=tokens, size=size)
        return replace(made, seq_len=made.firsts[-1])

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Positions where documents begin and end, and the sequence."""
        return 0, *self.tokens.edges, self.tokens.seq_len

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The number of blocks before each of `bounds`."""
        return (*accumulate(((stop - start) // self.size for start, stop in pairwise(self.bounds)), initial=0),)

    def parts(self, rank: int) -> Iterator[tuple[Span, int]]:
        """Yield for each piece of a rank the blocks [lo, hi) that end in it, and their first token."""
        for start, stop in self.tokens.pieces(rank):
            index = bisect_right(self.bounds, start) - 1
            document, first = self.bounds[index], self.firsts[index]
            lo, hi = ((end - document) // self.size for end in (start, stop))
            yield (first + lo, first + hi), document + lo * self.size

    def runs(self, rank: int) -> list[Span]:
        return [blocks for blocks, _ in self.parts(rank)]


@dataclass(frozen=True)
class BlockRows(RowMap):
    """The tokens of a rank's blocks; with `overlap`, those of the block before come before each part of them."""

    size: int
    overlap: bool

    def rows(self, sequence: SequenceLayout, rank: int) -> Iterator[Span]:
        for (lo, hi), start in Blocks.of(sequence, self.size).parts(rank):
            if lo < hi:
                yield from rows_before(sequence, start, self.size * self.overlap)
                yield start, start + (hi - lo) * self.size


class _Tables(NamedTuple):
    """A rank's n blocks and T tokens, on a device."""

    seen_on_cpu: Tensor
    positions: Tensor
    """(n,) of the first tokens of blocks, in their documents."""
    block: Tensor
    """(n,) of blocks among those that `BlockRows` gives with overlap."""
    at: Tensor
    """(T,) positions of tokens."""
    depth: Tensor
    """(T,) of tokens in their documents."""
    part: Tensor
    """(T,) of each token, the number of its piece."""
    seen: Tensor
    """(1, 2, T) the first block that each token sees, that of its document, and the end of those that it sees."""


def _tables(blocks: Blocks, rank: int, device: torch.device) -> _Tables:
    def made() -> _Tables:
        at = positions_of(blocks.tokens.segments(rank), "cpu")
        lengths = torch.tensor([stop - start for start, stop in blocks.tokens.pieces(rank)])
        part = torch.arange(len(lengths)).repeat_interleave(lengths)
        bounds, firsts = torch.tensor(blocks.bounds), torch.tensor(blocks.firsts)
        document = torch.bucketize(at, bounds, right=True) - 1
        depth = at - bounds[document]
        is_last = (depth + 1) % blocks.size == 0
        before = part[is_last].unique_consecutive(return_inverse=True)[1]  # parts that have blocks, before each block's
        block = torch.arange(len(before)) + before + 1  # `BlockRows` has one more before each of these parts
        seen = torch.stack((firsts[document], firsts[document] + (depth + 1) // blocks.size)).unsqueeze(0)
        found = depth[is_last] + 1 - blocks.size, block, at, depth, part, seen
        return _Tables(seen, *(each.to(device) for each in found))

    return tables_on(device, ("blocks", blocks, rank), made)


class LayerOfBlocks(SequenceLayer):
    """An operation on blocks of `size` tokens."""

    size: int

    def blocks(self, call: SequenceCall, batch_size: int, device: torch.device) -> tuple[Blocks, _Tables]:
        """Return the blocks of the call's sequence."""
        blocks = Blocks.of(call.sequence(batch_size), self.size)
        return blocks, _tables(blocks, call.ranks.rank, device)

    def check_pooled(self, call: SequenceCall, pooled: Tensor, indices: Tensor | None = None) -> None:
        """Refuse another number of pooled keys than this rank has blocks, and indices that are no blocks."""
        blocks, tables = self.blocks(call, pooled.size(0), pooled.device)
        check_numbers(call, indices, blocks.seq_len, "blocks")
        if pooled.size(1) != len(tables.positions):
            raise ValueError(
                f"{call.owner} expects the pooled keys of this rank's {len(tables.positions)} blocks of {self.size} "
                f"tokens, got {tuple(pooled.shape)}"
            )


@dataclass(frozen=True)
class PoolBlocks(LayerOfBlocks):
    """Pooled rows of this rank's blocks, (B, n, D), and the positions of these in their documents, (n,).

    The tensors are x (B, T, C), gate (B, T, C) or None for means, and bias (size, C) or None. With `overlap` C is 2 D:
    the first D values of a token are for the next block, the others for its own.
    """

    dims = "BTC", "BTC", "SC"
    keeps_rows = False
    size: int
    overlap: bool

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        x, gate, bias, *_ = tensors
        blocks, tables = self.blocks(call, x.size(0), x.device)
        wide, channels = wide_dtype(x), x.size(2)
        given = x if gate is None else torch.cat((x, gate), 2)
        rows = rows_of(given, 1, BlockRows(self.size, self.overlap), blocks.tokens, call.ranks)
        rows = rows.unflatten(1, (rows.size(1) // self.size, self.size)).to(wide)
        if gate is None:
            return rows.mean(2).to(x.dtype), tables.positions
        values, gates = rows[..., :channels], rows[..., channels:]
        if bias is not None:
            gates = gates + bias.to(wide)
        if self.overlap:
            values, gates = self._two_series(values, tables.block), self._two_series(gates, tables.block)
            is_none = (tables.positions == 0).unsqueeze(1) & (torch.arange(2 * self.size, device=x.device) < self.size)
            gates = gates.masked_fill(is_none.unsqueeze(2), float("-inf"))
        return (values * gates.softmax(2)).sum(2).to(x.dtype), tables.positions

    def _two_series(self, rows: Tensor, block: Tensor) -> Tensor:
        """Return for each block the first channels of the one before it, and then its own others."""
        half = rows.size(3) // 2
        before, own = rows[..., :half].index_select(1, block - 1), rows[..., half:].index_select(1, block)
        return torch.cat((before, own), 2)


@dataclass(frozen=True)
class SelectPooled(LayerOfBlocks):
    """Numbers of the blocks that score best, (B, T, topk), or the positions of their tokens and of the rest.

    The tensors are q (B, T, H, D), weights (B, T, H), and pooled keys (B, n, D).
    """

    dims = "BTHD", "BTH", "BND"
    is_sparse = True
    size: int
    topk: int
    expanded: bool

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        self.check_pooled(call, tensors[2])

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, weights, pooled, *_ = tensors
        blocks, tables = self.blocks(call, q.size(0), q.device)
        keys = rows_of(pooled, 1, Whole(), blocks, call.ranks)
        out = torch.empty((*q.shape[:2], self.topk), dtype=torch.int32, device=q.device)
        for row in range(q.size(0)):
            select(out[row], q[row], keys[row], weights[row], tables.seen_on_cpu, tables.seen)
        if not self.expanded:
            return out, None
        # Blocks of a query are in its document, which begins at `at - depth` with the block `first`.
        document = (tables.at - tables.depth).unsqueeze(1)
        start = (out - tables.seen[0, 0].unsqueeze(1)) * self.size + document
        tokens = (start.unsqueeze(3) + torch.arange(self.size, device=q.device)).masked_fill((out < 0).unsqueeze(3), -1)
        whole = (tables.depth + 1) // self.size * self.size
        rest = document + whole.unsqueeze(1) + torch.arange(self.size - 1, device=q.device)
        rest = rest.masked_fill(rest > tables.at.unsqueeze(1), -1).expand(q.size(0), -1, -1)
        return torch.cat((tokens.flatten(2), rest), 2).int(), None


@dataclass(frozen=True)
class PooledAttention(LayerOfBlocks):
    """Attention over a window of tokens and pooled keys, which are values too.

    The tensors are q (B, H, T, D), kv (B, T, D), numbers of blocks (B, T, K), or None for all that a query sees, pooled
    keys (B, n, D), and a sink of each head, (H,) or None.
    """

    dims = "BHTD", "BTD", "BTK", "BND", "H"
    dim = 2
    is_sparse = True
    size: int
    window: int
    scale: float | None

    def check(self, call: SequenceCall, tensors: Inputs) -> None:
        self.check_pooled(call, tensors[3], tensors[2])

    def forward(self, call: SequenceCall, tensors: Inputs) -> Result:
        q, kv, indices, pooled, sink, *_ = tensors
        blocks, tables = self.blocks(call, q.size(0), q.device)
        options = blocks, tables, call.ranks, self.window, softmax_scale(q.size(3), self.scale)
        return _PooledAttention.apply(q, kv, pooled, indices, sink, *options), None


class _PooledAttention(RankFunction):
    """Fetches windows and pooled keys, attends, and sums their gradients over the ranks, in float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, pooled: Tensor, indices: Tensor | None, sink: Tensor | None, blocks: Blocks,
        tables: _Tables, ranks: SequenceRanks, window: int, scale: float,
    ) -> Tensor:  # fmt: skip
        before = rows_of(kv, 1, Extended(window - 1), blocks.tokens, ranks)
        rows = torch.cat((before, rows_of(pooled, 1, Whole(), blocks, ranks)), 1).unsqueeze(2)
        ctx.options = blocks, tables, ranks, window, scale
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=wide_dtype(q))
        for at, index in _seen_rows(indices, blocks, tables, window, before.shape):
            out[at], lse[at] = attend_chosen(q[at], Chosen(rows[at[0]], index, sink, q.size(3), scale))
        ctx.save_for_backward(q, rows, indices, sink, out, lse)
        return out

    @staticmethod
    @backward_of_layer
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, rows, indices, sink, out, lse = saved
        blocks, tables, ranks, window, scale = ctx.options
        count = rows.size(1) - blocks.seq_len
        dq, d_rows = torch.empty_like(q), torch.zeros_like(rows, dtype=wide_dtype(rows))
        d_sink = None if sink is None else torch.zeros_like(sink, dtype=wide_dtype(sink))
        for at, index in _seen_rows(indices, blocks, tables, window, (q.size(0), count)):
            chosen = Chosen(rows[at[0]], index, sink, q.size(3), scale)
            dq[at], d_keys, of_sink = chosen_gradients(grad_out[at], q[at], out[at], lse[at], chosen)
            d_rows[at[0]] += d_keys
            if of_sink is not None:
                d_sink += of_sink
        d_kv = rows_of(d_rows[:, :count, 0], 1, Extended(window - 1), blocks.tokens, ranks, transposed=True)
        d_pooled = rows_of(d_rows[:, count:, 0], 1, Whole(), blocks, ranks, transposed=True)
        d_sink = None if d_sink is None else d_sink.to(sink.dtype)
        return dq, d_kv.to(rows.dtype), d_pooled.to(rows.dtype), None, d_sink, *[None] * 5


def _seen_rows(
    indices: Tensor | None, blocks: Blocks, tables: _Tables, window: int, before: Sequence[int]
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor]]:
    """Yield (batch row, all heads, some queries), and the rows that these see, (1, T, 1, N), -1 for none.

    Rows are those of `Extended`, whose shape begins with `before`, and then pooled keys.
    """
    (batch_size, rows), count, device = before[:2], len(tables.at), tables.at.device
    everything, back = torch.arange(blocks.seq_len, device=device), torch.arange(window - 1, -1, -1, device=device)
    keys = window + (blocks.seq_len if indices is None else indices.size(2))
    step = max(1, _BYTES // (8 * keys))
    own = torch.arange(count, device=device) + (window - 1) * (tables.part + 1)
    for start, row in product(range(0, count, step), range(batch_size)):
        at = slice(start, min(start + step, count))
        near = (own[at].unsqueeze(1) - back).masked_fill(back > tables.depth[at].unsqueeze(1), -1)
        if indices is None:
            far = (everything + rows).masked_fill(~in_intervals(tables.seen[:, :, at], everything), -1)
        else:
            far = (indices[row, at] + rows).masked_fill(indices[row, at] < 0, -1)
        yield (slice(row, row + 1), slice(None), at), torch.cat((near, far), 1).unsqueeze(1).unsqueeze(0)
