"""States that pass from run to run over all ranks: composition of affine maps in one exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.plan.scan import ScanPlan


def scanned(
    transition: Tensor, state: Tensor, plan: ScanPlan, groups: tuple[str, ...], initial: Tensor | None, documents: int,
    final: bool,
) -> tuple[list[Tensor | None], Tensor | None]:  # fmt: skip
    """The states that enter this rank's pieces, None for zeros, and the states at the ends of documents if `final`.

    Args:
        transition: (sent pieces, ...): `plan.sent`, each a matrix (..., K, K), a diagonal (..., K) or a number (...).
        state: (sent pieces, ..., K, V).
        groups: names of the process groups.
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
        by_rank = torch.ops.cp_dtensor.gathered(sent, list(groups))
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
        first = entering[0]
        entering[0] = (state.new_zeros(state.shape[1:]) if first is None else first) + sum(nothing)
    if not final:
        return entering, None
    ends = [finals.get(each, state.new_zeros(()) if initial is None else initial[each]) for each in range(documents)]
    return entering, torch.stack([end.expand(state.shape[1:]) for end in ends])


def _applied(transition: Tensor, state: Tensor) -> Tensor:
    """M S, where M is a matrix, a diagonal or a number."""
    if transition.dim() == state.dim():
        return transition @ state
    return transition[(..., *[None] * (state.dim() - transition.dim()))] * state


# The exchange


def _gathered(x: Tensor, groups: list[str]) -> Tensor:
    return _ranks(groups).gather(x)


def _reduce_scattered(x: Tensor, groups: list[str]) -> Tensor:
    return _ranks(groups).reduce_scatter(x)


def _ranks(groups: list[str]) -> SequenceRanks:
    return SequenceRanks.over([_torch.group_of_name(name) for name in groups])


def _keep_groups(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.groups = inputs


def _defined() -> torch.library.Library:
    def gradient_by(name: str) -> Callable[..., tuple[Tensor, None]]:
        return lambda ctx, grad: (getattr(torch.ops.cp_dtensor, name)(grad, ctx.groups), None)

    library = torch.library.Library("cp_dtensor", "FRAGMENT")
    for name, implementation, transposed, fake in (
        ("gathered", _gathered, "reduce_scattered", lambda x, groups: x.new_empty(_ranks(groups).size, *x.shape)),
        ("reduce_scattered", _reduce_scattered, "gathered", lambda x, groups: x.new_empty(x.shape[1:])),
    ):
        library.define(f"{name}(Tensor x, str[] groups) -> Tensor")
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cp_dtensor::{name}", fake, lib=library)
        torch.library.register_autograd(
            f"cp_dtensor::{name}", gradient_by(transposed), setup_context=_keep_groups, lib=library
        )
    return library


_library = _defined()  # operators exist as long as this does
