"""One rank's forward pass on one device, its keys and values delivered already: what `carried_state` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from cp_dtensor.division import CallShape, LayoutDivision
from cp_dtensor.kernels.attention_forward import ForwardConfig, launch_attention_forward
from cp_dtensor.layouts import HeadTail, Span
from cp_dtensor.local_attention.base import LocalAttention
from cp_dtensor.masks import Causal
from cp_dtensor.plan import Plan, Steps
from cp_dtensor.ring import RingCall, ring_forward
from cp_dtensor.rotation.base import GradTransfers, KvTransfers, Rotation
from cp_dtensor.rotation.rows import pack_rows, unpack_rows
from cp_dtensor.sharding import take_shard
from cp_dtensor.tools.delivered import ArrivedKv, Delivered

Partial = tuple[torch.Tensor, torch.Tensor]
_LAYOUT = HeadTail()
_SAMPLED_ROWS = 64


@dataclass(frozen=True)
class RankShape:
    """A causal problem under head-tail, batch size 1, and the rank whose part of it is computed."""

    length: int
    """Global."""
    rank: int
    world_size: int
    q_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel that carries its state: some rows of a tile, of the query heads of some kv heads."""

    step: int
    """Of the plan; says in which buffer `kv` counts rows."""
    heads: Span
    q: Span
    kv: Span
    causal_offset: int | None
    has_state: bool
    """Whether earlier launches have computed something for these rows."""
    is_last: bool
    """Whether no later one does."""


def carried_launches(steps: Steps) -> tuple[Launch, ...]:
    """The tiles of a plan, cut where some of their rows are done and others are not."""
    placed = [(index, step.heads, tile) for index, step in enumerate(steps) for tile in step.tiles]
    launches: list[Launch] = []
    for number, (index, heads, tile) in enumerate(placed):
        assert tile.mask.is_full or tile.mask.is_causal
        before, after = (
            [other.q for _, other_heads, other in others if _meet(other_heads, heads)]
            for others in (placed[:number], placed[number + 1 :])
        )
        edges = {edge for span in (*before, *after) for edge in span if tile.q[0] < edge < tile.q[1]}
        pieces: list[tuple[Span, bool, bool]] = []
        for start, stop in pairwise(sorted({*tile.q, *edges})):
            flags = _covers(before, start), not _covers(after, start)
            if pieces and pieces[-1][1:] == flags:
                start = pieces.pop()[0][0]
            pieces.append(((start, stop), *flags))
        for rows, has_state, is_last in pieces:
            offset = None if tile.mask.is_full else rows[0] - tile.q[0]
            launches.append(Launch(index, heads, rows, tile.kv, offset, has_state, is_last))
    return tuple(launches)


