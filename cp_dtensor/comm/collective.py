"""KV transports by all-to-all collectives of the process group: `AllGather` and `AllToAll` (a ring).

Both send only the rows that the receiver attends to, directly from their owner. `AllGather` exchanges rows with all
other ranks for one group of heads at a time, `AllToAll` with one rank for each hop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.distributed as dist

from cp_dtensor._torch import label, start_all_to_all, uses_nccl
from cp_dtensor._torch.tensors import NO_LABEL, is_profiled
from cp_dtensor.comm.faults import raise_for_peers
from cp_dtensor.comm.transport import Contribution, GradTransfers, KvTransfers, KVTransport, pack_rows, row_width
from cp_dtensor.plan.partition import BACKWARD_FLOPS, CallSpec
from cp_dtensor.plan.plan import Stages, TilePlan, Transfer, gathered_plan, ring_plan
from cp_dtensor.plan.tiling import Masking, rows_in_order
from cp_dtensor.spec.layouts import Span

Moves = Sequence[tuple[torch.Tensor, int, Sequence[tuple[int, int, Span]]]]
"""Contiguous memory, and the pieces of it for, or from, each rank (`RoutePiece`), in units of so many of its rows."""
_Places = list[tuple[int, int, torch.Tensor, int]]
"""Rank, slot, rows and their number, in the order of ranks, then of slots. A slot is one collective."""
_BY_RANK, _ROWS, _COUNT = itemgetter(0, 1), itemgetter(2), itemgetter(3)
_EXCHANGE = "an exchange of rows"


class Exchange:
    """Rows in flight between all ranks. `wait()` returns when they have arrived (on a GPU: for work launched later)."""

    def __init__(self, incoming: Moves, outgoing: Moves, slots: int, group: dist.ProcessGroup) -> None:
        like = outgoing[0][0]
        received, counts = _places(incoming, group.size())
        sent, sent_counts = _places(outgoing, group.size())
        self._keep = (received, sent)  # the memory is in use until the exchange has ended
        if uses_nccl(group, like.device):
            self.wait = _start_in_place(received, sent, slots, like, group)
        else:
            self.wait = _start_packed(received, counts, sent, sent_counts, like, group)


def _places(moves: Moves, ranks: int) -> tuple[_Places, list[int]]:
    """Return the places of all pieces, and the number of rows of each rank."""
    places: _Places = []
    counts = [0] * ranks
    for memory, unit, pieces in moves:
        for slot, rank, (start, stop) in pieces:
            count = (stop - start) * unit
            places.append((rank, slot, memory.narrow(0, start * unit, count), count))
            counts[rank] += count
    places.sort(key=_BY_RANK)
    return places, counts


def _start_in_place(
    received: _Places, sent: _Places, slots: int, like: torch.Tensor, group: dist.ProcessGroup
) -> Callable[[], object]:
    """Start one NCCL launch that reads and writes the rows where they are."""
    nothing = like.new_empty(0)
    into, out_of = ([[nothing] * group.size() for _ in range(slots)] for _ in range(2))
    for tensors, places in ((into, received), (out_of, sent)):
        for rank, slot, rows, _ in places:
            tensors[slot][rank] = rows
    return start_all_to_all(into, out_of, group)


def _start_packed(
    received: _Places, counts: list[int], sent: _Places, sent_counts: list[int], like: torch.Tensor,
    group: dist.ProcessGroup,
) -> Callable[[], object]:  # fmt: skip
    """Start one collective of contiguous buffers, which every backend has."""
    packed = torch.cat(list(map(_ROWS, sent))) if sent else like[:0]
    arrived = like.new_empty(sum(counts), *like.shape[1:])
    # Not `with peer_errors(...)`, which is several calls of Python functions.
    try:
        work = dist.all_to_all_single(arrived, packed, counts, sent_counts, group=group, async_op=True)
    except RuntimeError as error:
        raise_for_peers(error, group, _EXCHANGE)

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise_for_peers(error, group, _EXCHANGE)
        for (_, _, rows, _), piece in zip(received, arrived.split(list(map(_COUNT, received))), strict=True):
            rows.copy_(piece)

    return wait


class _KvExchanges(KvTransfers):
    """K/V transfers of which `ahead` are in flight besides the one that is received.

    On GPUs an exchange is a kernel, which starts when earlier kernels leave it multiprocessors. So the exchange that
    overlaps with a step is launched before the tiles of the step, by `receive`.
    """

    def __init__(
        self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, transfers: Sequence[Transfer], group: dist.ProcessGroup,
        ahead: int,
    ) -> None:  # fmt: skip
        self._k, self._v, self._plan, self._group = k, v, plan, group
        self._waiting = deque(transfers)
        self._own, self._own_heads = k.new_empty(0), (-1, -1)  # the packed rows of this rank, and their heads
        self._in_flight: deque[tuple[Exchange, torch.Tensor]] = deque()
        for _ in range(min(ahead, len(transfers))):
            self._start()

    def _start(self) -> None:
        transfer = self._waiting.popleft()
        route = self._plan.routes[transfer.hop]
        with label("send K/V") if is_profiled() else NO_LABEL:
            if self._own_heads != transfer.heads:
                self._own, self._own_heads = pack_rows(self._k, self._v, transfer.heads), transfer.heads
            rows = self._own.new_empty(route.rows, self._own.size(1))
            incoming, outgoing = [(rows, 1, route.recv)], [(self._own, 1, route.send)]
            self._in_flight.append((Exchange(incoming, outgoing, route.slots, self._group), rows))

    def receive(self) -> torch.Tensor:
        exchange, rows = self._in_flight.popleft()
        exchange.wait()
        if self._waiting:
            self._start()
        return rows


class _GradExchanges(GradTransfers):
    """dK/dV transfers directly to the owners of the rows."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, group: dist.ProcessGroup) -> None:
        self._k, self._v, self._plan, self._group = k, v, plan, group
        self._waiting = deque(plan.transfers[1])
        self._buffer = k.new_empty(0)
        self._in_flight: deque[tuple[Exchange, list[Contribution]]] = deque()

    def buffer(self) -> torch.Tensor:
        transfer = self._waiting[0]
        width = row_width(self._k, self._v, transfer.heads)
        self._buffer = self._k.new_empty(self._plan.routes[transfer.hop].rows, width)
        return self._buffer

    def send(self) -> None:
        buffer, self._buffer = self._buffer, self._k.new_empty(0)
        route, width = self._plan.routes[self._waiting.popleft().hop], buffer.size(1)
        with label("send dK/dV") if is_profiled() else NO_LABEL:
            contributions, incoming = [], []
            for pieces in route.grads:
                start, stop = pieces[0].rows
                stack = buffer.new_empty(len(pieces), stop - start, width)
                contributions.append(Contribution((start, stop), stack))
                for (slot, rank, _), gradients in zip(pieces, stack.unbind(), strict=True):
                    incoming.append((gradients, 1, ((slot, rank, (0, stop - start)),)))
            exchange = Exchange(incoming, [(buffer, 1, route.recv)], route.slots, self._group)
            self._in_flight.append((exchange, contributions))

    def receive(self) -> Sequence[Contribution]:
        exchange, contributions = self._in_flight.popleft()
        exchange.wait()
        return contributions


