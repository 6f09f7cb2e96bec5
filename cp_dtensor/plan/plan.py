"""Plans: the steps of one call on one rank, forward and backward, and the transfers that they wait for.

A schedule says which tiles there are; a plan says in which order they are computed, by groups of heads, so that the
next transfer is always in flight under the current step. Integers only, like schedules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from cp_dtensor.plan.tiles import Tile, without_long_triangles
from cp_dtensor.plan.tiling import GatheredRows, Tiling
from cp_dtensor.spec.layouts import Span, share

LONGEST_TRIANGLE = 1 << 16
"""Rows of a causal tile in forward: beyond, cuDNN is 7% slower on an H200 than on its parts (docs/log.md)."""
_MOST_SPANS = 4
"""Of what other ranks want: each is packed by launches of its own."""


@dataclass(frozen=True)
class Transfer:
    """Keys and values of some heads on their way to this rank, and their gradients on the way back.

    `hop` None: from all other ranks, into a buffer as `GatheredRows` describes it. Otherwise from rank - hop (and to
    rank + hop, modulo the world size), into a buffer with the rows of that rank's shard.
    """

    heads: Span
    hop: int | None

    def sources(self, rank: int, world_size: int) -> Sequence[int]:
        """The ranks whose rows `rank` may get (of its own it wants none)."""
        return range(world_size) if self.hop is None else ((rank - self.hop) % world_size,)

    def readers(self, rank: int, world_size: int) -> Sequence[int]:
        """The ranks that may get rows of `rank`."""
        return range(world_size) if self.hop is None else ((rank + self.hop) % world_size,)


@dataclass(frozen=True)
class Step:
    """Tiles of some key/value heads (and the query heads that read them) that can be computed together."""

    heads: Span
    transfer: Transfer | None
    """What the tiles wait for; None for tiles against this rank's own shard."""
    tiles: tuple[Tile, ...]
    is_last: bool = False
    """Whether no later step has any of the heads."""
    has_gaps: bool = False
    """Whether some of the rows that the transfer brings are seen by no query of some batch rows."""


Steps = tuple[Step, ...]


class Pull(NamedTuple):
    """Consecutive rows of a peer's shard, and where they go in a gathered buffer."""

    peer: int
    row: int
    peer_row: int
    rows: int


class GradPulls(NamedTuple):
    """Some rows of this rank's shard, and where the ranks that have seen them publish their gradients."""

    rows: Span
    places: tuple[tuple[int, int], ...]
    """Rank, and the first of the rows where they are gathered there."""


@dataclass(frozen=True)
class Plan:
    """Everything that is decided about a call before it runs but its tensors and its process group."""

    rank: int
    rows: GatheredRows
    """How shards are cut into parts, and where they lie when they are gathered here."""
    most_rows: int
    """Of such a buffer on any rank."""
    wanted: tuple[tuple[int, ...], ...]
    """`wanted[source]`: the parts of its shard that this rank's queries see."""
    given: tuple[tuple[int, ...], ...]
    """`given[rank]`: the parts of our shard that its queries see."""
    given_at: tuple[tuple[int, ...], ...]
    """`given_at[rank]`: the first row of each of these where they are gathered there."""
    forward: Steps
    backward: Steps

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.rows.world_size

    def buffer_rows(self, transfer: Transfer) -> int:
        """Rows of the buffer that a transfer fills."""
        if transfer.hop is None:
            return self.rows.total
        return sum(sum(self.rows.lengths[source]) for source in transfer.sources(self.rank, self.world_size))

    @cached_property
    def given_spans(self) -> tuple[Span, ...]:
        """The rows of this rank's shard that any other rank wants, as few ranges that have all of them."""
        parts = sorted({part for given in self.given for part in given})
        spans: list[Span] = []
        for start, stop in (self.rows.local_span(self.rank, part) for part in parts):
            if start < stop and spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], stop
            elif start < stop:
                spans.append((start, stop))
        return tuple(spans) if len(spans) <= _MOST_SPANS else ((spans[0][0], spans[-1][1]),)

    @cached_property
    def pulls(self) -> tuple[Pull, ...]:
        """What to copy into a gathered buffer."""
        pulls = []
        for peer in self._peers:
            for part in self.wanted[peer]:
                start, stop = self.rows.span(peer, part)
                if start < stop:
                    pulls.append(Pull(peer, start, self.rows.local_span(peer, part)[0], stop - start))
        return tuple(pulls)

    @cached_property
    def grad_pulls(self) -> tuple[GradPulls, ...]:
        """What to copy of the gradients of this rank's rows, each part of them from one peer after the other."""
        places: dict[int, list[tuple[int, int]]] = {}
        for peer in self._peers:
            for part, start in zip(self.given[peer], self.given_at[peer], strict=True):
                places.setdefault(part, []).append((peer, start))
        spans = {part: self.rows.local_span(self.rank, part) for part in sorted(places)}
        return tuple(
            GradPulls((start, stop), tuple(places[part])) for part, (start, stop) in spans.items() if start < stop
        )

    @property
    def _peers(self) -> list[int]:
        """All other ranks; each rank begins with another one, so that not all pull from one."""
        return [(self.rank + hop) % self.world_size for hop in range(1, self.world_size)]


