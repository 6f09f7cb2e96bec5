"""Tables of who holds and computes what in a call, from the plans that calls execute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from cp_dtensor import Layout, Mask
from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.comm.collective import AllToAll
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.base import Plan
from cp_dtensor.engine.planner import plan_call
from cp_dtensor.engine.ring import NestedRingPlan, Ring, RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, MergedPartition, Partition, masking_of
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiles import ShapedMask, Tile
from cp_dtensor.plan.tiling import GroupSegments
from cp_dtensor.spec.layouts import Span

NONE = -1
"""Value of what no rank holds or computes."""
HEADS = 4


class Method(NamedTuple):
    """A method and the shape of its mesh, the outer axis first."""

    method: str
    shape: tuple[int, ...]


METHODS = {
    "ring": Method("ring", (4,)),
    "Ulysses": Method("ulysses", (4,)),
    "hybrid": Method("hybrid", (2, 2)),
    "nested ring": Method("ring", (2, 2)),
}


@dataclass(frozen=True)
class Assignment:
    """Ranks and steps of one batch row of a call of `HEADS` heads as arrays; -1 where there is none."""

    before: np.ndarray
    """(heads, tokens): the rank that owns the rows of a head."""
    during: np.ndarray
    """(heads, tokens): the rank that holds these queries, keys and values during attention."""
    owner: np.ndarray
    """(heads, queries, keys): the rank that computes a pair."""
    step: np.ndarray
    """(heads, queries, keys): step of the ring that computes the pair; 0 for a rank's own keys."""
    inner_step: np.ndarray
    """(heads, queries, keys): step of the inner ring, if there is one."""
    times: np.ndarray
    """(heads, queries, keys): number of tiles that compute the pair."""
    buffer_row: np.ndarray
    """(ranks, keys): row of a key in the rank's buffer in a ring over one axis; -1 if the rank does not receive it."""


def assignment(
    mask: Mask, layout: Layout, seq_len: int, method: Method = METHODS["ring"], *, batch_size: int = 1,
    batch_row: int = 0, transport: TransportMethod | None = None,
) -> Assignment:  # fmt: skip
    """Tabulate who computes what, from the plans of all ranks.

    Args:
        batch_size: rows of the batch; replaced by that of the mask if the mask has one.
        batch_row: the row to show.
        transport: of K/V; None is `AllToAll()`. The plan of `AllGather()` is that of symmetric memory, too.
    """
    world_size = int(np.prod(method.shape))
    before, during = (np.full((HEADS, seq_len), NONE) for _ in range(2))
    owner, step, inner_step = (np.full((HEADS, seq_len, seq_len), NONE) for _ in range(3))
    times, buffer_row = np.zeros_like(owner), np.full((world_size, seq_len), NONE)
    partition = LayoutPartition(layout, seq_len, seq_len, mask.batch_size or batch_size, world_size)
    for ranks, plan in plans(method, partition, mask, transport or AllToAll()):
        rank, group = ranks.rank, _group_of(partition, batch_row)
        before[:, _positions(group, rank)] = rank
        heads, rows = _held(plan, partition, ranks, batch_row)
        during[slice(*heads), rows] = rank
        for each in _drawn(plan, ranks, batch_row, batch_row if mask.batch_size else 0):
            for head in range(*each.heads):
                place: Any = (head, *np.ix_(each.queries, each.keys))
                times[place] += each.seen
                for array, value in ((owner, rank), (step, each.step), (inner_step, each.inner_step)):
                    array[place] = np.where(each.seen, value, array[place])
        if isinstance(plan, RingPlan):
            of_tiles = plan.tile_plan
            for source, parts in enumerate(of_tiles.recv_parts):
                for part in parts:
                    keys = _positions(group, source)[slice(*of_tiles.rows.local_span(source, part))]
                    buffer_row[rank, keys] = range(*of_tiles.rows.span(source, part))
    return Assignment(before, during, owner, step, inner_step, times, buffer_row)


def plans(
    method: Method, partition: LayoutPartition, mask: Mask, transport: TransportMethod
) -> Iterator[tuple[SequenceRanks, Plan]]:
    """Yield every rank and its plan. Their process groups have a rank and a size only: planning needs no more."""
    masking = masking_of(partition, mask)
    spec = CallSpec(partition, mask, partition.batch_size, HEADS, HEADS, 1, 1, "float32", masking)
    make: Any = dist.ProcessGroup  # torch's annotations do not know this constructor
    for place in np.ndindex(*method.shape):
        ranks = SequenceRanks(*(make(rank, size) for rank, size in zip(place, method.shape, strict=True)))
        yield ranks, plan_call(spec, method.method, transport, MathAttention(), ranks)


