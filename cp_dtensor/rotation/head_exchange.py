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

    @property
    @abstractmethod
    def granule(self) -> int:
        """Bytes: what a row of one head takes must be a multiple of it."""

    @abstractmethod
    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        """Starts to bring heads together with all their rows.

        Args:
            bundles: tensors (B, all heads, this rank's rows, D); those of a bundle share heads, rows and dtype.
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

    @property
    def granule(self) -> int:
        return 1

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
        self._together = _travelling_together(bundles)
        self._waiting = list(stages)
        self._group = group
        self._next = self._start()

    def _start(self) -> list[ToHeads]:
        if not self._waiting:
            return []
        kinds = self._waiting.pop(0)
        return [
            ToHeads([self._bundles[i] for i in together], [kinds[i] for i in together], self._group)
            for together in self._together
        ]

    def receive(self) -> list[list[torch.Tensor]]:
        assert self._next, "as many as there are stages"
        arrived: dict[int, list[torch.Tensor]] = {}
        for together, heads in zip(self._together, self._next, strict=True):
            arrived.update(zip(together, heads.wait(), strict=True))
        self._next = self._start()
        return [arrived[index] for index in range(len(arrived))]


class _CollectiveDeparture(Departure):
    def __init__(
        self,
        bundles: Sequence[Tensors],
        targets: Sequence[Tensors],
        kinds: Sequence[HeadRows],
        group: dist.ProcessGroup,
    ) -> None:
        self._rows = [
            (
                ToRows([bundles[i] for i in together], [kinds[i] for i in together], group),
                [targets[i] for i in together],
            )
            for together in _travelling_together(bundles)
        ]

    def wait(self) -> None:
        for rows, targets in self._rows:
            rows.wait(targets)


def _travelling_together(bundles: Sequence[Tensors]) -> list[list[int]]:
    """The indices of bundles, those of one dtype together: they are one collective."""
    dtypes = dict.fromkeys(tensors[0].dtype for tensors in bundles)
    return [[i for i, tensors in enumerate(bundles) if tensors[0].dtype == dtype] for dtype in dtypes]


def _copied(tensor: torch.Tensor, copies: int) -> torch.Tensor:
    return tensor if copies == 1 else tensor.repeat_interleave(copies, dim=1)
