"""Configuration of attention: what a context, a module or a call decides once."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.validation import Mesh, checked_layout, ranks_and_method
from cp_dtensor.plan.partition import LayoutPartition, SequencePartition
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask


@dataclass(frozen=True)
class AttentionConfig:
    """Partition of a sequence, and the method and KV transport of its ranks."""

    ranks: SequenceRanks
    layout: Layout
    method: str
    """One of `validation.METHODS`."""
    transport: TransportMethod
    """The KV transport of rings."""
    deterministic: bool = False
    """True if results must be equal in every run, also without `torch.use_deterministic_algorithms`."""
    debug: bool = False
    """True if the ranks compare at every call what must agree."""
    mask: Mask | None = None
    """The mask of all calls, combined with the mask of each call."""
    declared_lengths: tuple[int, ...] | None = None
    """Known global lengths: of a context's buffers, or of a module. Other lengths are found by exchange."""
    batch_size: int | None = None
    """The batch size of a context's buffers, where the layout partitions batch rows differently."""
    lengths_vary: bool = False
    """True if the next context of this kind may have other `declared_lengths` and another `mask`, as each batch of
    packed documents has. Compiled code serves all of these contexts, so it reads both when it runs."""
    placed: SequencePartition | None = None
    """The partition of DTensors, by their placements; `layout` is not used then."""

    @classmethod
    def of(
        cls, mesh: Mesh | None, method: str, layout: Layout | None, rotate_method: str | None, *, debug: bool,
        deterministic: bool = False,
    ) -> AttentionConfig:  # fmt: skip
        """The checked configuration of public arguments.

        Raises:
            TypeError, ValueError, NotImplementedError: arguments that do not fit.
        """
        ranks, method = ranks_and_method(mesh, method)
        transport = transport_by_name(rotate_method)
        return cls(ranks, checked_layout(layout), method, transport, bool(deterministic), debug)

    def partition(self, lengths: tuple[int, int], batch_size: int) -> SequencePartition:
        """The partition of a call with these global (queries, keys)."""
        if self.placed is None:
            return LayoutPartition(self.layout, *lengths, batch_size, self.ranks.size)
        if (self.placed.q_len, self.placed.kv_len, self.placed.batch_size) == (*lengths, batch_size):
            return self.placed
        return self.placed.resized(*lengths, batch_size)


def check_batch_size(q: torch.Tensor, config: AttentionConfig) -> None:
    """Refuses batches of another size than the context's buffers, where the layout partitions batch rows differently.

    Raises:
        ValueError: such a batch.
    """
    if config.batch_size not in (None, q.size(0)):
        raise ValueError(
            f"{config.layout} divides batch rows differently, so attention needs the batch size of the "
            f"buffers, {config.batch_size}; got q of shape {tuple(q.shape)}"
        )
