"""Interface of KV transports, and the packing of tensors into rows.

A transport moves rows between the ranks of a mesh axis and does no arithmetic. A row is one token: its keys and values,
for some heads and all batch rows. The transport makes the `TilePlan` of a call, with the rows of each transfer.
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
    """The K/V transfers of one pass.

    For each step call `receive` if the step has a transfer, launch its tiles, and call `tiles_launched`.
    """

    @abstractmethod
    def receive(self) -> torch.Tensor:
        """Wait for the transfer of the next step that has one; return (rows, row width).

        Rows that this rank's queries do not attend to are uninitialised.
        """

    def tiles_launched(self) -> None:
        """Start transfers that overlap with the tiles of a step even if they are submitted after those. May do nothing.

        Called once a step, after its tiles were launched.
        """
        return


class GradTransfers(ABC):
    """The transfers of dK/dV to the ranks that own the rows. For each transfer call `buffer`, `send`, `receive`."""

    @abstractmethod
    def buffer(self) -> torch.Tensor:
        """Return (rows, row width), uninitialised, for gradients of the rows that `KvTransfers.receive` returned."""

    @abstractmethod
    def send(self) -> None:
        """Send the buffer, in which the gradients of all rows that this rank received are complete by now."""

    @abstractmethod
    def receive(self) -> Sequence[Contribution]:
        """Wait for other ranks' contributions to the gradients of this rank's rows."""


class TransportMethod(ABC):
    """A value of `rotate_method`: a KV transport, or a rule that chooses one for each call."""

    name: str
    """The value of `rotate_method` that selects it."""

    @abstractmethod
    def for_call(self, spec: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        """Return the transport of a call, equal on all ranks of the group."""


class KVTransport(TransportMethod):
    """A way to move K/V between the ranks of a mesh axis. A frozen value: the state of a call is in its transfers."""

    transfers_ahead: int
    """K/V transfers in flight while a step is computed."""
    slows_compute: bool
    """True if transfers run on multiprocessors, which they take from attention kernels."""
    keeps_own_gradients_wide: bool = False
    """True if gradients of tiles against the rank's own K/V stay float32 until they are summed (a slower kernel)."""

    def for_call(self, spec: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        return self

    @abstractmethod
    def plan(self, spec: CallSpec, rank: int) -> TilePlan:
        """Return the plan of a call on one rank, with its steps in the order that suits this transport."""

    @abstractmethod
    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        """Start the K/V transfers of `plan.forward`, or of `plan.backward`.

        Args:
            k: (B, Hkv, T, D), this rank's keys.
            v: (B, Hkv, T, Dv), this rank's values.
            plan: this rank's plan. All ranks' plans have the same steps and differ in tiles and rows only.
            backward: True for the steps of `plan.backward`.
            group: the ranks of the axis.
        """

    @abstractmethod
    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, group: dist.ProcessGroup) -> GradTransfers:
        """Prepare the dK/dV transfers of `plan.backward`, in the dtype of k and v."""


# Rows: one per token, `[some heads of one tensor | as many heads of the next one]` of all batch rows


def row_width(k: torch.Tensor, v: torch.Tensor, heads: Span) -> int:
    """Return the elements of a row of K and V: batch rows x heads x (D + Dv)."""
    return k.size(0) * (heads[1] - heads[0]) * (k.size(3) + v.size(3))


def pack_rows(k: torch.Tensor, v: torch.Tensor, heads: Span) -> torch.Tensor:
    """Pack some heads of K (B, Hkv, T, D) and V (B, Hkv, T, Dv) into rows (T, width)."""
    count = heads[1] - heads[0]
    rows = k.new_empty(k.size(2), row_width(k, v, heads))
    for source, packed in zip((k, v), unpack_rows(rows, (k, v), count), strict=True):
        packed.copy_(source.narrow(1, heads[0], count))
    return rows


def unpack_rows(rows: torch.Tensor, like: Sequence[torch.Tensor], heads: int) -> list[torch.Tensor]:
    """View rows (..., T, width) as tensors (..., B, heads, T, dim) like others (B, any, any, dim)."""
    *lead, length, _ = rows.shape
    *strides, row, _ = rows.stride()
    start, batch, views = rows.storage_offset(), like[0].size(0), []
    for tensor in like:  # one as_strided each: a chain of views costs more than the attention of a short sequence
        dim = tensor.size(3)
        views.append(rows.as_strided((*lead, batch, heads, length, dim), (*strides, heads * dim, dim, row, 1), start))
        start += batch * heads * dim
    return views


class HeadBlocks:
    """Blocks of rows, one after the other in flat memory, each with some heads of the same tensors."""

    def __init__(
        self, like: Sequence[torch.Tensor], head_counts: Sequence[int], length: int, memory: torch.Tensor | None = None
    ) -> None:
        """Allocate blocks, or take `memory`, which holds them.

        Args:
            like: tensors (B, any, any, D), with the batch size, the dims and the dtype.
            head_counts: heads of each block.
            length: rows of each block.
            memory: at least as many elements, contiguous.
        """
        self._like, self._counts, self._length = like, head_counts, length
        self.head_width = 0
        """Elements of one head in a row: those of all batch rows and tensors."""
        for tensor in like:
            self.head_width += tensor.size(0) * tensor.size(3)
        self._elements = self.head_width * sum(head_counts) * length
        self.memory = like[0].new_empty(self._elements) if memory is None else memory

    def tensors(self, block: int) -> list[torch.Tensor]:
        """Return views of the tensors in a block, (B, its heads, rows, D)."""
        width = self.head_width * self._counts[block]
        start = self.head_width * sum(self._counts[:block]) * self._length
        rows = self.memory[start : start + width * self._length].view(self._length, width)
        return unpack_rows(rows, self._like, self._counts[block])

    def pairs(
        self, tensors: Sequence[torch.Tensor], heads: Sequence[Span], first_row: int = 0
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return pairs of views that hold the same elements, of the tensors and of the blocks.

        One pair a tensor covers all blocks if `heads` are equally many and at equal distances.

        Args:
            tensors: (B, all heads, rows, D).
            heads: the heads of each block.
            first_row: row of a block that has the tensors' first row.
        """
        found, rows = [], slice(first_row, first_row + tensors[0].size(2))
        first, stop = heads[0]
        step = heads[1][0] - first if len(heads) > 1 else 0
        is_regular = len(heads) > 1 and first < stop
        for index, span in enumerate(heads):
            is_regular = is_regular and span == (first + index * step, stop + index * step)
        if not is_regular:
            for block, span in enumerate(heads):
                for tensor, view in zip(tensors, self.tensors(block), strict=True):
                    found.append((tensor[:, span[0] : span[1]], view[:, :, rows]))
            return found
        blocks = self.memory[: self._elements].view(len(heads), self._length, self.head_width * (stop - first))
        for tensor, view in zip(tensors, unpack_rows(blocks[:, rows], self._like, stop - first), strict=True):
            stride_h = tensor.stride(1)
            start = tensor.storage_offset() + first * stride_h
            found.append((tensor.as_strided(view.shape, (step * stride_h, *tensor.stride()), start), view))
        return found

    def write(self, tensors: Sequence[torch.Tensor], heads: Sequence[Span], first_row: int = 0) -> None:
        """Copy tensors (B, all heads, rows, D) to the blocks, as `pairs` describes."""
        for of_tensor, of_block in self.pairs(tensors, heads, first_row):
            of_block.copy_(of_tensor)
