"""The ranks that share a sequence: those of one mesh axis, or of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor._torch import all_gather_single, has_cpu_backend, reduce_scatter_single


@dataclass(frozen=True)
class SequenceRanks:
    """Rank = outer rank * inner size + inner rank. Collectives of all of them go over one axis after the other."""

    outer: dist.ProcessGroup
    inner: dist.ProcessGroup | None = None
    members: frozenset[int] = field(default=frozenset(), compare=False)
    """All of them, as the default process group counts them, where it is known; else those on this rank's axes."""
    rank: int = field(init=False, compare=False)
    """This rank's place among those that share the sequence."""
    size: int = field(init=False, compare=False)
    """Number of ranks that share the sequence."""
    inner_size: int = field(init=False, compare=False)
    """Ranks of the inner axis, 1 if there is none."""

    @classmethod
    def over(cls, groups: Sequence[dist.ProcessGroup]) -> SequenceRanks:
        """Over one axis or two, the outer one first."""
        return cls(groups[0], groups[1] if len(groups) > 1 else None)

    def __post_init__(self) -> None:
        inner_rank, inner_size = (0, 1) if self.inner is None else (self.inner.rank(), self.inner.size())
        object.__setattr__(self, "rank", self.outer.rank() * inner_size + inner_rank)
        object.__setattr__(self, "size", self.outer.size() * inner_size)
        object.__setattr__(self, "inner_size", inner_size)

    @property
    def have_cpu_backend(self) -> bool:
        """Whether CPU tensors can be gathered."""
        return all(has_cpu_backend(group) for group in self._groups)

    @property
    def _groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.outer,) if self.inner is None else (self.inner, self.outer)

    def global_ranks(self) -> set[int]:
        """The ranks that share the sequence, as the default process group counts them."""
        return set(self.members) or {rank for group in self._groups for rank in dist.get_process_group_ranks(group)}

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """(...) of equal shape on every rank to (ranks, ...)."""
        gathered = mine.contiguous()
        for group in self._groups:
            everyone = gathered.new_empty(group.size(), *gathered.shape)
            all_gather_single(everyone.view(-1), gathered.view(-1), group=group)
            gathered = everyone
        return gathered.view(self.size, *mine.shape)

    def gather_integers(self, mine: int | list[int], device: torch.device) -> list[Any]:
        """What every rank says, equally many on all: on the host where the groups have a CPU backend.

        Elsewhere it travels by way of `device`, which is waited for.
        """
        where = "cpu" if self.have_cpu_backend else device  # whatever the user's default device is
        return self.gather(torch.tensor(mine, dtype=torch.int64, device=where)).tolist()

    def reduce_scatter(self, blocks: torch.Tensor) -> torch.Tensor:
        """(ranks, ...) to this rank's (...), summed over the ranks."""
        home = blocks.contiguous()
        for group in reversed(self._groups):
            block = home.new_empty(home.numel() // group.size())
            reduce_scatter_single(block, home.view(-1), group=group)
            home = block
        return home.view(blocks.shape[1:])
