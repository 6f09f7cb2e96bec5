"""The exchange of Ulysses: from all heads of some rows to some heads of all rows, and back.

What goes to a rank is one block: its heads of this rank's rows, row after row, `[one tensor's heads | the next one's]`
of all batch rows. Blocks travel by the parts of a shard, straight to where they stand among all rows; so the order of
heads, of rows and of tensors changes with the exchange and takes no copies of its own. Several tensors travel in one
exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist

from cp_dtensor._torch_private import label
from cp_dtensor.layouts import Span
from cp_dtensor.rotation.exchange import Exchange, Places
from cp_dtensor.schedule import GatheredRows

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class HeadRows:
    """What the ranks of an axis have of one kind of tensors before and after an exchange."""

    rows: GatheredRows
    """Before, a rank has those of its shard; after, those of all ranks."""
    heads: tuple[Span, ...]
    """Before, a rank has all of them; after, `heads[rank]`, counted in units: heads, or copies of heads."""
    copies: int = 1
    """Units that each head is copied to on its way (see `HeadDivision`)."""

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
