"""What a context, a module or a call decides once about its attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.validation import Mesh, checked_layout, ranks_and_method
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask, mask_intersection


@dataclass(frozen=True)
class Splitting:
    """How a caller wants a sequence to be divided and the work to be spread."""

    layout: Layout
    method: str
    """One of `arguments.METHODS`."""
    transport: TransportMethod
    """How K/V travel in rings."""
    deterministic: bool = False
    """Whether results must be the same in every run, whatever torch's switch says."""


@dataclass(frozen=True)
class AttentionConfig:
    """How a sequence is divided and the work is spread: what a context, a module or a call decides once."""

    ranks: SequenceRanks
    splitting: Splitting
    declared_lengths: tuple[int, ...] | None = None
    """Global lengths known beforehand, of a context's buffers or a module; others are found by exchange."""
    debug: bool = False
    batch_size: int | None = None
    """Of the buffers of a context, where the layout divides batch rows differently."""
    lengths_vary: bool = False
    """Whether the next context of this kind may have other `declared_lengths` and another `mask`, as each batch of
    packed documents has: compiled code, which serves all of them, must look these up when it runs."""
    mask: Mask | None = None
    """What all attention is masked with, besides what calls ask for."""

    @classmethod
    def of(
        cls, mesh: Mesh, method: str, layout: Layout | None, rotate_method: str | None, *, debug: bool,
        deterministic: bool = False,
    ) -> AttentionConfig:  # fmt: skip
        """From what callers pass.

        Raises:
            TypeError, ValueError, NotImplementedError: arguments that do not fit.
        """
        ranks, method = ranks_and_method(mesh, method)
        transport = transport_by_name(rotate_method)
        return cls(ranks, Splitting(checked_layout(layout), method, transport, bool(deterministic)), debug=debug)

    @property
    def layout(self) -> Layout:
        """Which rank owns which tokens."""
        return self.splitting.layout


def check_batch_size(q: torch.Tensor, settings: AttentionConfig) -> None:
    """Refuses batches of another size than the region's buffers, where the layout divides batch rows differently."""
    if settings.batch_size not in (None, q.size(0)):
        raise ValueError(
            f"{settings.layout} divides batch rows differently, so attention needs the batch size of the "
            f"buffers, {settings.batch_size}; got q of shape {tuple(q.shape)}"
        )


def with_context_mask(ambient: Mask | None, mask: Mask) -> Mask:
    """What a call's mask and that of its settings, if they have one, show together."""
    return mask if ambient is None else mask_intersection(ambient, mask)
