"""How a sequence is divided, as small values by which decisions can be looked up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from cp_dtensor.areas import areas_of, areas_of_segments
from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Mask
from cp_dtensor.schedule import GroupSegments, group_segments
from cp_dtensor.tiling import Masking, Tiling
from cp_dtensor.tiling_by_row import tiling_of

BACKWARD_FLOPS = 2.5
"""Operations of backward over those of forward: five matrix products instead of two."""


class Division(ABC):
    """Where all ranks' rows stand in the sequence. Frozen and quick to hash."""

    @abstractmethod
    def groups(self) -> tuple[GroupSegments, ...]:
        """The segments of every rank, by batch groups."""

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, int]:
        """Queries and keys of the whole sequence, which masks speak of; these ranks may have but a part of it."""


@dataclass(frozen=True)
class LayoutDivision(Division):
    """Queries and keys divided by a layout."""

    layout: Layout
    q_len: int
    kv_len: int
    batch_size: int
    world_size: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.kv_len

    def groups(self) -> tuple[GroupSegments, ...]:
        return group_segments(self.layout, self.q_len, self.kv_len, self.batch_size, self.world_size)


@dataclass(frozen=True)
class CallShape:
    """What plans and costs of a call depend on; equal on every rank."""

    division: Division
    mask: Mask
    batch_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    """Bytes of an element."""
    masking: Masking = Masking.BY_SHAPE

    @property
    def tiling(self) -> Tiling:
        """Which tiles each rank computes."""
        return tiling_of(self.division.groups(), self.mask, self.masking, self.division.lengths)

    def flops(self, groups: Sequence[GroupSegments]) -> float:
        """Operations of forward, all ranks together; what is masked does not count."""
        q_len, kv_len = (
            sum(segment.length for segments in by_rank for segment in segments)
            for by_rank in (groups[0].q_by_rank, groups[0].kv_by_rank)
        )
        pairs = float(self.mask.pairs(*self.division.lengths))
        if (q_len, kv_len) != self.division.lengths:  # a part of the sequence: as if it were like the rest
            pairs *= q_len * kv_len / max(self.division.lengths[0] * self.division.lengths[1], 1)
        return 2.0 * self.batch_size * self.q_heads * pairs * (self.head_dim + self.v_head_dim)

    @property
    def busiest_rank(self) -> int | None:
        """The rank whose queries see the most keys; None for cross attention, and where it would take long to say."""
        groups, (q_len, kv_len) = self.division.groups(), self.division.lengths
        segments = (segment for group in groups for by_rank in group.q_by_rank for segment in by_rank)
        if q_len != kv_len or not all(segment.is_contiguous for segment in segments):
            return None
        pairs = [0] * len(groups[0].q_by_rank)
        for group in groups:
            rows = 1 if self.mask.batch_size else group.batch[1] - group.batch[0]
            areas = areas_of(self.mask, q_len, group.batch)
            for rank, seen in enumerate(areas_of_segments(group.q_by_rank, areas)):
                pairs[rank] += rows * seen
        return pairs.index(max(pairs))

    @property
    def head_bytes(self) -> int:
        """Bytes of the key and the value of one token and head, all batch rows."""
        return self.batch_size * (self.head_dim + self.v_head_dim) * self.itemsize
