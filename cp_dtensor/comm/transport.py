"""The contract of a rotation: how keys and values travel to the ranks that need them, and gradients come home.

A rotation moves rows and knows nothing of attention. One row is one token: the keys and values of some heads and of all
batch rows. What travels when is in the `Plan`, which the rotation makes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Plan
from cp_dtensor.spec.layouts import Span


class Contribution(NamedTuple):
    """What other ranks' queries contribute to the gradients of some of this rank's keys and values."""

    rows: Span
    """Of this rank's shard."""
    stack: torch.Tensor
    """(contributing ranks, rows, row width)."""


class KvTransfers(ABC):
    """Keys and values on their way to this rank. For each step in turn: `receive` if it has a transfer, its tiles,
    `tiles_launched`."""

    @abstractmethod
    def receive(self) -> torch.Tensor:
        """Waits for the next transfer, in the order of the steps.

        Returns:
            (rows, row width). Only rows that this rank wants are filled.
        """

    @abstractmethod
    def tiles_launched(self) -> None:
        """Says that a step's tiles have been launched. What travels under them is in flight when this returns.

        Here transfers can be started that need not come before the tiles, which then don't wait for the host to do so.
        """


class GradTransfers(ABC):
    """Gradients of keys and values on their way home. For each transfer in turn: `buffer`, `send`, `receive`."""

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """(rows, row width), uninitialised, for gradients of the rows that `KvTransfers.receive` returned."""

    @abstractmethod
    def send(self) -> None:
        """Says that the buffer has the gradients of all rows that this rank wanted, and is given away."""

    @abstractmethod
    def receive(self) -> Sequence[Contribution]:
        """Waits for the contributions to this rank's own rows."""


class TransportMethod(ABC):
    """What a caller asks for by name: a rotation, or a way to choose one."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that `set_rotate_method` knows."""

    @abstractmethod
    def for_call(self, shape: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        """The rotation of a call; the same on all ranks of the group."""


class KVTransport(TransportMethod):
    """A way to move rows around a context-parallel axis. A value without state; all state is in the transfers."""

    @property
    @abstractmethod
    def transfers_ahead(self) -> int:
        """Transfers of K/V in flight while a step is computed."""

    @property
    @abstractmethod
    def slows_compute(self) -> bool:
        """Whether transfers take multiprocessors from the attention that runs meanwhile."""

    @property
    @abstractmethod
    def keeps_own_gradients_wide(self) -> bool:
        """Whether the gradients of a rank's own tiles may take longer, so that they need not be rounded before sums."""

    @abstractmethod
    def plan(self, shape: CallSpec, rank: int) -> Plan:
        """The steps of a call on one rank, in the order that suits this rotation."""

    @abstractmethod
    def abandon(self, group: dist.ProcessGroup) -> None:
        """Forgets a call that has raised in the middle, on all ranks alike, so that the next one can work."""

    @abstractmethod
    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        """Starts the transfers of `plan.forward`, or of `plan.backward`.

        Args:
            k: (B, Hkv, T, D), this rank's keys.
            v: (B, Hkv, T, Dv), this rank's values.
            plan: equal on every rank but for what depends on the rank.
            backward: which steps.
            group: the ranks of the axis.
        """

    @abstractmethod
    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        """Prepares the way back of the gradients of `plan.backward`, in the dtype of k and v."""


# Rows, the form in which keys and values travel: one row per token, `[K of some heads | V of the same heads]`.


def row_width(k: torch.Tensor, v: torch.Tensor, heads: Span) -> int:
    """Elements of a row: batch rows x heads x (D + Dv)."""
    return k.size(0) * (heads[1] - heads[0]) * (k.size(3) + v.size(3))


def pack_rows(k: torch.Tensor, v: torch.Tensor, heads: Span, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Some heads of K (B, Hkv, T, D) and V (B, Hkv, T, Dv) as rows (T, width), into `rows` if given."""
    if rows is None:
        rows = k.new_empty(k.size(2), row_width(k, v, heads))
    packed_k, packed_v = unpack_rows(rows, k, v, heads)
    packed_k.copy_(k[:, heads[0] : heads[1]])
    packed_v.copy_(v[:, heads[0] : heads[1]])
    return rows


def pack_stages(
    k: torch.Tensor, v: torch.Tensor, stages: Sequence[Span], rows: torch.Tensor, pitch: int, first_row: int = 0
) -> None:
    """Groups of heads as `pack_rows` has them, one after the other in `rows` (flat), `pitch` rows from one to the next.

    Groups of equal size are packed at once. The last dim of k and v is contiguous. Each group begins at `first_row`.
    """
    sizes = {stop - start for start, stop in stages}
    if len(sizes) == 1:
        (count,) = sizes
        width = row_width(k, v, stages[0])
        start = rows.storage_offset() + first_row * width
        for tensor in (k, v):
            batch, _, length, dim = tensor.shape
            by_stage = (batch, len(stages), count, length, dim)
            stride_b, stride_h, stride_s, _ = tensor.stride()
            source = tensor.as_strided(
                by_stage, (stride_b, count * stride_h, stride_h, stride_s, 1), tensor.storage_offset()
            )
            rows.as_strided(by_stage, (count * dim, pitch * width, dim, width, 1), start).copy_(source)
            start += batch * count * dim
        return
    start = 0
    for heads in stages:
        width = row_width(k, v, heads)
        first = start + first_row * width
        pack_rows(k, v, heads, rows[first : first + k.size(2) * width].view(-1, width))
        start += pitch * width


def unpack_rows(
    rows: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, heads: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of (..., T, width) rows as K (..., B, heads, T, D) and V (..., B, heads, T, Dv).

    Batch and head dims are those of `like_*`, (B, Hkv, any, D or Dv).
    """
    batch, count, dim_k, dim_v = like_k.size(0), heads[1] - heads[0], like_k.size(3), like_v.size(3)
    lead, (row, _), start = rows.shape[:-2], rows.stride()[-2:], rows.storage_offset()
    strides = rows.stride()[:-2]
    # One view each: chains of view operations cost more than the attention of a short sequence.
    k = rows.as_strided((*lead, batch, count, rows.size(-2), dim_k), (*strides, count * dim_k, dim_k, row, 1), start)
    start += batch * count * dim_k
    v = rows.as_strided((*lead, batch, count, rows.size(-2), dim_v), (*strides, count * dim_v, dim_v, row, 1), start)
    return k, v