def ring_plan(tiling: Tiling, rank: int, kv_heads: int, head_groups: int = 1, grad_head_groups: int = 1) -> Plan:
    """One step per hop; memory does not grow with the number of ranks. Some heads after the others."""
    world_size = tiling.world_size
    tiles = [tiling.tiles_against(rank, (rank - hop) % world_size) for hop in range(world_size)]

    def steps(groups: int) -> Iterator[Step]:
        for heads in head_spans(kv_heads, groups if world_size > 1 else 1):
            yield Step(heads, None, tiles[0])
            yield from (Step(heads, Transfer(heads, hop), tiles[hop]) for hop in range(1, world_size))

    return _plan(tiling, rank, tuple(steps(head_groups)), tuple(steps(grad_head_groups)))


@dataclass(frozen=True)
class Stages:
    """Into how many groups of heads the work of a gathered plan is cut."""

    local: int
    """Groups for tiles against the own shard; each is followed by the remote tiles of its heads."""
    remote: int
    """Groups for tiles against everybody else's, in all."""


def gathered_plan(tiling: Tiling, rank: int, kv_heads: int, stages: Stages, grad_stages: Stages) -> Plan:
    """The own shard first; then, some heads after the others, everybody else's."""
    if tiling.world_size == 1:
        return ring_plan(tiling, rank, kv_heads)  # of a single step
    own, remote = tiling.tiles_against(rank, rank), tiling.gathered_tiles(rank)

    def steps(counts: Stages) -> Iterator[Step]:
        for local_heads in head_spans(kv_heads, counts.local):
            yield Step(local_heads, None, own)
            per_local = -(-counts.remote // counts.local)
            for start, stop in head_spans(local_heads[1] - local_heads[0], per_local):
                heads = (local_heads[0] + start, local_heads[0] + stop)
                yield Step(heads, Transfer(heads, None), remote)

    return _plan(tiling, rank, tuple(steps(stages)), tuple(steps(grad_stages)))


def head_spans(kv_heads: int, count: int) -> tuple[Span, ...]:
    """The heads in `count` groups whose sizes differ by at most one (fewer groups if there are fewer heads).

    >>> head_spans(8, 3)
    ((0, 3), (3, 6), (6, 8))
    """
    count = max(1, min(count, kv_heads))
    return tuple(share((0, kv_heads), index, count) for index in range(count))


def _plan(tiling: Tiling, rank: int, forward: Steps, backward: Steps) -> Plan:
    ranks = range(tiling.world_size)
    rows = tiling.gathered_rows(rank)
    wanted = tuple(tiling.wanted(rank, source) for source in ranks)
    given = tuple(tiling.wanted(reader, rank) for reader in ranks)
    batches = [group.batch for group in tiling.groups]

    def marked(steps: Steps) -> Steps:
        return tuple(
            replace(
                step,
                is_last=not any(_share_heads(step, later) for later in steps[index + 1 :]),
                has_gaps=_has_gaps(step, rank, rows, wanted, batches),
            )
            for index, step in enumerate(steps)
        )

    return Plan(
        rank=rank,
        rows=rows,
        most_rows=tiling.most_rows(),
        wanted=wanted,
        given=given,
        given_at=tuple(
            tuple(tiling.gathered_rows(reader).starts[rank][part] for part in given[reader]) for reader in ranks
        ),
        forward=marked(
            tuple(replace(step, tiles=without_long_triangles(step.tiles, LONGEST_TRIANGLE)) for step in forward)
        ),
        backward=marked(backward),
    )


def _share_heads(step: Step, other: Step) -> bool:
    return other.heads[0] < step.heads[1] and step.heads[0] < other.heads[1]


def _has_gaps(
    step: Step, rank: int, rows: GatheredRows, wanted: Sequence[Sequence[int]], batches: Sequence[Span]
) -> bool:
    if step.transfer is None:
        return False
    rows_of = rows.span if step.transfer.hop is None else rows.local_span
    sources = step.transfer.sources(rank, rows.world_size)
    brought = [rows_of(source, part) for source in sources for part in wanted[source]]
    return any(
        not _covers([tile.kv for tile in step.tiles if tile.batch == batch], rows_of_part)
        for batch in batches
        for rows_of_part in brought
    )


def _covers(spans: Sequence[Span], whole: Span) -> bool:
    """Whether some ranges together have all of another one."""
    reached = whole[0]
    for start, stop in sorted(spans):
        if start <= reached:
            reached = max(reached, stop)
    return reached >= whole[1]
