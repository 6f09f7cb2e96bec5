"""Cost model of recurrent layers: time and memory of each method. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from cp_dtensor.api.extension import wide_dtype
from cp_dtensor.engine.cost_model import Axis, Estimate
from cp_dtensor.engine.traffic import CountedEstimate, with_bytes
from cp_dtensor.layers.methods import Rows
from cp_dtensor.layers.rows import Relayout, SequenceLayout, rows_over_axes
from cp_dtensor.layers.scan import scan_plan
from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.partition import partition_heads
from cp_dtensor.spec.layouts import CachedHash, Contiguous, Span, shard_lengths

CHUNK = 64
"""Tokens of a chunk of the kernels."""
_BLOCK = 64
"""Columns of the state that a thread block of the kernels has."""
_CALL_SECONDS = (0.20e-3, 0.36e-3)
"""Seconds of a run's launches, forward and backward."""
_CHUNK_SECONDS = (1.4e-6, 3.5e-6)
"""Seconds of a chunk in the kernels that pass a state, or its gradient, from chunk to chunk."""
_TRAFFIC = {"none": (3.3, 11.0), "by head": (6.1, 14.7), "by channel": (14.1, 58.0)}
"""Bytes that all kernels of forward and of backward take the time of, over those of q, k, v and the output, by the
decays of a delta rule. These and the seconds are fitted to one H200 and fla-core 0.6 (docs/benchmarks/hybrid.md),
within 13%; "none", for no delta rule, is counted from the tensors that kernels read and write, at the speed of "by
head"."""
_LINK_SECONDS = 30e-6
"""Host time to compose one map."""


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


def slower_axis(axes: Sequence[Axis]) -> Axis:
    """All ranks as one axis with the slowest links, which exchanges over all axes wait for."""
    hardware = min((axis.hardware for axis in axes), key=lambda each: each.link_speed)
    return Axis(math.prod(axis.size for axis in axes), hardware, shares_memory=False)


def recurrence_estimates(spec: RecurrenceSpec, axis: Axis, *, one_axis: bool = True) -> dict[str, Estimate]:
    """An estimate for each method that the layer and the ranks allow; the first is preferred if times are equal.

    Args:
        axis: the ranks, see `slower_axis`.
        one_axis: False for ranks along two mesh axes, which exchange no heads.
    """
    sequence = spec.sequence
    found = {"scan": _scan(spec, sequence, axis)}
    if one_axis and spec.heads % sequence.world_size == 0:
        seconds = kernel_times(
            spec, sequence.seq_len, _longest(spec, sequence.seq_len), spec.heads // sequence.world_size,
            spec.value_dim, axis.hardware,
        )  # fmt: skip
        found["heads"] = _exchanged(spec, axis, *seconds, 0.0)
    if max(_runs(sequence, rank)[0] for rank in range(sequence.world_size)) > 1:
        there = SequenceLayout(Contiguous(), sequence.seq_len, sequence.world_size, 0, sequence.edges)
        scan = _scan(spec, there, axis)
        found["relayout"] = _exchanged(spec, axis, scan.forward, scan.backward, scan.memory)
    return found


def _scan(spec: RecurrenceSpec, sequence: SequenceLayout, axis: Axis) -> Estimate:
    """A run that gives maps and queries of states; the exchange; and products with states. Backward: another run."""
    runs, longest = map(max, zip(*(_runs(sequence, rank) for rank in range(sequence.world_size)), strict=True))
    tokens = max(shard_lengths(sequence.layout, sequence.seq_len, sequence.world_size))
    # Of a run with several documents, the first and the last go on elsewhere.
    maps = runs * (2 if len(sequence.edges) > 2 else 1)
    links, gathered = maps * axis.size, float(maps * axis.size * spec.map_bytes)
    rows = float(spec.batch_size * tokens * spec.heads)
    # With the delta rule, columns of the transition are beside those of v (`FlaRecurrence._from_zero`).
    columns, run = spec.value_dim + (spec.key_dim if spec.is_delta else 0), _longest(spec, longest)
    of_forward, _ = kernel_times(spec, tokens, run, spec.heads, columns, axis.hardware)
    of_backward = sum(kernel_times(spec, tokens, run, spec.heads, spec.value_dim, axis.hardware))
    widening = spec.value_dim + columns if spec.is_delta else 0
    products = [
        2 * rows * (spec.key_dim + each * spec.value_dim + more) / axis.hardware.memory_speed
        for each, more in ((4, widening), (1, 0))
    ]
    composed = links * _LINK_SECONDS + 3 * gathered / axis.hardware.memory_speed
    received = gathered * (axis.size - 1) / axis.size
    exchange = axis.hardware.link_latency + received / axis.hardware.link_speed
    forward = of_forward + products[0] + composed + exchange
    backward = of_backward + products[1] + 2 * composed + exchange
    # Values of the transition, and outputs; without the delta rule queries in float32, and outputs.
    widened = rows * (4 * columns if spec.is_delta else 4 * spec.key_dim + 2 * spec.value_dim)
    return Estimate("-", forward, backward, 2 * gathered + widened)


