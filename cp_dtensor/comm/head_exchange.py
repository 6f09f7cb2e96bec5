"""Head exchange of Ulysses attention: its interface, and an implementation by all-to-all collectives.

Before attention, a rank exchanges all heads of its rows for some heads of all rows; after attention, the reverse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor._torch.tensors import NO_LABEL, is_profiled
from cp_dtensor.comm.collective import Exchange
from cp_dtensor.comm.transport import HeadBlocks
from cp_dtensor.plan.plan import RoutePiece
from cp_dtensor.plan.tiling import GatheredRows
from cp_dtensor.spec.layouts import Span

Bundle = Sequence[torch.Tensor]
"""Tensors that share heads, rows and dtype."""


class HeadRoute(NamedTuple):
    """The rows of one rank in an exchange. A block of rows is in memory as `HeadBlocks`, in units of `head_width`."""

    local: tuple[RoutePiece, ...]
    """This rank's rows: block r has the heads of rank r."""
    gathered: tuple[RoutePiece, ...]
    """All ranks' rows, in the one block of this rank's heads."""
    rows: int
    """Rows of this rank's shard."""
    slots: int
    """Number of collectives until all parts have travelled, those of bundles before this one included."""


@dataclass(frozen=True)
class HeadRows:
    """The rows and heads of one kind of tensors on every rank, before and after an exchange."""

    rows: GatheredRows
    """Before, a rank has the rows of its shard; after, those of all ranks."""
    heads: tuple[Span, ...]
    """Before, a rank has all heads; after, `heads[rank]`, counted after replication."""
    copies: int = 1
    """Replicas of each head (KV-head replication, see `HeadPartition`)."""

    @cached_property
    def head_counts(self) -> list[int]:
        """Heads of each rank after an exchange."""
        return [stop - start for start, stop in self.heads]

    @cached_property
    def _routes(self) -> dict[tuple[int, int], HeadRoute]:
        return {}

    def route(self, rank: int, first_slot: int) -> HeadRoute:
        """Return the route of a rank, whose first collective is `first_slot`."""
        if (rank, first_slot) in self._routes:
            return self._routes[rank, first_slot]
        rows, local, gathered = self.rows, list[RoutePiece](), list[RoutePiece]()
        length, mine, before = sum(rows.lengths[rank]), self.head_counts[rank], 0
        for peer, count in enumerate(self.head_counts):
            for part in range(len(rows.lengths[rank])):
                start, stop = rows.local_span(rank, part)
                span = before * length + start * count, before * length + stop * count
                local.append(RoutePiece(first_slot + part, peer, span))
            for part in range(len(rows.lengths[peer])):
                start, stop = rows.span(peer, part)
                gathered.append(RoutePiece(first_slot + part, peer, (start * mine, stop * mine)))
            before += count
        local, gathered = ([each for each in pieces if each.rows[0] < each.rows[1]] for pieces in (local, gathered))
        found = HeadRoute(tuple(local), tuple(gathered), length, first_slot + rows.most_parts)
        return self._routes.setdefault((rank, first_slot), found)


Kinds = Sequence[HeadRows]
"""The heads and rows of each bundle."""
Arrivals = Callable[[], list[list[torch.Tensor]]]
"""Waits for the next stage, and starts the one after it. Returns for each bundle its tensors, (B, this rank's heads of
the stage, all rows, D)."""


class HeadExchange(ABC):
    """A way to exchange rows for heads. A frozen value without state."""

    granule: int
    """Number of bytes of which a row of one head is a multiple."""

    @abstractmethod
    def to_heads(self, bundles: Sequence[Bundle], stages: Sequence[Kinds], group: dist.ProcessGroup) -> Arrivals:
        """Start to exchange this rank's rows of all heads for all rows of this rank's heads.

        Args:
            bundles: tensors (B, all heads, this rank's rows, D); those of a bundle share heads, rows and dtype.
            stages: for each stage, the heads and rows of each bundle.
            group: the ranks of the axis.
        """

    @abstractmethod
    def to_rows(
        self, bundles: Sequence[Bundle], targets: Sequence[Bundle], kinds: Kinds, group: dist.ProcessGroup,
        is_last: bool,
    ) -> Callable[[], None]:  # fmt: skip
        """Start to exchange all rows of one stage's heads for all heads of this rank's rows.

        Args:
            bundles: tensors (B, this rank's heads of the stage, all rows, D).
            targets: for each, (B, all heads after replication, this rank's rows, D), in memory (B, rows, heads, D);
                only the stage's heads are written.
            kinds: the heads and rows of each bundle.
            group: the ranks of the axis.
            is_last: True if no attention runs at the same time.

        Returns:
            A function that waits until the heads are in the targets (on a GPU: for work launched later).
        """

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        """Return a stream for every other stage, so that the next kernel fills the GPU when one ends; or None."""
        return None


