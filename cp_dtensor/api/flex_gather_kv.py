"""K/V of all ranks in the order of global positions, and their gradients, summed on the ranks that own the tokens.

K/V are gathered in one of two ways. Where GPUs have peer access, and every shard is a few contiguous ranges over one
mesh axis, one kernel reads all shards from symmetric memory. Otherwise the ranks all-gather their shards, padded to one
length, and select rows by an index. Gradients are selected by an index, exchanged in one all-to-all per axis, and
summed in float32. Compiled code gathers by the operator `flex_keys`; FlexAttention itself is captured as torch does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cp_dtensor._torch.autograd import Tensors, differentiated_once, refuse_batches
from cp_dtensor._torch.tensors import in_words, on_device_of, wide_dtype
from cp_dtensor.api.flex_block_mask import (
    LocalRows,
    cached,
    check_mask_lengths,
    config_of,
    defined,
    found_in,
    layout_is_found,
    longest_seq_len,
    shard_lengths,
)
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.attention.modifiers import NO_MODIFIERS
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import HeadRows
from cp_dtensor.comm.head_exchange_symm_mem import whole_heads
from cp_dtensor.comm.select import gathers_by_symm_mem
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.compiled_spec import call_spec_of, pending_backwards, runtime_numbers
from cp_dtensor.plan.tiling import rows_in_order
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Full, Mask

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V or their gradients: (B, Hkv, T, D) and (B, Hkv, T, Dv)."""


@dataclass(frozen=True)
class KVGather:
    """The layout of a sharded K/V, and how to gather it."""

    ranks: SequenceRanks
    layout: Layout
    seq_len: int
    """Global number of keys."""
    rows: int
    """Rows of the gathered tensors, at least `seq_len`; rows after the last key are zero."""
    method: TransportMethod
    """The caller's KV transport: symmetric memory, where the ranks share it, else all-gather."""

    def gather(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """Local (B, H, T, D) and (B, H, T, Dv) to contiguous (B, H, rows, D) and (B, H, rows, Dv); a collective."""
        if self._is_empty(k):
            return k.new_zeros(*k.shape[:2], self.rows, k.size(3)), v.new_zeros(*v.shape[:2], self.rows, v.size(3))
        with on_device_of(k):
            words = in_words(k, v)
            # FlexAttention reads K and V that are contiguous 2% faster than K and V that share the rows of one tensor.
            all_k, all_v = self._read_shared_memory(*words) or self._all_gather(*words)
            if self.rows > self.seq_len:
                all_k, all_v = (F.pad(x, (0, 0, 0, self.rows - self.seq_len)) for x in (all_k, all_v))
            return all_k.view(k.dtype), all_v.view(v.dtype)

    def reduce_gradients(self, grad_k: torch.Tensor, grad_v: torch.Tensor, local: int) -> Pair:
        """Gradients of gathered K/V to those of this rank's `local` tokens, summed over the ranks."""
        out_k, out_v = (grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))
        if self._is_empty(grad_k):
            return out_k, out_v
        with on_device_of(grad_k):
            k, v = in_words(grad_k[:, :, : self.seq_len], grad_v[:, :, : self.seq_len])
            blocks = k.new_empty(self.ranks.size, self._longest, *k.shape[:2], k.size(3) + v.size(3))
            for source, rows in zip((k, v), _split_kv(blocks.flatten(0, 1), k.size(3)), strict=True):
                self._select_rows(source, rows, to_shards=True)
            summed = _sum_over_ranks(blocks.view(grad_k.dtype), self.ranks)[:local]
            for out, rows in zip((out_k, out_v), _split_kv(summed, grad_k.size(3)), strict=True):
                out.copy_(rows)
        return out_k, out_v

    def _is_empty(self, k: torch.Tensor) -> bool:
        """True if no element is gathered, on any rank."""
        return 0 in (*k.shape[:2], self.seq_len)

    @property
    def _longest(self) -> int:
        """Tokens of the longest shard."""
        return max(shard_lengths(self.layout, self.seq_len, self.ranks.size))

    def _read_shared_memory(self, k: torch.Tensor, v: torch.Tensor) -> Pair | None:
        """The first way of the module's docstring; None, on every rank alike, where it does not apply."""
        if self.ranks.inner is not None or len(self.layout.batch_groups(k.size(0))) > 1:
            return None
        group = self.ranks.outer
        rows = _rows_of_every_rank(self.layout, self.seq_len, group.size())
        if rows is None or not gathers_by_symm_mem(self.method, group, k.device):
            return None
        exchange = whole_heads((k, v), rows)
        if exchange is None:
            return None
        heads = [x.flatten(0, 1).unsqueeze(1) for x in (k, v)]
        try:
            ((all_k, all_v),) = exchange.to_heads([heads], [[rows]], group).receive()
        except BaseException:
            exchange.abandon(group)
            raise
        return all_k.squeeze(1).unflatten(0, k.shape[:2]), all_v.squeeze(1).unflatten(0, v.shape[:2])

    def _all_gather(self, k: torch.Tensor, v: torch.Tensor) -> Pair:
        """The second way of the module's docstring."""
        packed = k.new_empty(self._longest, *k.shape[:2], k.size(3) + v.size(3))
        for rows, shard in zip(_split_kv(packed[: k.size(2)], k.size(3)), (k, v), strict=True):
            rows.copy_(shard)
        all_k, all_v = (x.new_empty(*x.shape[:2], self.seq_len, x.size(3)) for x in (k, v))
        gathered = _split_kv(self.ranks.gather(packed).flatten(0, 1), k.size(3))
        for source, out in zip(gathered, (all_k, all_v), strict=True):
            self._select_rows(source, out, to_shards=False)
        return all_k, all_v

    def _select_rows(self, source: torch.Tensor, out: torch.Tensor, to_shards: bool) -> None:
        """Copies rows (dim 2) of `source` to `out` by `_row_index`, which may differ between batch groups."""
        for group, (start, stop) in enumerate(self.layout.batch_groups(source.size(0))):
            index = cached(_row_index, self.layout, self.seq_len, self.ranks.size, source.device, group, to_shards)
            torch.index_select(source[start:stop], 2, index, out=out[start:stop])


