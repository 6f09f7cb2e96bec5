"""Placements in which attention of DTensors computes, for any placements of its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from cp_dtensor.engine.config import is_ulysses_axis
from cp_dtensor.spec.layouts import Segment, TorchChunk

BATCH_DIM, HEAD_DIM, SEQ_DIM = 0, 1, 2


@dataclass(frozen=True)
class AttentionPlacements:
    """Placements of the local computation, one per mesh axis. `out` and `dq` are placed as `q`."""

    q: tuple[Placement, ...]
    kv: tuple[Placement, ...]
    grad_kv: tuple[Placement, ...]
    """As `kv`, but Partial where ranks with different queries hold the same keys."""
    ring_axis: int | None
    """The mesh axis around which K/V travel; None if there is no such axis. Ulysses may then be alone."""
    ulysses_axis: int | None = None
    """The mesh axis over which rows are exchanged for heads, if there is one."""

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes whose ranks share the sequence, the outer one first."""
        return tuple(axis for axis in (self.ring_axis, self.ulysses_axis) if axis is not None)


def on_seq(placement: Placement) -> bool:
    """True if a placement shards the sequence."""
    return _on(SEQ_DIM, placement)


def is_seq_sharded(*placements: Sequence[Placement]) -> bool:
    """True if any of the tensors is sharded along the sequence on any mesh axis."""
    return any(on_seq(placement) for each in placements for placement in each)


def plan_placements(
    q: Sequence[Placement],
    k: Sequence[Placement],
    v: Sequence[Placement],
    mesh_shape: Sequence[int],
    q_heads: int,
    kv_heads: int,
    axis_names: Sequence[str] | None = None,
) -> AttentionPlacements:
    """The placements of the computation, axis by axis.

    Sequence: q stays or becomes sharded. If q, k and v are all sharded along it on an axis whose name begins with
    "ulysses" (the first of several), or on two axes, then that axis, or the second, is for Ulysses. K/V that are
    sharded along the sequence stay so there and on the first other such axis, the ring, and are gathered over further
    ones; K/V that are replicated stay so. Batch and heads: all three sharded alike (heads only if every rank gets whole
    groups of query heads with their key head). Anything else: replicated.
    """
    by_axis: list[tuple[Placement, Placement, Placement]] = []  # of q, K/V, and gradients of K/V
    ring_axis = None
    head_shards = 1
    ulysses_axis = _ulysses_axis(q, k, v, axis_names)
    for axis, (on_q, on_k, on_v) in enumerate(zip(q, k, v, strict=True)):
        kv_on_seq = on_seq(on_k) or on_seq(on_v)
        if on_seq(on_q) or kv_on_seq:
            if axis == ulysses_axis or (kv_on_seq and ring_axis is None):
                ring_axis = ring_axis if axis == ulysses_axis else axis
                by_axis.append((Shard(SEQ_DIM),) * 3)
            else:
                by_axis.append((Shard(SEQ_DIM), Replicate(), Partial()))
            continue
        choice: Placement = Replicate()
        if any(_on(BATCH_DIM, placement) for placement in (on_q, on_k, on_v)):
            choice = Shard(BATCH_DIM)
        elif any(_on(HEAD_DIM, placement) for placement in (on_q, on_k, on_v)):
            shards = head_shards * mesh_shape[axis]
            if q_heads == kv_heads or (q_heads % shards == 0 and kv_heads % shards == 0):
                head_shards = shards
                choice = Shard(HEAD_DIM)
        by_axis.append((choice,) * 3)
    of_q, of_kv, of_grad_kv = zip(*by_axis, strict=True)
    return AttentionPlacements(of_q, of_kv, of_grad_kv, ring_axis, ulysses_axis)


def _ulysses_axis(
    q: Sequence[Placement], k: Sequence[Placement], v: Sequence[Placement], axis_names: Sequence[str] | None
) -> int | None:
    """The axis for Ulysses: one on which q, k and v are all sharded along the sequence."""
    axes = [axis for axis, placements in enumerate(zip(q, k, v, strict=True)) if all(map(on_seq, placements))]
    named = [axis for axis in axes if axis_names and is_ulysses_axis(axis_names[axis])]
    if named:
        return named[0]
    return axes[1] if len(axes) > 1 else None


def local_segment(
    length: int,
    placements: Sequence[Placement],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    dim: int = SEQ_DIM,
) -> Segment:
    """A rank's range of a dim of that length. Shards over several axes nest from left to right."""
    start, stop = 0, length
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if _on(dim, placement):
            (chunk,) = TorchChunk().segments(stop - start, index, size)
            start, stop = start + chunk.start, start + chunk.start + chunk.length
    return Segment.contiguous(start, stop)


def _on(dim: int, placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim
