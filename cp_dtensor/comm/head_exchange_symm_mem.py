"""Head exchange of Ulysses attention through symmetric memory.

Each rank writes its tensors to its symmetric buffer and reads its part of the other ranks' tensors. The copies exchange
heads for rows, so nothing has to be packed. One kernel reads the first stage of an exchange, and the last stage on the
way back, from all ranks at once, since nothing overlaps with them. Copy engines read the stages that overlap with
attention: cuDNN's kernels take all multiprocessors for as long as they run, and end late if some of them start late.

Flags order the ranks as in `symm_mem`: the flags of K/V on the way to heads, those of gradients on the way to rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor._torch import label
from cp_dtensor._torch.cache import Shared, refuse_capture
from cp_dtensor._torch.cuda_driver import copy_bytes, copy_rows
from cp_dtensor._torch.tensors import TRITON_AVAILABLE, current_stream
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm.flags import Flag
from cp_dtensor.comm.head_exchange import Arrivals, Bundle, HeadExchange, HeadRows, Kinds
from cp_dtensor.comm.symm_mem_workspace import Workspace
from cp_dtensor.plan.partition import CallSpec

if TRITON_AVAILABLE:
    from cp_dtensor.comm.triton_kernels import PIECE_FIELDS, launch_copies

ALIGNMENT = 16
"""Bytes that addresses, offsets, lengths and pitches of the copy kernel are multiples of."""
_TENSOR_ALIGNMENT = 256
_PROGRAMS = 1056
"""Programs of the copy kernel: eight for each multiprocessor of an H200."""

# Copies of an exchange
#
# A rank writes tensors (B, rows, heads, D) to its buffer one after the other. Each starts at an offset that suits the
# longest shard, or the rank with the most heads, so that the offset is equal on all ranks.


class Piece(NamedTuple):
    """Rows of equal length that one copy moves. Sizes are in bytes."""

    peer: int
    source: int
    """Offset in the peer's area of the symmetric buffer."""
    tensor: int
    """Number of the target tensor."""
    target: int
    """Offset in the target tensor."""
    rows: int
    row_bytes: int
    source_pitch: int
    target_pitch: int


@dataclass(frozen=True)
class Written:
    """A tensor (B, rows, heads, D) as ranks write it to their symmetric buffers."""

    kind: HeadRows
    batch: int
    all_heads: int
    """Heads of the tensor before an exchange to heads; heads after replication in an exchange to rows."""
    head_bytes: int

    def bytes(self, to_heads: bool) -> int:
        """Return the bytes to reserve: all heads of the longest shard, or all rows of the most heads of a rank."""
        rows = self.kind.rows
        elements = rows.longest * self.all_heads if to_heads else rows.total * max(self.kind.head_counts)
        return self.batch * elements * self.head_bytes


def offsets(tensors: Sequence[Written], to_heads: bool) -> list[int]:
    """Return the offsets of the tensors in a buffer, and, last, their size together."""
    sizes = (tensor.bytes(to_heads) for tensor in tensors)
    return list(accumulate((-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in sizes), initial=0))


