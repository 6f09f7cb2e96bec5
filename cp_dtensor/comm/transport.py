"""Interface of KV transports, and the packing of keys and values into rows.

A transport moves rows between the ranks of a mesh axis and does no arithmetic. A row is one token: its keys and values,
for some heads and all batch rows. The `TilePlan` of a call, which the transport makes, says which rows travel when.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.spec.layouts import Span


class Contribution(NamedTuple):
    """Gradients of some of this rank's keys and values, from the queries of other ranks."""

    rows: Span
    """Rows of this rank's shard."""
    stack: torch.Tensor
    """(contributing ranks, rows, row width)."""


class KvTransfers(ABC):
    """The K/V transfers of one pass. For each step call `receive` if it has a transfer, compute its tiles, and call
    `tiles_launched`."""

    @abstractmethod
    def receive(self) -> torch.Tensor:
        """Waits for the transfer of the next step that has one.

        Returns:
            (rows, row width). Rows that this rank's queries do not attend to are uninitialised.
        """

    @abstractmethod
    def tiles_launched(self) -> None:
        """Starts transfers that overlap with the tiles just launched and need not be submitted before them."""


class GradTransfers(ABC):
    """The transfers of dK/dV to the ranks that own the rows. For each transfer call `buffer`, `send`, `receive`."""

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """(rows, row width), uninitialised, for gradients of the rows that `KvTransfers.receive` returned."""

    @abstractmethod
    def send(self) -> None:
        """Sends the buffer, in which the gradients of all rows that this rank received are complete by now."""

    @abstractmethod
    def receive(self) -> Sequence[Contribution]:
        """Waits for other ranks' contributions to the gradients of this rank's rows."""


class TransportMethod(ABC):
    """A value of `rotate_method`: a KV transport, or a rule that chooses one for each call."""

    name: str
    """The value of `rotate_method` that selects it."""

    @abstractmethod
    def for_call(self, shape: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        """Returns the transport of a call, equal on all ranks of the group."""


class KVTransport(TransportMethod):
    """A way to move K/V between the ranks of a mesh axis. A frozen value: the state of a call is in its transfers."""

    transfers_ahead: int
    """K/V transfers in flight while a step is computed."""
    slows_compute: bool
    """True if transfers run on multiprocessors, which they take from attention kernels."""
    keeps_own_gradients_wide: bool
    """True if gradients of tiles against the rank's own K/V stay float32 until they are summed (a slower kernel)."""

    @abstractmethod
    def plan(self, shape: CallSpec, rank: int) -> TilePlan:
        """Returns the plan of a call on one rank, with its steps in the order that suits this transport."""

    @abstractmethod
    def abandon(self, group: dist.ProcessGroup) -> None:
        """Discards what a call that raised an error left behind. All ranks call it, so that the next call works."""

    @abstractmethod
    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        """Starts the K/V transfers of `plan.forward`, or of `plan.backward`.

        Args:
            k: (B, Hkv, T, D), this rank's keys.
            v: (B, Hkv, T, Dv), this rank's values.
            plan: this rank's plan. All ranks' plans have the same steps and differ in tiles and rows only.
            backward: True for the steps of `plan.backward`.
            group: the ranks of the axis.
        """

    @abstractmethod
    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, group: dist.ProcessGroup) -> GradTransfers:
        """Prepares the dK/dV transfers of `plan.backward`, in the dtype of k and v."""


# Rows: one per token, `[K of some heads | V of the same heads]`


def row_width(k: torch.Tensor, v: torch.Tensor, heads: Span) -> int:
    """Returns the elements of a row: batch rows x heads x (D + Dv)."""
    return k.size(0) * (heads[1] - heads[0]) * (k.size(3) + v.size(3))


def pack_rows(k: torch.Tensor, v: torch.Tensor, heads: Span, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Packs some heads of K (B, Hkv, T, D) and V (B, Hkv, T, Dv) into `rows` (T, width), by default new memory."""
    if rows is None:
        rows = k.new_empty(k.size(2), row_width(k, v, heads))
    packed_k, packed_v = unpack_rows(rows, k, v, heads)
    packed_k.copy_(k[:, heads[0] : heads[1]])
    packed_v.copy_(v[:, heads[0] : heads[1]])
    return rows


def pack_stages(
    k: torch.Tensor, v: torch.Tensor, stages: Sequence[Span], rows: torch.Tensor, pitch: int, first_row: int = 0
) -> None:
    """Packs each group of heads as `pack_rows` does, one group after the other in one flat tensor.

    Groups of equal size take one copy of K and one of V.

    Args:
        k: (B, Hkv, T, D), with a contiguous last dim.
        v: (B, Hkv, T, Dv), with a contiguous last dim.
        stages: the groups of heads.
        rows: flat memory of all groups.
        pitch: rows from the start of one group to the start of the next.
        first_row: row of each group at which the first token is written.
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
    """Views rows (..., T, width) as K (..., B, heads, T, D) and V (..., B, heads, T, Dv).

    B, D and Dv are those of `like_k` and `like_v`, (B, Hkv, any, D or Dv).
    """
    batch, count, dim_k, dim_v = like_k.size(0), heads[1] - heads[0], like_k.size(3), like_v.size(3)
    lead, (row, _), start = rows.shape[:-2], rows.stride()[-2:], rows.storage_offset()
    strides = rows.stride()[:-2]
    # One as_strided each: a chain of views costs more than the attention of a short sequence.
    k = rows.as_strided((*lead, batch, count, rows.size(-2), dim_k), (*strides, count * dim_k, dim_k, row, 1), start)
    start += batch * count * dim_k
    v = rows.as_strided((*lead, batch, count, rows.size(-2), dim_v), (*strides, count * dim_v, dim_v, row, 1), start)
    return k, v
