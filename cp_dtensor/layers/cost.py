"""Cost of recurrent layers: the work of each method, one step a pass. The same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul

from cp_dtensor.api.extension import Cluster, Estimate, Hardware, Step, seconds
from cp_dtensor.layers.chunked import Rows, token_bytes
from cp_dtensor.layers.rows import Relayout, SequenceLayout, rows_over_axes
from cp_dtensor.layers.scan import scan_plan
from cp_dtensor.spec.layouts import Contiguous, shard_lengths

CHUNK = 64
"""Tokens of a chunk of the kernels."""
_BLOCK = 64
"""Columns of the state that a thread block of the kernels has."""
# Fitted to one H200 and fla-core 0.6 (layers-hybrid in docs/benchmarks/measured.csv), within 13%.
_LAUNCHES = 1.4
"""Host time of the kernels of a run in forward, in launches."""
_BACKWARD = 3.0
"""FLOPs and launches of backward over those of forward."""
_CHUNK_SECONDS = 1.4e-6
"""Seconds of a chunk in forward, in a thread block that passes a state from chunk to chunk."""
_TRAFFIC = {"none": (3.3, 11.0), "by head": (6.1, 14.7), "by channel": (14.1, 58.0)}
"""Bytes that all kernels of forward and of backward take the time of, over those of q, k, v and the output, by the
decays of a delta rule. "none", for no delta rule, is counted from the tensors that kernels read and write, at the speed
of "by head"."""
_COMPOSING_LAUNCHES = 0.28
"""Host time to compose one map, in launches."""


def recurrence_estimates(
    rows: Rows, sequence: SequenceLayout, cluster: Cluster, *, one_axis: bool = True
) -> dict[str, Estimate]:
    """Return an estimate for each method that the layer and the ranks allow; the first is preferred if times are equal.

    Args:
        rows: arguments of any number of tokens.
        cluster: the ranks; exchanges over all tiers wait for the slowest links.
        one_axis: False for ranks along several mesh axes, which exchange no heads.
    """
    gpu, size, heads, columns = cluster.gpu, sequence.world_size, rows.v.size(2), rows.v.size(3)
    # Arguments go there and outputs back, and the gradients of both.
    tokens = float(max(shard_lengths(sequence.layout, sequence.seq_len, size)))
    there, back = tokens * token_bytes(*rows), tokens * rows.out_bytes
    travel = Step(moved=4 * (there + back), received=(there * (size - 1) / size,), sent=(back * (size - 1) / size,))
    held = 2 * (there + back)
    works = {"scan": _scan(rows, sequence, gpu)}
    if one_axis and heads % size == 0:
        run = kernels(rows, sequence.seq_len, _longest(sequence, sequence.seq_len), heads // size, columns, gpu)
        works["heads"] = run[0] + travel, run[1] + travel, held
    if max(_runs(sequence, rank)[0] for rank in range(size)) > 1:
        forward, backward, memory = _scan(rows, replace(sequence, layout=Contiguous(), group=0), gpu)
        works["relayout"] = forward + travel, backward + travel, memory + held
    flat = replace(cluster, tiers=(min(cluster.tiers, key=lambda tier: tier.speed),))
    return {
        name: Estimate("-", seconds((forward,), flat), seconds((backward,), flat), memory)
        for name, (forward, backward, memory) in works.items()
    }


def _scan(rows: Rows, sequence: SequenceLayout, gpu: Hardware) -> tuple[Step, Step, float]:
    """Return the work of forward and of backward, and the memory, of scans.

    A run gives maps and queries of states, maps are exchanged, and products with states follow. Backward has another
    run.
    """
    size, (batch, _, heads, columns), channels = sequence.world_size, rows.v.shape, rows.q.size(3)
    runs, longest = map(max, zip(*(_runs(sequence, rank) for rank in range(size)), strict=True))
    tokens = max(shard_lengths(sequence.layout, sequence.seq_len, size))
    # Of a run with several documents, the first and the last go on elsewhere.
    maps = runs * (2 if len(sequence.edges) > 2 else 1)
    gathered = float(maps * size * rows.map_bytes)
    # With the delta rule, columns of the transition are beside those of v (`FlaRecurrence._from_zero`).
    is_delta, run = rows.beta is not None, _longest(sequence, longest)
    wider = columns + channels * is_delta
    wide, _ = kernels(rows, tokens, run, heads, wider, gpu)
    again, backward = kernels(rows, tokens, run, heads, columns, gpu)
    composed = Step(moved=3 * gathered, launches=maps * size * _COMPOSING_LAUNCHES)
    exchange = Step(sent=(gathered * (size - 1) / size,))
    of_tokens = float(batch * tokens * heads)
    products = 2 * of_tokens * (channels + 4 * columns + (columns + wider) * is_delta)
    # Values of the transition, and outputs; without the delta rule queries in float32, and outputs.
    widened = of_tokens * (4 * wider if is_delta else 4 * channels + 2 * columns)
    return (
        wide + Step(moved=products) + exchange + composed,
        again + backward + Step(moved=2 * of_tokens * (channels + columns)) + exchange + composed + composed,
        2 * gathered + widened,
    )


def kernels(rows: Rows, tokens: int, longest: int, heads: int, columns: int, gpu: Hardware) -> tuple[Step, Step]:
    """Return the work of a run, forward and backward: launches, bytes, and chunks that follow each other."""
    batch, channels = rows.v.size(0), rows.q.size(3)
    moved = 4.0 * batch * tokens * heads * (channels + columns)
    blocks = batch * heads * -(-columns // _BLOCK)
    chunks = max(longest / CHUNK, tokens / CHUNK * blocks / gpu.multiprocessors)
    kind = "none" if rows.beta is None else "by channel" if rows.decays_by_channel else "by head"
    flops = chunks * _CHUNK_SECONDS * gpu.flops  # what the GPU could compute while thread blocks wait for one another
    forward, backward = _TRAFFIC[kind]
    return (
        Step(flops=flops, moved=forward * moved, launches=_LAUNCHES),
        Step(flops=_BACKWARD * flops, moved=backward * moved, launches=_BACKWARD * _LAUNCHES),
    )


def _longest(sequence: SequenceLayout, run: int) -> int:
    """Return the tokens of the longest piece of a run: a document, or the run."""
    edges = (0, *sequence.edges, sequence.seq_len)
    return min(run, max(stop - start for start, stop in pairwise(edges)))


def _runs(sequence: SequenceLayout, rank: int) -> tuple[int, int]:
    """Return the number of a rank's runs, about, and the length of the longest."""
    filled = [each for each in sequence.segments(rank) if each.length]
    count = sum(1 if each.is_contiguous else -(-each.length // each.block) for each in filled)
    return count, max((each.length if each.is_contiguous else each.block for each in filled), default=0)


# Bytes over each axis, counted from the plans of all ranks, forward and backward together


def counted_recurrence(
    found: dict[str, Estimate], groups: Iterable[tuple[Rows, SequenceLayout]], sizes: tuple[int, ...]
) -> dict[str, Estimate]:
    """Add the bytes of a recurrent layer to the estimates of its methods.

    Args:
        groups: for each group of batch rows that are divided alike, its arguments, of any number of tokens, and its
            sequence.
        sizes: ranks of each axis, the outer one first.
    """
    groups = list(groups)
    by_method = {}
    for name, each in found.items():
        of_groups = [recurrence_bytes(rows, sequence, name, sizes) for rows, sequence in groups]
        by_method[name] = replace(each, axis_bytes=busiest_of_axes(of_groups))
    return by_method


def busiest_of_axes(of_groups: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...]:
    """Return for each axis the most of any rank, given numbers by group of batch rows, by rank and by axis."""
    by_rank = zip(*of_groups, strict=True)
    summed = [tuple(map(sum, zip(*of_rank, strict=True))) for of_rank in by_rank]
    return tuple(map(max, zip(*summed, strict=True)))


def recurrence_bytes(
    rows: Rows, sequence: SequenceLayout, method: str, sizes: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Return by rank: bytes over each axis, the outer one first, of a method, gradients included."""
    size = sequence.world_size
    if method == "heads":  # each rank gets a part of all heads, and gives the other parts of its tokens
        parts = token_bytes(rows.v, rows.g, rows.beta) + rows.out_bytes
        parts += token_bytes(rows.q, rows.k) * rows.copies_of_keys(size)
        lengths = shard_lengths(sequence.layout, sequence.seq_len, size)
        return [(parts * (sequence.seq_len - own + own * (size - 1)) // size,) for own in lengths]
    if method == "relayout":
        there = replace(sequence, layout=Contiguous(), group=0)
        # Rows go there, gradients of outputs too; outputs go back, and gradients of rows.
        moved, of_row = (
            rows_over_axes(Relayout(Contiguous()), sequence, sizes),
            token_bytes(*rows) + rows.out_bytes,
        )
        states = recurrence_bytes(rows, there, "scan", sizes)
        return [
            tuple(count * of_row + more for count, more in zip(*of_rank, strict=True))
            for of_rank in zip(moved, states, strict=True)
        ]
    # Maps are all-gathered over the outer axis, then over the inner ones, and their gradients go the same ways back.
    sent = scan_plan(sequence, 0, False).slots * rows.map_bytes
    gathered = accumulate(sizes, mul, initial=2 * sent)
    return [tuple((count - 1) * each for count, each in zip(sizes, gathered, strict=False))] * size
