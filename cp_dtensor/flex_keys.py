"""Keys and values of all ranks in the order of their positions, for FlexAttention, which takes them whole.

K and V travel together, straight to their places among everybody's; their gradients straight to the ranks that own the
tokens, where they are summed in float32 and rounded once. Layouts of many short pieces, or over two axes, are gathered
rank by rank and put in order afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cp_dtensor import _torch_private
from cp_dtensor.attention_call import Tensors, differentiated_once
from cp_dtensor.kept_values import KeptValues, capturing
from cp_dtensor.layouts import Layout
from cp_dtensor.rotation.exchange import Exchange, Places
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.sums import add_parts
from cp_dtensor.tensors import positions_of

T = TypeVar("T")
_WORD = torch.int64
_MOST_PIECES = 8
"""Of a rank; each is a message to every other one."""


@dataclass(frozen=True)
class WholeKeys:
    """The keys of a sequence that is divided over some ranks, and how they come together."""

    ranks: SequenceRanks
    layout: Layout
    seq_len: int
    rows: int
    """How many to return, at least `seq_len`; the further ones are finite, for nobody to look at."""

    def gathered(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, H, local S, D) and (B, H, local S, Dv) to (B, H, rows, D) and (B, H, rows, Dv), contiguous.

        A collective, in which every rank takes part.
        """
        everyone = self._everyone(k, v)
        whole = tuple(x.new_empty(*x.shape[:2], self.rows, x.size(3)) for x in (k, v))
        # FlexAttention reads rows that follow each other 2% faster than such as are a token's K and V apart.
        for target, source in zip(whole, _keys_and_values(everyone, k.size(3)), strict=True):
            _copy(target[:, :, : self.seq_len], source)
            target[:, :, self.seq_len :].zero_()
        return whole  # type: ignore[return-value]

    def _everyone(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(positions, B, H, D + Dv)."""
        shape = _rows_shape(self.seq_len, k, v)
        if 0 in shape:  # alike on every rank
            return k.new_empty(shape)
        pieces = self._pieces(k.size(0))
        if pieces is None:
            return self._gathered_by_index(k, v)
        everyone, mine = k.new_empty(shape), pieces[self.ranks.rank]
        for start, stop, first in mine:
            here = slice(first, first + stop - start)
            _pack(k[:, :, here], v[:, :, here], everyone[start:stop])
        rows = _as_bytes(everyone)
        outgoing = self._places(lambda slot, rank: rows[slice(*mine[slot][:2])], len(mine))
        incoming = self._places(lambda slot, rank: rows[slice(*pieces[rank][slot][:2])], len(mine))
        Exchange(incoming, outgoing, rows, self.ranks.outer).wait()
        return everyone

    def gradients(
        self, grad_k: torch.Tensor, grad_v: torch.Tensor, local: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """This rank's shards of the sum over ranks of gradients of what `gathered` returned; a collective too."""
        grads = tuple(x.new_empty(*x.shape[:2], local, x.size(3)) for x in (grad_k, grad_v))
        whole, width = _pack(*(x[:, :, : self.seq_len] for x in (grad_k, grad_v))), grad_k.size(3)
        if whole.numel():
            self._bring_home(whole, width, grads)
        return grads  # type: ignore[return-value]

    def _bring_home(self, whole: torch.Tensor, width: int, grads: tuple[torch.Tensor, ...]) -> None:
        local, pieces = grads[0].size(2), self._pieces(whole.size(1))
        if pieces is None:
            for grad, found in zip(grads, _keys_and_values(self._sums_by_index(whole)[:local], width), strict=True):
                grad.copy_(found)
            return
        mine = pieces[self.ranks.rank]
        others = whole.new_empty(self.ranks.size - 1, local, *whole.shape[1:])
        rows, received = _as_bytes(whole), [_as_bytes(of_rank) for of_rank in others]

        def received_from(slot: int, rank: int) -> torch.Tensor:
            start, stop, first = mine[slot]
            return received[rank - (rank > self.ranks.rank)][first : first + stop - start]

        outgoing = self._places(lambda slot, rank: rows[slice(*pieces[rank][slot][:2])], len(mine))
        Exchange(self._places(received_from, len(mine)), outgoing, rows, self.ranks.outer).wait()
        sum_dtype = torch.promote_types(whole.dtype, torch.float32)
        own, contributions = _keys_and_values(whole, width), _keys_and_values(others, width)
        for grad, of_rank, of_others in zip(grads, own, contributions, strict=True):
            for start, stop, first in mine:
                here, length = slice(first, first + stop - start), stop - start
                if length:
                    parts = [((0, length), of_others[..., here, :])]
                    add_parts(grad[:, :, here], of_rank[:, :, start:stop], parts, sum_dtype)

    def _pieces(self, batch_size: int) -> tuple[tuple[_Piece, ...], ...] | None:
        """Those of each rank, equally many, where they are what travels."""
        if self.ranks.inner is not None or len(self.layout.batch_groups(batch_size)) > 1:
            return None
        return _pieces(self.layout, self.seq_len, self.ranks.size)

    def _places(self, rows: Callable[[int, int], torch.Tensor], slots: int) -> Places:
        """The rows of a slot that go to or come from each other rank."""
        ranks = range(self.ranks.size)
        return [[None if rank == self.ranks.rank else rows(slot, rank) for rank in ranks] for slot in range(slots)]

    def _gathered_by_index(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        sent = k.new_empty(_rows_shape(self._padded, k, v))
        _pack(k, v, sent[: k.size(2)])
        by_rank = self.ranks.gather(_as_bytes(sent)).view(sent.dtype).view(-1, *sent.shape[1:])
        return self._by_batch_group(_sources, by_rank)

    def _sums_by_index(self, whole: torch.Tensor) -> torch.Tensor:
        """(padded, B, H, D + Dv), summed in float32 or wider, of this rank's tokens."""
        sent = self._by_batch_group(_targets, whole)
        return _summed_at_home(sent.unflatten(0, (self.ranks.size, self._padded)), self.ranks)

    @property
    def _padded(self) -> int:
        """The longest shard's length."""
        return max(shard_lengths(self.layout, self.seq_len, self.ranks.size))

    def _by_batch_group(self, index: Callable[..., torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        """Rows (dim 0) in another order, which may differ by batch row (dim 1)."""
        groups = self.layout.batch_groups(rows.size(1))
        key = (self.layout, self.seq_len, self.ranks.size, rows.device)
        bits = rows.view(torch.uint8) if rows.itemsize == 1 else rows  # torch cannot index every dtype
        parts = [bits[:, a:b].index_select(0, kept(index, *key, group)) for group, (a, b) in enumerate(groups)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(rows.dtype)


def _pack(k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """(B, H, S, D) and (B, H, S, Dv) as (S, B, H, D + Dv), in `rows` if given."""
    if rows is None:
        rows = k.new_empty(_rows_shape(k.size(2), k, v))
    for part, tensor in zip(_keys_and_values(rows, k.size(3)), (k, v), strict=True):
        _copy(part, tensor)
    return rows


def _rows_shape(rows: int, k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """(rows, B, H, D + Dv)."""
    return rows, *k.shape[:2], k.size(3) + v.size(3)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies between tensors of other orders of dims, by words of 8 bytes where their rows consist of them."""
    count = _WORD.itemsize // source.itemsize
    if count > 1 and all(_has_words(x, count) for x in (target, source)):
        target, source = target.view(_WORD), source.view(_WORD)
    target.copy_(source)


def _has_words(x: torch.Tensor, count: int) -> bool:
    """Whether `count` elements are a word throughout, in memory as they are."""
    *strides, last = x.stride()
    split = x.size(-1) % count or x.storage_offset() % count or any(stride % count for stride in strides)
    return last == 1 and not (split or x.is_neg() or x.is_conj())


def _keys_and_values(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., S, B, H, D + Dv) as views (..., B, H, S, D) and (..., B, H, S, Dv); `width` is D.

    >>> [tuple(x.shape) for x in _keys_and_values(torch.zeros(5, 1, 2, 7), 4)]
    [(1, 2, 5, 4), (1, 2, 5, 3)]
    """
    return rows[..., :width].movedim(-4, -2), rows[..., width:].movedim(-4, -2)


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
        return *ctx.keys.gradients(grad_k, grad_v, ctx.local), None


@lru_cache(maxsize=256)
def shard_lengths(layout: Layout, seq_len: int, world_size: int) -> tuple[int, ...]:
    """The number of tokens of each rank."""
    return tuple(layout.local_length(seq_len, rank, world_size) for rank in range(world_size))


def most_tokens(layout: Layout, local: int, rank: int, world_size: int) -> int:
    """The length of the longest sequence of which a rank owns so many tokens.

    >>> from cp_dtensor.layouts import HeadTail
    >>> most_tokens(HeadTail(), 2, 0, 2)  # of 4 tokens rank 0 has 1 + 1, of 5 it has 2 + 1
    4
    """
    if layout.only_length is not None:
        return layout.only_length
    length = 1
    while layout.local_length(length, rank, world_size) <= local:
        length *= 2
    low = length // 2  # shares grow with the length in every layout
    while length - low > 1:
        middle = (low + length) // 2
        low, length = (low, middle) if layout.local_length(middle, rank, world_size) > local else (middle, length)
    return low


def kept(make: Callable[..., T], *key: Any) -> T:
    """`make(*key)`, a few small tensors, remembered; in a capture, what is not yet is computed by the graph."""
    value = _kept.get((make, *key))
    if value is None:
        if capturing():
            return make(*key)
        value = _kept.add((make, *key), _torch_private.prepared(lambda: make(*key)))
    return value  # type: ignore[return-value]


_kept = KeptValues[object](most=32)  # of a million tokens each has megabytes


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """(rows, ...) as (rows, bytes), since groups do not know every dtype."""
    return rows.flatten(1).view(torch.uint8)


_Piece = tuple[int, int, int]
"""Positions from and up to, and the first of them as the rank counts its own tokens."""


@lru_cache(maxsize=256)
def _pieces(layout: Layout, seq_len: int, world_size: int) -> tuple[tuple[_Piece, ...], ...] | None:
    """The unbroken ranges of each rank, equally many; None if they are too many to travel one by one."""
    found = []
    for rank in range(world_size):
        segments = layout.segments(seq_len, rank, world_size)
        if len(segments) > _MOST_PIECES or not all(segment.is_contiguous for segment in segments):
            return None
        first = accumulate((segment.length for segment in segments), initial=0)
        found.append(
            tuple((each.start, each.start + each.length, at) for each, at in zip(segments, first, strict=False))
        )
    return tuple(found)


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
