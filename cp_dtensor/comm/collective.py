"""Moving rows by collectives of the process group: what all-gather and all-to-all rotation have in common.

Both are all-to-all exchanges of just the rows that are wanted, straight between their places: all-gather has one with
every other rank for each group of heads, all-to-all one with a single rank for each hop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

from cp_dtensor._torch import label, start_all_to_all, uses_nccl
from cp_dtensor.comm.transport import (
    Contribution,
    GradTransfers,
    KvTransfers,
    KVTransport,
    pack_rows,
    row_width,
)
from cp_dtensor.plan.partition import (
    BACKWARD_FLOPS,
    CallSpec,
)
from cp_dtensor.plan.plan import Plan, Stages, Step, Transfer, gathered_plan, ring_plan
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.layouts import Span

# Rows for (or from) each rank, None where there are none: `places[slot][rank]`. A slot is one collective.
Places = list[list[torch.Tensor | None]]


class Exchange:
    """Rows on their way between all ranks, each from and to its place.

    `wait()` returns when they are there (on a GPU: for whatever is launched from then on).
    """

    def __init__(self, incoming: Places, outgoing: Places, like: torch.Tensor, group: dist.ProcessGroup) -> None:
        self._keep = (incoming, outgoing)  # must live until the transfer is done
        start = _in_place if uses_nccl(group, like.device) else _packed
        self.wait = start(incoming, outgoing, like, group)


def _in_place(incoming: Places, outgoing: Places, like: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """One launch without copies."""
    nothing = like.new_empty(0)

    def filled(places: Places) -> list[list[torch.Tensor]]:
        return [[nothing if rows is None else rows for rows in slot] for slot in places]

    return start_all_to_all(filled(incoming), filled(outgoing), group)


def _packed(incoming: Places, outgoing: Places, like: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
    """One collective of contiguous buffers, for backends that have no other."""
    width = like.size(-1)

    def by_rank(places: Places) -> list[list[torch.Tensor]]:
        return [[rows for rows in of_rank if rows is not None] for of_rank in zip(*places, strict=True)]

    def lengths(places: Places) -> list[int]:
        return [sum(rows.size(0) for rows in of_rank) for of_rank in by_rank(places)]

    sent = list(chain.from_iterable(by_rank(outgoing)))
    sent_rows = torch.cat(sent) if sent else like.new_empty(0, width)
    lengths_in, lengths_out = lengths(incoming), lengths(outgoing)
    received = like.new_empty(sum(lengths_in), width)
    work = dist.all_to_all_single(received, sent_rows, lengths_in, lengths_out, group=group, async_op=True)

    def wait() -> None:
        work.wait()
        places = list(chain.from_iterable(by_rank(incoming)))
        for rows, arrived in zip(places, received.split([rows.size(0) for rows in places]), strict=True):
            rows.copy_(arrived)

    return wait


class ExchangedKv(KvTransfers):
    """Keys and values by exchange, some `ahead` of the one that is received.

    An exchange is a kernel that begins when the tiles before it have ended; it is launched before those of its step.
    """

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: Plan,
        steps: Sequence[Step],
        group: dist.ProcessGroup,
        ahead: int,
    ) -> None:
        self._k, self._v, self._plan, self._group = k, v, plan, group
        self._waiting = deque(step.transfer for step in steps if step.transfer is not None)
        self._own: tuple[Span, torch.Tensor] | None = None  # the heads that were packed last, and their rows
        self._in_flight: deque[tuple[Exchange, torch.Tensor]] = deque()
        for _ in range(ahead):
            self._start()

    def _start(self) -> None:
        if not self._waiting:
            return
        transfer, plan = self._waiting.popleft(), self._plan
        with label("send K/V"):
            if self._own is None or self._own[0] != transfer.heads:
                self._own = (transfer.heads, pack_rows(self._k, self._v, transfer.heads))
            own = self._own[1]
            rows = own.new_empty(plan.buffer_rows(transfer), own.size(1))
            incoming = remote_places(rows, transfer, plan)
            outgoing = own_places(own, transfer, plan)
            self._in_flight.append((Exchange(incoming, outgoing, own, self._group), rows))

    def receive(self) -> torch.Tensor:
        exchange, rows = self._in_flight.popleft()
        exchange.wait()
        self._start()
        return rows

    def tiles_launched(self) -> None:
        pass  # what travels under them had to be launched before them


class ExchangedGrads(GradTransfers):
    """Gradients of keys and values straight home, by exchange."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> None:
        self._k, self._v, self._plan, self._group = k, v, plan, group
        self._waiting = deque(step.transfer for step in plan.backward if step.transfer is not None)
        self._buffer = k.new_empty(0)
        self._in_flight: deque[tuple[Exchange, list[Contribution]]] = deque()

    def buffer(self) -> torch.Tensor:
        transfer = self._waiting[0]
        width = row_width(self._k, self._v, transfer.heads)
        self._buffer = self._k.new_empty(self._plan.buffer_rows(transfer), width)
        return self._buffer

    def send(self) -> None:
        transfer, plan = self._waiting.popleft(), self._plan
        with label("send dK/dV"):
            incoming = _no_places(transfer, plan)
            contributions = []
            by_place: dict[tuple[int, Span], list[int]] = {}
            for reader in transfer.readers(plan.rank, plan.world_size):
                for place in _pieces(transfer, plan.given[reader], plan.rank, plan):
                    by_place.setdefault(place, []).append(reader)
            for (slot, rows), readers in by_place.items():
                stack = self._buffer.new_empty(len(readers), rows[1] - rows[0], self._buffer.size(1))
                for reader, piece in zip(readers, stack.unbind(), strict=True):
                    incoming[slot][reader] = piece
                contributions.append(Contribution(rows, stack))
            outgoing = remote_places(self._buffer, transfer, plan)
            exchange = Exchange(incoming, outgoing, self._buffer, self._group)
        self._in_flight.append((exchange, contributions))
        self._buffer = self._k.new_empty(0)

    def receive(self) -> Sequence[Contribution]:
        exchange, contributions = self._in_flight.popleft()
        exchange.wait()
        return contributions


