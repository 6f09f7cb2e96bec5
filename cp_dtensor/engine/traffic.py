"""Bytes that ranks receive over each mesh axis, counted from the plans of all ranks, forward and backward together.

Counted are rows, heads and states of others: what a rank keeps does not travel. An axis has the bytes of the rank that
receives most over it.
"""

from __future__ import annotations

from dataclasses import replace

from cp_dtensor.engine.choose import EXPANDED, Estimate, expanded
from cp_dtensor.plan.partition import (
    CallSpec,
    HeadPartition,
    InnerPartition,
    MergedPartition,
    OuterPartition,
    partition_call,
)
from cp_dtensor.spec.layouts import Span


def counted(
    found: dict[str, Estimate], spec: CallSpec, outer_size: int, inner_size: int | None = None
) -> dict[str, Estimate]:
    """Add the bytes of a call to the estimates of its methods.

    Args:
        inner_size: ranks of the inner axis, None if there is one axis.
    """
    by_method = {}
    for name, each in found.items():
        outer, inner = attention_bytes(spec, name, outer_size, inner_size)
        by_method[name] = replace(each, outer_bytes=outer, inner_bytes=inner)
    return by_method


def attention_bytes(spec: CallSpec, method: str, outer_size: int, inner_size: int | None) -> Span:
    """Return the bytes over the outer and the inner axis of a method of attention, a key of `estimates`."""
    if method.startswith(EXPANDED):
        return attention_bytes(expanded(spec), method.removeprefix(EXPANDED), outer_size, inner_size)
    if method == "ulysses":
        return 0, _exchanged_bytes(spec, partition_call(spec, outer_size, 1), 1)
    if inner_size is None:
        return max(_ring_rows(spec)) * spec.kv_heads * spec.head_bytes, 0
    if method == "hybrid":
        heads = partition_call(spec, inner_size, 1)
        most_heads = max(stop - start for start, stop in map(heads.kv_groups, range(inner_size)))
        merged = replace(spec, partition=MergedPartition(spec.partition, inner_size))
        return max(_ring_rows(merged)) * most_heads * spec.head_bytes, _exchanged_bytes(spec, heads, outer_size)
    over_outer, over_inner = _nested_rows(spec, outer_size, inner_size)
    return over_outer * spec.kv_heads * spec.head_bytes, over_inner * spec.kv_heads * spec.head_bytes


def _ring_rows(spec: CallSpec) -> list[int]:
    """Return by rank the rows of K/V, in forward and again in backward, and of gradients, which come from readers."""
    reading = spec.tiling.reading
    return [2 * come + back for come, back in zip(reading.received_rows(), reading.sent_rows(), strict=True)]


def _nested_rows(spec: CallSpec, outer_size: int, inner_size: int) -> Span:
    """Return the most rows over each axis: each outer rank's K/V go around a ring within the inner axis."""
    by_place = [
        replace(spec, partition=OuterPartition(spec.partition, inner_size, place)) for place in range(inner_size)
    ]
    readings = [each.tiling.reading for each in by_place]
    most = 0
    for outer_rank in range(outer_size):
        sources = [
            source
            for source in range(outer_size)
            if source == outer_rank or any(reading.parts(outer_rank, source) for reading in readings)
        ]
        partitions = (InnerPartition(spec.partition, inner_size, outer_rank, source) for source in sources)
        by_source = [_ring_rows(replace(spec, partition=each)) for each in partitions]
        most = max(most, *map(sum, zip(*by_source, strict=True)))
    return max(max(_ring_rows(each)) for each in by_place), most


def _exchanged_bytes(spec: CallSpec, heads: HeadPartition, outer_size: int) -> int:
    """Return the bytes over the axis on which rows are exchanged for heads, of the busiest of all ranks."""
    group = spec.partition.groups()[0]
    queries, keys = (
        [sum(segment.length for segment in segments) for segments in by_rank]
        for by_rank in (group.q_by_rank, group.kv_by_rank)
    )
    size, most = heads.world_size, 0
    for outer_rank in range(outer_size):
        here = slice(outer_rank * size, (outer_rank + 1) * size)
        for rank, (q_rows, kv_rows) in enumerate(zip(queries[here], keys[here], strict=True)):
            groups = heads.kv_groups(rank)
            first, last = heads.query_heads(groups)
            of_q, of_kv = last - first, groups[1] - groups[0]
            # Of forward and of backward: rows of others to this rank's heads, and own rows from the heads of others.
            q_heads = (sum(queries[here]) - q_rows) * of_q + q_rows * (spec.q_heads - of_q)
            kv_heads = (sum(keys[here]) - kv_rows) * of_kv + kv_rows * (heads.kv_group_count - of_kv)
            most = max(most, q_heads * (spec.head_dim + spec.v_head_dim) + kv_heads * sum(spec.kv_dims))
    return most * spec.batch_size * spec.itemsize
