"""Random inputs that each rank draws by itself, head by head, so that no rank holds the whole sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cp_dtensor import Layout
from cp_dtensor.tools.bench.cases import Case

Select = Callable[[torch.Tensor], torch.Tensor]
"""From all tokens of a head, (B, S, D), to the tokens of a rank."""


@dataclass(frozen=True)
class Inputs:
    """(B, heads, S, D) each, views of (B, S, heads, D) memory as in models."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    def contiguous(self) -> Inputs:
        """Returns the same numbers in (B, heads, S, D) memory."""
        return Inputs(*(tensor.contiguous() for tensor in (self.q, self.k, self.v, self.grad_out)))

    def with_expanded_kv(self) -> Inputs:
        """Returns the same problem without GQA: each K/V head repeated for the query heads that read it."""
        group = self.q.size(1) // self.k.size(1)
        k, v = (x.transpose(1, 2).repeat_interleave(group, 2).transpose(1, 2) for x in (self.k, self.v))
        return Inputs(self.q, k, v, self.grad_out)


@dataclass(frozen=True)
class Source:
    """Random numbers, equal on all ranks with the same kind of device."""

    seed: int
    device: torch.device

    def head(self, case: Case, name: str, head: int) -> torch.Tensor:
        """All tokens of one head of "q", "k", "v" or "grad_out": (B, S, D), normal, rounded to the case's dtype."""
        stream = ("q", "k", "v", "grad_out").index(name)
        generator = torch.Generator(self.device).manual_seed((self.seed * 4 + stream) * 100_003 + head)
        shape = (case.batch, case.seq_len, case.head_dim)
        return torch.randn(shape, device=self.device, generator=generator).to(getattr(torch, case.dtype))

    def inputs(self, case: Case, select: Select) -> Inputs:
        """Returns the selected tokens of all heads."""
        counts = {"q": case.heads.q, "k": case.heads.kv, "v": case.heads.kv, "grad_out": case.heads.q}
        return Inputs(**{name: self._tensor(case, name, count, select) for name, count in counts.items()})

    def _tensor(self, case: Case, name: str, heads: int, select: Select) -> torch.Tensor:
        first = select(self.head(case, name, 0))
        tensor = first.new_empty(case.batch, first.size(1), heads, case.head_dim)
        tensor[:, :, 0] = first
        for head in range(1, heads):
            tensor[:, :, head] = select(self.head(case, name, head))
        return tensor.transpose(1, 2)


class Shards(ABC):
    """Tokens of each rank, in local order. A value: methods with equal shards share their inputs."""

    @abstractmethod
    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        """Returns the function that selects a rank's tokens."""


@dataclass(frozen=True)
class AllTokens(Shards):
    """The whole sequence."""

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        return all_tokens


def all_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Selects all tokens."""
    return tokens


@dataclass(frozen=True)
class ByLayout(Shards):
    """The shards of a layout."""

    name: str | None = None
    """Name of the layout; None for that of the case."""

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        return shard_of(case.layout_value(self.name), case, rank, world_size, device)


def shard_of(layout: Layout, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
    """Returns the function that selects the tokens that a layout assigns to a rank."""
    groups = layout.batch_groups(case.batch)
    positions = [
        torch.tensor(
            [
                position
                for segment in layout.segments(case.seq_len, rank, world_size, group)
                for position in segment.positions()
            ],
            dtype=torch.int64,
            device=device,
        )
        for group in range(len(groups))
    ]

    def select(tokens: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [tokens[slice(*rows)].index_select(1, index) for rows, index in zip(groups, positions, strict=True)]
        )

    return select
