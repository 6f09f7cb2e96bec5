"""The contract of a rotation: how keys and values travel to the ranks that need them, and gradients come home.

A rotation moves rows and knows nothing of attention. One row is one token: the keys and values of some heads and of all
batch rows. What travels when is in the `Plan`, which the rotation makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape
from cp_dtensor.layouts import Span
from cp_dtensor.plan import Plan


class Contribution(NamedTuple):
    """What other ranks' queries contribute to the gradients of some of this rank's keys and values."""

    rows: Span
    """Of this rank's shard."""
    stack: torch.Tensor
    """(contributing ranks, rows, row width)."""


class KvTransfers(ABC):
    """Keys and values on their way to this rank. For each step in turn: `receive` if it has a transfer, its tiles,
    `tiles_launched`."""

    @abstractmethod
    def receive(self) -> torch.Tensor:
        """Waits for the next transfer, in the order of the steps.

        Returns:
            (rows, row width). Only rows that this rank wants are filled.
        """

    @abstractmethod
    def tiles_launched(self) -> None:
        """Says that a step's tiles have been launched. What travels under them is in flight when this returns.

        Here transfers can be started that need not come before the tiles, which then don't wait for the host to do so.
        """


class GradTransfers(ABC):
    """Gradients of keys and values on their way home. For each transfer in turn: `buffer`, `send`, `receive`."""

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """(rows, row width), uninitialised, for gradients of the rows that `KvTransfers.receive` returned."""

    @abstractmethod
    def send(self) -> None:
        """Says that the buffer has the gradients of all rows that this rank wanted, and is given away."""

    @abstractmethod
    def receive(self) -> Sequence[Contribution]:
        """Waits for the contributions to this rank's own rows."""


class RotationMethod(ABC):
    """What a caller asks for by name: a rotation, or a way to choose one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `set_rotate_method` knows."""

    @abstractmethod
    def for_call(self, shape: CallShape, group: dist.ProcessGroup, device: torch.device) -> Rotation:
        """The rotation of a call; the same on all ranks of the group."""


class Rotation(RotationMethod):
    """A way to move rows around a context-parallel axis. A value without state; all state is in the transfers."""

    @property
    @abstractmethod
    def transfers_ahead(self) -> int:
        """Transfers of K/V in flight while a step is computed."""

    @property
    @abstractmethod
    def slows_compute(self) -> bool:
        """Whether transfers take multiprocessors from the attention that runs meanwhile."""

    @property
    @abstractmethod
    def keeps_own_gradients_wide(self) -> bool:
        """Whether the gradients of a rank's own tiles may take longer, so that they need not be rounded before sums."""

    @abstractmethod
    def plan(self, shape: CallShape, rank: int) -> Plan:
        """The steps of a call on one rank, in the order that suits this rotation."""

    @abstractmethod
    def abandon(self, group: dist.ProcessGroup) -> None:
        """Forgets a call that has raised in the middle, on all ranks alike, so that the next one can work."""

    @abstractmethod
    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        """Starts the transfers of `plan.forward`, or of `plan.backward`.

        Args:
            k: (B, Hkv, T, D), this rank's keys.
            v: (B, Hkv, T, Dv), this rank's values.
            plan: equal on every rank but for what depends on the rank.
            backward: which steps.
            group: the ranks of the axis.
        """

    @abstractmethod
    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        """Prepares the way back of the gradients of `plan.backward`, in the dtype of k and v."""
