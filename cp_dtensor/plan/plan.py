"""Execution plans: the tiles of one rank in steps, forward and backward, and the transfers that steps wait for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from cp_dtensor.plan.tiles import Tile, without_long_triangles
from cp_dtensor.plan.tiling import GatheredRows, Tiling
from cp_dtensor.spec.layouts import Span, chunk, joined_spans

LONGEST_TRIANGLE = 1 << 16
"""Most rows of a causal tile in forward: cuDNN is slower on longer ones (docs/decisions.md#long-triangles-are-cut)."""
_MOST_SPANS = 4
"""Most ranges of rows to send: each is packed by launches of its own."""


@dataclass(frozen=True)
class Transfer:
    """K/V of some heads that this rank receives, and their gradients that it returns.

    With `hop` None it receives from all other ranks, into a buffer as `GatheredRows` describes it. Otherwise it
    receives from rank - hop and sends to rank + hop (modulo the world size), into a buffer with the rows of the
    sender's shard.
    """

    heads: Span
    hop: int | None

    def sources(self, rank: int, world_size: int) -> Sequence[int]:
        """Return the ranks that `rank` may receive rows from."""
        return others(rank, world_size) if self.hop is None else ((rank - self.hop) % world_size,)

    def readers(self, rank: int, world_size: int) -> Sequence[int]:
        """Return the ranks that may receive rows of `rank`."""
        return others(rank, world_size) if self.hop is None else ((rank + self.hop) % world_size,)


def others(rank: int, world_size: int) -> list[int]:
    """Return all other ranks; each rank begins with another one, so that links are used evenly."""
    return [(rank + hop) % world_size for hop in range(1, world_size)]


@dataclass(frozen=True)
class Step:
    """Tiles of some key/value heads (and their query heads) that are computed together."""

    heads: Span
    transfer: Transfer | None
    """The transfer that the tiles wait for; None for tiles against this rank's own shard."""
    tiles: tuple[Tile, ...]
    is_last: bool = False
    """True if no later step has any of the heads."""
    has_gaps: bool = False
    """True if some received rows are seen by no query of some batch rows."""

    @property
    def hop(self) -> int:
        """That of the transfer; 0 for tiles against this rank's own shard, and where rows come from all ranks."""
        return 0 if self.transfer is None or self.transfer.hop is None else self.transfer.hop

    @property
    def spans_read(self) -> list[Span]:
        """Ranges of key rows that the tiles read."""
        return joined_spans(tile.kv for tile in self.tiles)


Steps = tuple[Step, ...]


class RoutePiece(NamedTuple):
    """Consecutive rows that this rank sends to another rank or receives from it."""

    slot: int
    """Number of the all-to-all collective in which the rows travel."""
    rank: int
    """The other rank."""
    rows: Span


class Route(NamedTuple):
    """The rows of a transfer, whatever its heads, by all-to-all collectives or by copies of other ranks' memory."""

    rows: int
    """Rows of the transfer's buffer."""
    slots: int
    """Number of collectives, equal on all ranks."""
    recv: tuple[RoutePiece, ...]
    """In rows of the transfer's buffer."""
    recv_from: tuple[int, ...]
    """The first row of each of `recv` in the shard of its rank, where rows come from all ranks."""
    send: tuple[RoutePiece, ...]
    """In rows of this rank's shard."""
    grads: tuple[tuple[RoutePiece, ...], ...]
    """`send` grouped by slot and rows: each of these ranks returns gradients of the same rows."""
    grads_from: tuple[tuple[int, ...], ...]
    """The first row of each of `grads` in the gathered buffer of its rank, as `recv_from`."""


@dataclass(frozen=True)
class TilePlan:
    """All integers of a call on one rank: steps, and the rows that it sends and receives."""

    rank: int
    rows: GatheredRows
    """Parts of all shards, and their places in this rank's gathered buffer."""
    most_rows: int
    """Rows of the longest gathered buffer of any rank."""
    recv_parts: tuple[tuple[int, ...], ...]
    """`recv_parts[source]`: the parts of its shard that this rank receives."""
    send_parts: tuple[tuple[int, ...], ...]
    """`send_parts[reader]`: the parts of this rank's shard that it sends."""
    send_starts: tuple[tuple[int, ...], ...]
    """`send_starts[reader]`: the first row of each of these parts in the reader's gathered buffer."""
    forward: Steps
    backward: Steps

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.rows.world_size

    @property
    def summary(self) -> str:
        """Numbers of steps, tiles and rows, for logs."""
        passes = (
            f"{name} {sum(len(step.tiles) for step in steps)} tiles in {len(steps)} steps"
            for name, steps in (("forward", self.forward), ("backward", self.backward))
        )
        received = sum(
            self.rows.lengths[source][part]
            for source, parts in enumerate(self.recv_parts) if source != self.rank for part in parts
        )  # fmt: skip
        return f"rank {self.rank} of {self.world_size}: {', '.join(passes)}, receives {received:,} rows of K/V"

    def buffer_rows(self, transfer: Transfer) -> int:
        """Return the rows of the buffer that a transfer fills."""
        if transfer.hop is None:
            return self.rows.total
        return sum(sum(self.rows.lengths[source]) for source in transfer.sources(self.rank, self.world_size))

    @cached_property
    def send_spans(self) -> tuple[Span, ...]:
        """Few ranges of rows of this rank's shard that cover all rows it sends."""
        parts = sorted({part for sent in self.send_parts for part in sent})
        spans = joined_spans(self.rows.local_span(self.rank, part) for part in parts)
        return tuple(spans) if len(spans) <= _MOST_SPANS else ((spans[0][0], spans[-1][1]),)

    @cached_property
    def transfers(self) -> tuple[tuple[Transfer, ...], ...]:
        """The transfers of forward and of backward, in the order of their steps."""
        return tuple(tuple(step.transfer for step in steps if step.transfer) for steps in (self.forward, self.backward))

    @cached_property
    def routes(self) -> dict[int | None, Route]:
        """The route of the transfers with each hop."""
        transfers = {transfer.hop: transfer for of_pass in self.transfers for transfer in of_pass}
        return {hop: self._route(transfer) for hop, transfer in transfers.items()}

    def _route(self, transfer: Transfer) -> Route:
        rows, rank, is_hop = self.rows, self.rank, transfer.hop is not None
        rows_of = rows.local_span if is_hop else rows.span
        recv, send, grads = list[RoutePiece](), list[RoutePiece](), dict[tuple[int, Span], list[RoutePiece]]()
        for source in transfer.sources(rank, self.world_size):
            recv += _pieces(source, {part: rows_of(source, part) for part in self.recv_parts[source]}, is_hop)
        for reader in transfer.readers(rank, self.world_size):
            send += _pieces(reader, {part: rows.local_span(rank, part) for part in self.send_parts[reader]}, is_hop)
        for piece in send:
            grads.setdefault((piece.slot, piece.rows), []).append(piece)
        slots, recv_from, grads_from = rows.most_parts, list[int](), list[tuple[int, ...]]()
        if is_hop:
            slots = (slots + 1) // 2  # joined pieces begin at every other part at most
        else:  # a slot is a part
            recv_from = [rows.local_span(piece.rank, piece.slot)[0] for piece in recv]
            starts = [dict(zip(*each, strict=True)) for each in zip(self.send_parts, self.send_starts, strict=True)]
            grads_from = [tuple(starts[piece.rank][piece.slot] for piece in pieces) for pieces in grads.values()]
        return Route(
            self.buffer_rows(transfer), slots, tuple(recv), tuple(recv_from), tuple(send),
            tuple(map(tuple, grads.values())), tuple(grads_from),
        )  # fmt: skip


def _pieces(peer: int, spans: dict[int, Span], is_hop: bool) -> Iterator[RoutePiece]:
    """Return the pieces of parts; those of a hop joined where they are neighbours."""
    if is_hop:
        spans = dict(enumerate(joined_spans(spans.values())))
    return (RoutePiece(slot, peer, (start, stop)) for slot, (start, stop) in spans.items() if start < stop)


@dataclass(frozen=True)
class Stages:
    """Numbers of groups of heads of a plan."""

    local: int
    """Groups for tiles against the own shard; each is followed by the remote tiles of its heads (see `own_last`)."""
    remote: int
    """Groups for tiles against other shards, in all."""


def ring_plan(tiling: Tiling, rank: int, kv_heads: int, head_groups: int = 1, grad_head_groups: int = 1) -> TilePlan:
    """Return a plan of one step per hop and group of heads; memory does not grow with the number of ranks.

    In backward the own tiles of the last of several groups come last: the last gradients return under them.
    """
    ranks = tiling.world_size
    remote = [(hop, tiling.tiles_against(rank, (rank - hop) % ranks)) for hop in range(1, ranks)]
    forward, backward = (Stages(groups, groups) for groups in (head_groups, grad_head_groups))
    return _plan(tiling, rank, kv_heads, remote, forward, backward, own_last=True)


def gathered_plan(
    tiling: Tiling, rank: int, kv_heads: int, stages: Stages, grad_stages: Stages, own_last: bool = False
) -> TilePlan:
    """Return a plan of the own shard first, then all other shards together, by groups of heads.

    `own_last`: True if the own tiles of the last of several groups come last in backward, as in `ring_plan`.
    """
    remote = [(None, tiling.gathered_tiles(rank))] if tiling.world_size > 1 else []
    return _plan(tiling, rank, kv_heads, remote, stages, grad_stages, own_last)


def head_spans(kv_heads: int, count: int) -> tuple[Span, ...]:
    """Return the heads in `count` groups whose sizes differ by at most one (fewer groups if there are fewer heads).

    >>> head_spans(8, 3)
    ((0, 3), (3, 6), (6, 8))
    """
    count = max(1, min(count, kv_heads))
    return tuple(chunk((0, kv_heads), count, index) for index in range(count))


def _plan(
    tiling: Tiling, rank: int, kv_heads: int, remote: Sequence[tuple[int | None, tuple[Tile, ...]]], forward: Stages,
    backward: Stages, own_last: bool,
) -> TilePlan:  # fmt: skip
    """Return a plan of the own shard and `remote` tiles, by the hop of their transfers, in these stages."""
    ranks = range(tiling.world_size)
    rows, own, reading = tiling.gathered_rows(rank), tiling.tiles_against(rank, rank), tiling.reading
    recv_parts = tuple(reading.parts(rank, source) for source in ranks)
    send_parts = tuple(reading.parts(reader, rank) for reader in ranks)

    def steps(counts: Stages, late: bool = False) -> Iterator[Step]:
        for local in head_spans(kv_heads, counts.local if remote else 1):
            spans = head_spans(local[1] - local[0], -(-counts.remote // counts.local))
            groups = [(local[0] + start, local[0] + stop) for start, stop in spans]
            last = groups[-1]
            is_late = late and bool(remote) and last[0] > 0 and last[1] == kv_heads
            if not is_late or local != last:
                yield Step((local[0], last[0]) if is_late else local, None, own)
            for heads in groups:
                yield from (Step(heads, Transfer(heads, hop), tiles) for hop, tiles in remote)
            if is_late:
                yield Step(last, None, own)

    def has_gaps(step: Step) -> bool:
        if step.transfer is None:
            return False
        rows_of = rows.span if step.transfer.hop is None else rows.local_span
        sources = step.transfer.sources(rank, rows.world_size)
        brought = [rows_of(source, part) for source in sources for part in recv_parts[source]]
        for group in tiling.groups:
            seen = joined_spans(tile.kv for tile in step.tiles if tile.batch == group.batch)
            for start, stop in brought:
                if start < stop and not any(first <= start and stop <= last for first, last in seen):
                    return True
        return False

    def marked(steps: Iterable[Step]) -> Steps:
        found: list[Step] = []
        later: set[Span] = set()  # heads: few groups, however many steps there are
        for step in reversed(list(steps)):
            meets_later = any(heads[0] < step.heads[1] and step.heads[0] < heads[1] for heads in later)
            found.append(replace(step, is_last=not meets_later, has_gaps=has_gaps(step)))
            later.add(step.heads)
        return tuple(reversed(found))

    return TilePlan(
        rank=rank,
        rows=rows,
        most_rows=max(reading.received_rows()),
        recv_parts=recv_parts,
        send_parts=send_parts,
        send_starts=tuple(reading.starts(reader, rank) for reader in ranks),
        forward=marked(
            replace(step, tiles=without_long_triangles(step.tiles, LONGEST_TRIANGLE)) for step in steps(forward)
        ),
        backward=marked(steps(backward, own_last)),
    )
