"""Exchanging rows for heads over memory that ranks share: each publishes its tensors and reads what it wants.

Heads and rows change places on the way. The first stage of an exchange and the way back of the last are waited for, so
one kernel reads all their pieces at once, from all peers. What travels under computation is brought by copy engines:
cuDNN's kernels take all multiprocessors for as long as they run, and one that starts late on some of them ends late.
Ranks are ordered by flags, as in `symm_mem`: those of K/V on the way to heads, those of gradients on the way to rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor._torch_private import label, prepared
from cp_dtensor.division import CallShape
from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.rotation import workspace as workspaces
from cp_dtensor.rotation.device_streams import copy_bytes, copy_rows
from cp_dtensor.rotation.flags import Flag
from cp_dtensor.rotation.head_exchange import Arrivals, Departure, HeadExchange
from cp_dtensor.rotation.head_pieces import Piece, Published, offsets, pieces_to_heads, pieces_to_rows
from cp_dtensor.rotation.heads import HeadRows, Tensors
from cp_dtensor.rotation.workspace import Workspace
from cp_dtensor.tensors import current_stream

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.copy_pieces import ALIGNMENT, PIECE_FIELDS, launch_copies

_MOST_TABLES = 1024
_PROGRAMS = 1056  # eight for each multiprocessor of an H200


@dataclass(frozen=True)
class SharedMemoryHeads(HeadExchange):
    """Where the ranks can share memory; a row of a head must be a multiple of 16 bytes.

    Memory, besides the results: this rank's q, k and v, and the gradients of one stage, both in symmetric memory.
    """

    bytes_to_heads: int
    bytes_to_rows: int
    """What a rank publishes at most, in forward or in backward; alike on every rank."""

    @property
    def name(self) -> str:
        return "symm_mem"

    @property
    def granule(self) -> int:
        return ALIGNMENT

    def to_heads(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], group: dist.ProcessGroup
    ) -> Arrivals:
        return _ReadHeads(bundles, stages, self._workspace(bundles, group), group.rank())

    def to_rows(
        self,
        bundles: Sequence[Tensors],
        targets: Sequence[Tensors],
        kinds: Sequence[HeadRows],
        group: dist.ProcessGroup,
        is_last: bool,
    ) -> Departure:
        return _ReadRows(bundles, targets, kinds, self._workspace(bundles, group), is_last)

    def abandon(self, group: dist.ProcessGroup) -> None:
        workspaces.abandon(group)

    def side_stream(self, like: torch.Tensor, group: dist.ProcessGroup) -> torch.cuda.Stream | None:
        return self._workspace([[like]], group).side_stream

    def _workspace(self, bundles: Sequence[Tensors], group: dist.ProcessGroup) -> Workspace:
        # All that a call will need: memory must not move while the call before it, or half of it, is in there.
        return workspaces.workspace(group, bundles[0][0].device, self.bytes_to_heads, self.bytes_to_rows)


def obstacle_to_shared_memory(shape: CallShape, group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why heads cannot be exchanged so, None if they can; the same on every rank of the group.

    Args:
        shape: of this rank's tensors, all their heads.
        group: the ranks of the axis. Its first call may be a collective.
        device: of the tensors.
    """
    if not TRITON_AVAILABLE:
        return "it needs triton"
    dims = (shape.head_dim, shape.v_head_dim)
    if any(dim * shape.itemsize % ALIGNMENT for dim in dims):
        return f"head dims {dims} of {shape.itemsize} bytes are no multiples of {ALIGNMENT} bytes"
    return workspaces.why_unshared(group, device)


def shared_memory_heads(shape: CallShape, stages: Sequence[tuple[HeadRows, HeadRows]]) -> SharedMemoryHeads:
    """The exchange of a call, where there is no obstacle.

    Args:
        shape: of this rank's tensors, all their heads.
        stages: for each, the kind of queries and of keys and values.
    """
    dims = (shape.head_dim, shape.v_head_dim)

    def published(of_queries: HeadRows, of_keys: HeadRows) -> list[list[Published]]:
        d, dv = (dim * shape.itemsize for dim in dims)
        units = shape.kv_heads * of_keys.copies
        queries = Published(of_queries, shape.batch_size, shape.q_heads, max(d, dv))  # q and dQ; grad_out and out
        keys, values = (Published(of_keys, shape.batch_size, units, size) for size in (d, dv))
        return [[queries, keys, values], [queries, Published(of_queries, shape.batch_size, shape.q_heads, ALIGNMENT)]]

    # Of forward and of backward: out and LSE may be more than q, k and v.
    exchanged = [tensors for stage in stages for tensors in published(*stage)]
    return SharedMemoryHeads(
        bytes_to_heads=max(offsets([each.whole_bytes for each in tensors])[-1] for tensors in exchanged),
        bytes_to_rows=max(offsets([each.stage_bytes for each in tensors])[-1] for tensors in exchanged),
    )


def whole_heads(tensors: Tensors, kind: HeadRows) -> SharedMemoryHeads | None:
    """The exchange that brings all heads of all rows to every rank, of a group whose ranks share memory.

    It takes all heads as batch rows of one, so that they arrive in memory (B, all heads, all rows, D).

    Args:
        tensors: (B, all heads, this rank's rows, D).
        kind: of one head, which every rank gets.

    Returns:
        None where rows are not such as it takes.
    """
    sizes = [tensor.size(3) * tensor.itemsize for tensor in tensors]
    if not TRITON_AVAILABLE or any(size % ALIGNMENT for size in sizes):
        return None
    batch = tensors[0].size(0) * tensors[0].size(1)
    return SharedMemoryHeads(offsets([Published(kind, batch, 1, size).whole_bytes for size in sizes])[-1], 0)


