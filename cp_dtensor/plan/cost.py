"""Cost of work on a cluster: seconds from FLOPs, bytes and launches.

A call on one rank is `Work`: steps of FLOPs, bytes and launches. A `Cluster` is a GPU and tiers of links. `seconds`
turns work into time. It follows the steps on three clocks: the host launches, the GPU computes, links transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import TypeVar

from cp_dtensor.plan.cluster import TOLERANCE, Cluster, Hosts, Place
from cp_dtensor.plan.partition import BACKWARD_FLOPS, CallSpec
from cp_dtensor.plan.plan import Step as TileStep
from cp_dtensor.plan.plan import TilePlan, Transfer
from cp_dtensor.plan.tiles import ShapedMask, Tile
from cp_dtensor.spec.layouts import Span

# Constants of the model, beside those of the cluster, from tables of docs/benchmarks/measured.csv.
BACKWARD = 2.0
"""Host time of a launch in backward over that of one in forward (8xH200)."""
CALL = 1.5
"""Host time of a call beside that of its steps, in launches (8xH200)."""
TRIANGLE = 0.51
"""FLOPs that a triangle takes the time of, over those of its rectangle (kernels-tiles)."""
TRANSFER_TAX = 0.15
"""Fraction by which attention slows down while kernels of transfers take multiprocessors (2xH200)."""
PIECE = 4e-6
"""Seconds of each piece of memory of a transfer, which is a copy of its own (8xH200-packages-graphs, 8,192 tokens)."""
_OF_DIMS = ((64, 0.78, 0.9), (128, 1.0, 1.0), (192, 1.08, 0.9), (512, 1.08, 0.6))
"""Largest head dim, and the speeds of forward and of backward with it over those of 128 (kernels-tiles)."""


@dataclass(frozen=True)
class Step:
    """Part of a call: bytes that the GPU waits for, what it computes then, and bytes that leave after that."""

    flops: float = 0.0
    """Of matrix products beside attention."""
    moved: float = 0.0
    """Bytes that kernels other than attention read and write."""
    received: tuple[float, ...] = ()
    """Bytes that the step waits for, by tier; none of the tiers that are left out."""
    sent: tuple[float, ...] = ()
    """Bytes that leave after the step, by tier."""
    launches: float = 0.0
    """Host time of the step, in launches of a tile in forward."""
    attention: tuple[float, ...] = ()
    """FLOPs of attention, in the order of `Kernels`."""
    pieces: tuple[float, ...] = ()
    """Pieces of memory that transfers consist of, by tier."""

    def __add__(self, other: Step) -> Step:
        """Return a step with the numbers of both."""

        def added(mine: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(map(sum, zip_longest(mine, others, fillvalue=0.0)))

        return Step(
            self.flops + other.flops, self.moved + other.moved, added(self.received, other.received),
            added(self.sent, other.sent), self.launches + other.launches,
            added(self.attention, other.attention), added(self.pieces, other.pieces),
        )  # fmt: skip


Work = tuple[Step, ...]
Passes = tuple[Work, Work]
"""Forward and backward."""


Drawn = list[tuple[int | None, float, float]]
"""Spans of time: of a tier, or of the GPU (None), from when until when."""


def seconds(work: Work, cluster: Cluster, drawn: Drawn | None = None) -> float:
    """Return the time of work on one rank, if the other ranks are in step; `drawn` gets what is busy when.

    A step starts when the host has launched it, the GPU is free and its bytes have arrived. A tier transfers one thing
    after the other, in the order in which it is asked: for the first step from the beginning, for the next one that
    waits for the tier from the start of the step before, and what leaves after a step at its end. (With two transfers
    in flight predictions differ by 3% at most, where links are slow.)
    """
    gpu, tiers = cluster.gpu, cluster.tiers
    speeds = gpu.kernels.speeds(gpu.flops)
    waiting = [iter([step for step in work if step.received[tier : tier + 1] > (0,)]) for tier in range(len(tiers))]
    free = [0.0] * len(tiers)
    flying = [(0.0, 0.0)] * len(tiers)
    host = busy = 0.0

    def transfer(tier: int, size: float, step: Step, asked: float) -> None:
        lasts = tiers[tier].latency + PIECE * sum(step.pieces[tier : tier + 1]) + size / tiers[tier].speed
        begins = max(asked, free[tier])
        flying[tier], free[tier] = (begins, lasts), begins + lasts
        if drawn is not None:
            drawn.append((tier, begins, begins + lasts))

    def ask(tier: int, asked: float) -> None:
        for step in islice(waiting[tier], 1):
            transfer(tier, step.received[tier], step, asked)

    for index, step in enumerate(work):
        arrived, awaited = 0.0, [tier for tier, size in enumerate(step.received) if size]
        for tier in awaited:
            if index == 0:
                ask(tier, 0.0)
            begun, lasts = flying[tier]
            arrived = max(arrived, begun + lasts)
            if not tiers[tier].shares_memory:  # collectives are kernels, which take multiprocessors
                busy += TRANSFER_TAX * max(min(lasts, busy - begun), 0.0)
        start = max(host + gpu.launch * step.launches / 2, busy, arrived)
        for tier in awaited if index else range(len(tiers)):
            ask(tier, start)
        host += gpu.launch * step.launches
        busy = start + step.flops / gpu.flops + step.moved / gpu.memory_speed
        busy += gpu.ramp * step.launches if step.attention else 0.0
        busy += sum(flops / speed for flops, speed in zip(step.attention, speeds, strict=False))
        if drawn is not None and busy > start:
            drawn.append((None, start, busy))
        coming = list(flying)
        for tier, size in enumerate(step.sent):
            if size:
                transfer(tier, size, step, busy)
        flying = coming  # what leaves is not waited for by a step
    return max(host, busy, *free)


def slowest(works: Iterable[Passes], cluster: Cluster) -> tuple[float, float]:
    """Return the time of forward and of backward on the rank, of some, that needs the most for both."""
    return slowest_work(works, cluster)[1]


def slowest_work(works: Iterable[Passes], cluster: Cluster) -> tuple[Passes, tuple[float, float]]:
    """Return the work of the rank, of some, that needs the most for both passes, and the time of each."""
    times = [(each, (seconds(each[0], cluster), seconds(each[1], cluster))) for each in works]
    return max(times, key=lambda found: sum(found[1]))


Choice = TypeVar("Choice")


def nearly_fastest(choices: Sequence[Choice], times: Sequence[float], tolerance: float = TOLERANCE) -> Choice:
    """Return the first choice whose predicted time is the least, within the tolerance of predictions."""
    return next(choice for choice, time in zip(choices, times, strict=True) if time <= tolerance * min(times))


# Rings


def ring_work(plan: TilePlan, spec: CallSpec, tiers: Place = 0, transfer_launches: int = 0) -> Passes:
    """Return the work of a ring on the plan's rank.

    Args:
        tiers: the tier over which rows travel, or `Hosts` if that depends on the ranks.
        transfer_launches: launches of each transfer by kernels; 0 for copy engines.
    """
    forward, backward = (
        [_ring_step(step, plan, spec, bool(is_backward), tiers, transfer_launches) for step in steps]
        for is_backward, steps in enumerate((plan.forward, plan.backward))
    )
    return called(forward), called(backward, BACKWARD)


def called(steps: Sequence[Step], factor: float = 1.0) -> Work:
    """Return the steps of a pass after the host's work for the call."""
    return (Step(launches=factor * CALL), *steps)


