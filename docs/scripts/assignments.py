"""Tables of the pairs that each rank computes, and of the keys that it receives, from the plans that calls execute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cp_dtensor import Layout, Mask
from cp_dtensor.plan.partition import CallSpec, LayoutPartition, masking_of
from cp_dtensor.plan.plan import Stages, TilePlan, gathered_plan, ring_plan
from cp_dtensor.plan.tiles import ShapedMask, Tile
from cp_dtensor.plan.tiling import GroupSegments

NONE = -1
"""Value of pairs that no rank computes."""


@dataclass(frozen=True)
class Assignment:
    """The rank and step of every (query, key) pair of one batch row; -1 where there is none."""

    owner: np.ndarray
    """(queries, keys): the rank that computes a pair."""
    step: np.ndarray
    """(queries, keys): the step of the rank's plan in which it computes the pair; 0 for its own keys."""
    key_owner: np.ndarray
    """(keys,): the rank that owns a key."""
    buffer_row: np.ndarray
    """(ranks, keys): row of a key in the rank's gathered buffer; -1 if the rank does not receive the key."""


def assignment(
    mask: Mask, layout: Layout, seq_len: int, ranks: int, *, batch_size: int = 1, batch_row: int = 0,
    rotate_method: str = "alltoall",
) -> Assignment:  # fmt: skip
    """Tabulate who computes what of one batch row, from the plans of all ranks.

    Args:
        batch_size: rows of the batch; replaced by that of the mask if the mask has one.
        batch_row: the row to show.
        rotate_method: "alltoall" for a ring; "allgather" for the plan of all-gather and of symmetric memory.
    """
    batch_size = mask.batch_size or batch_size
    owner, step = (np.full((seq_len, seq_len), NONE) for _ in range(2))
    key_owner, buffer_row = np.full(seq_len, NONE), np.full((ranks, seq_len), NONE)
    partition = LayoutPartition(layout, seq_len, seq_len, batch_size, ranks)
    tiling = CallSpec(partition, mask, batch_size, 1, 1, 1, 1, "float32", masking_of(partition, mask)).tiling
    group = next(group for group in partition.groups() if group.batch[0] <= batch_row < group.batch[1])
    for rank in range(ranks):
        one = Stages(1, 1)
        plan = ring_plan(tiling, rank, 1) if rotate_method == "alltoall" else gathered_plan(tiling, rank, 1, one, one)
        queries = np.array(_positions(group, rank))
        key_owner[_positions(group, rank)] = rank
        for number, each in enumerate(plan.forward):
            for tile in each.tiles:
                if tile.batch != group.batch:
                    continue
                pairs = np.ix_(queries[slice(*tile.q)], key_positions(tile, plan, group)[slice(*tile.kv)])
                seen = seen_by(tile, batch_row if mask.batch_size else 0)
                for array, value in ((owner, rank), (step, number)):
                    array[pairs] = np.where(seen, value, array[pairs])
        for source, parts in enumerate(plan.recv_parts):
            for part in parts:
                keys = _positions(group, source)[slice(*plan.rows.local_span(source, part))]
                buffer_row[rank, keys] = range(*plan.rows.span(source, part))
    return Assignment(owner, step, key_owner, buffer_row)


def _positions(group: GroupSegments, rank: int) -> list[int]:
    """Return the positions of a rank's queries, and of its keys, in local order."""
    return [position for segment in group.kv_by_rank[rank] for position in segment.positions()]


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