# All-to-all collectives
#
# A rank sends one block to each rank: the receiver's heads of the sender's rows, row after row. The rows of each part
# of a shard travel directly to their places among all rows. Several tensors travel in one exchange.


class CollectiveHeads(HeadExchange):
    """Head exchange by all-to-all collectives of the process group, one for each dtype."""

    granule = 1

    def to_heads(self, bundles: Sequence[Bundle], stages: Sequence[Kinds], group: dist.ProcessGroup) -> Arrivals:
        bundles, waiting, rank = list(bundles), deque(stages), group.rank()
        for index, kind in enumerate(stages[0]):
            if kind.copies > 1:
                bundles[index] = [x.repeat_interleave(kind.copies, dim=1) for x in bundles[index]]
        in_flight: list[tuple[list[Exchange], list[list[torch.Tensor]]]] = []

        def start() -> None:
            """Start the exchanges of the next stage."""
            kinds = waiting.popleft()
            exchanges: list[Exchange] = []
            arriving: list[list[torch.Tensor]] = [[]] * len(kinds)
            for indices in _by_dtype(bundles):
                incoming, outgoing, slots = [], [], 0
                with label("send heads") if is_profiled() else NO_LABEL:
                    for index in indices:
                        tensors, kind = bundles[index], kinds[index]
                        local, gathered, rows, slots = kind.route(rank, slots)
                        by_rank = HeadBlocks(tensors, kind.head_counts, rows)
                        by_rank.write(tensors, kind.heads)
                        mine = HeadBlocks(tensors, [kind.head_counts[rank]], kind.rows.total)
                        arriving[index] = mine.tensors(0)
                        outgoing.append((by_rank.memory, by_rank.head_width, local))
                        incoming.append((mine.memory, mine.head_width, gathered))
                    exchanges.append(Exchange(incoming, outgoing, slots, group))
            in_flight.append((exchanges, arriving))

        def receive() -> list[list[torch.Tensor]]:
            exchanges, arrived = in_flight.pop()
            for exchange in exchanges:
                exchange.wait()
            if waiting:
                start()
            return arrived

        start()
        return receive

    def to_rows(
        self, bundles: Sequence[Bundle], targets: Sequence[Bundle], kinds: Kinds, group: dist.ProcessGroup,
        is_last: bool,
    ) -> Callable[[], None]:  # fmt: skip
        rank = group.rank()
        in_flight: list[tuple[Exchange, list[tuple[Bundle, HeadRows, HeadBlocks]]]] = []
        for indices in _by_dtype(bundles):
            incoming, outgoing, arriving, slots = [], [], [], 0
            with label("send rows") if is_profiled() else NO_LABEL:
                for index in indices:
                    tensors, kind = bundles[index], kinds[index]
                    local, gathered, rows, slots = kind.route(rank, slots)
                    in_rows, count = tensors[0].permute(2, 0, 1, 3), kind.head_counts[rank]
                    memory = in_rows.view(-1) if len(tensors) == 1 and in_rows.is_contiguous() else None
                    mine = HeadBlocks(tensors, [count], kind.rows.total, memory)
                    if memory is None:
                        mine.write(tensors, [(0, count)])
                    by_rank = HeadBlocks(tensors, kind.head_counts, rows)
                    arriving.append((targets[index], kind, by_rank))
                    outgoing.append((mine.memory, mine.head_width, gathered))
                    incoming.append((by_rank.memory, by_rank.head_width, local))
                in_flight.append((Exchange(incoming, outgoing, slots, group), arriving))

        def wait() -> None:
            for exchange, arriving in in_flight:
                exchange.wait()
                with label("place rows") if is_profiled() else NO_LABEL:
                    for targets, kind, by_rank in arriving:
                        for of_target, of_block in by_rank.pairs(targets, kind.heads):
                            of_target.copy_(of_block)

        return wait


def _by_dtype(bundles: Sequence[Bundle]) -> list[list[int]]:
    """Group the indices of bundles by dtype; each group travels in one collective."""
    indices: dict[torch.dtype, list[int]] = {}
    for index, tensors in enumerate(bundles):
        indices.setdefault(tensors[0].dtype, []).append(index)
    return list(indices.values())
