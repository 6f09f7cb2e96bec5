"""Interface of KV transports, and the packing of tensors into rows.

A transport moves rows between the ranks of a mesh axis and does no arithmetic. A row is one token: its keys and values,
for some heads and all batch rows. The transport makes the `TilePlan` of a call, with the rows of each transfer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor._torch.tensors import cut
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
        """Waits for the transfer of the next step that has one; returns (rows, row width).

        Rows that this rank's queries do not attend to are uninitialised.
        """

    def tiles_launched(self) -> None:
        """Starts transfers that overlap with the tiles just launched and need not be submitted before them, if any."""
        return


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
    def for_call(self, spec: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        """The transport of a call, equal on all ranks of the group."""


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
        """The plan of a call on one rank, with its steps in the order that suits this transport."""

    def abandon(self, group: dist.ProcessGroup) -> None:
        """Discards what a call that raised an error left behind; collectives leave nothing.

        All ranks call it, so that the next call works.
        """
        return

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


# Rows: one per token, `[some heads of one tensor | as many heads of the next one]` of all batch rows


def row_width(k: torch.Tensor, v: torch.Tensor, heads: Span) -> int:
    """The elements of a row of K and V: batch rows x heads x (D + Dv)."""
    return k.size(0) * (heads[1] - heads[0]) * (k.size(3) + v.size(3))


def pack_rows(k: torch.Tensor, v: torch.Tensor, heads: Span) -> torch.Tensor:
    """Packs some heads of K (B, Hkv, T, D) and V (B, Hkv, T, Dv) into rows (T, width)."""
    rows = k.new_empty(k.size(2), row_width(k, v, heads))
    for source, packed in zip((k, v), unpack_rows(rows, k, v, heads), strict=True):
        packed.copy_(cut(source, None, heads, None))
    return rows


def unpack_rows(
    rows: torch.Tensor, like_k: torch.Tensor, like_v: torch.Tensor, heads: Span
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views rows (..., T, width) as K (..., B, heads, T, D) and V (..., B, heads, T, Dv).

    B, D and Dv are those of `like_k` and `like_v`, (B, Hkv, any, D or Dv).
    """
    k, v = _unpacked(rows, like_k.size(0), heads[1] - heads[0], (like_k.size(3), like_v.size(3)))
    return k, v


def _unpacked(rows: torch.Tensor, batch: int, heads: int, dims: Sequence[int]) -> list[torch.Tensor]:
    """Views rows (..., T, width) as tensors (..., B, heads, T, dim), one for each of `dims`."""
    *lead, length, _ = rows.shape
    *strides, row, _ = rows.stride()
    start, views = rows.storage_offset(), []
    for dim in dims:  # one as_strided each: a chain of views costs more than the attention of a short sequence
        views.append(rows.as_strided((*lead, batch, heads, length, dim), (*strides, heads * dim, dim, row, 1), start))
        start += batch * heads * dim
    return views


class HeadBlocks:
    """Blocks of rows, one after the other in flat memory, each with some heads of the same tensors."""

    def __init__(
        self, like: Sequence[torch.Tensor], head_counts: Sequence[int], length: int, memory: torch.Tensor | None = None
    ) -> None:
        """Allocates blocks, or takes `memory`, which holds them.

        Args:
            like: tensors (B, any, any, D), with the batch size, the dims and the dtype.
            head_counts: heads of each block.
            length: rows of each block.
            memory: at least as many elements, contiguous.
        """
        self._batch, self._dims = like[0].size(0), [tensor.size(3) for tensor in like]
        self._counts, self._length = head_counts, length
        self._widths = [self._batch * count * sum(self._dims) for count in head_counts]
        self._starts = [0, *accumulate(width * length for width in self._widths)]
        self._memory = like[0].new_empty(self._starts[-1]) if memory is None else memory

    def rows(self, block: int, rows: Span) -> torch.Tensor | None:
        """Some rows of a block as (elements, 1), None if they are empty."""
        start, width = self._starts[block], self._widths[block]
        if width == 0 or rows[0] == rows[1]:
            return None
        return self._memory[start + rows[0] * width : start + rows[1] * width].view(-1, 1)

    def tensors(self, block: int) -> list[torch.Tensor]:
        """Views of the tensors in a block, (B, its heads, rows, D)."""
        rows = self._memory[self._starts[block] : self._starts[block + 1]].view(self._length, self._widths[block])
        return _unpacked(rows, self._batch, self._counts[block], self._dims)

    def pairs(
        self, tensors: Sequence[torch.Tensor], heads: Sequence[Span], first_row: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pairs of views that hold the same elements, of the tensors and of the blocks.

        One pair a tensor covers all blocks if `heads` are equally many and at equal distances.

        Args:
            tensors: (B, all heads, rows, D).
            heads: the heads of each block.
            first_row: row of a block that has the tensors' first row.
        """
        count, rows = self._counts[0], slice(first_row, first_row + tensors[0].size(2))
        steps = {span[0] - before[0] for before, span in pairwise(heads)}
        if count == 0 or len(set(self._counts)) > 1 or len(steps) != 1:
            for block, span in enumerate(heads):
                for tensor, view in zip(tensors, self.tensors(block), strict=True):
                    yield tensor[:, span[0] : span[1]], view[:, :, rows]
            return
        (step,) = steps
        blocks = self._memory[: self._starts[-1]].view(len(heads), self._length, self._widths[0])
        for tensor, view in zip(tensors, _unpacked(blocks[:, rows], self._batch, count, self._dims), strict=True):
            stride_h = tensor.stride(1)
            start = tensor.storage_offset() + heads[0][0] * stride_h
            yield tensor.as_strided(view.shape, (step * stride_h, *tensor.stride()), start), view

    def write(self, tensors: Sequence[torch.Tensor], heads: Sequence[Span], first_row: int = 0) -> None:
        """Copies tensors (B, all heads, rows, D) to the blocks, as `pairs` describes."""
        for of_tensor, of_block in self.pairs(tensors, heads, first_row):
            of_block.copy_(of_tensor)