class RankTiles:
    """The tensors of a rank, and its result in several ways.

    Queries are views of (B, S, H, D) memory, as models have them; keys and values of other ranks are views of rows
    `[K | V]`, as rotations deliver them.
    """

    def __init__(self, shape: RankShape, rotation: Rotation, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int) -> torch.Tensor:
            drawn = torch.randn(1, shape.length, heads, shape.head_dim, device=device, generator=generator)
            return drawn.to(dtype).transpose(1, 2)

        self._segments = _LAYOUT.segments(shape.length, shape.rank, shape.world_size)
        self._scale = shape.head_dim**-0.5
        self._q = self._shard(normal(shape.q_heads))
        k, v = normal(shape.kv_heads), normal(shape.kv_heads)
        self._k, self._v = self._shard(k), self._shard(v)
        all_heads = (0, shape.kv_heads)
        self._whole_k, self._whole_v = unpack_rows(pack_rows(k, v, all_heads), k, v, all_heads)
        call = CallShape(
            LayoutDivision(_LAYOUT, shape.length, shape.length, 1, shape.world_size),
            Causal(),
            batch_size=1,
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.head_dim,
            itemsize=k.itemsize,
        )
        self._plan = rotation.plan(call, shape.rank)
        self.launches = carried_launches(self._plan.forward)
        delivered = [
            pack_rows(*self._sent(k, v, step.transfer.hop), step.heads)
            for step in self._plan.forward
            if step.transfer is not None
        ]
        self._rotation = _DeliveredTo(self._plan, delivered)
        self._by_step = self._keys_and_values(delivered)

    @property
    def flops(self) -> int:
        """Of the (query, key) pairs that the mask allows."""
        pairs = sum(s.length * s.start + s.length * (s.length + 1) // 2 for s in self._segments)
        return 4 * pairs * self.shape.q_heads * self.shape.head_dim

    def merged(self, backend: LocalAttention) -> Partial:
        """As the library does it: a backend's results, merged."""
        # Nothing travels, so the group is never asked for anything.
        group = dist.ProcessGroup(dist.HashStore(), self.shape.rank, self.shape.world_size)
        call = RingCall(self._plan, group, self._rotation, backend, backend, self._scale, torch.float32)
        return ring_forward(self._q, self._k, self._v, call)

    def unmerged(self, backend: LocalAttention) -> None:
        """A backend's results, not merged."""
        for step, (k, v) in zip(self._plan.forward, self._by_step, strict=True):
            for tile in step.tiles:
                tile_k, tile_v = _rows(k, tile.kv), _rows(v, tile.kv)
                backend.forward(self._queries(step.heads, tile.q), tile_k, tile_v, tile.mask, self._scale)

    def carried(self, config: ForwardConfig) -> Partial:
        """The Triton kernel on the same tiles, each going on from the one before in float32."""
        out, lse = self._empty_result()
        wide = out
        if any(not launch.is_last for launch in self.launches):
            wide = torch.empty_like(out, dtype=torch.float32)
        for launch in self.launches:
            k, v = self._by_step[launch.step]
            heads = self._query_heads(launch.heads)
            rows_lse = _rows(lse[:, heads], launch.q)
            state = _rows(wide[:, heads], launch.q), rows_lse
            launch_attention_forward(
                _rows(out[:, heads], launch.q) if launch.is_last else state[0],
                rows_lse,
                self._queries(launch.heads, launch.q),
                _rows(k, launch.kv),
                _rows(v, launch.kv),
                self._scale,
                causal_offset=launch.causal_offset,
                state=state if launch.has_state else None,
                config=config,
            )
        return out, lse

    def in_few_launches(self, config: ForwardConfig) -> Partial:
        """The Triton kernel on all keys that a segment of the queries sees: one launch for each segment."""
        out, lse = self._empty_result()
        row = 0
        for segment in self._segments:
            rows, keys = (row, row + segment.length), (0, segment.start + segment.length)
            row = rows[1]
            launch_attention_forward(
                _rows(out, rows),
                _rows(lse, rows),
                _rows(self._q, rows),
                _rows(self._whole_k, keys),
                _rows(self._whole_v, keys),
                self._scale,
                causal_offset=segment.start,
                config=config,
            )
        return out, lse

    def error(self, result: Partial) -> float:
        """Relative Frobenius norm of what some rows of `out`, in all heads, are off by from float64; NaN if any is."""
        rows = torch.linspace(0, self._q.size(2) - 1, _SAMPLED_ROWS, device=self._q.device).long()
        positions = torch.tensor([p for segment in self._segments for p in segment.positions()], device=rows.device)
        hidden = torch.arange(self.shape.length, device=rows.device) > positions[rows, None]
        wrong = total = 0.0
        for kv_head in range(self.shape.kv_heads):
            heads = self._query_heads((kv_head, kv_head + 1))
            k, v = (x[0, kv_head].double() for x in (self._whole_k, self._whole_v))
            logits = self._q[0, heads][:, rows].double() @ k.mT * self._scale
            expected = logits.masked_fill_(hidden, float("-inf")).softmax(-1) @ v
            wrong += (result[0][0, heads][:, rows].double() - expected).square().sum().item()
            total += expected.square().sum().item()
        return (wrong / total) ** 0.5

    def _shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows, in (B, S, H, D) memory as well."""
        whole = x.transpose(1, 2)
        return take_shard(whole, 1, _LAYOUT, self.shape.rank, self.shape.world_size).contiguous().transpose(1, 2)

    def _sent(self, k: torch.Tensor, v: torch.Tensor, hop: int | None) -> Partial:
        """The rows that a transfer brings. All ranks' stand in the order of their positions."""
        if hop is None:
            return k, v
        source = (self.shape.rank - hop) % self.shape.world_size
        shard_k, shard_v = (take_shard(x, 2, _LAYOUT, source, self.shape.world_size) for x in (k, v))
        return shard_k, shard_v

    def _keys_and_values(self, delivered: Sequence[torch.Tensor]) -> list[Partial]:
        """For each step, the K and V of its heads."""
        rows = iter(delivered)
        return [
            (self._k[:, slice(*step.heads)], self._v[:, slice(*step.heads)])
            if step.transfer is None
            else unpack_rows(next(rows), self._k, self._v, step.heads)
            for step in self._plan.forward
        ]

    def _query_heads(self, kv_heads: Span) -> slice:
        group = self.shape.q_heads // self.shape.kv_heads
        return slice(kv_heads[0] * group, kv_heads[1] * group)

    def _queries(self, kv_heads: Span, rows: Span) -> torch.Tensor:
        return _rows(self._q[:, self._query_heads(kv_heads)], rows)

    def _empty_result(self) -> Partial:
        return torch.empty_like(self._q), self._q.new_empty(self._q.shape[:3], dtype=torch.float32)


class _DeliveredTo(Delivered):
    """Keys and values that have arrived for one plan."""

    def __init__(self, plan: Plan, delivered: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._delivered = delivered

    def plan(self, shape: CallShape, rank: int) -> Plan:
        return self._plan

    def start_kv(
        self, k: torch.Tensor, v: torch.Tensor, plan: Plan, backward: bool, group: dist.ProcessGroup
    ) -> KvTransfers:
        return ArrivedKv(self._delivered)

    def start_grads(self, k: torch.Tensor, v: torch.Tensor, plan: Plan, group: dist.ProcessGroup) -> GradTransfers:
        raise NotImplementedError("forward only")


def _rows(tensor: torch.Tensor, rows: Span) -> torch.Tensor:
    return tensor[:, :, rows[0] : rows[1]]


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _covers(spans: Sequence[Span], row: int) -> bool:
    return any(start <= row < stop for start, stop in spans)
