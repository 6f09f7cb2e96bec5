"""What a rank copies from its peers' memory in an exchange of heads, as integers.

Every tensor is published as (B, rows, heads, D), without gaps, one after the other; each begins where it would begin
for the longest shard, or for the rank with the most heads, so that every rank knows where to look.
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
    from cp_dtensor.comm.triton_kernels import ALIGNMENT, PIECE_FIELDS, launch_copies


_TENSOR_ALIGNMENT = 256


class Piece(NamedTuple):
    """Rows of equal length. Sizes in bytes."""

    peer: int
    source: int
    """Offset in what the peer has published."""
    tensor: int
    """Which tensor it goes to."""
    target: int
    """Offset in that tensor."""
    rows: int
    row_bytes: int
    source_pitch: int
    target_pitch: int


@dataclass(frozen=True)
class Published:
    """A tensor (B, rows, heads, D) as ranks publish it in one direction."""

    kind: HeadRows
    batch: int
    all_heads: int
    """Heads of the tensor before an exchange to heads; units after one to rows."""
    head_bytes: int

    @property
    def whole_bytes(self) -> int:
        """Of all heads of the longest shard."""
        return self.batch * self.kind.rows.longest * self.all_heads * self.head_bytes

    @property
    def stage_bytes(self) -> int:
        """Of all rows of the most heads that a rank has."""
        return self.batch * self.kind.rows.total * max(self.kind.head_counts) * self.head_bytes


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where tensors of these sizes begin, and, last, how much they take together."""
    return list(accumulate((-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in sizes), initial=0))


def pieces_to_heads(tensors: tuple[Published, ...], rank: int) -> tuple[Piece, ...]:
    """This rank's heads of all rows, its own rows last."""
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


def pieces_to_rows(tensors: tuple[Published, ...], rank: int) -> tuple[Piece, ...]:
    """All heads of this rank's rows, its own heads last; those of one stage."""
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
    """Each rank begins with the next one, so that not all read from one."""
    world_size = len(kind.heads)
    return [(rank + hop) % world_size for hop in range(1, world_size + 1)]


def _own_last(pieces: Sequence[Piece], rank: int) -> tuple[Piece, ...]:
    """A copy within a GPU is a kernel, which may have to wait for a multiprocessor; no other should wait for it."""
    return tuple(sorted((piece for piece in pieces if piece.rows and piece.row_bytes), key=lambda it: it.peer == rank))


def _runs(first: int, last: int, copies: int) -> list[tuple[int, int, int]]:
    """`(head, unit among these, count)` of heads that lie together on both sides."""
    if copies == 1:
        return [(first, 0, last - first)]
    return [(unit // copies, unit - first, 1) for unit in range(first, last)]


# Exchanging rows for heads over memory that ranks share: each publishes its tensors and reads what it wants. Heads
# and rows change places on the way. The first stage of an exchange and the way back of the last are waited for, so
# one kernel reads all their pieces at once, from all peers. What travels under computation is brought by copy
# engines: cuDNN's kernels take all multiprocessors for as long as they run, and one that starts late on some of
# them ends late. Ranks are ordered by flags, as in `symm_mem`: those of K/V on the way to heads, those of gradients
# on the way to rows.

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


def obstacle_to_shared_memory(shape: CallSpec, group: dist.ProcessGroup, device: torch.device) -> str | None:
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


def shared_memory_heads(shape: CallSpec, stages: Sequence[tuple[HeadRows, HeadRows]]) -> SharedMemoryHeads:
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
