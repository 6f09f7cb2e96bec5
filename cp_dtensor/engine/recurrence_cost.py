"""Cost model of recurrent layers: time and memory of each method. The same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cp_dtensor.engine.cost_model import Axis, Estimate
from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.rows import SequenceLayout
from cp_dtensor.spec.layouts import CachedHash, Contiguous, shard_lengths

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