def _group_of(partition: Partition, batch_row: int) -> GroupSegments:
    return next(group for group in partition.groups() if group.batch[0] <= batch_row < group.batch[1])


def _positions(group: GroupSegments, rank: int) -> list[int]:
    """Return the positions of a rank's queries, and of its keys, in local order."""
    return [position for segment in group.kv_by_rank[rank] for position in segment.positions()]


def _held(plan: Plan, partition: LayoutPartition, ranks: SequenceRanks, batch_row: int) -> tuple[Span, list[int]]:
    """Return the query heads and the rows that a rank holds during attention."""
    if not isinstance(plan, UlyssesPlan):
        return (0, HEADS), _positions(_group_of(partition, batch_row), ranks.rank)
    size = plan.heads.world_size
    heads = plan.heads.query_heads(plan.heads.kv_groups(ranks.rank % size))
    return heads, _positions(_group_of(MergedPartition(partition, size), batch_row), ranks.rank // size)


@dataclass(frozen=True)
class _Drawn:
    """A tile, as positions of its queries and keys."""

    heads: Span
    step: int
    inner_step: int
    queries: np.ndarray
    keys: np.ndarray
    seen: np.ndarray
    """(queries, keys): pairs that the mask allows."""


def _drawn(plan: Plan, ranks: SequenceRanks, batch_row: int, mask_row: int) -> Iterator[_Drawn]:
    """Yield the tiles of one rank."""
    if isinstance(plan, RingPlan):
        yield from _drawn_of_ring(plan, (0, HEADS), batch_row, mask_row)
    elif isinstance(plan, UlyssesPlan):
        for stage, inner in enumerate(plan.inner):
            assert isinstance(inner, RingPlan)
            kv_groups = plan.heads.kv_groups(ranks.rank % plan.heads.world_size, stage)
            yield from _drawn_of_ring(inner, plan.heads.query_heads(kv_groups), batch_row, mask_row)
    elif isinstance(plan, NestedRingPlan):
        for number, of_step in enumerate(plan.inner.values()):  # one group of heads
            for each in () if of_step is None else _drawn_of_ring(of_step, (0, HEADS), batch_row, mask_row):
                yield replace(each, step=number, inner_step=each.step)


def _drawn_of_ring(plan: Ring, heads: Span, batch_row: int, mask_row: int) -> Iterator[_Drawn]:
    group = _group_of(plan.spec.partition, batch_row)
    queries = np.array([p for segment in group.q_by_rank[plan.tile_plan.rank] for p in segment.positions()])
    for number, step in enumerate(plan.tile_plan.forward):
        for tile in step.tiles:
            if tile.batch == group.batch:
                keys = key_positions(tile, plan.tile_plan, group)[slice(*tile.kv)]
                yield _Drawn(heads, number, NONE, queries[slice(*tile.q)], keys, seen_by(tile, mask_row))


def key_positions(tile: Tile, plan: TilePlan, group: GroupSegments) -> np.ndarray:
    """Return the positions of the rows that `tile.kv` counts."""
    if tile.source is not None:
        return np.array(_positions(group, tile.source))
    positions = np.full(plan.rows.total, NONE)
    for source, part in plan.rows.places:
        rows = slice(*plan.rows.span(source, part))
        positions[rows] = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
    return positions


def seen_by(tile: Tile, batch_row: int = 0) -> np.ndarray:
    """Return the (query, key) pairs of a tile that its mask allows in one of its batch rows: (rows, columns)."""
    rows, columns = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
    mask = tile.mask
    if isinstance(mask, ShapedMask):
        return np.tri(rows, columns, dtype=bool) if mask.is_causal else np.ones((rows, columns), dtype=bool)
    queries, keys = (
        np.array([position for segment in segments for position in segment.positions()])[slice(*span)]
        for segments, span in ((mask.queries, mask.q), (mask.keys.segments, mask.kv))
    )
    seen = np.zeros((rows, columns), dtype=bool)
    for of_batch in mask.sets:
        for band in of_batch[batch_row if len(of_batch) > 1 else 0]:
            start, stop = queries - band.left, queries + band.right + 1
            in_band = (band.first <= queries) & (queries < band.last)
            columns_of = (keys >= np.maximum(band.lo, start)[:, None]) & (keys < np.minimum(band.hi, stop)[:, None])
            seen |= in_band[:, None] & columns_of
    return seen