def _ring_step(
    step: TileStep, plan: TilePlan, spec: CallSpec, backward: bool, tiers: Place, transfer_launches: int
) -> Step:
    factor = BACKWARD if backward else 1.0
    heads = _length(step.heads) * spec.q_heads // max(spec.kv_heads, 1)  # DTensor shards may have none
    of_dim = next(speeds for most, *speeds in _OF_DIMS if spec.head_dim <= most or most == _OF_DIMS[-1][0])
    of_pair = 2.0 * heads * (spec.head_dim + spec.v_head_dim) * (BACKWARD_FLOPS if backward else 1.0)
    attention = [0.0] * 4  # in the order of `Kernels`
    for tile in step.tiles:
        by_row = not isinstance(tile.mask, ShapedMask)
        attention[2 * by_row + backward] += of_pair * _pairs(tile) / of_dim[backward]
    found = Step(attention=tuple(attention), launches=factor * (1 + len(step.tiles)))
    if spec.latent_dims is not None:
        found += expansion(rows_read(step), spec, 3 if backward else 1)
    if step.transfer is None:
        return found
    # Merging reads the partial result of the step, and reads and writes the sum, in float32 or narrower.
    rows = sum(_length(tile.q) * _length(tile.batch) for tile in step.tiles)
    merged = rows * heads * spec.v_head_dim * (spec.itemsize + (2 * spec.itemsize if step.is_last else 8))
    carried, pieces = transferred(step.transfer, plan, spec, tiers)
    launches = factor * transfer_launches if carried else 0.0
    found += Step(moved=merged, received=carried, pieces=pieces, launches=launches)
    return found + Step(moved=4 * sum(carried), sent=carried) if backward else found  # gradients return


