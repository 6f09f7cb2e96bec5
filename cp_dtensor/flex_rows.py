"""The queries of one rank, as FlexAttention of shards counts them: how many there are, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor.flex_keys import kept, shard_lengths
from cp_dtensor.layouts import Layout
from cp_dtensor.tensors import positions_of


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