class GatherKV(torch.autograd.Function):
    """`KVGather.gather`, differentiable."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, gather: KVGather) -> Pair:
        """Gathers K/V."""
        ctx.gather, ctx.local = gather, k.size(2)
        return gather.gather(k, v)

    @staticmethod
    @differentiated_once
    def backward(
        ctx: Any, _saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Sums gradients over the ranks."""
        refuse_batches(grad_k, grad_v)
        return *ctx.gather.reduce_gradients(grad_k, grad_v, ctx.local), None


def _split_kv(rows: torch.Tensor, width: int) -> Pair:
    """Rows (T, B, H, D + Dv) as views (B, H, T, D) and (B, H, T, Dv); `width` is D.

    >>> [tuple(x.shape) for x in _split_kv(torch.zeros(5, 1, 2, 7), 4)]
    [(1, 2, 5, 4), (1, 2, 5, 3)]
    """
    return rows[..., :width].movedim(0, 2), rows[..., width:].movedim(0, 2)


def _row_index(
    layout: Layout, seq_len: int, world_size: int, device: torch.device, group: int, to_shards: bool
) -> torch.Tensor:
    """(ranks * longest shard,) positions of padded shards, 0 for padding, with `to_shards`; else (positions,) rows."""
    longest = max(shard_lengths(layout, seq_len, world_size))
    shards = [positions_of(layout.segments(seq_len, rank, world_size, group), device) for rank in range(world_size)]
    rows = torch.cat([torch.arange(each.numel(), device=device) + rank * longest for rank, each in enumerate(shards)])
    at, values = (rows, torch.cat(shards)) if to_shards else (torch.cat(shards), rows)
    index = torch.zeros(world_size * longest if to_shards else seq_len, dtype=torch.int32, device=device)
    index[at] = values.int()
    return index


def _sum_over_ranks(blocks: torch.Tensor, ranks: SequenceRanks) -> torch.Tensor:
    """(ranks, ...) of each rank to this rank's (...), summed over the ranks in float32 or wider."""
    wide = wide_dtype(blocks)
    blocks = blocks.unflatten(0, (ranks.outer.size(), ranks.inner_size))
    if ranks.inner is None:
        blocks = blocks.squeeze(1)
    else:  # the inner axis first, since its sums leave less to exchange over the outer one
        blocks = _exchange(blocks.transpose(0, 1), ranks.inner).sum(0, dtype=wide)
    return _exchange(blocks, ranks.outer).sum(0, dtype=wide)


def _exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-to-all of (ranks, ...): block i goes to rank i, and block i of the result comes from rank i."""
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received.flatten(), blocks.flatten(), group=group)
    return received


_MAX_RANGES = 8
"""Ranges of one rank that the kernel reads from shared memory, each as pieces of its own."""


@lru_cached  # equal calls must get the same object: the exchange's tables are looked up by its identity
def _rows_of_every_rank(layout: Layout, seq_len: int, world_size: int) -> HeadRows | None:
    """All ranks' rows of one head, which every rank receives; None if a shard is not a few contiguous ranges."""
    shards = [layout.segments(seq_len, rank, world_size) for rank in range(world_size)]
    if not all(len(shard) <= _MAX_RANGES and all(each.is_contiguous for each in shard) for shard in shards):
        return None
    return HeadRows(rows_in_order(shards), ((0, 1),) * world_size)


# K/V in compiled code


def check_context_mask(mask: Mask | None) -> None:
    """Refuses contexts with a mask."""
    if mask is not None:
        raise NotImplementedError(
            f"FlexAttention does not take the mask of its context, got {mask!r}: give flex_attention a block_mask, "
            "in a context without a mask"
        )


