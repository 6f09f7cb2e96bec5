"""The contract of a rotation: it moves K/V to where they are needed and brings dK/dV home, and does nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor.masks import Mask
from cp_dtensor.schedule import GatheredRows, GroupSegments, Steps


@dataclass(frozen=True)
class Route:
    """Who sends how many rows. The same on every rank but for `rank`."""

    group: dist.ProcessGroup | None
    """None only with a world size of 1, where nothing travels."""
    rank: int
    rows: GatheredRows

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.rows.world_size

    def length(self, rank: int) -> int:
        """Rows that `rank` owns."""
        return sum(self.rows.lengths[rank])


class KvTransfer(ABC):
    """Rows of K/V on their way to this rank. `receive` is called once for each step, in order."""

    @abstractmethod
    def receive(self, step: int) -> torch.Tensor | None:
        """Waits for the rows that the tiles of `step` count in, and has the next transfer in flight.

        Returns None in step 0, whose tiles are against this rank's own K/V.
        """


class GradTransfer(ABC):
    """Gradients of K/V rows on their way home. `buffer` and `send` are called once for each step, in order."""

    @abstractmethod
    def buffer(self, step: int) -> torch.Tensor:
        """Where to add the gradients of the rows of this step: zeros, or sums from earlier steps."""

    @abstractmethod
    def send(self, step: int) -> None:
        """Says that the buffer of this step is complete."""

    @abstractmethod
    def finish(self) -> torch.Tensor:
        """Waits for everything; the summed gradients of this rank's own rows."""


class Rotation(ABC):
    """A way to move rows around a context-parallel axis. Stateless; all state is in the transfers it starts."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `set_rotate_method` knows."""

    @abstractmethod
    def steps(self, groups: Iterable[GroupSegments], rank: int, mask: Mask) -> Steps:
        """The schedule in the form that suits this rotation."""

    @abstractmethod
    def start_kv(self, kv_rows: torch.Tensor, route: Route) -> KvTransfer:
        """Starts moving K/V.

        Args:
            kv_rows: (rows of this rank, W), contiguous: one row per token, K and V of all heads and batch rows.
            route: who owns how much.
        """

    @abstractmethod
    def start_grads(self, width: int, dtype: torch.dtype, device: torch.device, route: Route) -> GradTransfer:
        """Prepares the way back of (rows, `width`) gradients in `dtype`."""
