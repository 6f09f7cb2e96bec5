"""Keys and values that come from all ranks straight to their places, and gradients that go straight home.

Where ranks share memory, one kernel reads all keys and values from it: nothing is computed meanwhile, and the host has
little to launch. Elsewhere, and on the way home, a rotation brings rows, some heads after the others.
For layouts of few unbroken ranges, over one axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from cp_dtensor.attention_call import cleaned_up_on_error
from cp_dtensor.flex_rows import Pair
from cp_dtensor.layouts import Layout, Segment, Span
from cp_dtensor.masks import Full
from cp_dtensor.plan import Plan, Stages, gathered_plan
from cp_dtensor.rotation.base import Contribution, Rotation, RotationMethod
from cp_dtensor.rotation.choice import rotation_of_all_rows
from cp_dtensor.rotation.head_exchange import HeadExchange
from cp_dtensor.rotation.head_exchange_symm_mem import whole_heads
from cp_dtensor.rotation.heads import HeadRows
from cp_dtensor.rotation.rows import unpack_rows
from cp_dtensor.rotation.symm_mem import SymmetricMemory
from cp_dtensor.schedule import GroupSegments
from cp_dtensor.sums import add_parts
from cp_dtensor.tensors import cut, in_words
from cp_dtensor.tiling import TilingByShape

_STAGE_BYTES = 64 << 20
"""Of all ranks' K/V or their gradients, of which shared memory holds a stage; each stage costs launches."""
_MOST_RANGES = 8
"""Of a rank; each travels by itself to every other one."""


@dataclass(frozen=True)
class RowsInPlace:
    """Rows on the way between all ranks of an axis, as a rotation moves them."""

    rotation: Rotation
    group: dist.ProcessGroup
    stages: tuple[Span, ...]
    """Heads that travel together."""
    plan: Plan
    own: dict[Span, Span]
    """Where the ranges of this rank's shard lie among everybody's rows."""
    others: tuple[Span, ...]
    """The rows of the other ranks."""
    kind: HeadRows
    """The same rows as an exchange of heads has them, in which all ranks want each head."""

    def gather(self, local: Pair) -> Pair:
        """Keys and values of all positions, contiguous; all of them `in_words`."""
        with cleaned_up_on_error(lambda: self.rotation.abandon(self.group)):
            shares_memory = isinstance(self.rotation, SymmetricMemory)
            reads = whole_heads(local, self.kind) if shares_memory else None
            return self._received(local) if reads is None else self._read(local, reads)

    def _read(self, local: Pair, reads: HeadExchange) -> Pair:
        """By one kernel, which writes what it reads from all ranks' memory to its place."""
        heads = [x.flatten(0, 1).unsqueeze(1) for x in local]
        (arrived,) = reads.to_heads([heads], [[self.kind]], self.group).receive()
        k, v = (x.squeeze(1).unflatten(0, local[0].shape[:2]) for x in arrived)
        return k, v

    def _received(self, local: Pair) -> Pair:
        transfers = self.rotation.start_kv(*local, self.plan, False, self.group)
        k, v = (x.new_empty(*x.shape[:2], self.plan.rows.total, x.size(3)) for x in local)
        for target, source in zip((k, v), local, strict=True):
            for rows, place in self.own.items():
                cut(target, None, None, place).copy_(cut(source, None, None, rows))
        for heads in self.stages:
            for target, source in zip((k, v), unpack_rows(transfers.receive(), *local, heads), strict=True):
                for place in self.others:
                    cut(target, None, heads, place).copy_(cut(source, None, None, place))
            transfers.tiles_launched()
        return k, v

    def bring_home(self, whole: Pair, local: Pair) -> None:
        """Fills gradients of this rank's keys and values with the sums of all ranks' gradients of all of them."""
        words = in_words(*whole)
        with cleaned_up_on_error(lambda: self.rotation.abandon(self.group)):
            transfers = self.rotation.start_grads(*words, self.plan, self.group)
            under_way: Span | None = None
            for heads in (*self.stages, None):
                if heads is not None:
                    for target, source in zip(unpack_rows(transfers.buffer(), *words, heads), words, strict=True):
                        target.copy_(cut(source, None, heads, None))
                    transfers.send()
                if under_way is not None:
                    self._sum(under_way, transfers.receive(), whole, local)
                under_way = heads

    def _sum(self, heads: Span, contributions: Sequence[Contribution], whole: Pair, local: Pair) -> None:
        dtype = whole[0].dtype
        sum_dtype = torch.promote_types(dtype, torch.float32)
        for rows, stack in contributions:
            stacks = unpack_rows(stack.view(dtype), *whole, heads)
            for out, own, others in zip(local, whole, stacks, strict=True):
                base = cut(own, None, heads, self.own[rows])
                add_parts(cut(out, None, heads, rows), base, [((0, others.size(-2)), others)], sum_dtype)