class CollectiveTransport(KVTransport):
    """What rotations by exchange have in common; they differ in their plans."""

    def for_call(self, shape: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        return self

    @property
    def slows_compute(self) -> bool:
        return True

    def abandon(self, group: dist.ProcessGroup) -> None:
        pass  # collectives leave nothing behind

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        steps = plan.backward if backward else plan.forward
        return ExchangedKv(k, v, plan, steps, group, self.transfers_ahead)

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        return ExchangedGrads(k, v, plan, group)


def remote_places(rows: torch.Tensor, transfer: Transfer, plan: Plan) -> Places:
    """Where in a transfer's buffer the rows lie that this rank wants of each other rank."""
    places = _no_places(transfer, plan)
    for source in transfer.sources(plan.rank, plan.world_size):
        for slot, (start, stop) in _pieces(transfer, plan.wanted[source], source, plan, in_buffer=True):
            places[slot][source] = rows[start:stop]
    return places


def own_places(rows: torch.Tensor, transfer: Transfer, plan: Plan) -> Places:
    """Which of this rank's rows go to each other rank."""
    places = _no_places(transfer, plan)
    for reader in transfer.readers(plan.rank, plan.world_size):
        for slot, (start, stop) in _pieces(transfer, plan.given[reader], plan.rank, plan):
            places[slot][reader] = rows[start:stop]
    return places


def _pieces(
    transfer: Transfer, parts: Sequence[int], owner: int, plan: Plan, in_buffer: bool = False
) -> Iterator[tuple[int, Span]]:
    """Slots and rows of some parts of a shard: rows of the shard or, `in_buffer`, of the transfer's buffer."""
    if transfer.hop is None:
        span = plan.rows.span if in_buffer else plan.rows.local_span
        yield from ((part, span(owner, part)) for part in parts if plan.rows.lengths[owner][part])
        return
    # Neighbours travel as one; so at most every other part begins a piece, which is what `_no_places` counts on.
    joined: list[Span] = []
    for part in parts:
        start, stop = plan.rows.local_span(owner, part)
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    yield from ((slot, span) for slot, span in enumerate(joined) if span[0] < span[1])


def _no_places(transfer: Transfer, plan: Plan) -> Places:
    """As many slots as there may be pieces: alike on all ranks, since each is a collective."""
    parts = len(plan.rows.lengths[plan.rank])
    return [[None] * plan.world_size for _ in range(parts if transfer.hop is None else (parts + 1) // 2)]


# The all-gather rotation: every other rank's K/V at once, so that a few large attention calls do the work. Staged
# by groups of heads: a stage is computed while the next one travels. Memory: two stages of all ranks' K/V, in
# backward two stages of gradients and one of contributions as well, each about `stage_bytes` or `grad_stage_bytes`,
# or as many heads as it takes to fill a GPU, whichever is more.


@dataclass(frozen=True)
class Staging:
    """How finely to cut the work by heads, by the size of all ranks' K/V together; alike on every rank."""

    stage_bytes: int = 64 << 20
    """K/V of a stage in forward: little enough to hide under the local tile."""
    grad_stage_bytes: int = 32 << 20
    """K/V of a stage in backward, where the gradients of the last stage are not hidden."""
    grad_local_bytes: int = 128 << 20
    """K/V of all ranks for each cut of the local tile in backward, of which kernels keep several copies in float32."""
    flops_per_stage: float = 0.3e12
    """Operations of a rank that a stage should have at least (half a millisecond on an H200): launches cost time."""
    grad_flops_per_stage: float = 0.6e12
    """The same in backward, whose launches cost about twice as much."""
    queries_per_stage: int = 1 << 15
    """Query rows of a stage, all heads together, that fill a GPU: about two waves of blocks of 128 on an H200."""
    keys_per_stage_by_row: int = 1 << 18
    """Key rows of a stage of tiles that mask by row: sixteen waves, since their blocks have work of all sizes."""

    def plan(self, shape: CallSpec, rank: int) -> Plan:
        """The steps of a call on one rank, everybody else's K/V at once."""
        return gathered_plan(shape.tiling, rank, shape.kv_heads, *self.stages(shape))

    def stages(self, shape: CallSpec) -> tuple[Stages, Stages]:
        """Of forward and of backward."""
        tiling = shape.tiling
        groups, world_size, gathered = tiling.groups, tiling.world_size, tiling.most_rows()
        queries = sum(segment.length for segments in groups[0].q_by_rank for segment in segments)
        total = gathered * shape.head_bytes * shape.kv_heads
        flops = shape.flops(groups) / world_size
        filling = queries // world_size * shape.batch_size * shape.q_heads // self.queries_per_stage
        if shape.masking is not Masking.BY_SHAPE:
            filling = min(filling, gathered * shape.batch_size * shape.kv_heads // self.keys_per_stage_by_row)

        def count(limit: int, worthwhile: float) -> int:
            most = max(1, min(shape.kv_heads, -(-total // limit), int(worthwhile), filling))
            # Stages of equal size fill a GPU equally well.
            return next((few for few in range(most, most // 2, -1) if shape.kv_heads % few == 0), most)

        worthwhile = BACKWARD_FLOPS * flops / self.grad_flops_per_stage
        local = min(4, count(self.grad_local_bytes, worthwhile))
        remote = count(self.grad_stage_bytes, worthwhile)
        return Stages(1, count(self.stage_bytes, flops / self.flops_per_stage)), Stages(local, max(local, remote))


DEFAULT_STAGING = Staging()


@dataclass(frozen=True)
class AllGather(CollectiveTransport):
    """Gather K/V by groups of heads, and bring dK/dV home likewise."""

    staging: Staging = DEFAULT_STAGING

    @property
    def name(self) -> str:
        return "allgather"

    @property
    def transfers_ahead(self) -> int:
        return 1  # one is as large as all hops of a ring

    @property
    def keeps_own_gradients_wide(self) -> bool:
        return True  # it is the most exact of the rotations, and symm_mem is the fastest

    def plan(self, shape: CallSpec, rank: int) -> Plan:
        return self.staging.plan(shape, rank)


# The all-to-all rotation, a ring: in hop h every rank has the K/V of rank - h, the next two hops always in flight.
# Rows go straight from their owner to the rank that reads them, which is as many bytes as passing them on from rank
# to rank, lets each hop leave out what its reader cannot see, and depends on no hop before it. Gradients go
# straight home, in the dtype of K/V and not as float32 sums. Large shards are worked on by groups of heads, one
# ring after the other. Memory, whatever the number of ranks: three such groups of K/V, this rank's own group as
# rows, in backward two of gradients and one of contributions as well. Transfers: n - 1 hops of K/V in forward and
# again in backward, where n - 1 hops of dK/dV go beside them.

# More would make tiles too small to fill a GPU.
_MOST_HEAD_GROUPS = 4


@dataclass(frozen=True)
class AllToAll(CollectiveTransport):
    """One hop after the other, and the gradients after them."""

    shard_bytes: int = 32 << 20
    """K/V of a shard that are worked on at a time in forward: kernels need several times as much memory."""
    grad_shard_bytes: int = 16 << 20
    """The same in backward, where kernels and sums keep twice as much of it, in float32."""
    flops_per_hop: float = 0.3e12
    """Operations that a hop of some heads should have at least (half a millisecond on an H200): launches cost time."""
    transfers_ahead: int = 2
    """Hops in flight under a tile. One may get multiprocessors only when a tile ends, and needs those of both ranks:
    with one ahead, every delay of one rank delays its neighbours."""

    @property
    def name(self) -> str:
        return "alltoall"

    @property
    def keeps_own_gradients_wide(self) -> bool:
        return False

    def plan(self, shape: CallSpec, rank: int) -> Plan:
        tiling = shape.tiling
        shard = tiling.gathered_rows(rank).longest * shape.head_bytes * shape.kv_heads
        worthwhile = int(shape.flops(tiling.groups) / tiling.world_size**2 / self.flops_per_hop)

        def head_groups(limit: int) -> int:
            return max(1, min(-(-shard // limit), worthwhile, _MOST_HEAD_GROUPS))

        groups = head_groups(self.shard_bytes), head_groups(self.grad_shard_bytes)
        return ring_plan(tiling, rank, shape.kv_heads, *groups)


OUTER_TRANSPORT = AllToAll(transfers_ahead=1)
"""Of rings of rings: every hop travels under a whole inner ring."""
