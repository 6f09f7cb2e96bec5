"""Calls through symmetric memory to record: attention records only which tensors it uses on which stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from cp_dtensor._torch.autograd import Tensors
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange_symm_mem import obstacle_to_shared_memory, shared_memory_heads
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.engine import gather_kv
from cp_dtensor.engine.base import Plan, Values
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.gather_kv import KVGather
from cp_dtensor.engine.planner import exchange_stages
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, MergedPartition, partition_heads
from cp_dtensor.plan.plan import Stages, gathered_plan
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Contiguous, Layout
from cp_dtensor.spec.masks import Full, Mask, is_plain
from support.stream_model.recording import Rank

DIM = 4
Program = Callable[[Rank], None]


@dataclass(frozen=True)
class Stage(Plan):
    """Attention of some heads to all rows; records the tensors that it uses."""

    rank: Rank
    saved: list[torch.Tensor] = field(default_factory=list)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[Any, Any, Any]:
        self.rank.use(q, k, v)
        self.saved[:] = [q, k, v]
        return torch.empty_like(q), q.new_empty(q.shape[:3]), ()

    def backward(self, grad_out: torch.Tensor, saved: Tensors, *_: Any) -> tuple[Any, Any, Any]:
        self.rank.use(grad_out, *saved)
        q, k, v = map(torch.empty_like, saved)
        return q, k, v

    def remake_saved(self, *tensors: Any) -> Any:
        self.rank.use(*tensors[:4])  # lse is a copy of what came with out
        return ()


@dataclass(frozen=True)
class Tiles(AttentionBackend):
    """Attention of tiles; records the tensors that it uses."""

    rank: Rank
    name = "none"

    def refusal(self, problem: object) -> None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        self.rank.use(k, v)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(self, _grad_out: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        self.rank.use(k, v)
        return tuple(map(torch.zeros_like, (q, k, v)))


def spec_of(ranks: int, layout: Layout, mask: Mask) -> CallSpec:
    length = 8 * ranks
    masking = Masking.BY_SHAPE if is_plain(mask, length, length) else Masking.INTERVALS
    partition = LayoutPartition(layout, length, length, 1, ranks)
    return CallSpec(partition, mask, 1, 4 * ranks, 4 * ranks, DIM, DIM, "float32", masking)


def tensors(rank: Rank, count: int) -> list[torch.Tensor]:
    made = [torch.zeros(1, 4 * rank.size(), 8, DIM) for _ in range(count)]
    rank.alive += made
    return made


def ulysses(stages: int, two_streams: bool, backward: bool) -> Program:
    def program(rank: Rank) -> None:
        ranks = rank.size()
        spec = spec_of(ranks, Contiguous(), Full())
        heads = partition_heads(spec.q_heads, spec.kv_heads, ranks, stages)
        assert heads.stages == stages
        kinds = exchange_stages(heads, MergedPartition(spec.partition, ranks), 0)
        assert obstacle_to_shared_memory(spec, rank, torch.device("cpu")) is None
        exchange = shared_memory_heads(spec, kinds)
        inner = tuple(Stage(rank) for _ in range(stages))
        plan = UlyssesPlan(heads, kinds, inner, exchange, two_streams and stages > 1, torch.float32)
        group: Any = rank
        one_axis = SequenceRanks(group, members=tuple(range(rank.size())))
        q, k, v = tensors(rank, 3)
        values = Values(NO_MODIFIERS, one_axis, 1.0)
        out, lse, _ = plan.forward(q, k, v, values, backward)
        rank.use(out)
        if backward:
            plan.remake_saved(q, k, v, out, lse, values)  # as compiled code does in graphs
            saved = tuple(tensor for stage in inner for tensor in stage.saved)
            rank.use(*plan.backward(*tensors(rank, 1), saved, values, None))

    return program


def ring(stages: int, mask: Mask, layout: Layout, backward: bool) -> Program:
    def program(rank: Rank) -> None:
        spec = spec_of(rank.size(), layout, mask)
        by_heads = Stages(1, stages)
        plan = gathered_plan(spec.tiling, rank.rank(), spec.kv_heads, by_heads, by_heads)
        tiles = Tiles(rank)
        ring = RingPlan(plan, spec, SymmetricMemory(), tiles, torch.float32, tiles)
        group: Any = rank
        one_axis = SequenceRanks(group, members=tuple(range(rank.size())))
        q, k, v, grad_out = tensors(rank, 4)
        values = Values(NO_MODIFIERS, one_axis, 1.0)
        _, _, saved = ring.forward(q, k, v, values, False)
        if backward:
            ring.backward(grad_out, saved, values, None)

    return program


def gathered_kv(layout: Layout) -> Program:
    """K/V of all ranks for FlexAttention."""

    def program(rank: Rank) -> None:
        length = 8 * rank.size()
        group: Any = rank
        ranks = SequenceRanks(group, members=tuple(range(rank.size())))
        gather = KVGather(Call(ranks, layout, transport=SymmetricMemory()), length)
        with mock.patch.object(gather_kv, "gathers_by_symm_mem", return_value=True):
            gathered = gather._read_shared_memory(*tensors(rank, 2))
        assert gathered is not None
        rank.use(*gathered)

    return program