def rows_in_place(
    k: torch.Tensor, v: torch.Tensor, layout: Layout, seq_len: int, group: dist.ProcessGroup, method: RotationMethod
) -> RowsInPlace | None:
    """How the rows of such a call travel, alike on all ranks; None where the layout is not for it.

    Args:
        k: (B, Hkv, any, D), on this rank's device.
        v: (B, Hkv, any, Dv).
        layout: of the keys.
        seq_len: the global number of keys.
        group: the ranks of the axis.
        method: what the caller has asked for. Its first call for a group may be a collective.
    """
    if len(layout.batch_groups(k.size(0))) > 1 or not _has_few_ranges(layout, seq_len, group.size()):
        return None
    rotation, kv_heads = rotation_of_all_rows(method, group, k.device), k.size(1)
    # By collectives all at once: launching one takes the host longer than what it would hide, and no memory is kept.
    total = 0 if rotation.slows_compute else seq_len * k.size(0) * kv_heads * (k.size(3) + v.size(3)) * k.itemsize
    stages = max(1, min(-(-total // _STAGE_BYTES), kv_heads))
    stages = next(count for count in range(stages, kv_heads + 1) if kv_heads % count == 0)
    return RowsInPlace(rotation, group, *planned(layout, seq_len, group.size(), group.rank(), kv_heads, stages))


@lru_cache(maxsize=256)
def _has_few_ranges(layout: Layout, seq_len: int, world_size: int) -> bool:
    """Whether every rank's positions are some unbroken ranges."""
    shards = [layout.segments(seq_len, rank, world_size) for rank in range(world_size)]
    return all(len(shard) <= _MOST_RANGES and all(each.is_contiguous for each in shard) for shard in shards)


@lru_cache(maxsize=256)
def planned(
    layout: Layout, seq_len: int, world_size: int, rank: int, kv_heads: int, stages: int
) -> tuple[tuple[Span, ...], Plan, dict[Span, Span], tuple[Span, ...], HeadRows]:
    """The last five of `RowsInPlace`. As if every rank had all queries, since each wants every key."""
    everywhere = ((Segment.contiguous(0, seq_len),),) * world_size
    shards = tuple(layout.segments(seq_len, each, world_size) for each in range(world_size))
    tiling = TilingByShape((GroupSegments((0, 1), everywhere, shards),), Full())
    plan = gathered_plan(tiling, rank, kv_heads, Stages(1, stages), Stages(1, stages))
    rows, own, others = plan.rows, {}, list[Span]()
    for owner, part in rows.places:
        start, stop = rows.span(owner, part)
        if owner == rank:
            own[rows.local_span(owner, part)] = start, stop
        elif others and others[-1][1] == start:
            others[-1] = others[-1][0], stop
        else:
            others.append((start, stop))
    kind = HeadRows(rows, ((0, 1),) * world_size)
    return tuple(step.heads for step in plan.forward if step.transfer is not None), plan, own, tuple(others), kind
