"""Head exchange of Ulysses attention: its interface, and an implementation by all-to-all collectives.

Before attention, a rank exchanges all heads of its rows for some heads of all rows; after attention, the reverse.
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
        """Returns when the stage's heads are in the targets (on a GPU: for work launched later)."""


class HeadExchange(ABC):
    """A way to exchange rows for heads. A frozen value without state."""

    name: str
    granule: int
    """Bytes; the bytes of a row of one head are a multiple of it."""

    @abstractmethod
    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        """Starts to exchange this rank's rows of all heads for all rows of this rank's heads.

        Args:
            bundles: tensors (B, all heads, this rank's rows, D); those of a bundle share heads, rows and dtype.
            stages: for each stage, the heads and rows of each bundle.
            group: the ranks of the axis.
        """

    @abstractmethod
    def to_rows(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows],
        group: dist.ProcessGroup, is_last: bool,
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

    @abstractmethod
    def abandon(self, group: dist.ProcessGroup) -> None:
        """Discards what a call that raised an error left behind. All ranks call it, so that the next call works."""

    @abstractmethod
    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        """Returns a stream for every other stage, so that the next kernel fills the GPU when one ends; or None."""


# All-to-all collectives
#
# A rank sends one block to each rank: the receiver's heads of the sender's rows, row after row. The rows of a block
# travel by the parts of a shard, directly to their places among all rows, so the exchange itself changes the order of
# heads, rows and tensors. Several tensors travel in one exchange.


class CollectiveHeads(HeadExchange):
    """Head exchange by all-to-all collectives of the process group."""

    name = "all-to-all"
    granule = 1

    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        return _CollectiveArrivals(bundles, stages, group)

    def to_rows(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows],
        group: dist.ProcessGroup, is_last: bool,
    ) -> Departure:  # fmt: skip
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
            [x if kind.copies == 1 else x.repeat_interleave(kind.copies, dim=1) for x in tensors]
            for tensors, kind in zip(bundles, stages[0], strict=True)
        ]
        self._by_dtype = _by_dtype(bundles)
        self._waiting = list(stages)
        self._group = group
        self._next = self._start()

    def _start(self) -> list[ToHeads]:
        if not self._waiting:
            return []
        kinds = self._waiting.pop(0)
        return [
            ToHeads([self._bundles[i] for i in indices], [kinds[i] for i in indices], self._group)
            for indices in self._by_dtype
        ]

    def receive(self) -> list[list[torch.Tensor]]:
        assert self._next, "called more often than there are stages"
        arrived: dict[int, list[torch.Tensor]] = {}
        for indices, heads in zip(self._by_dtype, self._next, strict=True):
            arrived.update(zip(indices, heads.wait(), strict=True))
        self._next = self._start()
        return [arrived[index] for index in range(len(arrived))]


class _CollectiveDeparture(Departure):
    def __init__(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows],
        group: dist.ProcessGroup,
    ) -> None:  # fmt: skip
        self._rows = [
            (ToRows([bundles[i] for i in indices], [kinds[i] for i in indices], group), [targets[i] for i in indices])
            for indices in _by_dtype(bundles)
        ]

    def wait(self) -> None:
        for rows, targets in self._rows:
            rows.wait(targets)


def _by_dtype(bundles: Sequence[Tensors]) -> list[list[int]]:
    """Groups the indices of bundles by dtype; each group travels in one collective."""
    dtypes = dict.fromkeys(tensors[0].dtype for tensors in bundles)
    return [[i for i, tensors in enumerate(bundles) if tensors[0].dtype == dtype] for dtype in dtypes]


class ToHeads:
    """Exchange in flight from (B, all heads, this rank's rows, D) to (B, this rank's heads, all rows, D)."""

    def __init__(self, bundles: Sequence[Tensors], kinds: Sequence[HeadRows], group: dist.ProcessGroup) -> None:
        rank = group.rank()
        self._results: list[list[torch.Tensor]] = []
        incoming: Places = []
        outgoing: Places = []
        with label("send heads"):
            for tensors, kind in zip(bundles, kinds, strict=True):
                by_rank = _Blocks(tensors, kind.head_counts, sum(kind.rows.lengths[rank]))
                for of_tensor, of_block in by_rank.pairs(tensors, kind.heads):
                    of_block.copy_(of_tensor)
                mine = _Blocks(tensors, [kind.head_counts[rank]], kind.rows.total)
                self._results.append(mine.views(0))
                outgoing += _local_places(by_rank, kind, group)
                incoming += _gathered_places(mine, kind, group)
            self._exchange = Exchange(incoming, outgoing, bundles[0][0].new_empty(0, 1), group)

    def wait(self) -> list[list[torch.Tensor]]:
        """Returns the tensors of each bundle."""
        self._exchange.wait()
        return self._results


