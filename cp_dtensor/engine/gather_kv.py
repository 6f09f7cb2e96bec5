"""K/V of all ranks in the order of global positions, and their gradients, summed on the ranks that own the tokens.

K/V are gathered in one of two ways. Where GPUs have peer access, and every shard is a few contiguous ranges over one
mesh axis, one kernel reads all shards from symmetric memory. Otherwise the ranks all-gather their shards, padded to one
length, and select rows by an index. Gradients are selected by an index, exchanged in one all-to-all per axis, and
summed in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_dtensor._torch.autograd import RankFunction, Tensors, differentiated_once, refuse_batches
from cp_dtensor._torch.cache import Shared, capturing
from cp_dtensor._torch.tensors import in_words, on_device, wide_dtype
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.comm.calls import Signature, begin_pass
from cp_dtensor.comm.faults import exchanged
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import HeadRows
from cp_dtensor.comm.head_exchange_symm_mem import whole_heads
from cp_dtensor.comm.symm_mem_workspace import abandon
from cp_dtensor.comm.transports import gathers_by_symm_mem
from cp_dtensor.engine.call import Call
from cp_dtensor.plan.tiling import rows_in_order
from cp_dtensor.spec.cache import LRUCache, lru_cached
from cp_dtensor.spec.layouts import Layout, shard_lengths
from cp_dtensor.spec.logs import is_logged, log_once

Pair = tuple[Tensor, Tensor]
"""K and V or their gradients: (B, Hkv, T, D) and (B, Hkv, T, Dv)."""


@dataclass(frozen=True)
class KVGather:
    """A call whose K/V are gathered: by symmetric memory, if its transport may be that and the ranks share it."""

    call: Call
    seq_len: int
    """Global number of keys."""

    def gather(self, k: Tensor, v: Tensor) -> Pair:
        """Gather local (B, H, T, D) and (B, H, T, Dv) to those of all keys, contiguous."""
        if self._is_empty(k):
            return tuple(x.new_empty(*x.shape[:2], self.seq_len, x.size(3)) for x in (k, v))  # type: ignore[return-value]
        self._begin(k, v, backward=False)
        with on_device(k.device):
            words = in_words(k, v)
            # FlexAttention reads K and V that are contiguous 2% faster than K and V that share the rows of one tensor.
            all_k, all_v = self._read_shared_memory(*words) or self._all_gather(*words)
            return all_k.view(k.dtype), all_v.view(v.dtype)

    def reduce_gradients(self, grad_k: Tensor, grad_v: Tensor, local: int) -> Pair:
        """Return gradients of this rank's `local` tokens: those of gathered K/V, summed over the ranks."""
        out_k, out_v = (grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))
        if self._is_empty(grad_k):
            return out_k, out_v
        self._begin(grad_k, grad_v, backward=True)
        with on_device(grad_k.device):
            k, v = in_words(grad_k, grad_v)
            blocks = k.new_empty(self.call.ranks.size, self._longest, *k.shape[:2], k.size(3) + v.size(3))
            for source, rows in zip((k, v), _split_kv(blocks.flatten(0, 1), k.size(3)), strict=True):
                self._select_rows(source, rows, to_shards=True)
            summed = _sum_over_ranks(blocks.view(grad_k.dtype), self.call.ranks)[:local]
            for out, rows in zip((out_k, out_v), _split_kv(summed, grad_k.size(3)), strict=True):
                out.copy_(rows)
        return out_k, out_v

    def _begin(self, k: Tensor, v: Tensor, backward: bool) -> None:
        """Count a pass before it exchanges anything."""
        signature = _signature(self.call.layout, self.seq_len, k.shape[:2], (k.size(3), v.size(3)), k.dtype)
        begin_pass(self.call.ranks, signature, k, backward=backward, debug=self.call.debug)

    def _is_empty(self, k: Tensor) -> bool:
        """Return whether no element is gathered, on any rank."""
        return 0 in (*k.shape[:2], self.seq_len)

    @property
    def _longest(self) -> int:
        """Return the tokens of the longest shard."""
        return max(shard_lengths(self.call.layout, self.seq_len, self.call.ranks.size))

    def _read_shared_memory(self, k: Tensor, v: Tensor) -> Pair | None:
        """Gather by the first way of the module's docstring; None, on every rank alike, where it does not apply."""
        layout, group = self.call.layout, self.call.ranks.outer
        if self.call.ranks.inner is not None or len(layout.batch_groups(k.size(0))) > 1:
            return None
        rows = _rows_of_every_rank(layout, self.seq_len, group.size())
        if rows is None or not gathers_by_symm_mem(self.call.transport, group, k.device):
            return None
        exchange = whole_heads((k, v), rows)
        if exchange is None:
            return None
        heads = [x.flatten(0, 1).unsqueeze(1) for x in (k, v)]
        try:
            ((all_k, all_v),) = exchange.to_heads([heads], [[rows]], group)()
        except BaseException:
            abandon(group)
            raise
        return all_k.squeeze(1).unflatten(0, k.shape[:2]), all_v.squeeze(1).unflatten(0, v.shape[:2])

    def _all_gather(self, k: Tensor, v: Tensor) -> Pair:
        """Gather by the second way of the module's docstring."""
        if is_logged("engine"):
            _log_gather(self.call.layout, self.seq_len, self.call.ranks.size, "all-gathered")
        packed = k.new_empty(self._longest, *k.shape[:2], k.size(3) + v.size(3))
        for rows, shard in zip(_split_kv(packed[: k.size(2)], k.size(3)), (k, v), strict=True):
            rows.copy_(shard)
        all_k, all_v = (x.new_empty(*x.shape[:2], self.seq_len, x.size(3)) for x in (k, v))
        gathered = _split_kv(self.call.ranks.gather(packed).flatten(0, 1), k.size(3))
        for source, out in zip(gathered, (all_k, all_v), strict=True):
            self._select_rows(source, out, to_shards=False)
        return all_k, all_v

    def _select_rows(self, source: Tensor, out: Tensor, to_shards: bool) -> None:
        select_rows(source, out, 2, self.call.layout, self.seq_len, self.call.ranks.size, to_shards=to_shards)