def expansion(rows: int, spec: CallSpec, products: int) -> Step:
    """Return the products that expand rows of latents, or their gradients.

    Each makes K/V of all heads, and copies these and the rotary keys next to one another.
    """
    assert spec.latent_dims is not None
    latent, rotary = spec.latent_dims
    tokens = float(products * rows * spec.batch_size * spec.q_heads)
    return Step(
        flops=2 * tokens * latent * (spec.head_dim - rotary + spec.v_head_dim),
        moved=3 * tokens * (spec.head_dim + spec.v_head_dim) * spec.itemsize,
    )


def rows_read(step: TileStep) -> int:
    """Return the number of key rows that the tiles of a step read."""
    return sum(map(_length, step.spans_read))


def _pairs(tile: Tile) -> float:
    """Return the pairs of queries and keys that a tile takes the time of, of one head."""
    batch = _length(tile.batch)
    if isinstance(tile.mask, ShapedMask):
        return batch * _length(tile.q) * _length(tile.kv) * (1.0 if tile.mask.is_full else TRIANGLE)
    return batch * tile.mask.pairs


def transferred(
    transfer: Transfer, plan: TilePlan, spec: CallSpec, tiers: Place = 0
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return by tier the bytes of K/V that a rank receives or sends, whichever are more, and the pieces it receives."""
    lengths, rank, size = plan.rows.lengths, plan.rank, _length(transfer.heads) * spec.head_bytes
    count = 1 + (len(tiers.ranks) if isinstance(tiers, Hosts) else tiers)

    def tier(peer: int) -> int:
        return tiers.tier(rank, peer) if isinstance(tiers, Hosts) else tiers

    received = [
        (tier(source), lengths[source][part])
        for source in transfer.sources(rank, plan.world_size) for part in plan.recv_parts[source]
    ]  # fmt: skip
    sent = [
        (tier(reader), lengths[rank][part])
        for reader in transfer.readers(rank, plan.world_size) for part in plan.send_parts[reader]
    ]  # fmt: skip
    by_tier = [
        size * max(sum(rows for over, rows in pieces if over == each) for pieces in (received, sent))
        for each in range(count)
    ]
    pieces = tuple(float(sum(over == each and rows > 0 for over, rows in received)) for each in range(count))
    return tuple(map(float, by_tier)) if any(by_tier) else (), pieces


def _length(span: Span) -> int:
    return span[1] - span[0]