class _ReadHeads(Arrivals):
    def __init__(
        self, bundles: Sequence[Tensors], stages: Sequence[Sequence[HeadRows]], workspace: Workspace, rank: int
    ) -> None:
        self._tensors = tensors = [tensor for bundle in bundles for tensor in bundle]
        self._sizes = [len(bundle) for bundle in bundles]
        self._stages = [_published(bundles, stage) for stage in stages]
        self._rank, self._workspace = rank, workspace
        starts = offsets([tensor.whole_bytes for tensor in self._stages[0]])
        stream = current_stream(tensors[0].device)
        with label("publish heads"):
            workspace.follow(stream)
            workspace.flags.submit(stream, wait=Flag.KV_TAKEN)
            _publish(tensors, workspace.kv_address(workspace.rank), starts, stream)
            workspace.flags.submit(stream, tell=Flag.KV_READY, wait=Flag.KV_READY)
        # The first stage is waited for at once, so it needs no stream of its own.
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
                workspace.flags.submit(stream, tell=Flag.KV_TAKEN, beside=stream != current)
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
        self,
        bundles: Sequence[Tensors],
        targets: Sequence[Tensors],
        kinds: Sequence[HeadRows],
        workspace: Workspace,
        is_last: bool,
    ) -> None:
        tensors = [tensor for bundle in bundles for tensor in bundle]
        published = _published(targets, kinds)
        starts = offsets([tensor.stage_bytes for tensor in published])
        current = current_stream(tensors[0].device)
        beside = not is_last  # the next stage is computed meanwhile, perhaps on two streams
        with label("publish rows"):
            workspace.follow(current)
            workspace.flags.submit(current, wait=Flag.GRAD_TAKEN, beside=beside)
            _publish(tensors, workspace.grads_address(workspace.rank), starts, current)
        stream = workspace.grad_stream if beside else current
        with label("read rows"):
            if beside:
                workspace.flags.submit(current, tell=Flag.GRAD_READY, beside=True)
                workspace.memory_is_free.record(current)
                stream.wait_event(workspace.memory_is_free)
                workspace.flags.submit(stream, wait=Flag.GRAD_READY, beside=True)
            else:
                workspace.flags.submit(current, tell=Flag.GRAD_READY, wait=Flag.GRAD_READY)
            table = _table(workspace, published, pieces_to_rows, workspace.grads_address)
            table.copy([target for bundle in targets for target in bundle], stream, current)
            workspace.flags.submit(stream, tell=Flag.GRAD_TAKEN, beside=beside)
        self._read_on, self._device = stream, tensors[0].device

    def wait(self) -> None:
        current = current_stream(self._device)
        if self._read_on != current:
            current.wait_stream(self._read_on)


def _published(bundles: Sequence[Tensors], kinds: Sequence[HeadRows]) -> tuple[Published, ...]:
    """Of tensors with all their heads."""
    return tuple(
        Published(kind, tensor.size(0), tensor.size(1), tensor.size(3) * tensor.itemsize)
        for bundle, kind in zip(bundles, kinds, strict=True)
        for tensor in bundle
    )


def _publish(tensors: Sequence[torch.Tensor], address: int, starts: Sequence[int], stream: torch.cuda.Stream) -> None:
    """Tensors (B, H, S, D) as (B, S, H, D), each at its start."""
    for tensor, start in zip(tensors, starts, strict=False):
        row_after_row = tensor.transpose(1, 2).contiguous()  # as models have them
        copy_bytes(stream.cuda_stream, address + start, row_after_row.data_ptr(), tensor.numel() * tensor.itemsize)


@dataclass(frozen=True, eq=False)
class _Table:
    """Pieces, whose sources are addresses now."""

    pieces: tuple[Piece, ...]
    on_device: torch.Tensor
    most_rows: int
    most_row_bytes: int
    published: tuple[Published, ...]
    """Kept, since it is looked up by identity."""

    def copy(self, targets: list[torch.Tensor], stream: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        """Copies all pieces to the targets: on the current stream by a kernel, elsewhere by copy engines."""
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
    published: tuple[Published, ...],
    pieces_of: Callable[[tuple[Published, ...], int], tuple[Piece, ...]],
    address: Callable[[int], int],
) -> _Table:
    """Made once for each kind of exchange: uploading it takes longer than the exchange."""
    key = (pieces_of, *((id(each.kind), each.batch, each.all_heads, each.head_bytes) for each in published))
    table = workspace.tables.get(key)
    is_capturing = torch.cuda.is_current_stream_capturing()
    if table is None:
        if is_capturing:
            raise RuntimeError(
                "an exchange of heads has to be prepared on the device, which a CUDA graph cannot capture: run one "
                "forward and backward of this size before capturing"
            )
        pieces = tuple(
            piece._replace(source=address(piece.peer) + piece.source) for piece in pieces_of(published, workspace.rank)
        )
        fields = [piece[1:] for piece in pieces]
        table = _Table(
            pieces,
            prepared(lambda: torch.tensor(fields, dtype=torch.int64, device=workspace.kv().device)).view(
                -1, PIECE_FIELDS
            ),
            max((piece.rows for piece in pieces), default=0),
            max((piece.row_bytes for piece in pieces), default=0),
            published,
        )
        if len(workspace.tables) > _MOST_TABLES:  # lengths that change at every call
            workspace.tables.clear()
        workspace.tables[key] = table
    if is_capturing:
        workspace.captured.append(table)
    return table
