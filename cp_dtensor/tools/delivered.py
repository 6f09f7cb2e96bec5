"""Transfers of which everything has arrived already: what one rank of many launches then is its own work alone.

Rows of K/V and gradients of other ranks are random numbers that stay where they are; what a rank sends goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape
from cp_dtensor.plan import Plan
from cp_dtensor.rotation.base import Contribution, GradTransfers, KvTransfers, Rotation
from cp_dtensor.rotation.head_exchange import Arrivals, Departure, HeadExchange
from cp_dtensor.rotation.heads import HeadRows, Tensors
from cp_dtensor.rotation.rows import row_width
from cp_dtensor.rotation.symm_mem import SymmetricMemory

T = TypeVar("T")


class OneOfMany:
    """Stands for the process group of a rank that is alone with its work. Has what others would have sent."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._delivered: dict[object, Any] = {}

    def rank(self) -> int:
        """This rank."""
        return self._rank

    def size(self) -> int:
        """The ranks that there would be."""
        return self._size

    def delivered(self, key: object, make: Callable[[], T]) -> T:
        """What has been made for a key at first."""
        if key not in self._delivered:
            self._delivered[key] = make()
        found: T = self._delivered[key]
        return found

    def _get_backend(self, _device: torch.device) -> Any:
        return SimpleNamespace(name=lambda: "none")


class Delivered(Rotation):
    """A rotation that brings nothing, since it has been brought; its subclasses say what."""

    name = "delivered"
    transfers_ahead = 0
    slows_compute = False
    keeps_own_gradients_wide = False

    def for_call(self, shape: CallShape, group: dist.ProcessGroup, device: torch.device) -> Rotation:
        return self

    def abandon(self, group: dist.ProcessGroup) -> None:
        pass


class ArrivedKv(KvTransfers):
    """Rows that are there, one transfer's after the other."""

    def __init__(self, rows: Iterable[torch.Tensor]) -> None:
        self._rows = iter(rows)

    def receive(self) -> torch.Tensor:
        return next(self._rows)

    def tiles_launched(self) -> None:
        pass


@dataclass(frozen=True)
class DeliveredRows(Delivered):
    """A ring that is planned as `symm_mem` is. Its buffers are made at the first call, and kept by the group."""

    def plan(self, shape: CallShape, rank: int) -> Plan:
        return SymmetricMemory().plan(shape, rank)

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        assert isinstance(group, OneOfMany)
        return group.delivered((plan, backward), lambda: ArrivedKv(cycle(_rows_of_others(k, v, plan, backward))))

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        assert isinstance(group, OneOfMany)
        return group.delivered(plan, lambda: _ArrivedGrads(k, v, plan))


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


def _rows_of_others(k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool) -> list[torch.Tensor]:
    """What each transfer of a pass brings."""
    steps = plan.backward if backward else plan.forward
    return [
        _random(k, plan.buffer_rows(step.transfer), row_width(k, v, step.heads))
        for step in steps
        if step.transfer is not None
    ]


def _contributions(like: torch.Tensor, plan: Plan, width: int) -> list[Contribution]:
    """Of all ranks that want a part of this rank's shard."""
    return [
        Contribution(rows, _random(like, len(places) * (rows[1] - rows[0]), width).view(len(places), -1, width))
        for rows, places in plan.grad_pulls
    ]


@dataclass(frozen=True)
class DeliveredHeads(HeadExchange):
    """Heads whose rows have arrived; results stay where they are."""

    name = "delivered"
    granule = 1

    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        assert isinstance(group, OneOfMany)
        rank = group.rank()

        def arrived() -> list[list[list[torch.Tensor]]]:
            return [
                [
                    [_heads(tensor, kind, rank) for tensor in tensors]
                    for tensors, kind in zip(bundles, kinds, strict=True)
                ]
                for kinds in stages
            ]  # fmt: skip

        return _ArrivedHeads(group.delivered((len(bundles), tuple(map(tuple, stages))), arrived))

    def to_rows(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows],
        group: dist.ProcessGroup, is_last: bool,
    ) -> Departure:  # fmt: skip
        return _Gone()

    def abandon(self, group: dist.ProcessGroup) -> None:
        pass

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        assert isinstance(group, OneOfMany)
        return group.delivered("side stream", lambda: torch.cuda.Stream(like.device)) if like.is_cuda else None


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
