"""Ulysses attention: ranks exchange rows for heads, attend with some heads to all rows, and exchange back.

Each stage of heads has an inner plan: of this rank alone, or of a ring over another axis (a hybrid: USP, arXiv
2405.07719), whose shards are the rows of a whole Ulysses axis.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors
from cp_dtensor._torch.tensors import current_stream, on_device
from cp_dtensor.attention.lse import dense_lse
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers, bias_part
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import CollectiveHeads, HeadExchange, HeadRows
from cp_dtensor.engine.base import Gradients, Plan, Result, Values, zeros_for_sums
from cp_dtensor.plan.partition import HeadPartition


class StageBias:
    """The bias of a stage's heads for all rows, and the way of its gradient back to the ranks that own the rows.

    Memory: all ranks' rows of the bias of this rank's heads (of all heads, if they are alike).
    """

    def __init__(self, bias: Tensor, of_queries: HeadRows, group: dist.ProcessGroup) -> None:
        """Exchange the rows of `bias` (B or 1, H or 1, S or 1, T or 1), unless all are alike."""
        self._group, self._queries = group, of_queries
        self._batch = (0, bias.size(0))
        self._heads = of_queries.heads[group.rank()]
        # Alike on every rank: where some rank has a single query, its bias does not show whether there are rows.
        self._has_rows = bias.size(2) != 1 or any(sum(lengths) == 1 for lengths in of_queries.rows.lengths)
        if not self._has_rows:
            self.bias = bias_part(bias, self._batch, self._heads, None)
            return
        rows = sum(of_queries.rows.lengths[group.rank()])
        bias = bias.expand(-1, -1, rows, -1)
        as_numbers = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
        # Rows of one head go to the rank that has the head; rows of all heads go to every rank.
        kind = of_queries if bias.size(1) > 1 else HeadRows(of_queries.rows, ((0, 1),) * group.size())
        ((arrived,),) = CollectiveHeads().to_heads([[as_numbers]], [[kind]], group)()
        self.bias = arrived.view(torch.bool) if bias.dtype == torch.bool else arrived

    def add_gradient(self, grad: Tensor, total: Tensor) -> None:
        """Add the stage's gradient to this rank's rows of `total`. A collective, unless all rows are alike.

        Where rows or heads are alike, `total` has this rank's share, and the sum over ranks is the gradient.
        """
        if not self._has_rows:
            bias_part(total, self._batch, self._heads, None).add_(grad)
            return
        ranks, heads = self._group.size(), total.size(1)
        one_a_rank = tuple((rank, rank + 1) for rank in range(ranks))
        kind = self._queries if heads > 1 else HeadRows(self._queries.rows, one_a_rank)
        rows = sum(self._queries.rows.lengths[self._group.rank()])
        units = heads if heads > 1 else ranks
        target = grad.new_zeros(grad.size(0), rows, units, grad.size(3)).transpose(1, 2)
        CollectiveHeads().to_rows([[grad]], [[target]], [kind], self._group, True)()
        if heads == 1:
            target = target.sum(1, keepdim=True)
        total.add_(target if total.size(2) == rows else target.sum(2, keepdim=True))


@dataclass(frozen=True)
class UlyssesPlan(Plan):
    """Attention by heads. While one stage is computed, the next one and the result of the last one travel."""

    heads: HeadPartition
    stages: tuple[tuple[HeadRows, HeadRows], ...]
    """The rows and heads of the ranks in each stage: of queries, and of keys and values."""
    inner: tuple[Plan, ...]
    """One for each stage."""
    exchange: HeadExchange
    overlaps_stages: bool
    """True if stages may be computed on two streams in turns, so that the next kernel fills the end of each."""
    state_dtype: torch.dtype

    saves_rows_of_others = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, values: Values, needs_lse: bool) -> Result:
        (group, ring), modifiers = _axes(values.ranks), values.modifiers
        out = _row_after_row(q, modifiers.value_dim(q, v))
        floats_of_lse = 2 if modifiers.split_lse else 1
        lse = _row_after_row(q, max(self._lse_copies, floats_of_lse), self.state_dtype) if needs_lse else None
        saved: list[Tensor] = []
        with on_device(q.device):
            modifiers_by_stage = [_of_stage(modifiers, queries, q.size(0), group)[0] for queries, _ in self.stages]
            arriving = self.exchange.to_heads([[q], [k, v]], self.stages, group)
            leaving: list[Callable[[], None]] = []
            with self._streams(q, group) as streams:
                for index, ((queries, _), inner, stage_modifiers) in enumerate(
                    zip(self.stages, self.inner, modifiers_by_stage, strict=True)
                ):
                    is_last = index == len(self.stages) - 1
                    stream = streams[index % 2]
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        (stage_q,), (stage_k, stage_v) = arriving()
                        of_stage = Values(stage_modifiers, ring, values.scale)
                        stage_out, stage_lse, stage_saved = inner.forward(stage_q, stage_k, stage_v, of_stage, True)
                        saved += stage_saved  # what the stage allocates lives until both streams have joined
                        if streams[0] is streams[1]:
                            _finish(leaving)
                        results, targets = [[stage_out]], [[out]]
                        if lse is not None:
                            results.append([self._as_rows(stage_lse)])
                            targets.append([lse])
                        kinds = [queries] * len(results)
                        leaving.append(self.exchange.to_rows(results, targets, kinds, group, is_last))
                _finish(leaving)
            if streams[0] is not None:
                for tensor in saved:  # the allocator does not see that backward reads them on the other stream
                    tensor.record_stream(streams[0])
        of_rows = q.new_empty(0, dtype=self.state_dtype) if lse is None else _lse_of(lse, floats_of_lse)
        return out, of_rows, tuple(saved)

    @contextmanager
    def _streams(
        self, q: Tensor, group: dist.ProcessGroup
    ) -> Iterator[tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]]:
        """Yield two streams on which stages are computed in turns, joined in the end; None is the current one."""
        overlaps = self.overlaps_stages and not _torch.is_before_capture(q.device)
        side = self.exchange.side_stream(q, group) if overlaps else None
        if side is None:
            yield None, None
            return
        main = current_stream(q.device)
        side.wait_stream(main)
        try:
            yield main, side
        finally:
            main.wait_stream(side)

    def backward(self, grad_out: Tensor, saved: Tensors, values: Values, grad_bias: Tensor | None) -> Gradients:
        group, ring = _axes(values.ranks)
        count, rest = divmod(len(saved), len(self.stages))
        assert rest == 0, "every stage saves equally many tensors"
        saved_by_stage = [saved[first : first + count] for first in range(0, len(saved), count)]
        q_like, k_like, v_like = saved_by_stage[0][:3]  # some heads of all rows
        grad_q = _row_after_row(grad_out, q_like.size(3))
        own_rows, units = sum(self.stages[0][1].rows.lengths[group.rank()]), self.heads.kv_group_count
        grad_k, grad_v = (x.new_empty(x.size(0), own_rows, units, x.size(3)).transpose(1, 2) for x in (k_like, v_like))
        with on_device(grad_out.device):
            arriving = self.exchange.to_heads([[grad_out]], [stage[:1] for stage in self.stages], group)
            leaving: list[Callable[[], None]] = []
            for index, (stage, inner, stage_saved) in enumerate(
                zip(self.stages, self.inner, saved_by_stage, strict=True)
            ):
                ((stage_grad_out,),) = arriving()
                stage_modifiers, stage_bias = _of_stage(values.modifiers, stage[0], grad_out.size(0), group)
                stage_grad_bias = None if grad_bias is None or stage_bias is None else zeros_for_sums(stage_bias.bias)
                of_stage = Values(stage_modifiers, ring, values.scale)
                stage_grad_q, *stage_grad_kv = inner.backward(stage_grad_out, stage_saved, of_stage, stage_grad_bias)
                if grad_bias is not None and stage_bias is not None and stage_grad_bias is not None:
                    stage_bias.add_gradient(stage_grad_bias, grad_bias)
                _finish(leaving)
                sums = [[stage_grad_q], stage_grad_kv]
                targets = [[grad_q], [grad_k, grad_v]]
                is_last = index == len(self.stages) - 1
                leaving.append(self.exchange.to_rows(sums, targets, stage, group, is_last))
            _finish(leaving)
            return grad_q, self._summed(grad_k), self._summed(grad_v)

    def remake_saved(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, values: Values) -> Tensors:
        group, ring = _axes(values.ranks)
        results_stages = [stage[:1] * 2 for stage in self.stages]
        with on_device(q.device):
            # One exchange after the other: they share the symmetric buffer.
            arriving = self.exchange.to_heads([[q], [k, v]], self.stages, group)
            inputs = [[tensor for bundle in arriving() for tensor in bundle] for _ in self.inner]
            arriving = self.exchange.to_heads([[out], [self._as_rows(lse)]], results_stages, group)
            results = [arriving() for _ in self.inner]
            saved: list[Tensor] = []
            for inner, (stage_q, stage_k, stage_v), ((stage_out,), (rows,)) in zip(
                self.inner, inputs, results, strict=True
            ):
                stage_lse, of_ring = _lse_of(rows, 1 + (lse.dim() == 4)), values._replace(ranks=ring)
                saved += inner.remake_saved(stage_q, stage_k, stage_v, stage_out, stage_lse, of_ring)
            return tuple(saved)

    @property
    def _lse_copies(self) -> int:
        """Copies of each LSE value in the exchange, so that a row of a head fills the exchange's granule."""
        return max(1, self.exchange.granule // self.state_dtype.itemsize)

    def _as_rows(self, lse: Tensor) -> Tensor:
        """Return (B, H, S) or (B, H, S, 2) as (B, H, S, copies), which is exchanged."""
        if lse.dim() == 3:
            return lse.unsqueeze(3).expand(-1, -1, -1, self._lse_copies)
        return lse.repeat(1, 1, 1, max(1, self._lse_copies // 2))

    def _summed(self, grad_units: Tensor) -> Tensor:
        """Return the gradient of key/value heads from that of their copies."""
        if self.heads.replication == 1:
            return grad_units
        copies = grad_units.unflatten(1, (self.heads.kv_heads, self.heads.replication))
        return copies.sum(2, dtype=self.state_dtype).to(grad_units.dtype)


def _lse_of(rows: Tensor, floats: int) -> Tensor:
    """Return the LSE, of one float or two, from exchanged rows (B, H, S, copies)."""
    return rows[..., 0].contiguous() if floats == 1 else dense_lse(rows[..., :2])


def _axes(ranks: SequenceRanks) -> tuple[dist.ProcessGroup, SequenceRanks]:
    """Return the axis of the exchange and those of the ring: without a ring, ranks that inner plans do not use."""
    return ranks.axes[-1], ranks if ranks.inner is None else SequenceRanks(*ranks.axes[:-1])


def _of_stage(
    modifiers: Modifiers, queries: HeadRows, batch: int, group: dist.ProcessGroup
) -> tuple[Modifiers, StageBias | None]:
    """Return the modifiers of a stage's heads, for all rows. A collective if there is a bias."""
    if modifiers is NO_MODIFIERS:
        return modifiers, None
    heads = queries.heads[group.rank()]
    bias = None if modifiers.bias is None else StageBias(modifiers.bias, queries, group)
    placed = replace(modifiers, bias=None).part((0, batch), heads)
    return replace(placed, bias=None if bias is None else bias.bias), bias


def _finish(leaving: list[Callable[[], None]]) -> None:
    for wait in leaving:
        wait()
    leaving.clear()


def _row_after_row(like: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty (B, H, S, dim) in memory (B, S, H, dim), as exchanged rows arrive."""
    return like.new_empty(like.size(0), like.size(2), like.size(1), dim, dtype=dtype).transpose(1, 2)
