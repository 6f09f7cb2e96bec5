"""The exchange of Ulysses: from all heads of some rows to some heads of all rows, and back.

What goes to a rank is one block: its heads of this rank's rows, row after row, `[one tensor's heads | the next one's]`
of all batch rows. Blocks travel by the parts of a shard, straight to where they stand among all rows; so the order of
heads, of rows and of tensors changes with the exchange and takes no copies of its own. Several tensors travel in one
exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor.comm.collective import Exchange, Places
from cp_dtensor.plan.tiling import GatheredRows
from cp_dtensor.spec.layouts import Span

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class HeadRows:
    """What the ranks of an axis have of one kind of tensors before and after an exchange."""

    rows: GatheredRows
    """Before, a rank has those of its shard; after, those of all ranks."""
    heads: tuple[Span, ...]
    """Before, a rank has all of them; after, `heads[rank]`, counted in units: heads, or copies of heads."""
    copies: int = 1
    """Units that each head is copied to on its way (see `HeadPartition`)."""

    @property
    def head_counts(self) -> list[int]:
        """Heads of each rank."""
        return [stop - start for start, stop in self.heads]


class ToHeads:
    """Tensors (B, all heads, this rank's rows, D) on their way to (B, this rank's heads, all rows, D)."""

    def __init__(self, bundles: Sequence[Tensors], kinds: Sequence[HeadRows], group: dist.ProcessGroup) -> None:
        rank = group.rank()
        self._results: list[list[torch.Tensor]] = []
        incoming: Places = []
        outgoing: Places = []
        with label("send heads"):
            for tensors, kind in zip(bundles, kinds, strict=True):
                blocks = _Blocks(tensors, kind.head_counts, sum(kind.rows.lengths[rank]))
                for of_tensor, of_block in blocks.pairs(tensors, kind.heads):
                    of_block.copy_(of_tensor)
                mine = _Blocks(tensors, [kind.head_counts[rank]], kind.rows.total)
                self._results.append(mine.views(0))
                for part in range(len(kind.rows.lengths[rank])):
                    own = kind.rows.local_span(rank, part)
                    outgoing.append([blocks.rows(peer, own) for peer in range(group.size())])
                    incoming.append([mine.rows(0, kind.rows.span(peer, part)) for peer in range(group.size())])
            self._exchange = Exchange(incoming, outgoing, bundles[0][0].new_empty(0, 1), group)

    def wait(self) -> list[list[torch.Tensor]]:
        """For each bundle its tensors, as views of what has arrived."""
        self._exchange.wait()
        return self._results


class ToRows:
    """Tensors (B, this rank's heads, all rows, D) on their way to (B, all heads, this rank's rows, D)."""

    def __init__(self, bundles: Sequence[Tensors], kinds: Sequence[HeadRows], group: dist.ProcessGroup) -> None:
        rank = group.rank()
        self._kinds = kinds
        self._arriving: list[_Blocks] = []
        incoming: Places = []
        outgoing: Places = []
        with label("send rows"):
            for tensors, kind in zip(bundles, kinds, strict=True):
                mine = _Blocks(tensors, [kind.head_counts[rank]], kind.rows.total, of_same_memory=True)
                if not mine.is_memory_of_tensors:
                    for of_block, tensor in zip(mine.views(0), tensors, strict=True):
                        of_block.copy_(tensor)
                blocks = _Blocks(tensors, kind.head_counts, sum(kind.rows.lengths[rank]))
                self._arriving.append(blocks)
                for part in range(len(kind.rows.lengths[rank])):
                    own = kind.rows.local_span(rank, part)
                    outgoing.append([mine.rows(0, kind.rows.span(peer, part)) for peer in range(group.size())])
                    incoming.append([blocks.rows(peer, own) for peer in range(group.size())])
            self._exchange = Exchange(incoming, outgoing, bundles[0][0].new_empty(0, 1), group)

    def wait(self, targets: Sequence[Tensors]) -> None:
        """Writes what arrived to each bundle's `targets`, (B, all heads, this rank's rows, D)."""
        self._exchange.wait()
        with label("place rows"):
            for tensors, kind, blocks in zip(targets, self._kinds, self._arriving, strict=True):
                for of_tensor, of_block in blocks.pairs(tensors, kind.heads):
                    of_tensor.copy_(of_block)


class _Blocks:
    """One block for each rank, one after the other in memory. A row has `heads` x D of every tensor and batch row."""

    def __init__(self, like: Tensors, head_counts: Sequence[int], rows: int, of_same_memory: bool = False) -> None:
        self._batch = like[0].size(0)
        self._dims = [tensor.size(3) for tensor in like]
        self._counts = head_counts
        self._widths = [self._batch * count * sum(self._dims) for count in head_counts]
        self._length = rows
        self._starts = [0, *accumulate(width * rows for width in self._widths)]
        self.is_memory_of_tensors = of_same_memory and len(like) == 1 and _is_row_after_row(like[0])
        if self.is_memory_of_tensors:
            self._memory = like[0].permute(2, 0, 1, 3).view(-1)
        else:
            self._memory = like[0].new_empty(self._starts[-1])

    def rows(self, block: int, rows: Span) -> torch.Tensor | None:
        """Some rows of a block, as a column of elements; None if there is nothing in them."""
        start, width = self._starts[block], self._widths[block]
        if width == 0 or rows[0] == rows[1]:
            return None
        return self._memory[start + rows[0] * width : start + rows[1] * width].view(-1, 1)

    def views(self, block: int) -> list[torch.Tensor]:
        """The tensors in a block, (B, its heads, rows, D)."""
        count, width = self._counts[block], self._widths[block]
        starts = accumulate((self._batch * count * dim for dim in self._dims), initial=self._starts[block])
        return [
            self._memory.as_strided(
                (self._batch, count, self._length, dim), (count * dim, dim, width, 1), self._at(start)
            )
            for dim, start in zip(self._dims, starts, strict=False)
        ]

    def pairs(self, tensors: Tensors, heads: Sequence[Span]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Equal parts of the tensors (B, all heads, rows, D) and of the blocks; few where `heads` are regular."""
        count = self._counts[0]
        steps = {span[0] - before[0] for before, span in pairwise(heads)}
        if count == 0 or len(set(self._counts)) > 1 or len(steps) != 1:
            for block, span in enumerate(heads):
                for tensor, view in zip(tensors, self.views(block), strict=True):
                    yield tensor[:, span[0] : span[1]], view
            return
        (step,) = steps
        start = 0
        for tensor, dim in zip(tensors, self._dims, strict=True):
            shape = (len(heads), self._batch, count, self._length, dim)
            stride_h = tensor.stride(1)
            of_tensor = tensor.as_strided(
                shape, (step * stride_h, *tensor.stride()), tensor.storage_offset() + heads[0][0] * stride_h
            )
            width = self._widths[0]
            of_block = self._memory.as_strided(
                shape, (self._length * width, count * dim, dim, width, 1), self._at(start)
            )
            yield of_tensor, of_block
            start += self._batch * count * dim

    def _at(self, start: int) -> int:
        return int(self._memory.storage_offset()) + start


def _is_row_after_row(tensor: torch.Tensor) -> bool:
    return tensor.permute(2, 0, 1, 3).is_contiguous()


# The contract of exchanging rows for heads, as Ulysses does, and its implementation by collectives.


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