class GatherKV(RankFunction):
    """`KVGather.gather`, differentiable."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, gather: KVGather) -> Pair:
        """Gather K/V."""
        ctx.gather, ctx.local = gather, k.size(2)
        return gather.gather(k, v)

    @staticmethod
    @differentiated_once
    def backward(ctx: Any, _saved: Tensors, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        """Sum gradients over the ranks."""
        refuse_batches(grad_k, grad_v)
        return *ctx.gather.reduce_gradients(grad_k, grad_v, ctx.local), None


@lru_cached
def _signature(
    layout: Layout, seq_len: int, batch_and_heads: tuple[int, ...], dims: tuple[int, int], dtype: torch.dtype
) -> Signature:
    """Return the signature of FlexAttention, which is equal on all ranks."""
    batch, heads = batch_and_heads
    return Signature(f"FlexAttention to {seq_len:,} keys, batch {batch}, {heads} heads of {dims}, {dtype}, {layout}")


def _split_kv(rows: Tensor, width: int) -> Pair:
    """Return rows (T, B, H, D + Dv) as views (B, H, T, D) and (B, H, T, Dv); `width` is D.

    >>> [tuple(x.shape) for x in _split_kv(torch.zeros(5, 1, 2, 7), 4)]
    [(1, 2, 5, 4), (1, 2, 5, 3)]
    """
    return rows[..., :width].movedim(0, 2), rows[..., width:].movedim(0, 2)


def select_rows(
    source: Tensor, out: Tensor, dim: int, layout: Layout, seq_len: int, world_size: int, *, to_shards: bool
) -> None:
    """Copy rows (`dim`) of gathered shards, each padded to the longest, to their positions of the whole `out`.

    `to_shards`: copy those of the whole to their places in padded shards, whose padding gets any row.
    """
    # Where rows are dim 0, there are no batch rows that a layout may divide in other ways.
    for group, (start, stop) in enumerate(layout.batch_groups(source.size(0)) if dim else [(0, None)]):
        index = cached(_row_index, source.device, layout, seq_len, world_size, group, to_shards)
        torch.index_select(source[start:stop], dim, index, out=out[start:stop])


def _row_index(
    device: torch.device, layout: Layout, seq_len: int, world_size: int, group: int, to_shards: bool
) -> Tensor:
    """Return, `to_shards`, (ranks * longest shard,) positions of padded shards (0: padding), else (positions,) rows."""
    longest = max(shard_lengths(layout, seq_len, world_size))
    shards = [positions_of(layout.segments(seq_len, rank, world_size, group), device) for rank in range(world_size)]
    rows = torch.cat([torch.arange(each.numel(), device=device) + rank * longest for rank, each in enumerate(shards)])
    at, values = (rows, torch.cat(shards)) if to_shards else (torch.cat(shards), rows)
    index = torch.zeros(world_size * longest if to_shards else seq_len, dtype=torch.int32, device=device)
    index[at] = values.int()
    return index


def _log_gather(layout: Layout, seq_len: int, world_size: int, how: str) -> None:
    text = f"FlexAttention of {seq_len:,} keys on {world_size} ranks, {layout}: K/V of all ranks are {how}"
    log_once("engine", logging.INFO, f"{text}, and torch's kernel computes this rank's queries")


def _sum_over_ranks(blocks: Tensor, ranks: SequenceRanks) -> Tensor:
    """Exchange (ranks, ...) of each rank for this rank's (...), summed over the ranks in float32 or wider."""
    if ranks.inner is not None:  # the inner axes first, since their sums leave less to exchange over the outer one
        blocks = blocks.unflatten(0, (ranks.outer.size(), ranks.inner.size)).transpose(0, 1)
        blocks = _sum_over_ranks(blocks, ranks.inner)
    return exchanged(blocks, ranks.outer, _SUM).sum(0, dtype=wide_dtype(blocks))


_SUM = "an exchange of dK/dV"
_MAX_RANGES = 8
"""Ranges of one rank that the kernel reads from shared memory, each as pieces of its own."""


@lru_cached  # equal calls must get the same object: the exchange's tables are looked up by its identity
def _rows_of_every_rank(layout: Layout, seq_len: int, world_size: int) -> HeadRows | None:
    """Return all ranks' rows of one head, which every rank receives; None if a shard has many ranges."""
    shards = [layout.segments(seq_len, rank, world_size) for rank in range(world_size)]
    if not all(len(shard) <= _MAX_RANGES and all(each.is_contiguous for each in shard) for shard in shards):
        return None
    _log_gather(layout, seq_len, world_size, "read from shared memory if ranks share it")
    return HeadRows(rows_in_order(shards), ((0, 1),) * world_size)


# Small tensors on devices


def cached(make: Callable[..., Tensor], device: torch.device, *key: Any) -> Tensor:
    """Return `make(device, *key)`, a small tensor, from an LRU cache; what a capture misses is made and not kept."""
    value = _cache.get((make, device, *key))
    if value is None:
        if capturing():
            return make(device, *key)
        shared = Shared(device, lambda: make(device, *key), lambda tensor: (tensor,))
        value = _cache.add((make, device, *key), shared)
    return value.read()


_cache = LRUCache[Shared[Tensor]](pins=capturing)
