"""Cost of recurrent layers: the work of each method, one step a pass. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from cp_dtensor.api.extension import (
    BACKWARD,
    Cluster,
    Estimate,
    Hardware,
    Step,
    partition_heads,
    seconds,
    wide_dtype,
)
from cp_dtensor.layers.methods import Rows
from cp_dtensor.layers.rows import Relayout, SequenceLayout, rows_over_axes
from cp_dtensor.layers.scan import scan_plan
from cp_dtensor.spec.layouts import CachedHash, Contiguous, Span, shard_lengths

CHUNK = 64
"""Tokens of a chunk of the kernels."""
_BLOCK = 64
"""Columns of the state that a thread block of the kernels has."""
# Fitted to one H200 and fla-core 0.6 (layers-hybrid in docs/benchmarks/measured.csv), within 13%.
_LAUNCHES = 1.25
"""Host time of the kernels of a run in forward, in launches."""
_CHUNK_SECONDS = 1.4e-6
"""Seconds of a chunk in forward, in a thread block that passes a state from chunk to chunk."""
_TRAFFIC = {"none": (3.3, 11.0), "by head": (6.1, 14.7), "by channel": (14.1, 58.0)}
"""Bytes that all kernels of forward and of backward take the time of, over those of q, k, v and the output, by the
decays of a delta rule. "none", for no delta rule, is counted from the tensors that kernels read and write, at the speed
of "by head"."""
_COMPOSING_LAUNCHES = 0.25
"""Host time to compose one map, in launches."""


@dataclass(frozen=True)
class RecurrenceSpec(CachedHash):
    """A recurrent layer on one rank: all that its cost depends on."""

    sequence: SequenceLayout
    batch_size: int
    heads: int
    key_dim: int
    value_dim: int
    token_bytes: int
    """Bytes of a token's arguments, all heads."""
    out_bytes: int
    """Bytes of a token's output, all heads."""
    is_delta: bool
    """True if maps of states are matrices (delta rules), not diagonals."""
    by_channel: bool
    """True if decays differ by channel."""

    @property
    def map_bytes(self) -> int:
        """Bytes of the map of a run, in float32."""
        width = self.key_dim if self.is_delta else 1
        return 4 * self.batch_size * self.heads * self.key_dim * (width + self.value_dim)