def _keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: str, q_len: int, kv_len: int, declared: bool,
    scale: float, needs_backward: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Lengths are -1 where they are known only when the code runs, and `declared` if the caller passed them."""
    known, call_spec = (q_len, kv_len) if q_len >= 0 else None, call_spec_of(token)
    compared = known if declared or call_spec.fixed.debug else None  # debugging, ranks compare the lengths of masks
    lengths, found = call_spec.resolve(q, k, v, Full(), NO_MODIFIERS, scale, compared)
    check_mask_lengths(lengths, known)
    if found.context is not None:
        check_context_mask(found.context.mask)
    config = call_spec.config(found.context)
    ranks, layout = config.ranks, config.layout
    if call_spec.reads_context and len(layout.batch_groups(q.size(0))) > 1:
        raise NotImplementedError(
            "compiled FlexAttention takes layouts that are made for one length if they divide batch rows alike, got "
            f"{layout}"
        )
    rows = lengths[1] if known else longest_seq_len(layout, k.size(2), ranks.rank, ranks.size)
    keys, values = KVGather(ranks, layout, lengths[1], rows, config.transport).gather(k, v)
    positions = LocalRows.of(layout, lengths[0], ranks.rank, ranks.size, q.size(0)).positions(q.device)
    # Backward gets these numbers, so it needs neither the context nor communication.
    if call_spec.reads_context:
        begun_in = pending_backwards.begin(found, needs_backward)
        numbers = torch.tensor([lengths[1], runtime_numbers.number_of(found), begun_in], device="cpu")
    else:
        numbers = q.new_empty(0, dtype=torch.int64) if known else torch.tensor([lengths[1]], device="cpu")
    return keys, values, positions.clone(), q.new_full((1,), lengths[1], dtype=torch.int32), numbers


def _fake_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, token: str, q_len: int, kv_len: int, *_: Any
) -> tuple[torch.Tensor, ...]:
    config, is_found = config_of(token), layout_is_found(token)
    ranks, layout = config.ranks, config.layout
    rows = kv_len if kv_len >= 0 else longest_seq_len(layout, int(k.size(2)), ranks.rank, ranks.size)
    per_row = () if is_found or len(layout.batch_groups(int(q.size(0)))) == 1 else (q.size(0),)
    numbers = 3 if is_found else 0 if q_len >= 0 else 1
    return (
        k.new_empty(*k.shape[:2], rows, k.size(3)),
        v.new_empty(*v.shape[:2], rows, v.size(3)),
        q.new_empty(*per_row, q.size(2), dtype=torch.int32),
        q.new_empty(1, dtype=torch.int32),
        torch.empty(numbers, dtype=torch.int64, device="cpu" if numbers else q.device),
    )


def _keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, numbers: torch.Tensor, token: str, kv_len: int, local: int
) -> Pair:
    found = found_in(numbers)
    if found is not None:
        pending_backwards.end(found, int(numbers[2]))
    config, seq_len = config_of(token, numbers), int(numbers[0]) if kv_len < 0 else kv_len
    gather = KVGather(config.ranks, config.layout, seq_len, grad_k.size(2), config.transport)
    return gather.reduce_gradients(grad_k, grad_v, local)


def _fake_keys_backward(
    grad_k: torch.Tensor, grad_v: torch.Tensor, _numbers: torch.Tensor, _token: str, _kv_len: int, local: int
) -> tuple[torch.Tensor, ...]:
    return tuple(grad.new_empty(*grad.shape[:2], local, grad.size(3)) for grad in (grad_k, grad_v))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, k, _, token, _, kv_len, *_ = inputs
    *_, positions, total, numbers = output
    ctx.save_for_backward(numbers)
    ctx.settings = token, kv_len, k.size(2)
    ctx.mark_non_differentiable(positions, total, numbers)


@differentiated_once
def _gradients(
    ctx: Any, saved: Tensors, grad_k: torch.Tensor, grad_v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor | None, ...]:
    grads = torch.ops.cp_dtensor.flex_keys_backward(grad_k, grad_v, *saved, *ctx.settings)
    return None, *grads, *[None] * 6


_keys_library = defined(
    "flex_keys(Tensor q, Tensor k, Tensor v, str token, int q_len, int kv_len, bool declared, float scale, "
    "bool needs_backward) -> (Tensor keys, Tensor values, Tensor positions, Tensor kv_total, Tensor numbers)",
    _keys, _fake_keys,
)  # fmt: skip
_backward_library = defined(
    "flex_keys_backward(Tensor grad_k, Tensor grad_v, Tensor numbers, str token, int kv_len, SymInt local) "
    "-> (Tensor grad_k, Tensor grad_v)",
    _keys_backward, _fake_keys_backward,
)  # fmt: skip
torch.library.register_autograd(
    "cp_dtensor::flex_keys", _gradients, setup_context=_save_for_backward, lib=_keys_library
)
