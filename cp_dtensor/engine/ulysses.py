"""Ulysses: ranks exchange rows for heads, attend with some heads to all rows, and exchange back.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3. Inside may be any other call: that of this rank alone, or a
ring over another axis (a hybrid: USP, arXiv 2405.07719), whose queries and keys are those of a whole Ulysses axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cp_dtensor import _torch
from cp_dtensor._torch.autograd import Tensors, cleaned_up_on_error
from cp_dtensor._torch.tensors import current_stream, on_device_of
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers, bias_part
from cp_dtensor.comm.head_exchange import CollectiveHeads, Departure, HeadExchange, HeadRows
from cp_dtensor.engine.autograd import AttentionCall, new_grad_bias
from cp_dtensor.plan.head_partition import HeadPartition

# The bias of queries under Ulysses: its rows travel with the queries, to the heads that read them and back.


class StageBias:
    """The bias of some heads of all rows, of one stage, and what the tiles add to its gradient.

    Memory: all ranks' rows of the bias of this rank's heads (of all heads, if they are alike).
    """

    def __init__(self, bias: torch.Tensor, of_queries: HeadRows, group: dist.ProcessGroup) -> None:
        """A collective, unless all rows are alike: `bias` (B or 1, H or 1, S or 1, T or 1)."""
        self._group, self._kind = group, of_queries
        self._everyone = (0, bias.size(0))
        self._mine = of_queries.heads[group.rank()]
        self._travels = _rows_differ(bias, of_queries)
        if not self._travels:
            self.bias = bias_part(bias, self._everyone, self._mine, None)
            return
        rows = sum(of_queries.rows.lengths[group.rank()])
        bias = bias.expand(-1, -1, rows, -1)
        as_numbers = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
        ((arrived,),) = CollectiveHeads().to_heads([[as_numbers]], [[self._towards(bias)]], group).receive()
        self.bias = arrived.view(torch.bool) if bias.dtype == torch.bool else arrived

    def add_home(self, grad: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the stage's gradient to this rank's rows of `total`. What is alike for all rows or heads is this rank's
        share, and the sum over ranks is the gradient. A collective, unless all rows are alike."""
        if not self._travels:
            bias_part(total, self._everyone, self._mine, None).add_(grad)
            return
        ranks = self._group.size()
        heads = total.size(1)
        home = self._kind if heads > 1 else HeadRows(self._kind.rows, tuple((rank, rank + 1) for rank in range(ranks)))
        rows = sum(self._kind.rows.lengths[self._group.rank()])
        units = heads if heads > 1 else ranks
        target = grad.new_zeros(grad.size(0), rows, units, grad.size(3)).transpose(1, 2)
        CollectiveHeads().to_rows([[grad]], [[target]], [home], self._group, True).wait()
        if heads == 1:
            target = target.sum(1, keepdim=True)
        total.add_(target if total.size(2) == rows else target.sum(2, keepdim=True))

    def _towards(self, bias: torch.Tensor) -> HeadRows:
        """Where rows go: those of a head to its reader, those of all heads to every rank."""
        return self._kind if bias.size(1) > 1 else HeadRows(self._kind.rows, ((0, 1),) * self._group.size())


def _rows_differ(bias: torch.Tensor, of_queries: HeadRows) -> bool:
    """Whether the bias has rows, alike on every rank: of one local query it cannot be seen."""
    return bias.size(2) != 1 or any(sum(lengths) == 1 for lengths in of_queries.rows.lengths)


