"""Ulysses: ranks exchange rows for heads, attend with some heads to all rows, and exchange back.

Source: DeepSpeed-Ulysses (arXiv 2309.14509), section 3. Inside may be any other call: that of this rank alone, or a
ring over another axis (a hybrid: USP, arXiv 2405.07719), whose queries and keys are those of a whole Ulysses axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor.attention_call import AttentionCall, Tensors
from cp_dtensor.head_division import HeadDivision
from cp_dtensor.rotation.heads import HeadRows, ToHeads, ToRows
from cp_dtensor.schedule import GatheredRows
from cp_dtensor.tensors import on_device_of


@dataclass(frozen=True)
class UlyssesCall(AttentionCall):
    """Attention by heads. The next stage of heads travels while one is computed, and so does the result of the last."""

    group: dist.ProcessGroup
    heads: HeadDivision
    query_rows: GatheredRows
    key_rows: GatheredRows
    inner: tuple[AttentionCall, ...]
    """One for each stage."""
    state_dtype: torch.dtype

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        with on_device_of(q):
            return self._forward(q, k, v, needs_lse)

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, needs_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        units = [_copied(k, self.heads.copies), _copied(v, self.heads.copies)]
        out = _row_after_row(q, v.size(3))
        lse = q.new_empty(q.shape[:3] if needs_lse else (0,), dtype=self.state_dtype)
        saved: list[torch.Tensor] = []
        arriving = ToHeads([[q], units], self._kinds(0), self.group)
        leaving: list[tuple[ToRows, torch.Tensor]] = []
        for stage, inner in enumerate(self.inner):
            (stage_q,), (stage_k, stage_v) = arriving.wait()
            if stage + 1 < len(self.inner):
                arriving = ToHeads([[q], units], self._kinds(stage + 1), self.group)
            stage_out, stage_lse, stage_saved = inner.forward(stage_q, stage_k, stage_v, True)
            saved += stage_saved
            _finish(leaving)
            leaving.append((ToRows([[stage_out]], self._kinds(stage)[:1], self.group), out))
            if needs_lse:
                rows_of_lse = ToRows([[stage_lse.unsqueeze(3)]], self._kinds(stage)[:1], self.group)
                leaving.append((rows_of_lse, lse.unsqueeze(3)))
        _finish(leaving)
        return out, lse, tuple(saved)

    def backward(self, grad_out: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with on_device_of(grad_out):
            return self._backward(grad_out, saved)

    def _backward(self, grad_out: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stages = len(self.inner)
        by_stage = [saved[len(saved) // stages * stage : len(saved) // stages * (stage + 1)] for stage in range(stages)]
        q_like, k_like, v_like = by_stage[0][:3]  # some heads of all rows
        grad_q = _row_after_row(grad_out, q_like.size(3))
        grad_k, grad_v = (self._grad_of_units(like) for like in (k_like, v_like))
        arriving = ToHeads([[grad_out]], self._kinds(0)[:1], self.group)
        leaving: ToRows | None = None
        for stage, inner in enumerate(self.inner):
            ((stage_grad_out,),) = arriving.wait()
            if stage + 1 < stages:
                arriving = ToHeads([[grad_out]], self._kinds(stage + 1)[:1], self.group)
            stage_grad_q, *stage_grad_kv = inner.backward(stage_grad_out, by_stage[stage])
            if leaving is not None:
                leaving.wait([[grad_q], [grad_k, grad_v]])
            leaving = ToRows([[stage_grad_q], stage_grad_kv], self._kinds(stage), self.group)
        assert leaving is not None
        leaving.wait([[grad_q], [grad_k, grad_v]])
        return grad_q, self._summed(grad_k), self._summed(grad_v)

    def _kinds(self, stage: int) -> list[HeadRows]:
        """Of queries, and of keys and values."""
        units = tuple(self.heads.units(rank, stage) for rank in range(self.heads.world_size))
        return [
            HeadRows(self.query_rows, tuple(map(self.heads.query_heads, units))),
            HeadRows(self.key_rows, units),
        ]

    def _grad_of_units(self, like: torch.Tensor) -> torch.Tensor:
        rows = sum(self.key_rows.lengths[self.group.rank()])
        return like.new_empty(like.size(0), rows, self.heads.unit_count, like.size(3)).transpose(1, 2)

    def _summed(self, grad_units: torch.Tensor) -> torch.Tensor:
        """The gradient of heads from that of their copies."""
        if self.heads.copies == 1:
            return grad_units
        copies = grad_units.unflatten(1, (self.heads.kv_heads, self.heads.copies))
        return copies.sum(2, dtype=self.state_dtype).to(grad_units.dtype)


def _finish(leaving: list[tuple[ToRows, torch.Tensor]]) -> None:
    for rows, target in leaving:
        rows.wait([[target]])
    leaving.clear()


def _copied(kv: torch.Tensor, copies: int) -> torch.Tensor:
    return kv if copies == 1 else kv.repeat_interleave(copies, dim=1)


def _row_after_row(like: torch.Tensor, dim: int) -> torch.Tensor:
    """(B, H, S, dim) in which what belongs to a row lies together, as it arrives."""
    return like.new_empty(like.size(0), like.size(2), like.size(1), dim).transpose(1, 2)
