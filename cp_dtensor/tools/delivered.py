"""Transfers of which everything has arrived already: what one rank of many launches then is its own work alone.

Rows of K/V and gradients of other ranks are random numbers that stay where they are; what a rank sends goes nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape
from cp_dtensor.plan import Plan
from cp_dtensor.rotation.base import Contribution, GradTransfers, KvTransfers, Rotation
from cp_dtensor.rotation.head_exchange import Arrivals, Departure, HeadExchange
from cp_dtensor.rotation.heads import HeadRows, Tensors
from cp_dtensor.rotation.rows import row_width
from cp_dtensor.rotation.symm_mem import SymmetricMemory


class OneOfMany:
    """Stands for the process group of a rank that is alone with its work."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The ranks that there would be."""
        return self._size

    def _get_backend(self, _device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "none")


class DeliveredRows(Rotation):
    """A ring that is planned as `symm_mem` is. Its buffers are made at the first call of a plan and kept."""

    def __init__(self) -> None:
        self._planner = SymmetricMemory()
        self._kv: dict[tuple[Plan, bool], KvTransfers] = {}
        self._grads: dict[Plan, GradTransfers] = {}

    name = "delivered"
    slows_compute = False

    def for_call(self, shape: CallShape, group: dist.ProcessGroup, device: torch.device) -> Rotation:
        return self

    def plan(self, shape: CallShape, rank: int) -> Plan:
        return self._planner.plan(shape, rank)

    def abandon(self, group: dist.ProcessGroup) -> None:
        pass

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        if (plan, backward) not in self._kv:
            self._kv[plan, backward] = _ArrivedKv(k, v, plan, backward)
        return self._kv[plan, backward]

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        if plan not in self._grads:
            self._grads[plan] = _ArrivedGrads(k, v, plan)
        return self._grads[plan]


class _ArrivedKv(KvTransfers):
    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool) -> None:
        steps = plan.backward if backward else plan.forward
        self._rows = cycle(
            [
                _random(k, plan.buffer_rows(step.transfer), row_width(k, v, step.heads))
                for step in steps
                if step.transfer is not None
            ]
        )

    def receive(self) -> torch.Tensor:
        return next(self._rows)


class _ArrivedGrads(GradTransfers):
    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
        steps = [step for step in plan.backward if step.transfer is not None]
        widths = [row_width(k, v, step.heads) for step in steps]
        self._buffers = cycle([k.new_empty(plan.rows.total, width) for width in widths])
        self._contributions = cycle([_contributions(k, plan, width) for width in widths])

    def buffer(self) -> torch.Tensor:
        return next(self._buffers)

    def send(self) -> None:
        pass

    def receive(self) -> Sequence[Contribution]:
        return next(self._contributions)


def _contributions(like: torch.Tensor, plan: Plan, width: int) -> list[Contribution]:
    """Of all ranks that want a part of this rank's shard."""
    found = []
    for part, length in enumerate(plan.rows.lengths[plan.rank]):
        readers = sum(part in given for given in plan.given)
        if readers and length:
            found.append(
                Contribution(plan.rows.local_span(plan.rank, part), _random(like, readers * length, width).view(
                    readers, length, width
                ))
            )  # fmt: skip
    return found


@dataclass(frozen=True, eq=False)
class DeliveredHeads(HeadExchange):
    """Heads whose rows have arrived; results stay where they are."""

    rank: int
    stream: torch.cuda.Stream | None
    _stages: dict[object, list[list[list[torch.Tensor]]]]

    @classmethod
    def of(cls, rank: int, device: torch.device) -> DeliveredHeads:
        """For a rank."""
        return cls(rank, torch.cuda.Stream(device) if device.type == "cuda" else None, {})

    name = "delivered"
    granule = 1

    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        key = (len(bundles), tuple(map(tuple, stages)))
        if key not in self._stages:
            self._stages[key] = [
                [
                    [_heads(tensor, kind, self.rank) for tensor in tensors]
                    for tensors, kind in zip(bundles, kinds, strict=True)
                ]
                for kinds in stages
            ]
        return _ArrivedHeads(self._stages[key])

    def to_rows(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows],
        group: dist.ProcessGroup, is_last: bool,
    ) -> Departure:  # fmt: skip
        return _Gone()

    def abandon(self, group: dist.ProcessGroup) -> None:
        pass

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        return self.stream


class _ArrivedHeads(Arrivals):
    def __init__(self, stages: list[list[list[torch.Tensor]]]) -> None:
        self._stages = iter(stages)

    def receive(self) -> list[list[torch.Tensor]]:
        return next(self._stages)


class _Gone(Departure):
    def wait(self) -> None:
        pass


def _heads(like: torch.Tensor, kind: HeadRows, rank: int) -> torch.Tensor:
    """(B, the rank's heads, all rows, D), row after row as it arrives."""
    count, dim = kind.head_counts[rank], like.size(3)
    rows = _random(like, like.size(0) * kind.rows.total, count * dim)
    return rows.view(like.size(0), kind.rows.total, count, dim).transpose(1, 2)


def _random(like: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Zeros would let a GPU draw less power, and run faster."""
    return torch.randn(rows, width, dtype=like.dtype, device=like.device)