class ToRows:
    """Exchange in flight from (B, this rank's heads, all rows, D) to (B, all heads, this rank's rows, D)."""

    def __init__(self, bundles: Sequence[Tensors], kinds: Sequence[HeadRows], group: dist.ProcessGroup) -> None:
        rank = group.rank()
        self._kinds = kinds
        self._arriving: list[_Blocks] = []
        incoming: Places = []
        outgoing: Places = []
        with label("send rows"):
            for tensors, kind in zip(bundles, kinds, strict=True):
                mine = _Blocks(tensors, [kind.head_counts[rank]], kind.rows.total, reuse_memory=True)
                if not mine.reuses_memory:
                    for of_block, tensor in zip(mine.views(0), tensors, strict=True):
                        of_block.copy_(tensor)
                by_rank = _Blocks(tensors, kind.head_counts, sum(kind.rows.lengths[rank]))
                self._arriving.append(by_rank)
                outgoing += _gathered_places(mine, kind, group)
                incoming += _local_places(by_rank, kind, group)
            self._exchange = Exchange(incoming, outgoing, bundles[0][0].new_empty(0, 1), group)

    def wait(self, targets: Sequence[Tensors]) -> None:
        """Writes what has arrived to each bundle's `targets`, (B, all heads, this rank's rows, D)."""
        self._exchange.wait()
        with label("place rows"):
            for tensors, kind, by_rank in zip(targets, self._kinds, self._arriving, strict=True):
                for of_tensor, of_block in by_rank.pairs(tensors, kind.heads):
                    of_tensor.copy_(of_block)


def _local_places(blocks: _Blocks, kind: HeadRows, group: dist.ProcessGroup) -> Places:
    """Places of this rank's rows: block r has the heads of rank r."""
    rank, ranks = group.rank(), range(group.size())
    spans = [kind.rows.local_span(rank, part) for part in range(len(kind.rows.lengths[rank]))]
    return [[blocks.rows(peer, span) for peer in ranks] for span in spans]


def _gathered_places(block: _Blocks, kind: HeadRows, group: dist.ProcessGroup) -> Places:
    """Places of all ranks' rows in the one block of this rank's heads."""
    parts, ranks = range(len(kind.rows.lengths[group.rank()])), range(group.size())
    return [[block.rows(0, kind.rows.span(peer, part)) for peer in ranks] for part in parts]


class _Blocks:
    """One block for each rank, one after the other in memory.

    A row of a block is `[heads of one tensor | heads of the next one]` of all batch rows.
    """

    def __init__(self, like: Tensors, head_counts: Sequence[int], rows: int, reuse_memory: bool = False) -> None:
        self._batch = like[0].size(0)
        self._dims = [tensor.size(3) for tensor in like]
        self._counts = head_counts
        self._widths = [self._batch * count * sum(self._dims) for count in head_counts]
        self._length = rows
        self._starts = [0, *accumulate(width * rows for width in self._widths)]
        self.reuses_memory = reuse_memory and len(like) == 1 and like[0].permute(2, 0, 1, 3).is_contiguous()
        if self.reuses_memory:
            self._memory = like[0].permute(2, 0, 1, 3).view(-1)
        else:
            self._memory = like[0].new_empty(self._starts[-1])

    def rows(self, block: int, rows: Span) -> torch.Tensor | None:
        """Returns some rows of a block as (elements, 1), None if they are empty."""
        start, width = self._starts[block], self._widths[block]
        if width == 0 or rows[0] == rows[1]:
            return None
        return self._memory[start + rows[0] * width : start + rows[1] * width].view(-1, 1)

    def views(self, block: int) -> list[torch.Tensor]:
        """Returns the tensors in a block, (B, its heads, rows, D)."""
        count, width = self._counts[block], self._widths[block]
        first = int(self._memory.storage_offset())
        starts = accumulate((self._batch * count * dim for dim in self._dims), initial=self._starts[block])
        return [
            self._memory.as_strided(
                (self._batch, count, self._length, dim), (count * dim, dim, width, 1), first + start
            )
            for dim, start in zip(self._dims, starts, strict=False)
        ]

    def pairs(self, tensors: Tensors, heads: Sequence[Span]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pairs of views, of the tensors (B, all heads, rows, D) and of the blocks, that hold the same elements.

        One pair a tensor covers all blocks if `heads` are equally many and at equal distances.
        """
        count = self._counts[0]
        steps = {span[0] - before[0] for before, span in pairwise(heads)}
        if count == 0 or len(set(self._counts)) > 1 or len(steps) != 1:
            for block, span in enumerate(heads):
                for tensor, view in zip(tensors, self.views(block), strict=True):
                    yield tensor[:, span[0] : span[1]], view
            return
        (step,) = steps
        first = int(self._memory.storage_offset())
        start = 0
        for tensor, dim in zip(tensors, self._dims, strict=True):
            shape = (len(heads), self._batch, count, self._length, dim)
            stride_h = tensor.stride(1)
            of_tensor = tensor.as_strided(
                shape, (step * stride_h, *tensor.stride()), tensor.storage_offset() + heads[0][0] * stride_h
            )
            width = self._widths[0]
            of_block = self._memory.as_strided(shape, (self._length * width, count * dim, dim, width, 1), first + start)
            yield of_tensor, of_block
            start += self._batch * count * dim