def pieces_of(tensors: tuple[Written, ...], rank: int, to_heads: bool) -> tuple[Piece, ...]:
    """Return the copies that a rank makes in an exchange, those of its own memory last.

    To heads, they bring this rank's heads of all rows; else all heads of this rank's rows, in one stage.
    """
    pieces = []
    for index, (tensor, start) in enumerate(zip(tensors, offsets(tensors, to_heads), strict=False)):
        kind, size = tensor.kind, tensor.head_bytes
        # From the next rank on, so that not all ranks read from the same peer at once.
        for peer in ((rank + hop) % len(kind.heads) for hop in range(1, len(kind.heads) + 1)):
            rows_of, heads_of = (peer, rank) if to_heads else (rank, peer)
            first, last = kind.heads[heads_of]
            lengths = kind.rows.lengths[rows_of]
            shard_pitch, heads_pitch = tensor.all_heads * size, (last - first) * size
            # (head, number after replication, count) of heads that are contiguous on both sides
            runs = [(first, 0, last - first)]
            if to_heads and kind.copies > 1:
                runs = [(unit // kind.copies, unit - first, 1) for unit in range(first, last)]
            for part in range(len(lengths)):
                here, there = kind.rows.local_span(rows_of, part), kind.rows.span(rows_of, part)
                for head, unit, count in runs:
                    for batch in range(tensor.batch):
                        of_shard = (batch * sum(lengths) + here[0]) * shard_pitch + head * size
                        of_heads = (batch * kind.rows.total + there[0]) * heads_pitch + unit * size
                        rows, row_bytes = here[1] - here[0], count * size
                        pieces.append(
                            Piece(peer, start + of_shard, index, of_heads, rows, row_bytes, shard_pitch, heads_pitch)
                            if to_heads
                            else Piece(
                                peer, start + of_heads, index, of_shard, rows, row_bytes, heads_pitch, shard_pitch
                            )
                        )
    # A copy within a GPU is a kernel, which may wait for a multiprocessor.
    return tuple(sorted((each for each in pieces if each.rows and each.row_bytes), key=lambda each: each.peer == rank))


# Exchange


@dataclass(frozen=True)
class SharedMemoryHeads(HeadExchange):
    """Head exchange through symmetric memory. A row of a head is a multiple of 16 bytes.

    Memory, besides the results: this rank's q, k and v, and the gradients of one stage, both in symmetric memory.
    """

    bytes_to_heads: int
    bytes_to_rows: int
    """The most bytes that a rank writes in a direction, in forward or in backward; equal on every rank."""

    granule = ALIGNMENT

    def to_heads(self, bundles: Sequence[Bundle], stages: Sequence[Kinds], group: dist.ProcessGroup) -> Arrivals:
        tensors = [tensor for bundle in bundles for tensor in bundle]
        workspace, transfer = self._workspace(tensors[0], group), object()
        tables = deque([_table(workspace, _written(bundles, stage), to_heads=True) for stage in stages])
        device = tensors[0].device
        arriving: list[list[torch.Tensor]] = []

        def read(stream: torch.cuda.Stream) -> None:
            """Read the next stage."""
            table, current = tables.popleft(), current_stream(device)
            targets = [like.new_empty(*shape, like.size(3)) for shape, like in zip(table.shapes, tensors, strict=True)]
            with label("read heads"):
                if stream != current:
                    workspace.in_flight[id(transfer)] = targets
                    workspace.memory_is_free.record(current)
                    stream.wait_event(workspace.memory_is_free)
                table.copy(targets, stream, current)
                if not tables:
                    workspace.flags.submit(stream, signal=Flag.KV_TAKEN, overlaps=stream != current)
                if stream != current:
                    workspace.kv_arrived.record(stream)
            arriving.append(targets)

        def receive() -> list[list[torch.Tensor]]:
            arrived = arriving.pop()
            if workspace.in_flight.pop(id(transfer), None) is not None:
                current_stream(device).wait_event(workspace.kv_arrived)
            if tables:
                read(workspace.kv_stream)
            views = iter([tensor.transpose(1, 2) for tensor in arrived])
            return [[next(views) for _ in bundle] for bundle in bundles]

        stream = current_stream(device)
        with label("write heads"):
            workspace.follow(stream)
            workspace.flags.submit(stream, wait=Flag.KV_TAKEN)
            _write(tensors, workspace.kv_address(workspace.rank), tables[0].starts, stream)
            workspace.flags.submit(stream, signal=Flag.KV_READY, wait=Flag.KV_READY)
        read(stream)  # nothing overlaps with the first stage
        return receive

    def to_rows(
        self, bundles: Sequence[Bundle], targets: Sequence[Bundle], kinds: Kinds,
        group: dist.ProcessGroup, is_last: bool,
    ) -> Callable[[], None]:  # fmt: skip
        tensors = [tensor for bundle in bundles for tensor in bundle]
        workspace = self._workspace(tensors[0], group)
        table = _table(workspace, _written(targets, kinds), to_heads=False)
        device, transfer = tensors[0].device, object()
        current = current_stream(device)
        overlaps = not is_last  # with the next stage, on another stream perhaps
        with label("write rows"):
            workspace.follow(current)
            workspace.flags.submit(current, wait=Flag.GRAD_TAKEN, overlaps=overlaps)
            _write(tensors, workspace.grads_address(workspace.rank), table.starts, current)
        stream = workspace.grad_stream if overlaps else current
        with label("read rows"):
            if overlaps:
                workspace.in_flight[id(transfer)] = targets
                workspace.flags.submit(current, signal=Flag.GRAD_READY, overlaps=True)
                workspace.memory_is_free.record(current)
                stream.wait_event(workspace.memory_is_free)
                workspace.flags.submit(stream, wait=Flag.GRAD_READY, overlaps=True)
            else:
                workspace.flags.submit(current, signal=Flag.GRAD_READY, wait=Flag.GRAD_READY)
            table.copy([target for bundle in targets for target in bundle], stream, current)
            workspace.flags.submit(stream, signal=Flag.GRAD_TAKEN, overlaps=overlaps)

        def wait() -> None:
            current = current_stream(device)
            if stream != current:
                current.wait_stream(stream)
            workspace.in_flight.pop(id(transfer), None)

        return wait

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        return self._workspace(like, group).side_stream

    def _workspace(self, like: torch.Tensor, group: dist.ProcessGroup) -> Workspace:
        # The size is that of the whole call: memory must not be mapped anew while a pass of the call uses it.
        return workspaces.workspace(group, like.device, self.bytes_to_heads, self.bytes_to_rows)


def obstacle_to_shared_memory(spec: CallSpec, group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the reason why heads cannot be exchanged through symmetric memory, None if they can; equal on every rank.

    The first call for a group may be a collective. `spec` is that of this rank's tensors, with all heads.
    """
    if not TRITON_AVAILABLE:
        return "it needs triton"
    dims = (spec.head_dim, spec.v_head_dim, *(spec.latent_dims or ()))
    if any(dim * spec.itemsize % ALIGNMENT for dim in dims):
        return f"head dims {dims} of {spec.itemsize} bytes are no multiples of {ALIGNMENT} bytes"
    return workspaces.p2p_obstacle(group, device)


def shared_memory_heads(spec: CallSpec, stages: Sequence[tuple[HeadRows, HeadRows]]) -> SharedMemoryHeads:
    """Return the exchange of a call, if `obstacle_to_shared_memory` returns None.

    Args:
        spec: shapes of this rank's tensors, with all heads.
        stages: for each stage, the heads and rows of queries, and those of keys and values.
    """
    d, dv = spec.head_dim * spec.itemsize, spec.v_head_dim * spec.itemsize
    exchanged = []
    for of_queries, of_keys in stages:
        units = spec.kv_heads * of_keys.copies
        queries = Written(of_queries, spec.batch_size, spec.q_heads, max(d, dv))  # q and dQ; grad_out and out
        lse = Written(of_queries, spec.batch_size, spec.q_heads, ALIGNMENT)
        keys, values = (Written(of_keys, spec.batch_size, units, dim * spec.itemsize) for dim in spec.kv_dims)
        exchanged += [[queries, keys, values], [queries, lse]]  # out and LSE may take more memory than q, k and v
    return SharedMemoryHeads(
        bytes_to_heads=max(offsets(tensors, True)[-1] for tensors in exchanged),
        bytes_to_rows=max(offsets(tensors, False)[-1] for tensors in exchanged),
    )


def whole_heads(tensors: Bundle, kind: HeadRows) -> SharedMemoryHeads | None:
    """Return the exchange that brings all heads of all rows to every rank of a group whose ranks share memory.

    Its tensors have all heads as batch rows of one head, so that they arrive in memory (B, all heads, all rows, D).

    Args:
        tensors: (B, all heads, this rank's rows, D).
        kind: the rows, with one head, which every rank gets.

    Returns:
        None if a row is not a multiple of 16 bytes.
    """
    sizes = [tensor.size(3) * tensor.itemsize for tensor in tensors]
    if not TRITON_AVAILABLE or any(size % ALIGNMENT for size in sizes):
        return None
    batch = tensors[0].size(0) * tensors[0].size(1)
    return SharedMemoryHeads(offsets([Written(kind, batch, 1, size) for size in sizes], True)[-1], 0)


def _written(bundles: Sequence[Bundle], kinds: Kinds) -> tuple[Written, ...]:
    """Describe tensors (B, all heads, rows, D)."""
    return tuple(
        Written(kind, tensor.size(0), tensor.size(1), tensor.size(3) * tensor.itemsize)
        for bundle, kind in zip(bundles, kinds, strict=True)
        for tensor in bundle
    )


def _write(tensors: Sequence[torch.Tensor], address: int, starts: Sequence[int], stream: torch.cuda.Stream) -> None:
    """Write tensors (B, H, S, D) as (B, S, H, D), each at its start."""
    for tensor, start in zip(tensors, starts, strict=True):
        row_after_row = tensor.transpose(1, 2).contiguous()  # no copy of what most models compute
        copy_bytes(stream.cuda_stream, address + start, row_after_row.data_ptr(), tensor.numel() * tensor.itemsize)


@dataclass(frozen=True, eq=False)
class _Table:
    """The pieces of an exchange, with addresses as sources."""

    pieces: tuple[Piece, ...]
    on_device: Shared[torch.Tensor]
    most_rows: int
    most_row_bytes: int
    starts: list[int]
    """Offsets of the tensors in a rank's area."""
    shapes: list[tuple[int, int, int]]
    """Of the tensors after an exchange to heads: batch rows, all rows, this rank's heads."""
    written: tuple[Written, ...]
    """Held because the key of the table has identities of its values."""

    def copy(self, targets: list[torch.Tensor], stream: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        """Copy all pieces to the targets: on the current stream by a kernel, on another one by copy engines."""
        if stream == current:
            if self.pieces:
                launch_copies(self.on_device.read(), self.most_rows, self.most_row_bytes, targets, _PROGRAMS)
            return
        addresses = [target.data_ptr() for target in targets]
        for _, source, tensor, target, rows, row_bytes, source_pitch, target_pitch in self.pieces:
            copy_rows(
                stream.cuda_stream, addresses[tensor] + target, target_pitch, source, source_pitch, row_bytes, rows
            )


def _table(workspace: Workspace, written: tuple[Written, ...], to_heads: bool) -> _Table:
    """Return the cached table of an exchange; its upload takes longer than the exchange."""
    key = (to_heads, *((id(each.kind), each.batch, each.all_heads, each.head_bytes) for each in written))
    table: _Table | None = workspace.tables.get(key)
    if table is not None:
        return table
    refuse_capture("the copies of a head exchange have to be uploaded", "run one forward and backward of this size")
    address = workspace.kv_address if to_heads else workspace.grads_address
    pieces = tuple(
        piece._replace(source=address(piece.peer) + piece.source)
        for piece in pieces_of(written, workspace.rank, to_heads)
    )
    fields, device = [piece[1:] for piece in pieces], workspace.flags.device

    def uploaded() -> torch.Tensor:
        return torch.tensor(fields, dtype=torch.int64, device=device).view(-1, PIECE_FIELDS)

    on_device = Shared(device, uploaded, lambda tensor: (tensor,))
    most_rows = max((piece.rows for piece in pieces), default=0)
    most_row_bytes = max((piece.row_bytes for piece in pieces), default=0)
    starts, rank = offsets(written, to_heads)[:-1], workspace.rank
    shapes = [(each.batch, each.kind.rows.total, each.kind.head_counts[rank]) for each in written]
    return workspace.tables.add(key, _Table(pieces, on_device, most_rows, most_row_bytes, starts, shapes, written))
