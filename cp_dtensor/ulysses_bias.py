"""The bias of queries under Ulysses: its rows travel with the queries, to the heads that read them and back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_dtensor.extras import bias_part
from cp_dtensor.rotation.head_exchange import CollectiveHeads
from cp_dtensor.rotation.heads import HeadRows


class StageBias:
    """The bias of some heads of all rows, of one stage, and what the tiles add to its gradient.

    Memory: all ranks' rows of the bias of this rank's heads (of all heads, if they are alike).
    """

    def __init__(self, bias: torch.Tensor, of_queries: HeadRows, group: dist.ProcessGroup) -> None:
        """A collective, unless all rows are alike: `bias` (B or 1, H or 1, S or 1, T or 1)."""
        self._group, self._kind = group, of_queries
        self._everyone = (0, bias.size(0))
        self._mine = of_queries.heads[group.rank()]
        self._travels = _rows_differ(bias, of_queries)
        if not self._travels:
            self.bias = bias_part(bias, self._everyone, self._mine, None)
            return
        rows = sum(of_queries.rows.lengths[group.rank()])
        bias = bias.expand(-1, -1, rows, -1)
        as_numbers = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
        ((arrived,),) = CollectiveHeads().to_heads([[as_numbers]], [[self._towards(bias)]], group).receive()
        self.bias = arrived.view(torch.bool) if bias.dtype == torch.bool else arrived

    def add_home(self, grad: torch.Tensor, total: torch.Tensor) -> None:
        """Adds the stage's gradient to this rank's rows of `total`. What is alike for all rows or heads is this rank's
        share, and the sum over ranks is the gradient. A collective, unless all rows are alike."""
        if not self._travels:
            bias_part(total, self._everyone, self._mine, None).add_(grad)
            return
        ranks = self._group.size()
        heads = total.size(1)
        home = self._kind if heads > 1 else HeadRows(self._kind.rows, tuple((rank, rank + 1) for rank in range(ranks)))
        rows = sum(self._kind.rows.lengths[self._group.rank()])
        units = heads if heads > 1 else ranks
        target = grad.new_zeros(grad.size(0), rows, units, grad.size(3)).transpose(1, 2)
        CollectiveHeads().to_rows([[grad]], [[target]], [home], self._group, True).wait()
        if heads == 1:
            target = target.sum(1, keepdim=True)
        total.add_(target if total.size(2) == rows else target.sum(2, keepdim=True))

    def _towards(self, bias: torch.Tensor) -> HeadRows:
        """Where rows go: those of a head to its reader, those of all heads to every rank."""
        return self._kind if bias.size(1) > 1 else HeadRows(self._kind.rows, ((0, 1),) * self._group.size())


def _rows_differ(bias: torch.Tensor, of_queries: HeadRows) -> bool:
    """Whether the bias has rows, alike on every rank: of one local query it cannot be seen."""
    return bias.size(2) != 1 or any(sum(lengths) == 1 for lengths in of_queries.rows.lengths)
