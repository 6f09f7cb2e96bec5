"""How a sequence is divided, as small values by which decisions can be looked up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Causal, Mask
from cp_dtensor.schedule import GroupSegments, group_segments

BACKWARD_FLOPS = 2.5
"""Operations of backward over those of forward: five matrix products instead of two."""


class Division(ABC):
    """Where all ranks' rows stand in the sequence. Frozen and quick to hash."""

    @abstractmethod
    def groups(self) -> tuple[GroupSegments, ...]:
        """The segments of every rank, by batch groups."""


@dataclass(frozen=True)
class LayoutDivision(Division):
    """Queries and keys divided by a layout."""

    layout: Layout
    q_len: int
    kv_len: int
    batch_size: int
    world_size: int

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

    def flops(self, groups: Sequence[GroupSegments]) -> float:
        """Operations of forward, all ranks together; masked halves do not count."""
        q_len, kv_len = (
            sum(segment.length for segments in by_rank for segment in segments)
            for by_rank in (groups[0].q_by_rank, groups[0].kv_by_rank)
        )
        half = 0.5 if self.mask == Causal() else 1.0
        return 2.0 * half * self.batch_size * self.q_heads * q_len * kv_len * (self.head_dim + self.v_head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of the key and the value of one token and head, all batch rows."""
        return self.batch_size * (self.head_dim + self.v_head_dim) * self.itemsize