def _exchanged(spec: RecurrenceSpec, axis: Axis, forward: float, backward: float, memory: float) -> Estimate:
    """The estimate of a layer whose arguments and output travel."""
    sequence = spec.sequence
    tokens = max(shard_lengths(sequence.layout, sequence.seq_len, sequence.world_size)) * spec.batch_size
    size = float(tokens * (spec.token_bytes + spec.out_bytes))
    moved = size * (axis.size - 1) / axis.size
    hardware = axis.hardware
    seconds = 4 * hardware.link_latency + moved / hardware.link_speed + 4 * size / hardware.memory_speed
    return Estimate("-", forward + seconds, backward + seconds, memory + 2 * size)


def kernel_times(
    spec: RecurrenceSpec, tokens: int, longest: int, heads: int, columns: int, hardware: Hardware
) -> tuple[float, float]:
    """Seconds of a run, forward and backward: launches, bytes, and the chunks that follow each other."""
    rows = float(spec.batch_size * tokens * heads)
    moved = 2 * rows * 2 * (spec.key_dim + columns) / hardware.memory_speed
    blocks = spec.batch_size * heads * -(-columns // _BLOCK)
    steps = max(longest / CHUNK, tokens / CHUNK * blocks / hardware.multiprocessors)
    traffic = _TRAFFIC["none" if not spec.is_delta else "by channel" if spec.by_channel else "by head"]
    forward, backward = (
        call + steps * chunk + each * moved
        for call, chunk, each in zip(_CALL_SECONDS, _CHUNK_SECONDS, traffic, strict=True)
    )
    return forward, backward


def _longest(spec: RecurrenceSpec, run: int) -> int:
    """Tokens of the longest piece of a run: a document, or the run."""
    edges = (0, *spec.sequence.edges, spec.sequence.seq_len)
    return min(run, max(stop - start for start, stop in pairwise(edges)))


def _runs(sequence: SequenceLayout, rank: int) -> tuple[int, int]:
    """The number of a rank's runs, about, and the length of the longest."""
    segments = sequence.layout.segments(sequence.seq_len, rank, sequence.world_size, sequence.group)
    filled = [each for each in segments if each.length]
    count = sum(1 if each.is_contiguous else -(-each.length // each.block) for each in filled)
    return count, max((each.length if each.is_contiguous else each.block for each in filled), default=0)


# Bytes over each axis, counted from the plans of all ranks, forward and backward together


def counted_recurrence(
    found: dict[str, Estimate], groups: Iterable[tuple[Rows, SequenceLayout]], inner_size: int | None
) -> dict[str, CountedEstimate]:
    """Add the bytes of a recurrent layer to the estimates of its methods.

    Args:
        groups: for each group of batch rows that are divided alike, its arguments, of any number of tokens, and its
            sequence.
        inner_size: ranks of the inner axis, None if there is one axis.
    """
    groups = list(groups)
    by_method = {}
    for name, each in found.items():
        of_groups = [recurrence_bytes(rows, sequence, name, inner_size or 1) for rows, sequence in groups]
        by_rank = list(zip(*of_groups, strict=True))
        outer, inner = (max(sum(pair[axis] for pair in of_rank) for of_rank in by_rank) for axis in range(2))
        by_method[name] = with_bytes(each, outer, inner)
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
