"""How a sequence is divided, as small values by which decisions can be looked up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Mask
from cp_dtensor.schedule import GroupSegments, group_segments


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

    @property
    def head_bytes(self) -> int:
        """Bytes of the key and the value of one token and head, all batch rows."""
        return self.batch_size * (self.head_dim + self.v_head_dim) * self.itemsize