def recurrence_estimates(spec: RecurrenceSpec, cluster: Cluster, *, one_axis: bool = True) -> dict[str, Estimate]:
    """Return an estimate for each method that the layer and the ranks allow; the first is preferred if times are equal.

    Args:
        cluster: the ranks; exchanges over all tiers wait for the slowest links.
        one_axis: False for ranks along two mesh axes, which exchange no heads.
    """
    sequence, gpu = spec.sequence, cluster.gpu
    size, seq_len = sequence.world_size, sequence.seq_len
    # Arguments go there and outputs back, and the gradients of both.
    rows = float(max(shard_lengths(sequence.layout, seq_len, size)) * spec.batch_size)
    there, back = rows * spec.token_bytes * (size - 1) / size, rows * spec.out_bytes * (size - 1) / size
    travel = Step(moved=4 * rows * (spec.token_bytes + spec.out_bytes), received=(there,), sent=(back,))
    held = 2 * rows * (spec.token_bytes + spec.out_bytes)
    works = {"scan": _scan(spec, sequence, gpu)}
    if one_axis and spec.heads % size == 0:
        run = kernels(spec, seq_len, _longest(spec, seq_len), spec.heads // size, spec.value_dim, gpu)
        works["heads"] = run[0] + travel, run[1] + travel, held
    if max(_runs(sequence, rank)[0] for rank in range(size)) > 1:
        contiguous = SequenceLayout(Contiguous(), seq_len, size, 0, sequence.edges)
        forward, backward, memory = _scan(spec, contiguous, gpu)
        works["relayout"] = forward + travel, backward + travel, memory + held
    flat = replace(cluster, tiers=(min(cluster.tiers, key=lambda tier: tier.speed),))
    return {
        name: Estimate("-", seconds((forward,), flat), seconds((backward,), flat), memory)
        for name, (forward, backward, memory) in works.items()
    }


def _scan(spec: RecurrenceSpec, sequence: SequenceLayout, gpu: Hardware) -> tuple[Step, Step, float]:
    """Return the work of forward and of backward, and the memory, of scans.

    A run gives maps and queries of states, maps are exchanged, and products with states follow. Backward has another
    run.
    """
    size = sequence.world_size
    runs, longest = map(max, zip(*(_runs(sequence, rank) for rank in range(size)), strict=True))
    tokens = max(shard_lengths(sequence.layout, sequence.seq_len, size))
    # Of a run with several documents, the first and the last go on elsewhere.
    maps = runs * (2 if len(sequence.edges) > 2 else 1)
    gathered = float(maps * size * spec.map_bytes)
    rows = float(spec.batch_size * tokens * spec.heads)
    # With the delta rule, columns of the transition are beside those of v (`FlaRecurrence._from_zero`).
    columns, run = spec.value_dim + (spec.key_dim if spec.is_delta else 0), _longest(spec, longest)
    wide, _ = kernels(spec, tokens, run, spec.heads, columns, gpu)
    again, backward = kernels(spec, tokens, run, spec.heads, spec.value_dim, gpu)
    widening = spec.value_dim + columns if spec.is_delta else 0
    composed = Step(moved=3 * gathered, launches=maps * size * _COMPOSING_LAUNCHES)
    exchange = Step(sent=(gathered * (size - 1) / size,))
    products = 2 * rows * (spec.key_dim + 4 * spec.value_dim + widening), 2 * rows * (spec.key_dim + spec.value_dim)
    # Values of the transition, and outputs; without the delta rule queries in float32, and outputs.
    widened = rows * (4 * columns if spec.is_delta else 4 * spec.key_dim + 2 * spec.value_dim)
    return (
        wide + Step(moved=products[0]) + exchange + composed,
        again + backward + Step(moved=products[1]) + exchange + composed + composed,
        2 * gathered + widened,
    )


def kernels(
    spec: RecurrenceSpec, tokens: int, longest: int, heads: int, columns: int, gpu: Hardware
) -> tuple[Step, Step]:
    """Return the work of a run, forward and backward: launches, bytes, and chunks that follow each other."""
    moved = 4.0 * spec.batch_size * tokens * heads * (spec.key_dim + columns)
    blocks = spec.batch_size * heads * -(-columns // _BLOCK)
    chunks = max(longest / CHUNK, tokens / CHUNK * blocks / gpu.multiprocessors)
    kind = "none" if not spec.is_delta else "by channel" if spec.by_channel else "by head"
    flops = chunks * _CHUNK_SECONDS * gpu.flops  # what the GPU could compute while thread blocks wait for one another
    forward, backward = _TRAFFIC[kind]
    return (
        Step(flops=flops, moved=forward * moved, launches=_LAUNCHES),
        Step(flops=BACKWARD * flops, moved=backward * moved, launches=BACKWARD * _LAUNCHES),
    )


def _longest(spec: RecurrenceSpec, run: int) -> int:
    """Return the tokens of the longest piece of a run: a document, or the run."""
    edges = (0, *spec.sequence.edges, spec.sequence.seq_len)
    return min(run, max(stop - start for start, stop in pairwise(edges)))


def _runs(sequence: SequenceLayout, rank: int) -> tuple[int, int]:
    """Return the number of a rank's runs, about, and the length of the longest."""
    segments = sequence.layout.segments(sequence.seq_len, rank, sequence.world_size, sequence.group)
    filled = [each for each in segments if each.length]
    count = sum(1 if each.is_contiguous else -(-each.length // each.block) for each in filled)
    return count, max((each.length if each.is_contiguous else each.block for each in filled), default=0)


# Bytes over each axis, counted from the plans of all ranks, forward and backward together


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
    row = sum(_token_bytes(x) for x in rows if x is not None)
    there = replace(sequence, layout=Contiguous(), group=0)
    # Rows go there, gradients of outputs too; outputs go back, and gradients of rows.
    moved = rows_over_axes(Relayout(Contiguous()), sequence, inner_size)
    states = _scanned_bytes(rows, there, inner_size)
    return [
        (outer * (row + out) + more[0], inner * (row + out) + more[1])
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
