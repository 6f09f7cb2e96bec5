"""Head exchange of Ulysses attention through symmetric memory.

Each rank writes its tensors to its symmetric buffer and reads its part of the other ranks' tensors. The copies exchange
heads for rows, so nothing has to be packed. One kernel reads the first stage of an exchange, and the last stage on the
way back, from all ranks at once, since nothing overlaps with them. Copy engines read the stages that overlap with
attention: cuDNN's kernels take all multiprocessors for as long as they run, and end late if some of them start late.

Flags order the ranks as in `symm_mem`: the flags of K/V on the way to heads, those of gradients on the way to rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from cp_dtensor._torch import label, prepared
from cp_dtensor._torch.cuda_driver import copy_bytes, copy_rows
from cp_dtensor._torch.tensors import TRITON_AVAILABLE, current_stream
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm.head_exchange import Arrivals, Departure, HeadExchange, HeadRows, Tensors
from cp_dtensor.comm.symm_mem_workspace import Flag, Workspace
from cp_dtensor.plan.partition import CallSpec

if TRITON_AVAILABLE:
    from cp_dtensor.comm.triton_kernels import PIECE_FIELDS, launch_copies

ALIGNMENT = 16
"""Bytes that addresses, offsets, lengths and pitches of the copy kernel are multiples of."""
_TENSOR_ALIGNMENT = 256
_PROGRAMS = 1056
"""Programs of the copy kernel: eight for each multiprocessor of an H200."""

# Pieces: the copies of an exchange as integers
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

    @property
    def whole_bytes(self) -> int:
        """Bytes of all heads of the longest shard."""
        return self.batch * self.kind.rows.longest * self.all_heads * self.head_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of all rows of the most heads that a rank has."""
        return self.batch * self.kind.rows.total * max(self.kind.head_counts) * self.head_bytes


def offsets(sizes: Sequence[int]) -> list[int]:
    """Returns the offsets of tensors of these sizes, and, last, their size together."""
    return list(accumulate((-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in sizes), initial=0))


def pieces_to_heads(tensors: tuple[Written, ...], rank: int) -> tuple[Piece, ...]:
    """Returns the copies that bring this rank's heads of all rows, those of its own rows last."""
    starts = offsets([tensor.whole_bytes for tensor in tensors])
    pieces = []
    for index, (tensor, start) in enumerate(zip(tensors, starts, strict=False)):
        kind, size = tensor.kind, tensor.head_bytes
        first, last = kind.heads[rank]
        source_pitch, target_pitch = tensor.all_heads * size, (last - first) * size
        for peer in _peers(rank, kind):
            length = sum(kind.rows.lengths[peer])
            for part in range(len(kind.rows.lengths[peer])):
                here, there = kind.rows.local_span(peer, part), kind.rows.span(peer, part)
                for head, unit, count in _runs(first, last, kind.copies):
                    for batch in range(tensor.batch):
                        source = start + (batch * length + here[0]) * source_pitch + head * size
                        target = (batch * kind.rows.total + there[0]) * target_pitch + unit * size
                        rows = here[1] - here[0]
                        pieces.append(
                            Piece(peer, source, index, target, rows, count * size, source_pitch, target_pitch)
                        )
    return _own_last(pieces, rank)


def pieces_to_rows(tensors: tuple[Written, ...], rank: int) -> tuple[Piece, ...]:
    """Returns the copies that bring all heads of this rank's rows in one stage, those of its own heads last."""
    starts = offsets([tensor.stage_bytes for tensor in tensors])
    pieces = []
    for index, (tensor, start) in enumerate(zip(tensors, starts, strict=False)):
        kind, size = tensor.kind, tensor.head_bytes
        length = sum(kind.rows.lengths[rank])
        target_pitch = tensor.all_heads * size
        for peer in _peers(rank, kind):
            first, last = kind.heads[peer]
            source_pitch = (last - first) * size
            for part in range(len(kind.rows.lengths[rank])):
                here, there = kind.rows.local_span(rank, part), kind.rows.span(rank, part)
                for batch in range(tensor.batch):
                    source = start + (batch * kind.rows.total + there[0]) * source_pitch
                    target = (batch * length + here[0]) * target_pitch + first * size
                    rows = here[1] - here[0]
                    pieces.append(Piece(peer, source, index, target, rows, source_pitch, source_pitch, target_pitch))
    return _own_last(pieces, rank)


