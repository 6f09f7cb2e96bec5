"""Keys and values that come from all ranks straight to their places, and gradients that go straight home.

Where ranks share memory, one kernel reads all keys and values from it: nothing is computed meanwhile, and the host has
little to launch. Elsewhere, and on the way home, a rotation brings rows, some heads after the others.
For layouts of few unbroken ranges, over one axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_dtensor._torch.autograd import Tensors, cleaned_up_on_error, differentiated_once, refuse_batches
from cp_dtensor._torch.tensors import cut, in_words, on_device_of, unit_stride
from cp_dtensor.api.flex.block_mask import Pair, kept, shard_lengths
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.attention.merge import add_parts
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import HeadExchange, HeadRows
from cp_dtensor.comm.head_exchange_symm_mem import whole_heads
from cp_dtensor.comm.select import transport_of_all_rows
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transport import Contribution, KVTransport, TransportMethod, unpack_rows
from cp_dtensor.plan.plan import Plan, Stages, gathered_plan
from cp_dtensor.plan.tiling import GroupSegments, ShapeTiling
from cp_dtensor.spec.layouts import Layout, Segment, Span
from cp_dtensor.spec.masks import Full

# Keys and values of all ranks in the order of their positions, for FlexAttention, which takes them whole. Gradients
# go to the ranks that own the tokens, where they are summed in float32 and rounded once.


@dataclass(frozen=True)
class WholeKeys:
    """The keys of a sequence that is divided over some ranks, and how they come together."""

    ranks: SequenceRanks
    layout: Layout
    seq_len: int
    rows: int
    """How many to return, at least `seq_len`; the further ones are finite, for nobody to look at."""
    method: TransportMethod
    """How K/V are to travel; always all at once, if not by symmetric memory then by all-gather."""

    def gathered(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, H, local S, D) and (B, H, local S, Dv) to (B, H, rows, D) and (B, H, rows, Dv), contiguous.

        A collective, in which every rank takes part.
        """
        if self._is_empty(k):
            return k.new_zeros(*k.shape[:2], self.rows, k.size(3)), v.new_zeros(*v.shape[:2], self.rows, v.size(3))
        with on_device_of(k):
            # FlexAttention reads rows that follow each other 2% faster than such as are a token's K and V apart.
            all_k, all_v = self._way(k, v).gather(in_words(k, v))
            return self._longer(all_k).view(k.dtype), self._longer(all_v).view(v.dtype)

    def _longer(self, x: torch.Tensor) -> torch.Tensor:
        """With zeros behind the last position."""
        return x if self.rows == self.seq_len else F.pad(x, (0, 0, 0, self.rows - self.seq_len))

    def gradients(self, grad_k: torch.Tensor, grad_v: torch.Tensor, local: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shards of the sum over ranks of gradients of what `gathered` returned; a collective too."""
        shapes = [(*x.shape[:2], local, x.size(3)) for x in (grad_k, grad_v)]
        grads = grad_k.new_empty(shapes[0]), grad_v.new_empty(shapes[1])
        with on_device_of(grad_k):
            if not self._is_empty(grad_k):
                whole = self._positions(grad_k), self._positions(grad_v)
                self._way(*whole).bring_home(whole, grads)
        return grads

    def _positions(self, grad: torch.Tensor) -> torch.Tensor:
        return unit_stride(grad.resolve_neg())[:, :, : self.seq_len]

    def _is_empty(self, k: torch.Tensor) -> bool:
        """Whether there is nothing to bring; alike on every rank."""
        return 0 in (*k.shape[:2], self.seq_len)

    def _way(self, k: torch.Tensor, v: torch.Tensor) -> RowsInPlace | RowsByIndex:
        in_place = None
        if self.ranks.inner is None:
            in_place = rows_in_place(k, v, self.layout, self.seq_len, self.ranks.outer, self.method)
        return in_place or RowsByIndex(self.ranks, self.layout, self.seq_len)


class GatheredKeys(torch.autograd.Function):
    """`WholeKeys.gathered`, differentiable."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, keys: WholeKeys) -> tuple[torch.Tensor, torch.Tensor]:
        """As `keys.gathered(k, v)`."""
        ctx.keys, ctx.local = keys, k.size(2)
        return keys.gathered(k, v)

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, _saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """As `keys.gradients`."""
        refuse_batches(grad_k, grad_v)
        return *ctx.keys.gradients(grad_k, grad_v, ctx.local), None


# Keys and values that are gathered rank by rank and put in the order of their positions by an index. For layouts of
# many short ranges or stripes, for batch rows that are divided differently, and for two axes.


@dataclass(frozen=True)
class RowsByIndex:
    """Rows on the way between all ranks, shards padded to one length."""

    ranks: SequenceRanks
    layout: Layout
    seq_len: int

    def gather(self, local: Pair) -> Pair:
        """Keys and values of all positions, contiguous; all of them `in_words`."""
        by_rank = self.ranks.gather(_packed(local, self._padded))
        k, v = _keys_and_values(self._by_batch_group(_sources, by_rank.flatten(0, 1)), local[0].size(3))
        return k.contiguous(), v.contiguous()

    def bring_home(self, whole: Pair, local: Pair) -> None:
        """Fills gradients of this rank's keys and values with the sums of all ranks' gradients of all of them."""
        sent = self._by_batch_group(_targets, _packed(in_words(*whole), self.seq_len)).view(whole[0].dtype)
        home = _summed_at_home(sent.unflatten(0, (self.ranks.size, self._padded)), self.ranks)
        for tensor, part in zip(local, _keys_and_values(home[: local[0].size(2)], local[0].size(3)), strict=True):
            tensor.copy_(part)

    @property
    def _padded(self) -> int:
        """The longest shard's length."""
        return max(shard_lengths(self.layout, self.seq_len, self.ranks.size))

    def _by_batch_group(self, index: Callable[..., torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Rows (dim 0) in another order, which may differ by batch row (dim 1)."""
        groups = self.layout.batch_groups(rows.size(1))
        key = (self.layout, self.seq_len, self.ranks.size, rows.device)
        parts = [rows[:, a:b].index_select(0, kept(index, *key, group)) for group, (a, b) in enumerate(groups)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _packed(pair: Pair, rows: int) -> torch.Tensor:
    """(rows, B, H, D + Dv), of which the first T are filled."""
    k, v = pair
    packed = k.new_empty(rows, *k.shape[:2], k.size(3) + v.size(3))
    for part, tensor in zip(_keys_and_values(packed[: k.size(2)], k.size(3)), pair, strict=True):
        part.copy_(tensor)
    return packed


def _keys_and_values(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, B, H, D + Dv) as views (B, H, S, D) and (B, H, S, Dv); `width` is D.

    >>> [tuple(x.shape) for x in _keys_and_values(torch.zeros(5, 1, 2, 7), 4)]
    [(1, 2, 5, 4), (1, 2, 5, 3)]
    """
    return rows[..., :width].movedim(0, 2), rows[..., width:].movedim(0, 2)


def _sources(layout: Layout, seq_len: int, world_size: int, device: torch.device, group: int) -> torch.Tensor:
    """(positions,): where each lies in the shards of all ranks, padded to one length."""
    padded = max(shard_lengths(layout, seq_len, world_size))
    index = torch.zeros(seq_len, dtype=torch.int32, device=device)
    for rank in range(world_size):
        positions = positions_of(layout.segments(seq_len, rank, world_size, group), device)
        first = rank * padded
        index[positions] = torch.arange(first, first + positions.numel(), dtype=torch.int32, device=device)
    return index


def _targets(layout: Layout, seq_len: int, world_size: int, device: torch.device, group: int) -> torch.Tensor:
    """(ranks * padded,): the position of each row of these shards; 0 for padding."""
    index = torch.zeros(world_size, max(shard_lengths(layout, seq_len, world_size)), dtype=torch.int32, device=device)
    for rank in range(world_size):
        positions = positions_of(layout.segments(seq_len, rank, world_size, group), device)
        index[rank, : positions.numel()] = positions
    return index.flatten()


def _summed_at_home(blocks: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    """(ranks, ...) of each rank to this rank's (...), summed over the ranks in float32 or wider."""
    wide = torch.promote_types(blocks.dtype, torch.float32)
    blocks = blocks.unflatten(0, (ranks.outer.size(), ranks.inner_size))
    if ranks.inner is None:
        blocks = blocks.squeeze(1)
    else:  # the inner axis first, since it leaves less to the outer one
        blocks = _exchanged(blocks.transpose(0, 1), ranks.inner).sum(0, dtype=wide)
    return _exchanged(blocks, ranks.outer).sum(0, dtype=wide)


def _exchanged(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """(ranks, ...): the i-th block goes to rank i, and the i-th of the result comes from there."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received.flatten(), blocks.flatten(), group=group)
    return received


_STAGE_BYTES = 64 << 20
"""Of all ranks' K/V or their gradients, of which shared memory holds a stage; each stage costs launches."""
_MOST_RANGES = 8
"""Of a rank; each travels by itself to every other one."""


@dataclass(frozen=True)
class RowsInPlace:
    """Rows on the way between all ranks of an axis, as a rotation moves them."""

    transport: KVTransport
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
        with cleaned_up_on_error(lambda: self.transport.abandon(self.group)):
            shares_memory = isinstance(self.transport, SymmetricMemory)
            reads = whole_heads(local, self.kind) if shares_memory else None
            return self._received(local) if reads is None else self._read(local, reads)

    def _read(self, local: Pair, reads: HeadExchange) -> Pair:
        """By one kernel, which writes what it reads from all ranks' memory to its place."""
        heads = [x.flatten(0, 1).unsqueeze(1) for x in local]
        (arrived,) = reads.to_heads([heads], [[self.kind]], self.group).receive()
        k, v = (x.squeeze(1).unflatten(0, local[0].shape[:2]) for x in arrived)
        return k, v

    def _received(self, local: Pair) -> Pair:
        transfers = self.transport.start_kv(*local, self.plan, False, self.group)
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
        with cleaned_up_on_error(lambda: self.transport.abandon(self.group)):
            transfers = self.transport.start_grads(*words, self.plan, self.group)
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
    k: torch.Tensor, v: torch.Tensor, layout: Layout, seq_len: int, group: dist.ProcessGroup, method: TransportMethod
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
    transport, kv_heads = transport_of_all_rows(method, group, k.device), k.size(1)
    # By collectives all at once: launching one takes the host longer than what it would hide, and no memory is kept.
    total = 0 if transport.slows_compute else seq_len * k.size(0) * kv_heads * (k.size(3) + v.size(3)) * k.itemsize
    stages = max(1, min(-(-total // _STAGE_BYTES), kv_heads))
    stages = next(count for count in range(stages, kv_heads + 1) if kv_heads % count == 0)
    return RowsInPlace(transport, group, *planned(layout, seq_len, group.size(), group.rank(), kv_heads, stages))


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
    tiling = ShapeTiling((GroupSegments((0, 1), everywhere, shards),), Full())
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