@dataclass(frozen=True)
class UlyssesCall(AttentionCall):
    """Attention by heads. The next stage of heads travels while one is computed, and so does the result of the last."""

    group: dist.ProcessGroup
    heads: HeadPartition
    stages: tuple[tuple[HeadRows, HeadRows], ...]
    """What the ranks have of each stage's heads: of queries, and of keys and values."""
    inner: tuple[AttentionCall, ...]
    """One for each stage."""
    exchange: HeadExchange
    overlaps_stages: bool
    """Whether stages may be computed on two streams in turns, so that the end of one kernel is filled by the next."""
    state_dtype: torch.dtype

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        with on_device_of(q), self._abandoned_on_error():
            return self._forward(q, k, v, modifiers, needs_lse)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, modifiers: Modifiers, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        out = _row_after_row(q, v.size(3))
        lse = _row_after_row(q, self._lse_copies, self.state_dtype) if needs_lse else None
        saved: list[torch.Tensor] = []
        modifiers_by_stage = [self._stage_modifiers(modifiers, queries, q.size(0))[0] for queries, _ in self.stages]
        arriving = self.exchange.to_heads([[q], [k, v]], self.stages, self.group)
        leaving: list[Departure] = []
        with self._streams(q) as streams:
            for index, ((queries, _), inner, stage_modifiers) in enumerate(
                zip(self.stages, self.inner, modifiers_by_stage, strict=True)
            ):
                is_last = index == len(self.stages) - 1
                with _on_stream(streams[index % 2]):
                    (stage_q,), (stage_k, stage_v) = arriving.receive()
                    stage_out, stage_lse, stage_saved = inner.forward(stage_q, stage_k, stage_v, stage_modifiers, True)
                    saved += stage_saved  # among them what it allocates: kept until both streams have met again
                    if streams[0] is streams[1]:
                        _finish(leaving)
                    results, targets = [[stage_out]], [[out]]
                    if lse is not None:
                        results.append([self._as_rows(stage_lse)])
                        targets.append([lse])
                    kinds = [queries] * len(results)
                    leaving.append(self.exchange.to_rows(results, targets, kinds, self.group, is_last))
            _finish(leaving)
        if streams[0] is not None:
            for tensor in saved:  # the allocator of the side stream does not see who reads them in backward
                tensor.record_stream(streams[0])
        return out, q.new_empty(0, dtype=self.state_dtype) if lse is None else lse[..., 0].contiguous(), tuple(saved)

    @contextmanager
    def _streams(self, q: torch.Tensor) -> Iterator[tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]]:
        """Two streams on which stages are computed in turns, joined in the end; None is the current one."""
        overlaps = self.overlaps_stages and not _torch.is_before_capture(q.device)
        side = self.exchange.side_stream(q, self.group) if overlaps else None
        if side is None:
            yield None, None
            return
        main = current_stream(q.device)
        side.wait_stream(main)
        try:
            yield main, side
        finally:
            main.wait_stream(side)

    def backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with on_device_of(grad_out), self._abandoned_on_error():
            return self._backward(grad_out, modifiers, saved, grad_bias)

    def _backward(
        self, grad_out: torch.Tensor, modifiers: Modifiers, saved: Tensors, grad_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        saved_by_stage = self._by_stage(saved)
        q_like, k_like, v_like = saved_by_stage[0][:3]  # some heads of all rows
        grad_q = _row_after_row(grad_out, q_like.size(3))
        grad_k, grad_v = (self._grad_of_units(like) for like in (k_like, v_like))
        arriving = self.exchange.to_heads([[grad_out]], [stage[:1] for stage in self.stages], self.group)
        leaving: list[Departure] = []
        for index, (stage, inner, stage_saved) in enumerate(zip(self.stages, self.inner, saved_by_stage, strict=True)):
            ((stage_grad_out,),) = arriving.receive()
            stage_modifiers, stage_bias = self._stage_modifiers(modifiers, stage[0], grad_out.size(0))
            stage_grad_bias = None if grad_bias is None or stage_bias is None else new_grad_bias(stage_bias.bias)
            stage_grad_q, *stage_grad_kv = inner.backward(stage_grad_out, stage_modifiers, stage_saved, stage_grad_bias)
            if grad_bias is not None and stage_bias is not None and stage_grad_bias is not None:
                stage_bias.add_home(stage_grad_bias, grad_bias)
            _finish(leaving)
            sums = [[stage_grad_q], stage_grad_kv]
            targets = [[grad_q], [grad_k, grad_v]]
            is_last = index == len(self.stages) - 1
            leaving.append(self.exchange.to_rows(sums, targets, stage, self.group, is_last))
        _finish(leaving)
        return grad_q, self._summed(grad_k), self._summed(grad_v)

    @property
    def saves_rows_of_others(self) -> bool:
        return True

    def saved_again(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> Tensors:
        results_stages = [stage[:1] * 2 for stage in self.stages]
        with on_device_of(q), self._abandoned_on_error():
            # One exchange after the other: they share the memory in which ranks publish.
            arriving = self.exchange.to_heads([[q], [k, v]], self.stages, self.group)
            inputs = [[tensor for bundle in arriving.receive() for tensor in bundle] for _ in self.inner]
            arriving = self.exchange.to_heads([[out], [self._as_rows(lse)]], results_stages, self.group)
            results = [arriving.receive() for _ in self.inner]
            return tuple(
                tensor
                for inner, (stage_q, stage_k, stage_v), ((stage_out,), (stage_lse,)) in zip(
                    self.inner, inputs, results, strict=True
                )
                for tensor in inner.saved_again(stage_q, stage_k, stage_v, stage_out, stage_lse[..., 0].contiguous())
            )

    @property
    def _lse_copies(self) -> int:
        """How many times an LSE is repeated on its way, so that a row of a head fills the exchange's granule."""
        return max(1, self.exchange.granule // self.state_dtype.itemsize)

    def _as_rows(self, lse: torch.Tensor) -> torch.Tensor:
        """(B, H, S) to (B, H, S, copies), which is exchanged."""
        return lse.unsqueeze(3).expand(-1, -1, -1, self._lse_copies)

    def _stage_modifiers(
        self, modifiers: Modifiers, queries: HeadRows, batch: int
    ) -> tuple[Modifiers, StageBias | None]:
        """What a stage's heads of all rows have of the extras. With a bias, a collective."""
        if modifiers is NO_MODIFIERS:
            return modifiers, None
        heads = queries.heads[self.group.rank()]
        bias = None if modifiers.bias is None else StageBias(modifiers.bias, queries, self.group)
        placed = replace(modifiers, bias=None).part((0, batch), heads)
        return replace(placed, bias=None if bias is None else bias.bias), bias

    def _abandoned_on_error(self) -> AbstractContextManager[None]:
        return cleaned_up_on_error(lambda: self.exchange.abandon(self.group))

    def _by_stage(self, saved: Tensors) -> list[Tensors]:
        """What each stage has saved, of what forward has strung together."""
        count, rest = divmod(len(saved), len(self.stages))
        assert rest == 0, "every stage saves equally many tensors"
        return [saved[first : first + count] for first in range(0, len(saved), count)]

    def _grad_of_units(self, like: torch.Tensor) -> torch.Tensor:
        rows = sum(self.stages[0][1].rows.lengths[self.group.rank()])
        return like.new_empty(like.size(0), rows, self.heads.kv_group_count, like.size(3)).transpose(1, 2)

    def _summed(self, grad_units: torch.Tensor) -> torch.Tensor:
        """The gradient of heads from that of their copies."""
        if self.heads.replication == 1:
            return grad_units
        copies = grad_units.unflatten(1, (self.heads.kv_heads, self.heads.replication))
        return copies.sum(2, dtype=self.state_dtype).to(grad_units.dtype)


def _finish(leaving: list[Departure]) -> None:
    for rows in leaving:
        rows.wait()
    leaving.clear()


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """None is the current one, which torch would look up."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _row_after_row(like: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """(B, H, S, dim) in which what belongs to a row lies together, as it arrives."""
    return like.new_empty(like.size(0), like.size(2), like.size(1), dim, dtype=dtype).transpose(1, 2)