def _peers(rank: int, kind: HeadRows) -> list[int]:
    """All ranks, from the next one on, so that not all ranks read from the same peer at once."""
    world_size = len(kind.heads)
    return [(rank + hop) % world_size for hop in range(1, world_size + 1)]


def _own_last(pieces: Sequence[Piece], rank: int) -> tuple[Piece, ...]:
    """Non-empty pieces; a copy within a GPU is last, since it is a kernel, which may wait for a multiprocessor."""
    return tuple(sorted((piece for piece in pieces if piece.rows and piece.row_bytes), key=lambda it: it.peer == rank))


def _runs(first: int, last: int, copies: int) -> list[tuple[int, int, int]]:
    """`(head, number after replication, count)` of heads that are contiguous in source and target."""
    if copies == 1:
        return [(first, 0, last - first)]
    return [(unit // copies, unit - first, 1) for unit in range(first, last)]


# Exchange


@dataclass(frozen=True)
class SharedMemoryHeads(HeadExchange):
    """Head exchange through symmetric memory. A row of a head is a multiple of 16 bytes.

    Memory, besides the results: this rank's q, k and v, and the gradients of one stage, both in symmetric memory.
    """

    bytes_to_heads: int
    bytes_to_rows: int
    """The most bytes that a rank writes in either direction, in forward or in backward; equal on every rank."""

    name = "symm_mem"
    granule = ALIGNMENT

    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        return _ReadHeads(bundles, stages, self._workspace(bundles, group), group.rank())

    def to_rows(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows],
        group: dist.ProcessGroup, is_last: bool,
    ) -> Departure:  # fmt: skip
        return _ReadRows(bundles, targets, kinds, self._workspace(bundles, group), is_last)

    def abandon(self, group: dist.ProcessGroup) -> None:
        workspaces.abandon(group)

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        return self._workspace([[like]], group).side_stream

    def _workspace(self, bundles: Sequence[Tensors], group: dist.ProcessGroup) -> Workspace:
        # The size is that of the whole call: memory must not be mapped anew while a pass of the call uses it.
        return workspaces.workspace(group, bundles[0][0].device, self.bytes_to_heads, self.bytes_to_rows)


def obstacle_to_shared_memory(shape: CallSpec, group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why heads cannot be exchanged through symmetric memory, None if they can; equal on every rank.

    Args:
        shape: shape of this rank's tensors, with all heads.
        group: the ranks of the axis. The first call for a group may be a collective.
        device: device of the tensors.
    """
    if not TRITON_AVAILABLE:
        return "it needs triton"
    dims = (shape.head_dim, shape.v_head_dim)
    if any(dim * shape.itemsize % ALIGNMENT for dim in dims):
        return f"head dims {dims} of {shape.itemsize} bytes are no multiples of {ALIGNMENT} bytes"
    return workspaces.p2p_obstacle(group, device)


def shared_memory_heads(shape: CallSpec, stages: Sequence[tuple[HeadRows, HeadRows]]) -> SharedMemoryHeads:
    """Returns the exchange of a call, if `obstacle_to_shared_memory` returns None.

    Args:
        shape: shape of this rank's tensors, with all heads.
        stages: for each stage, the heads and rows of queries, and those of keys and values.
    """
    dims = (shape.head_dim, shape.v_head_dim)

    def written(of_queries: HeadRows, of_keys: HeadRows) -> list[list[Written]]:
        d, dv = (dim * shape.itemsize for dim in dims)
        units = shape.kv_heads * of_keys.copies
        queries = Written(of_queries, shape.batch_size, shape.q_heads, max(d, dv))  # q and dQ; grad_out and out
        keys, values = (Written(of_keys, shape.batch_size, units, size) for size in (d, dv))
        return [[queries, keys, values], [queries, Written(of_queries, shape.batch_size, shape.q_heads, ALIGNMENT)]]

    # In forward and in backward: out and LSE may take more memory than q, k and v.
    exchanged = [tensors for stage in stages for tensors in written(*stage)]
    return SharedMemoryHeads(
        bytes_to_heads=max(offsets([each.whole_bytes for each in tensors])[-1] for tensors in exchanged),
        bytes_to_rows=max(offsets([each.stage_bytes for each in tensors])[-1] for tensors in exchanged),
    )


def whole_heads(tensors: Tensors, kind: HeadRows) -> SharedMemoryHeads | None:
    """Returns the exchange that brings all heads of all rows to every rank of a group whose ranks share memory.

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
    return SharedMemoryHeads(offsets([Written(kind, batch, 1, size).whole_bytes for size in sizes])[-1], 0)


class _ReadHeads(Arrivals):
    def __init__(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], workspace: Workspace, rank: int
    ) -> None:
        self._tensors = tensors = [tensor for bundle in bundles for tensor in bundle]
        self._sizes = [len(bundle) for bundle in bundles]
        self._stages = [_written(bundles, stage) for stage in stages]
        self._rank, self._workspace = rank, workspace
        starts = offsets([tensor.whole_bytes for tensor in self._stages[0]])
        stream = current_stream(tensors[0].device)
        with label("write heads"):
            workspace.follow(stream)
            workspace.flags.submit(stream, wait=Flag.KV_TAKEN)
            _write(tensors, workspace.kv_address(workspace.rank), starts, stream)
            workspace.flags.submit(stream, signal=Flag.KV_READY, wait=Flag.KV_READY)
        # Nothing overlaps with the first stage, so it is read on the current stream.
        self._next_stage = 0
        self._arriving = self._read(stream)

    def _read(self, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        workspace, stage = self._workspace, self._stages[self._next_stage]
        current = current_stream(self._tensors[0].device)
        self._next_stage += 1
        arriving = [
            like.new_empty(each.batch, each.kind.rows.total, each.kind.head_counts[self._rank], like.size(3))
            for each, like in zip(stage, self._tensors, strict=True)
        ]
        with label("read heads"):
            if stream != current:
                workspace.memory_is_free.record(current)
                stream.wait_event(workspace.memory_is_free)
            _table(workspace, stage, pieces_to_heads, workspace.kv_address).copy(arriving, stream, current)
            if self._next_stage == len(self._stages):
                workspace.flags.submit(stream, signal=Flag.KV_TAKEN, overlaps=stream != current)
            if stream != current:
                workspace.kv_arrived.record(stream)
        return arriving

    def receive(self) -> list[list[torch.Tensor]]:
        arrived = self._arriving
        if self._next_stage > 1:
            current_stream(arrived[0].device).wait_event(self._workspace.kv_arrived)
        if self._next_stage < len(self._stages):
            self._arriving = self._read(self._workspace.kv_stream)
        views = iter([tensor.transpose(1, 2) for tensor in arrived])
        return [[next(views) for _ in range(size)] for size in self._sizes]


class _ReadRows(Departure):
    def __init__(
        self, bundles: Sequence[Tensors], targets: Sequence[Tensors], kinds: Sequence[HeadRows], workspace: Workspace,
        is_last: bool,
    ) -> None:  # fmt: skip
        tensors = [tensor for bundle in bundles for tensor in bundle]
        written = _written(targets, kinds)
        starts = offsets([tensor.stage_bytes for tensor in written])
        current = current_stream(tensors[0].device)
        overlaps = not is_last  # with the next stage, on another stream perhaps
        with label("write rows"):
            workspace.follow(current)
            workspace.flags.submit(current, wait=Flag.GRAD_TAKEN, overlaps=overlaps)
            _write(tensors, workspace.grads_address(workspace.rank), starts, current)
        stream = workspace.grad_stream if overlaps else current
        with label("read rows"):
            if overlaps:
                workspace.flags.submit(current, signal=Flag.GRAD_READY, overlaps=True)
                workspace.memory_is_free.record(current)
                stream.wait_event(workspace.memory_is_free)
                workspace.flags.submit(stream, wait=Flag.GRAD_READY, overlaps=True)
            else:
                workspace.flags.submit(current, signal=Flag.GRAD_READY, wait=Flag.GRAD_READY)
            table = _table(workspace, written, pieces_to_rows, workspace.grads_address)
            table.copy([target for bundle in targets for target in bundle], stream, current)
            workspace.flags.submit(stream, signal=Flag.GRAD_TAKEN, overlaps=overlaps)
        self._read_on, self._device = stream, tensors[0].device

    def wait(self) -> None:
        current = current_stream(self._device)
        if self._read_on != current:
            current.wait_stream(self._read_on)


def _written(bundles: Sequence[Tensors], kinds: Sequence[HeadRows]) -> tuple[Written, ...]:
    """The layout of the tensors, which have all heads."""
    return tuple(
        Written(kind, tensor.size(0), tensor.size(1), tensor.size(3) * tensor.itemsize)
        for bundle, kind in zip(bundles, kinds, strict=True)
        for tensor in bundle
    )


def _write(tensors: Sequence[torch.Tensor], address: int, starts: Sequence[int], stream: torch.cuda.Stream) -> None:
    """Writes tensors (B, H, S, D) as (B, S, H, D), each at its start."""
    for tensor, start in zip(tensors, starts, strict=False):
        row_after_row = tensor.transpose(1, 2).contiguous()  # no copy of what most models compute
        copy_bytes(stream.cuda_stream, address + start, row_after_row.data_ptr(), tensor.numel() * tensor.itemsize)


@dataclass(frozen=True, eq=False)
class _Table:
    """The pieces of an exchange, with addresses as sources."""

    pieces: tuple[Piece, ...]
    on_device: torch.Tensor
    most_rows: int
    most_row_bytes: int
    written: tuple[Written, ...]
    """Held because the key of the table has identities of its values."""

    def copy(self, targets: list[torch.Tensor], stream: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        """Copies all pieces to the targets: on the current stream by a kernel, on another one by copy engines."""
        if stream == current:
            if self.pieces:
                launch_copies(self.on_device, self.most_rows, self.most_row_bytes, targets, _PROGRAMS)
            return
        addresses = [target.data_ptr() for target in targets]
        for _, source, tensor, target, rows, row_bytes, source_pitch, target_pitch in self.pieces:
            copy_rows(
                stream.cuda_stream, addresses[tensor] + target, target_pitch, source, source_pitch, row_bytes, rows
            )


def _table(
    workspace: Workspace,
    written: tuple[Written, ...],
    pieces_of: Callable[[tuple[Written, ...], int], tuple[Piece, ...]],
    address: Callable[[int], int],
) -> _Table:
    """Returns the cached table of an exchange; its upload takes longer than the exchange."""
    key = (pieces_of, *((id(each.kind), each.batch, each.all_heads, each.head_bytes) for each in written))
    table: _Table | None = workspace.tables.get(key)
    if table is not None:
        return table
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the copies of a head exchange have to be uploaded, which a CUDA graph cannot capture: run one forward and "
            "backward of this size before capturing"
        )
    pieces = tuple(
        piece._replace(source=address(piece.peer) + piece.source) for piece in pieces_of(written, workspace.rank)
    )
    fields, device = [piece[1:] for piece in pieces], workspace.kv().device
    on_device = prepared(lambda: torch.tensor(fields, dtype=torch.int64, device=device)).view(-1, PIECE_FIELDS)
    most_rows = max((piece.rows for piece in pieces), default=0)
    most_row_bytes = max((piece.row_bytes for piece in pieces), default=0)
    return workspace.tables.add(key, _Table(pieces, on_device, most_rows, most_row_bytes, written))
