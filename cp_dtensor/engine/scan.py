"""States that pass from run to run over all ranks: composition of affine maps in one exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cp_dtensor._torch.autograd import RankFunction
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.plan.scan import ScanPlan


def scanned(
    transition: Tensor, state: Tensor, plan: ScanPlan, ranks: SequenceRanks, initial: Tensor | None, documents: int,
    final: bool,
) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
    """The states that enter this rank's pieces, None for zeros, and the states at the ends of documents if `final`.

    Args:
        transition: (sent pieces, ...): `plan.sent`, each a matrix (..., K, K), a diagonal (..., K) or a number (...).
        state: (sent pieces, ..., K, V).
        initial: (documents, ..., K, V), equal on every rank, or None for zeros.
    """
    entering: list[Tensor | None] = [
        None if initial is None or index is None else initial[index] for index in plan.documents
    ]
    finals: dict[int, Tensor] = {}
    by_rank = None
    if plan.chains:
        flat = transition.unsqueeze(-1).flatten(1)  # (sent pieces, 1) of numbers
        width = flat.size(1)
        sent = torch.cat([flat, state.flatten(1)], 1)
        sent = torch.nn.functional.pad(sent, (0, 0, 0, plan.slots - sent.size(0)))
        by_rank = gathered(sent, ranks)
        for document, chain in plan.chains:
            here = [place for place, link in enumerate(chain) if link.rank == plan.rank]
            current = None if initial is None or document is None else initial[document]
            for link in chain if final else chain[: max(here, default=-1) + 1]:
                if link.rank == plan.rank:
                    entering[link.piece] = current
                row = by_rank[link.rank, link.slot]
                added = row[width:].view(state.shape[1:])
                if current is not None:
                    added = added + _applied(row[:width].view(transition.shape[1:]), current)
                current = added
            if document is not None and current is not None:
                finals[document] = current
    # Backward of the exchange is a collective: each rank's results depend on it, with a gradient of zero at least.
    nothing = [x.flatten()[:0].sum() for x in (by_rank, initial) if x is not None]
    if nothing:
        first, zero = entering[0], torch.stack(nothing).sum()
        zero = zero * zero  # saves a tensor: a checkpoint recomputes up to here, past the exchange
        entering[0] = (state.new_zeros(state.shape[1:]) if first is None else first) + zero
    if not final:
        return entering, None
    ends = [finals.get(each, state.new_zeros(()) if initial is None else initial[each]) for each in range(documents)]
    return entering, torch.stack([end.expand(state.shape[1:]) for end in ends])


def gathered(x: Tensor, ranks: SequenceRanks) -> Tensor:
    """A tensor of every rank (ranks, ...), all-gathered; the gradient is the sum over ranks of those of the results."""
    result: Tensor = _Gathered.apply(x, ranks, False)
    return result


def _applied(transition: Tensor, state: Tensor) -> Tensor:
    """M S, where M is a matrix, a diagonal or a number."""
    if transition.dim() == state.dim():
        return transition @ state
    return transition[(..., *[None] * (state.dim() - transition.dim()))] * state


class _Gathered(RankFunction):
    """All-gather of a tensor of each rank, or its transpose: the sums over ranks, each on its rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: SequenceRanks, transposed: bool) -> Tensor:
        ctx.arguments = ranks, not transposed
        return ranks.reduce_scatter(x) if transposed else ranks.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Gathered.apply(grad, *ctx.arguments), None, None
