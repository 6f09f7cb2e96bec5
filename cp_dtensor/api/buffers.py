"""Buffers of a context: tensors that are sharded in place while it is open."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cp_dtensor import _torch
from cp_dtensor._torch.tensors import indexable
from cp_dtensor.attention.masked import positions_of
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.agreement import warn_once
from cp_dtensor.engine.call import Call
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.layouts import Layout, Segment, shard_lengths

_SHARD = "cp_dtensor_shard"
"""Attribute of tensors that a context has left sharded: the ranks, and the local length."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor that a context shards along `dim`."""

    tensor: torch.Tensor
    dim: int
    layout: Layout
    ranks: SequenceRanks
    restore: bool


_lock = threading.RLock()
_open_shards: dict[int, list[InPlaceShard]] = {}
"""By the id of a buffer: its open shards, the innermost last."""


def is_shard_now(tensor: object) -> bool:
    """Return whether this is a tensor that is a buffer of an open context."""
    return id(tensor) in _open_shards


class InPlaceShard:
    """A buffer's shard, which takes the place of the whole tensor while a context is open.

    Two tensor objects exchange identities: code that holds the buffer sees the shard, and tensors that autograd saves
    meanwhile do not change, so that backward may run after the buffer has been restored. Restoring copies nothing.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.whole_shape = buffer.tensor.shape
        self._stays = False
        # Of each time that this was entered, the object that has the contents from before; None if this was in place.
        self._before: list[torch.Tensor | None] = []
        with torch.no_grad():
            self._shard = take_shard(buffer.tensor, buffer.dim, buffer.layout, buffer.ranks.rank, buffer.ranks.size)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the buffer this shard while open (for good, if it is not to be restored). May be entered repeatedly."""
        tensor, key, before = self.buffer.tensor, id(self.buffer.tensor), None
        with _lock:
            if not self._stays and self not in _open_shards.get(key, [])[-1:]:
                # A new object each time: autograd may have saved the last one, whose identity must not change.
                before = self._shard.detach()
                _torch.swap_identities(tensor, before)
            _open_shards.setdefault(key, []).append(self)
            self._before.append(before)
            del before  # or `release_whole` would not free it
        try:
            yield
        finally:
            with _lock:
                shards = _open_shards[key]
                if shards[-1] is not self:
                    raise RuntimeError(
                        "contexts that shard the same buffer must be left in the reverse order of entering them, got a "
                        f"buffer of shape {tuple(self.whole_shape)} whose later context is still open"
                    )
                shards.pop()
                if not shards:
                    del _open_shards[key]
                local = self._before.pop()
                if local is not None:
                    _torch.swap_identities(tensor, local)
                    if local.requires_grad and local.is_leaf:
                        local.register_post_accumulate_grad_hook(_warn_of_late_gradient)

    def release_whole(self) -> None:
        """Free the whole contents of a buffer that is not to be restored."""
        buffer = self.buffer
        if not buffer.restore and not self._stays:
            self._stays = True
            self._before[-1] = None
            setattr(buffer.tensor, _SHARD, (set(buffer.ranks.global_ranks()), self._shard.size(buffer.dim)))


def _warn_of_late_gradient(shard: torch.Tensor) -> None:
    warnings.warn(
        f"a buffer that was set to require grad inside of context_parallel got the gradient of its shard, of shape "
        f"{tuple(shard.shape)}, after the context had ended, so its .grad does not have it: call backward inside, or "
        "shard the tensor by context_parallel_shard, which is differentiable",
        stacklevel=2,
    )


