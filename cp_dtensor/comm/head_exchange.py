"""Head exchange of Ulysses attention: its interface, and an implementation by all-to-all collectives.

Before attention, a rank exchanges all heads of its rows for some heads of all rows; after attention, the reverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor.comm.collective import Exchange, Places
from cp_dtensor.comm.transport import HeadBlocks
from cp_dtensor.plan.tiling import GatheredRows
from cp_dtensor.spec.layouts import Span

Bundle = Sequence[torch.Tensor]
"""Tensors that share heads, rows and dtype."""


@dataclass(frozen=True)
class HeadRows:
    """The rows and heads of one kind of tensors on every rank, before and after an exchange."""

    rows: GatheredRows
    """Before, a rank has the rows of its shard; after, those of all ranks."""
    heads: tuple[Span, ...]
    """Before, a rank has all heads; after, `heads[rank]`, counted after replication."""
    copies: int = 1
    """Replicas of each head (KV-head replication, see `HeadPartition`)."""

    @property
    def head_counts(self) -> list[int]:
        """Heads of each rank after an exchange."""
        return [stop - start for start, stop in self.heads]


Kinds = Sequence[HeadRows]
"""The heads and rows of each bundle."""


class Arrivals(ABC):
    """Tensors on their way from some rows of all heads to some heads of all rows, stage after stage."""

    @abstractmethod
    def receive(self) -> list[list[torch.Tensor]]:
        """Waits for the next stage, and starts the one after it.

        Returns:
            For each bundle its tensors, (B, this rank's heads of the stage, all rows, D).
        """


class Departure(ABC):
    """Tensors of one stage on their way back to all heads of some rows."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until the stage's heads are in the targets (on a GPU: for work launched later)."""


class HeadExchange(ABC):
    """A way to exchange rows for heads. A frozen value without state."""

    granule: int
    """Number of bytes of which a row of one head is a multiple."""

    @abstractmethod
    def to_heads(self, bundles: Sequence[Bundle], stages: Sequence[Kinds], group: dist.ProcessGroup) -> Arrivals:
        """Starts to exchange this rank's rows of all heads for all rows of this rank's heads.

        Args:
            bundles: tensors (B, all heads, this rank's rows, D); those of a bundle share heads, rows and dtype.
            stages: for each stage, the heads and rows of each bundle.
            group: the ranks of the axis.
        """

    @abstractmethod
    def to_rows(
        self, bundles: Sequence[Bundle], targets: Sequence[Bundle], kinds: Kinds, group: dist.ProcessGroup,
        is_last: bool,
    ) -> Departure:  # fmt: skip
        """Starts to exchange all rows of one stage's heads for all heads of this rank's rows.

        Args:
            bundles: tensors (B, this rank's heads of the stage, all rows, D).
            targets: for each, (B, all heads after replication, this rank's rows, D), in memory (B, rows, heads, D);
                only the stage's heads are written.
            kinds: the heads and rows of each bundle.
            group: the ranks of the axis.
            is_last: True if no attention runs at the same time.
        """

    def abandon(self, group: dist.ProcessGroup) -> None:
        """Discards what a call that raised an error left behind; collectives leave nothing.

        All ranks call it, so that the next call works.
        """
        return

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        """A stream for every other stage, so that the next kernel fills the GPU when one ends; or None."""
        return None


# All-to-all collectives
#
# A rank sends one block to each rank: the receiver's heads of the sender's rows, row after row. The rows of each part
# of a shard travel directly to their places among all rows. Several tensors travel in one exchange.


class CollectiveHeads(HeadExchange):
    """Head exchange by all-to-all collectives of the process group, one for each dtype."""

    granule = 1

    def to_heads(self, bundles: Sequence[Bundle], stages: Sequence[Kinds], group: dist.ProcessGroup) -> Arrivals:
        return _CollectiveArrivals(bundles, stages, group)

    def to_rows(
        self, bundles: Sequence[Bundle], targets: Sequence[Bundle], kinds: Kinds, group: dist.ProcessGroup,
        is_last: bool,
    ) -> Departure:  # fmt: skip
        return _CollectiveDeparture(bundles, targets, kinds, group)


class _CollectiveArrivals(Arrivals):
    def __init__(self, bundles: Sequence[Bundle], stages: Sequence[Kinds], group: dist.ProcessGroup) -> None:
        self._bundles = [
            [x if kind.copies == 1 else x.repeat_interleave(kind.copies, dim=1) for x in tensors]
            for tensors, kind in zip(bundles, stages[0], strict=True)
        ]
        self._waiting, self._group = list(stages), group
        self._exchanges: list[Exchange] = []
        self._arriving: dict[int, list[torch.Tensor]] = {}
        """The tensors of each bundle, by its index."""
        self._start()

    def _start(self) -> None:
        """Starts the exchanges of the next stage if there is one."""
        self._exchanges, self._arriving = [], {}
        if not self._waiting:
            return
        kinds, group, rank = self._waiting.pop(0), self._group, self._group.rank()
        for indices in _by_dtype(self._bundles):
            incoming: Places = []
            outgoing: Places = []
            with label("send heads"):
                for index in indices:
                    tensors, kind = self._bundles[index], kinds[index]
                    by_rank = HeadBlocks(tensors, kind.head_counts, sum(kind.rows.lengths[rank]))
                    by_rank.write(tensors, kind.heads)
                    mine = HeadBlocks(tensors, [kind.head_counts[rank]], kind.rows.total)
                    self._arriving[index] = mine.tensors(0)
                    outgoing += _local_places(by_rank, kind, group)
                    incoming += _gathered_places(mine, kind, group)
                self._exchanges.append(Exchange(incoming, outgoing, tensors[0].new_empty(0, 1), group))

    def receive(self) -> list[list[torch.Tensor]]:
        assert self._arriving, "called more often than there are stages"
        for exchange in self._exchanges:
            exchange.wait()
        arrived = self._arriving
        self._start()
        return [arrived[index] for index in range(len(arrived))]


class _CollectiveDeparture(Departure):
    def __init__(
        self, bundles: Sequence[Bundle], targets: Sequence[Bundle], kinds: Kinds, group: dist.ProcessGroup
    ) -> None:
        rank = group.rank()
        self._in_flight: list[tuple[Exchange, list[tuple[Bundle, HeadRows, HeadBlocks]]]] = []
        for indices in _by_dtype(bundles):
            incoming: Places = []
            outgoing: Places = []
            arriving = []
            with label("send rows"):
                for index in indices:
                    tensors, kind = bundles[index], kinds[index]
                    in_rows = tensors[0].permute(2, 0, 1, 3)
                    memory = in_rows.view(-1) if len(tensors) == 1 and in_rows.is_contiguous() else None
                    mine = HeadBlocks(tensors, [kind.head_counts[rank]], kind.rows.total, memory)
                    if memory is None:
                        mine.write(tensors, [(0, kind.head_counts[rank])])
                    by_rank = HeadBlocks(tensors, kind.head_counts, sum(kind.rows.lengths[rank]))
                    arriving.append((targets[index], kind, by_rank))
                    outgoing += _gathered_places(mine, kind, group)
                    incoming += _local_places(by_rank, kind, group)
                self._in_flight.append((Exchange(incoming, outgoing, tensors[0].new_empty(0, 1), group), arriving))

    def wait(self) -> None:
        for exchange, arriving in self._in_flight:
            exchange.wait()
            with label("place rows"):
                for targets, kind, by_rank in arriving:
                    for of_target, of_block in by_rank.pairs(targets, kind.heads):
                        of_target.copy_(of_block)


def _by_dtype(bundles: Sequence[Bundle]) -> list[list[int]]:
    """Groups the indices of bundles by dtype; each group travels in one collective."""
    dtypes = dict.fromkeys(tensors[0].dtype for tensors in bundles)
    return [[i for i, tensors in enumerate(bundles) if tensors[0].dtype == dtype] for dtype in dtypes]


def _local_places(blocks: HeadBlocks, kind: HeadRows, group: dist.ProcessGroup) -> Places:
    """Places of this rank's rows: block r has the heads of rank r."""
    rank, ranks = group.rank(), range(group.size())
    spans = [kind.rows.local_span(rank, part) for part in range(len(kind.rows.lengths[rank]))]
    return [[blocks.rows(peer, span) for peer in ranks] for span in spans]


def _gathered_places(block: HeadBlocks, kind: HeadRows, group: dist.ProcessGroup) -> Places:
    """Places of all ranks' rows in the one block of this rank's heads."""
    parts, ranks = range(len(kind.rows.lengths[group.rank()])), range(group.size())
    return [[block.rows(0, kind.rows.span(peer, part)) for peer in ranks] for part in parts]
