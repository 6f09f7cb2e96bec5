"""The ranks that share a sequence, over one mesh axis or two."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor._torch import all_gather_single, has_cpu_backend, reduce_scatter_single
from cp_dtensor.comm.faults import raise_peer_error


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks along an outer axis and perhaps an inner one: rank = outer rank * inner size + inner rank.

    A collective of all ranks goes over one axis after the other.
    """

    outer: dist.ProcessGroup
    inner: dist.ProcessGroup | None = None
    members: frozenset[int] = field(default=frozenset(), compare=False)
    """Global ranks of all of them; empty if unknown."""
    rank: int = field(init=False, compare=False)
    """This rank's place among those that share the sequence."""
    size: int = field(init=False, compare=False)
    """Number of ranks that share the sequence."""
    inner_size: int = field(init=False, compare=False)
    """Ranks of the inner axis, 1 if there is none."""

    @classmethod
    def over(cls, groups: Sequence[dist.ProcessGroup]) -> SequenceRanks:
        """The ranks of one axis or two, the outer axis first."""
        return cls(groups[0], groups[1] if len(groups) > 1 else None)

    def __post_init__(self) -> None:
        inner_rank, inner_size = (0, 1) if self.inner is None else (self.inner.rank(), self.inner.size())
        object.__setattr__(self, "rank", self.outer.rank() * inner_size + inner_rank)
        object.__setattr__(self, "size", self.outer.size() * inner_size)
        object.__setattr__(self, "inner_size", inner_size)

    @property
    def have_cpu_backend(self) -> bool:
        """True if CPU tensors can be gathered."""
        return all(map(has_cpu_backend, self._groups))

    @property
    def _groups(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.outer,) if self.inner is None else (self.inner, self.outer)

    def global_ranks(self) -> set[int]:
        """The global ranks of `members`; if they are unknown, those on this rank's axes."""
        return set(self.members) or {rank for group in self._groups for rank in dist.get_process_group_ranks(group)}

    def gather(self, mine: torch.Tensor, what: str = "an all-gather") -> torch.Tensor:
        """All-gathers (...), of equal shape on every rank, to (ranks, ...); `what` names the exchange in errors."""
        gathered = mine.contiguous()
        for group in self._groups:
            of_group = gathered.new_empty(group.size(), *gathered.shape)
            try:
                all_gather_single(of_group.view(-1), gathered.view(-1), group=group)
            except RuntimeError as error:
                raise_peer_error(error, group, what)
            gathered = of_group
        return gathered.view(self.size, *mine.shape)

    def gather_integers(self, mine: int | list[int], device: torch.device) -> list[Any]:
        """All-gathers equally many integers of every rank.

        They travel in CPU tensors if the groups have a CPU backend, else in tensors on `device`, which is waited for.
        """
        where = "cpu" if self.have_cpu_backend else device  # whatever the user's default device is
        integers = torch.tensor(mine, dtype=torch.int64, device=where)
        return self.gather(integers, "a comparison of calls").tolist()

    def gather_objects(self, mine: Any, device: torch.device) -> list[Any]:
        """One picklable object of every rank. Two gathers of integers."""
        pickled = pickle.dumps(mine)
        longest = max(self.gather_integers(len(pickled), device))
        gathered = self.gather_integers(list(pickled.ljust(longest, b"\0")), device)
        return [pickle.loads(bytes(each)) for each in gathered]  # pickle ignores the padding

    def reduce_scatter(self, blocks: torch.Tensor) -> torch.Tensor:
        """Sums (ranks, ...) over the ranks, and returns this rank's block (...)."""
        mine = blocks.contiguous()
        for group in reversed(self._groups):
            block = mine.new_empty(mine.numel() // group.size())
            try:
                reduce_scatter_single(block, mine.view(-1), group=group)
            except RuntimeError as error:
                raise_peer_error(error, group, "a sum over ranks")
            mine = block
        return mine.view(blocks.shape[1:])
