"""The contract of exchanging rows for heads, as Ulysses does, and its implementation by collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist

from cp_dtensor.rotation.heads import HeadRows, Tensors, ToHeads, ToRows


class Arrivals(ABC):
    """Some heads of all rows, stage after stage."""

    @abstractmethod
    def receive(self) -> list[list[torch.Tensor]]:
        """Waits for the next stage, and has the one after it in flight.

        Returns:
            for each bundle its tensors, (B, this rank's heads of the stage, all rows, D).
        """


class Departure(ABC):
    """All heads of this rank's rows, of one stage."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when the stage's heads are in the targets (on a GPU: for whatever is launched from then on)."""


class HeadExchange(ABC):
    """A way to exchange rows for heads. A value without state."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What it is called in tables."""

    @abstractmethod
    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        """Starts to bring heads together with all their rows.

        Args:
            bundles: tensors (B, all heads, this rank's rows, D); those of a bundle share heads and rows.
            stages: for each stage, the kind of each bundle.
            group: the ranks of the axis.
        """

    @abstractmethod
    def to_rows(
        self,
        bundles: Sequence[Tensors],
        targets: Sequence[Tensors],
        kinds: Sequence[HeadRows],
        group: dist.ProcessGroup,
        is_last: bool,
    ) -> Departure:
        """Starts to bring one stage's rows home.

        Args:
            bundles: tensors (B, this rank's heads of the stage, all rows, D).
            targets: for each, (B, all units, this rank's rows, D), in memory (B, rows, units, D); only the stage's
                heads of it are written.
            kinds: of each bundle.
            group: the ranks of the axis.
            is_last: nothing is computed meanwhile.
        """

    @abstractmethod
    def abandon(self, group: dist.ProcessGroup) -> None:
        """Forgets a call that has raised in the middle, on all ranks alike, so that the next one can work."""

    @abstractmethod
    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        """A stream on which every other stage may be computed, so that the end of a kernel is not idle; or None."""


class CollectiveHeads(HeadExchange):
    """By all-to-all collectives of the process group."""

    @property
    def name(self) -> str:
        return "all-to-all"

    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        return _CollectiveArrivals(bundles, stages, group)

    def to_rows(
        self,
        bundles: Sequence[Tensors],
        targets: Sequence[Tensors],
        kinds: Sequence[HeadRows],
        group: dist.ProcessGroup,
        is_last: bool,
    ) -> Departure:
        return _CollectiveDeparture(bundles, targets, kinds, group)

    def abandon(self, group: dist.ProcessGroup) -> None:
        pass  # collectives leave nothing behind

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        return None


class _CollectiveArrivals(Arrivals):
    def __init__(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> None:
        self._bundles = [
            [_copied(tensor, kind.copies) for tensor in tensors]
            for tensors, kind in zip(bundles, stages[0], strict=True)
        ]
        self._waiting = list(stages)
        self._group = group
        self._next = self._start()

    def _start(self) -> ToHeads | None:
        return ToHeads(self._bundles, self._waiting.pop(0), self._group) if self._waiting else None

    def receive(self) -> list[list[torch.Tensor]]:
        assert self._next is not None
        arrived = self._next.wait()
        self._next = self._start()
        return arrived


class _CollectiveDeparture(Departure):
    def __init__(
        self,
        bundles: Sequence[Tensors],
        targets: Sequence[Tensors],
        kinds: Sequence[HeadRows],
        group: dist.ProcessGroup,
    ) -> None:
        self._rows = ToRows(bundles, kinds, group)
        self._targets = targets

    def wait(self) -> None:
        self._rows.wait(self._targets)


def _copied(tensor: torch.Tensor, copies: int) -> torch.Tensor:
    return tensor if copies == 1 else tensor.repeat_interleave(copies, dim=1)
