"""The rows of one rank, as FlexAttention of shards counts them: how many there are, and where they stand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from cp_dtensor import _torch_private
from cp_dtensor.kept_values import KeptValues, capturing
from cp_dtensor.layouts import Layout
from cp_dtensor.tensors import positions_of

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]
"""Something of keys and of values, (B, Hkv, T, D) and (B, Hkv, T, Dv)."""


@dataclass(frozen=True)
class LocalRows:
    """The queries of one rank."""

    layout: Layout
    seq_len: int
    rank: int
    world_size: int
    batch_size: int
    """1 where all batch rows are divided alike."""

    @classmethod
    def of(cls, layout: Layout, seq_len: int, rank: int, world_size: int, batch_size: int) -> LocalRows:
        """Those of a batch."""
        differ = len(layout.batch_groups(batch_size)) > 1
        return cls(layout, seq_len, rank, world_size, batch_size if differ else 1)

    @property
    def count(self) -> int:
        """How many there are in each batch row."""
        return shard_lengths(self.layout, self.seq_len, self.world_size)[self.rank]

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The batch rows that share their positions."""
        return self.layout.batch_groups(self.batch_size)

    def check_batch_size(self, of_mask: int) -> None:
        """Refuses masks that do not have a row for each of the batch, where these differ."""
        if of_mask not in (1, self.batch_size) and len(self.groups) > 1:
            raise ValueError(
                f"{self.layout} divides batch rows differently, so it needs a block mask of one batch row or of "
                f"{self.batch_size}, got one of {of_mask}"
            )

    def positions(self, device: torch.device) -> torch.Tensor:
        """(rows,) int32, or (batch, rows) where batch rows differ; not to be written to."""
        return kept(_positions, self, device)

    def group_positions(self, device: torch.device) -> list[torch.Tensor]:
        """For each batch group (rows,) int64."""
        places = [self.layout.segments(self.seq_len, self.rank, self.world_size, g) for g in range(len(self.groups))]
        return [positions_of(each, device) for each in places]


def _positions(rows: LocalRows, device: torch.device) -> torch.Tensor:
    of_groups = rows.group_positions(device)
    if len(of_groups) == 1:
        return of_groups[0].int()
    spans = zip(of_groups, rows.groups, strict=True)
    return torch.cat([positions.expand(stop - start, -1) for positions, (start, stop) in spans]).int()


@lru_cache(maxsize=256)
def shard_lengths(layout: Layout, seq_len: int, world_size: int) -> tuple[int, ...]:
    """The number of tokens of each rank."""
    return tuple(layout.local_length(seq_len, rank, world_size) for rank in range(world_size))


def most_tokens(layout: Layout, local: int, rank: int, world_size: int) -> int:
    """The length of the longest sequence of which a rank owns so many tokens.

    >>> from cp_dtensor.layouts import HeadTail
    >>> most_tokens(HeadTail(), 2, 0, 2)  # of 4 tokens rank 0 has 1 + 1, of 5 it has 2 + 1
    4
    """
    if layout.only_length is not None:
        return layout.only_length
    length = 1
    while layout.local_length(length, rank, world_size) <= local:
        length *= 2
    low = length // 2  # shares grow with the length in every layout
    while length - low > 1:
        middle = (low + length) // 2
        low, length = (low, middle) if layout.local_length(middle, rank, world_size) > local else (middle, length)
    return low


def kept(make: Callable[..., T], *key: Any) -> T:
    """`make(*key)`, a few small tensors, remembered; in a capture, what is not yet is computed by the graph."""
    value = _kept.get((make, *key))
    if value is None:
        if capturing():
            return make(*key)
        value = _kept.add((make, *key), _torch_private.prepared(lambda: make(*key)))
    return value  # type: ignore[return-value]


_kept = KeptValues[object](most=32)  # of a million tokens each has megabytes
