"""Bytes that ranks receive over each mesh axis, counted from the plans of all ranks, forward and backward together.

Counted are rows, heads and states of others: what a rank keeps does not travel. An axis has the bytes of the rank that
receives most over it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.engine.choose import EXPANDED, Estimate, expanded
from cp_dtensor.engine.recurrence import Rows
from cp_dtensor.plan.partition import (
    CallSpec,
    HeadPartition,
    InnerPartition,
    MergedPartition,
    OuterPartition,
    partition_call,
    partition_heads,
)
from cp_dtensor.plan.rows import Relayout, SequenceLayout, rows_over_axes
from cp_dtensor.plan.scan import scan_plan
from cp_dtensor.spec.layouts import Contiguous, Span


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
    """Bytes over the outer and the inner axis of a method of attention, a key of `estimates`."""
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
    """By rank: rows of K/V in forward and again in backward, and of their gradients, which come from their readers."""
    reading = spec.tiling.reading
    return [2 * come + back for come, back in zip(reading.received_rows(), reading.sent_rows(), strict=True)]


def _nested_rows(spec: CallSpec, outer_size: int, inner_size: int) -> Span:
    """The most rows over the outer and the inner axis: each outer rank's K/V go around a ring within the inner axis."""
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
    """Bytes over the axis on which rows are exchanged for heads, of the busiest of all ranks."""
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


# Recurrent layers


def counted_recurrence(
    found: dict[str, Estimate], groups: Iterable[tuple[Rows, SequenceLayout]], inner_size: int
) -> dict[str, Estimate]:
    """Add the bytes of a recurrent layer to the estimates of its methods.

    Args:
        groups: for each group of batch rows that are divided alike, its arguments, of any number of tokens, and its
            sequence.
        inner_size: ranks of the inner axis, 1 if there is one axis.
    """
    groups = list(groups)
    by_method = {}
    for name, each in found.items():
        of_groups = [recurrence_bytes(rows, sequence, name, inner_size) for rows, sequence in groups]
        by_rank = list(zip(*of_groups, strict=True))
        outer, inner = (max(sum(pair[axis] for pair in of_rank) for of_rank in by_rank) for axis in range(2))
        by_method[name] = replace(each, outer_bytes=outer, inner_bytes=inner)
    return by_method


def recurrence_bytes(rows: Rows, sequence: SequenceLayout, method: str, inner_size: int) -> list[Span]:
    """By rank: bytes over the outer and the inner axis of a method of a recurrent layer.

    The output is in the dtype of q, as of kernels; that of torch operations is in the dtype of v.
    """
    v, q = rows.v, rows.q
    out = v.size(0) * v.size(2) * v.size(3) * q.itemsize
    if method == "scan":
        return _scanned_bytes(rows, sequence, inner_size)
    if method == "heads":
        return [(each, 0) for each in _recurrence_heads(rows, sequence, out)]
    token = sum(_token_bytes(x) for x in rows if x is not None)
    there = replace(sequence, layout=Contiguous(), group=0)
    # Rows go there, gradients of outputs too; outputs go back, and gradients of rows.
    moved = rows_over_axes(Relayout(Contiguous()), sequence, inner_size)
    states = _scanned_bytes(rows, there, inner_size)
    return [
        (outer * (token + out) + more[0], inner * (token + out) + more[1])
        for (outer, inner), more in zip(moved, states, strict=True)
    ]


def _token_bytes(x: Tensor) -> int:
    """Bytes of a token, all batch rows."""
    return x.size(0) * math.prod(x.shape[2:]) * x.itemsize


def _scanned_bytes(rows: Rows, sequence: SequenceLayout, inner_size: int) -> list[Span]:
    """Of maps, all-gathered over one axis after the other, and of their gradients, which go the same ways back."""
    v, q = rows.v, rows.q
    width = q.size(3) if rows.beta is not None else 1  # a matrix or a diagonal
    of_map = v.size(0) * v.size(2) * q.size(3) * (width + v.size(3)) * wide_dtype(v).itemsize
    sent = scan_plan(sequence, 0, False).slots * of_map
    outer_size = sequence.world_size // inner_size
    return [(2 * (outer_size - 1) * inner_size * sent, 2 * (inner_size - 1) * sent)] * sequence.world_size


def _recurrence_heads(rows: Rows, sequence: SequenceLayout, out: int) -> list[int]:
    """By rank: bytes of an exchange of rows for heads, of the outputs back, and of the gradients of both."""
    size = sequence.world_size
    heads = partition_heads(rows.v.size(2), rows.q.size(2), size)
    value = (sum(_token_bytes(x) for x in (rows.v, rows.g, rows.beta) if x is not None) + out) // heads.q_heads
    key = (_token_bytes(rows.q) + _token_bytes(rows.k)) // heads.kv_heads
    tokens = [sequence.layout.local_length(sequence.seq_len, rank, size) for rank in range(size)]
    received = []
    for rank, own in enumerate(tokens):
        others, groups = sequence.seq_len - own, heads.kv_groups(rank)
        first, last = heads.query_heads(groups)
        values, keys = last - first, groups[1] - groups[0]
        of_values = others * values + own * (heads.q_heads - values)
        of_keys = others * keys + own * (heads.kv_group_count - keys)
        received.append(of_values * value + of_keys * key)
    return received