def buffers_of(
    tensors: list[torch.Tensor], dims: list[int], no_restore: Collection[torch.Tensor] | None, call: Call
) -> list[Buffer]:
    """Return the buffers of a context, which has this call; refuse tensors that cannot be sharded in place."""
    if isinstance(no_restore, torch.Tensor):
        raise TypeError("expected no_restore_buffers to be a collection of tensors, got one tensor")
    listed, stay_sharded = [*map(id, tensors)], {*map(id, no_restore or ())}
    for tensor in no_restore or ():
        if id(tensor) not in listed:
            raise ValueError(
                "expected no_restore_buffers to be among buffers (the same objects); got one of shape "
                f"{tuple(tensor.shape)} that is not"
            )
    for index, tensor in enumerate(tensors):
        if listed.index(id(tensor)) < index:
            raise ValueError(f"buffer {index} is the same tensor as buffer {listed.index(id(tensor))}: list it once")
        if tensor.requires_grad:
            raise ValueError(
                f"buffer {index}: got a tensor that requires grad, of shape {tuple(tensor.shape)}, expected one that "
                "does not: context_parallel_shard is differentiable (or detach the tensor, or set requires_grad inside)"
            )
        if _torch.is_wrapper(tensor):
            raise TypeError(
                f"buffer {index}: got a {type(tensor).__name__}, which keeps its data in other tensors, expected a "
                "plain torch.Tensor. Use context_parallel_shard, which makes a new one"
            )
    buffers = [
        Buffer(tensor, dim, call.layout, call.ranks, restore=id(tensor) not in stay_sharded)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    refuse_shards(buffers)
    return buffers


def refuse_shards(buffers: list[Buffer]) -> None:
    """Refuse buffers that contexts over the same ranks have sharded."""
    for index, buffer in enumerate(buffers):
        tensor, found = buffer.tensor, getattr(buffer.tensor, _SHARD, None)
        if found is None and id(tensor) not in _open_shards:
            continue
        ranks = set(buffer.ranks.global_ranks())
        left_sharded = found == (ranks, tensor.size(buffer.dim))
        is_open = any(set(shard.buffer.ranks.global_ranks()) == ranks for shard in _open_shards.get(id(tensor), []))
        if len(ranks) > 1 and (left_sharded or is_open):
            why = "was left sharded (no_restore_buffers) by" if left_sharded else "is a buffer of"
            raise ValueError(
                f"buffer {index}: expected a tensor that every rank has whole, got a shard of shape "
                f"{tuple(tensor.shape)}: it {why} another context over the same ranks, or this one before"
            )


def refuse_shards_of_other_dims(shards: tuple[InPlaceShard, ...], call: Call, q: torch.Tensor, k: torch.Tensor) -> None:
    """Refuse queries (..., S, D) of no declared length that have a buffer's share in another dim than S.

    Either the buffer has another sequence dim, or q is (batch, sequence, heads, head_dim). Where nothing but the share
    says so, it may be the number of heads, so that is warned of. Only shares that are equal on all ranks count, so that
    ranks refuse alike: others make calls whose sizes differ, which the ranks compare.
    """
    ranks, q_len = call.ranks, q.size(-2)
    lengths = {n for each in call.lengths for n in shard_lengths(call.layout, each, ranks.size)}
    if ranks.size == 1 or q.dim() < 3 or q_len in lengths:
        return
    for index, each in enumerate(shards):
        dim, shape = each.buffer.dim, tuple(each.whole_shape)
        share, *others = {*shard_lengths(each.buffer.layout, shape[dim], ranks.size)}
        if others or q.shape[: dim + 1] != (*shape[:dim], share):
            continue
        is_batch = dim == 0 and q_len in shape[1:]
        is_buffer = q.shape == (*shape[:dim], share, *shape[dim + 1 :])
        # k of (batch, heads, sequence, head_dim) is a transposed projection in most models.
        are_heads = k.shape[: dim + 1] != q.shape[: dim + 1] or k.size(-2) in lengths or k.stride(-2) > k.stride(-3)
        if not (is_batch or is_buffer) and (dim != q.dim() - 3 or are_heads):
            continue
        place = shape.index(q_len, 1) if is_batch else q.dim() - 2
        hint = f", for buffer {index} maybe {place}" if is_batch or is_buffer else ""
        total = q_len * ranks.size
        text = (
            f"buffer {index} of shape {shape} is sharded along dim {dim}, and q {tuple(q.shape)} has its share of "
            f"{share} there, with {q_len} queries on each of {ranks.size} ranks, which no length of the context "
            f"explains: expected buffer_seq_dims to name the sequence dim{hint}, and q, k and v of (batch, heads, "
            f"sequence, head_dim), maybe q.transpose(1, 2). If there is a sequence of {total} tokens in all, announce "
            f"it: context_parallel(..., seq_len={total})"
        )
        if is_batch or is_buffer or q_len * q.size(-1) in shape[dim + 1 :]:  # where heads are one dim of the buffer
            raise ValueError(text)
        warn_once(ranks, ("heads", dim, q.size(-1), q.dtype), text)


# Shards of tensors


def take_shard(tensor: torch.Tensor, dim: int, layout: Layout, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's part of a whole tensor, in local order; new and contiguous."""
    source, groups = indexable(tensor), layout.batch_groups(tensor.size(0))
    positions = positions_by_group(layout, tensor.size(dim), rank, world_size, tensor.size(0), tensor.device)
    rows = [source] if len(groups) == 1 else [source[start:stop] for start, stop in groups]
    parts = [part.index_select(dim, each) for part, each in zip(rows, positions, strict=True)]
    shard = parts[0] if len(parts) == 1 else torch.cat(parts)
    return shard if shard.dtype == tensor.dtype else shard.view(tensor.dtype)


@lru_cached
def _segments(layout: Layout, seq_len: int, rank: int, world_size: int, group: int) -> tuple[Segment, ...]:
    return layout.segments(seq_len, rank, world_size, group)


def positions_by_group(
    layout: Layout, seq_len: int, rank: int, world_size: int, batch_size: int, device: torch.device | str | None
) -> list[torch.Tensor]:
    """Return a rank's global positions in each group of batch rows of one layout: (local tokens,) int64."""
    by_group = []
    for group in range(len(layout.batch_groups(batch_size))):  # no comprehension, which would be a frame of each entry
        by_group.append(positions_of(_segments(layout, seq_len, rank, world_size, group), device))
    return by_group


def positions_of_batch(
    layout: Layout, seq_len: int, rank: int, world_size: int, batch_size: int, device: torch.device | str | None
) -> torch.Tensor:
    """Return a rank's global positions: (local tokens,) int64, or (batch, local tokens) where batch rows differ."""
    groups = layout.batch_groups(batch_size)
    by_group = positions_by_group(layout, seq_len, rank, world_size, batch_size, device)
    if len(groups) == 1:
        return by_group[0]
    return torch.cat([each.expand(stop - start, -1) for each, (start, stop) in zip(by_group, groups, strict=True)])
