"""Cost model of a plan: seconds from FLOPs, bytes and launches.

The model follows the steps of a plan on three clocks: the host launches kernels, the GPU computes, the link transfers.
A step starts when all three have reached it, and the next transfer starts with it. (With two transfers in flight
predictions differ by 3% at most, where links are slow.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Step, TilePlan, Transfer
from cp_dtensor.plan.tiles import ShapedMask, Tile
from cp_dtensor.spec.layouts import Span

Way = TypeVar("Way")

TRANSFER_TAX = 0.15
"""Fraction by which attention slows down while transfer kernels take multiprocessors."""
TOLERANCE = 1.05
"""Predictions within this ratio count as equal."""
_BLOCK = 128
"""Queries (keys in backward) of a thread block of attention kernels."""
_KERNEL = 10e-6
"""Seconds to begin and end a kernel."""
_BACKWARD_TIME = 2.8
"""GPU time of backward over forward: five matrix products instead of two, and slower kernels."""
_BACKWARD_LAUNCH = 2.4
"""Host time of a launch of backward over one of forward (from the benchmark tables)."""
_TRIANGLE_TIME = 0.53
"""GPU time of forward of a triangle over that of the whole rectangle (measured on H200s)."""
_TRIANGLE_BACKWARD_TIME = 0.5
"""GPU time of backward of a triangle over that of the whole rectangle."""
_INTERVALS_TIME = 1.3
"""GPU time of interval-masked tiles over tiles by shape (measured on H200s, docs/benchmarks/2xH200-masks)."""
_INTERVALS_LAUNCH = 1.7
"""Host time of a launch of an interval-masked tile over one of a tile by shape."""


def predicted_seconds(plan: TilePlan, spec: CallSpec, hardware: Hardware, backward: bool, slows_compute: bool) -> float:
    """The time of forward, or of `backward`, on the plan's rank, if the other ranks are in step.

    With `slows_compute`, transfers are kernels, which take multiprocessors and another launch.
    """
    steps = plan.backward if backward else plan.forward
    arrivals = [step.transfer for step in steps if step.transfer is not None]

    def transfer_seconds(transfer: Transfer) -> float:
        return hardware.link_latency + transfer_bytes(transfer, plan, spec) / hardware.link_speed

    host = gpu = sending = 0.0
    link = transfer_seconds(arrivals[0]) if arrivals else 0.0
    for step in steps:
        launch = hardware.launch * (_BACKWARD_LAUNCH if backward else 1.0)
        tiles = sum(1.0 if isinstance(tile.mask, ShapedMask) else _INTERVALS_LAUNCH for tile in step.tiles)
        host += launch * (1 + tiles + (slows_compute and step.transfer is not None))
        start = max(host, gpu)
        if step.transfer is not None:
            start = max(start, link)
            arrivals.pop(0)
            if arrivals:
                link = start + transfer_seconds(arrivals[0])
        compute = _compute_seconds(step, plan, spec, hardware, backward)
        if slows_compute:
            compute += TRANSFER_TAX * min(compute, max(link - start, 0.0))
        gpu = start + compute
        if backward and step.transfer is not None:
            sending = max(sending, gpu) + transfer_seconds(step.transfer)
    return max(gpu, sending)


def nearly_fastest(ways: Sequence[Way], seconds: Sequence[float]) -> Way:
    """The first way whose predicted time is the least, within the tolerance of predictions."""
    return next(way for way, each in zip(ways, seconds, strict=True) if each <= TOLERANCE * min(seconds))


def _compute_seconds(step: Step, plan: TilePlan, spec: CallSpec, hardware: Hardware, backward: bool) -> float:
    heads = (step.heads[1] - step.heads[0]) * spec.q_heads // max(spec.kv_heads, 1)  # DTensor shards may have none
    seconds = sum(_tile_seconds(tile, heads, spec, hardware, backward) for tile in step.tiles)
    if step.transfer is None:
        return seconds
    # Merging reads the partial result of the step, and reads and writes the sum, in float32 or narrower.
    rows = sum(_length(tile.q) * _length(tile.batch) for tile in step.tiles)
    per_element = spec.itemsize + (2 * spec.itemsize if step.is_last else 8)
    moved = rows * heads * spec.v_head_dim * per_element
    if backward:
        moved += 4 * _transfer_rows(step.transfer, plan) * _row_bytes(step.heads, spec)
    return seconds + moved / hardware.memory_speed


def _tile_seconds(tile: Tile, heads: int, spec: CallSpec, hardware: Hardware, backward: bool) -> float:
    rows, columns, batch = _length(tile.q), _length(tile.kv), _length(tile.batch)
    if isinstance(tile.mask, ShapedMask):
        triangle = _TRIANGLE_BACKWARD_TIME if backward else _TRIANGLE_TIME
        pairs = rows * columns * (1.0 if tile.mask.is_full else triangle)
    else:
        pairs = _INTERVALS_TIME * tile.mask.pairs
    flops = 2.0 * batch * heads * pairs * (spec.head_dim + spec.v_head_dim) * (_BACKWARD_TIME if backward else 1.0)
    blocks = batch * heads * -(-(columns if backward else rows) // _BLOCK)
    waves = blocks / hardware.multiprocessors
    if not waves:
        return 0.0
    # Blocks of triangles and of interval-masked tiles differ in length; multiprocessors wait about half of the longest.
    idle = -(-blocks // hardware.multiprocessors) / waves if tile.mask.is_full else 1.0 + 0.5 / waves
    return flops / hardware.flops * idle + _KERNEL


def transfer_bytes(transfer: Transfer, plan: TilePlan, spec: CallSpec) -> int:
    """The bytes of K/V that a rank receives or sends, whichever are more."""
    return _transfer_rows(transfer, plan) * _row_bytes(transfer.heads, spec)


def buffer_bytes(transfer: Transfer, plan: TilePlan, spec: CallSpec) -> int:
    """The bytes of the buffer that a transfer of K/V fills."""
    return plan.buffer_rows(transfer) * _row_bytes(transfer.heads, spec)


def _transfer_rows(transfer: Transfer, plan: TilePlan) -> int:
    """The rows that the rank receives or sends, whichever are more."""
    sources = transfer.sources(plan.rank, plan.world_size)
    readers = transfer.readers(plan.rank, plan.world_size)
    incoming = sum(plan.rows.lengths[source][part] for source in sources for part in plan.recv_parts[source])
    outgoing = sum(plan.rows.lengths[plan.rank][part] for reader in readers for part in plan.send_parts[reader])
    return max(incoming, outgoing)


def _row_bytes(heads: Span, spec: CallSpec) -> int:
    return (heads[1] - heads[0]) * spec.head_bytes


def _length(span: Span) -> int:
    return span[1] - span[0]