class CollectiveTransport(KVTransport):
    """Transport by collectives of the process group."""

    slows_compute = True

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        return _KvExchanges(k, v, plan, plan.transfers[backward], group, self.transfers_ahead)

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: TilePlan, group: dist.ProcessGroup) -> GradTransfers:
        return _GradExchanges(k, v, plan, group)


@dataclass(frozen=True)
class Staging:
    """Limits that decide into how many groups of heads an all-gather call is cut; equal on every rank."""

    stage_bytes: int = 64 << 20
    """Bytes of all ranks' K/V in a stage of forward; the local tile hides a transfer of this size."""
    grad_stage_bytes: int = 32 << 20
    """Bytes of all ranks' K/V in a stage of backward, where nothing hides the gradients of the last stage."""
    grad_local_bytes: int = 64 << 20
    """Bytes of a rank's K/V for each group of heads of the local tile in backward; kernels copy it in float32."""
    flops_per_stage: float = 0.3e12
    """FLOPs of a rank that a stage of forward has at least (half a millisecond on an H200): launches cost time."""
    grad_flops_per_stage: float = 0.6e12
    """As `flops_per_stage`, in backward, whose launches cost about twice as much."""
    queries_per_stage: int = 1 << 15
    """Query rows of a stage, of all heads, that fill a GPU: on an H200 two waves (blocks of 128 computed at once)."""
    grad_keys_per_stage: int = 1 << 17
    """Rows of keys of all ranks, times query heads, that a stage of backward has at least: eight waves of blocks of 128
    keys on an H200. Of two ranks with a causal mask and `HeadTail`, one computes two of these waves, the other four.
    More rows: up to 5% faster, up to 44% more memory (docs/decisions.md#a-stage-of-backward-fills-the-gpu)."""
    keys_per_stage_by_row: int = 1 << 18
    """Key rows of a stage of interval-masked tiles: sixteen waves, since the work of their blocks varies."""

    def plan(self, spec: CallSpec, rank: int, own_last: bool = False) -> TilePlan:
        """Return the plan of a call that gathers the K/V of all other ranks; `own_last` as for `gathered_plan`."""
        return gathered_plan(spec.tiling, rank, spec.kv_heads, *self.stages(spec), own_last)

    def stages(self, spec: CallSpec) -> tuple[Stages, Stages]:
        """Return the groups of heads of forward and of backward."""
        tiling = spec.tiling
        groups, world_size, rows = tiling.groups, tiling.world_size, tiling.gathered_rows(0)
        # Limits of masks by shape were measured against the rows of all ranks, of which a rank gathers nearly all.
        of_all, received = sum(map(sum, rows.lengths)), tiling.reading.received_rows()
        gathered = of_all if spec.masking is Masking.BY_SHAPE else max(received)
        queries = sum(segment.length for segments in groups[0].q_by_rank for segment in segments)
        own, total = (count * spec.head_bytes * spec.kv_heads for count in (rows.longest, gathered))
        flops = spec.flops(groups) / world_size
        filling = queries // world_size * spec.batch_size * spec.q_heads // self.queries_per_stage
        if spec.masking is not Masking.BY_SHAPE:
            filling = min(filling, gathered * spec.batch_size * spec.kv_heads // self.keys_per_stage_by_row)
        grad_filling = min(filling, gathered * spec.batch_size * spec.q_heads // self.grad_keys_per_stage)

        def count(size: int, limit: int, worthwhile: float, most_filling: int) -> int:
            most = max(1, min(spec.kv_heads, -(-size // limit), int(worthwhile), most_filling))
            # Stages of equal size fill a GPU equally well.
            return next((few for few in range(most, most // 2, -1) if spec.kv_heads % few == 0), most)

        worthwhile = BACKWARD_FLOPS * flops / self.grad_flops_per_stage
        local = min(4, count(own, self.grad_local_bytes, worthwhile, grad_filling))
        remote = count(total, self.grad_stage_bytes, worthwhile, grad_filling)
        forward = count(total, self.stage_bytes, flops / self.flops_per_stage, filling)
        return Stages(1, forward), Stages(local, max(local, remote))


DEFAULT_STAGING = Staging()


@dataclass(frozen=True)
class AllGather(CollectiveTransport):
    """All other ranks' K/V of some heads at a time, so that a few large attention calls do the work.

    The next two groups of heads (stages) travel while one is computed. Memory: three stages of all ranks' K/V; in
    backward also two stages of gradients and one of contributions. A stage has about `staging.stage_bytes` or
    `staging.grad_stage_bytes`, or more if a GPU is not busy with fewer heads.
    """

    staging: Staging = DEFAULT_STAGING

    name = "allgather"
    transfers_ahead = 2  # with one, the second would start after the own tiles: links would be idle until then
    keeps_own_gradients_wide = True  # for exactness; `symm_mem` is the faster one

    def plan(self, spec: CallSpec, rank: int) -> TilePlan:
        return self.staging.plan(spec, rank, own_last=True)


@dataclass(frozen=True)
class AllToAll(CollectiveTransport):
    """A ring: in hop h each rank receives the K/V of rank - h, with the next two hops in flight.

    Rows travel directly from their owner to their reader. That takes as many bytes as passing them from rank to rank,
    each hop leaves out rows that its reader does not attend to, and no hop depends on an earlier one. Gradients go
    directly to the owner, in the dtype of K/V. Large shards go around by groups of heads, one ring after the other.

    Memory, whatever the number of ranks n: three groups of K/V and this rank's own group as rows; in backward also two
    groups of gradients and one of contributions. Transfers: n - 1 hops of K/V in forward, and n - 1 hops of K/V and
    of dK/dV in backward.
    """

    shard_bytes: int = 32 << 20
    """Bytes of a shard's K/V in a group of heads in forward; kernels need several times as much memory."""
    grad_shard_bytes: int = 16 << 20
    """As `shard_bytes`, in backward, whose kernels and sums need twice as much memory, in float32."""
    most_head_groups: int = 4
    """More groups make tiles too small to fill a GPU."""
    flops_per_hop: float = 0.3e12
    """FLOPs that a hop of a group has at least (half a millisecond on an H200), since launches cost time."""
    transfers_ahead: int = 2
    """Hops in flight under a tile. An exchange may get multiprocessors only when a tile ends, and needs them on both
    ranks: with one hop ahead, every delay of a rank delays its neighbours."""

    name = "alltoall"

    def plan(self, spec: CallSpec, rank: int) -> TilePlan:
        groups = self.head_groups(spec, spec.tiling.world_size)
        return ring_plan(spec.tiling, rank, spec.kv_heads, *groups)

    def head_groups(self, spec: CallSpec, ring_size: int) -> tuple[int, int]:
        """Return the groups of heads of forward and of backward. Equal on all ranks of `spec`, if rings are of some."""
        groups = spec.partition.groups()
        shard = rows_in_order(groups[0].kv_by_rank).longest * spec.head_bytes * spec.kv_heads
        worthwhile = int(spec.flops(groups) / groups[0].world_size / ring_size / self.flops_per_hop)
        forward, backward = (
            max(1, min(-(-shard // limit), worthwhile, self.most_head_groups))
            for limit in (self.shard_bytes, self.grad_shard_bytes)
        )
        return forward, backward


OUTER_TRANSPORT = AllToAll(shard_bytes=16 << 20, grad_shard_bytes=16 << 20, most_head_groups=8)
"""Transport of the outer axis of a nested ring. Networks are slow, so hops are smaller: the first tiles wait for the
first group of heads, and after the last transfer come the tiles of one group. Both passes have equally many groups."""
