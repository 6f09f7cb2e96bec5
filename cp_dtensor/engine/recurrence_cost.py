"""Cost of recurrent layers: the work of each method, one step a pass. The same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from cp_dtensor.engine.choose import Estimate
from cp_dtensor.plan.cost import BACKWARD, Cluster, Hardware, Step, seconds
from cp_dtensor.plan.rows import SequenceLayout
from cp_dtensor.spec.layouts import CachedHash, Contiguous, shard_lengths

CHUNK = 64
"""Tokens of a chunk of the kernels."""
_BLOCK = 64
"""Columns of the state that a thread block of the kernels has."""
# Fitted to one H200 and fla-core 0.6 (docs/benchmarks/hybrid.md), within 13%.
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
