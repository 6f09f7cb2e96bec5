"""Keys and values of all ranks in the order of their positions, for FlexAttention, which takes them whole.

One all-gather brings K and V together; their gradients go straight to the ranks that own the tokens, by one all-to-all
for each axis, and are summed there in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cp_dtensor import _torch_private
from cp_dtensor.kept_values import KeptValues, capturing
from cp_dtensor.layouts import Layout
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.tensors import positions_of

T = TypeVar("T")


@dataclass(frozen=True)
class WholeKeys:
    """The keys of a sequence that is divided over some ranks, and how they come together."""

    ranks: SequenceRanks
    layout: Layout
    seq_len: int
    rows: int
    """How many to return, at least `seq_len`; the further ones are copies of some key, for nobody to look at."""

    def gathered(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, H, local S, D) and (B, H, local S, Dv) to (B, H, rows, D) and (B, H, rows, Dv), new tensors.

        A collective, in which every rank takes part.
        """
        if not self._padded:  # alike on every rank
            return tuple(x.new_zeros(*x.shape[:2], self.rows, x.size(3)) for x in (k, v))  # type: ignore[return-value]
        batch, heads, local, width = k.shape
        sent = k.new_empty(self._padded, batch, heads, width + v.size(3))
        sent[:local, ..., :width] = k.permute(2, 0, 1, 3)
        sent[:local, ..., width:] = v.permute(2, 0, 1, 3)
        # As bytes, since groups do not know every dtype.
        everyone = self.ranks.gather(sent.view(torch.uint8)).view(k.dtype).flatten(0, 1).permute(1, 2, 0, 3)
        return (
            self._by_batch_group(_sources, everyone[..., :width], self.rows),
            self._by_batch_group(_sources, everyone[..., width:], self.rows),
        )

    def gradients(
        self, grad_k: torch.Tensor, grad_v: torch.Tensor, local: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """This rank's shards of the sum over ranks of gradients of what `gathered` returned; a collective too."""
        if not self._padded:
            return tuple(x.new_zeros(*x.shape[:2], local, x.size(3)) for x in (grad_k, grad_v))  # type: ignore[return-value]
        width = grad_k.size(3)
        sent = torch.cat([self._by_batch_group(_targets, grad, 0) for grad in (grad_k, grad_v)], 3)
        blocks = sent.permute(2, 0, 1, 3).unflatten(0, (self.ranks.size, self._padded))
        home = _summed_at_home(blocks, self.ranks)[:local].permute(1, 2, 0, 3).to(grad_k.dtype)
        return home[..., :width].contiguous(), home[..., width:].contiguous()

    @property
    def _padded(self) -> int:
        """The longest shard's length."""
        return max(shard_lengths(self.layout, self.seq_len, self.ranks.size))

    def _by_batch_group(self, index: Callable[..., torch.Tensor], rows: torch.Tensor, count: int) -> torch.Tensor:
        """Rows (dim 2) in another order, which may differ by batch row."""
        groups = self.layout.batch_groups(rows.size(0))
        key = (self.layout, self.seq_len, self.ranks.size, count, rows.device)
        bits = rows.view(torch.uint8) if rows.itemsize == 1 else rows  # torch cannot index every dtype
        parts = [bits[a:b].index_select(2, kept(index, *key, group)) for group, (a, b) in enumerate(groups)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(rows.dtype)


class GatheredKeys(torch.autograd.Function):
    """`WholeKeys.gathered`, differentiable."""

    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, keys: WholeKeys) -> tuple[torch.Tensor, torch.Tensor]:
        """As `keys.gathered(k, v)`."""
        ctx.keys, ctx.local = keys, k.size(2)
        return keys.gathered(k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_k: torch.Tensor, grad_v: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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


def _sources(
    layout: Layout, seq_len: int, world_size: int, rows: int, device: torch.device, group: int
) -> torch.Tensor:
    """(rows,): where each position lies in the shards of all ranks, padded to one length."""
    padded = max(shard_lengths(layout, seq_len, world_size))
    index = torch.zeros(rows, dtype=torch.int32, device=device)
    for rank in range(world_size):
        positions = positions_of(layout.segments(seq_len, rank, world_size, group), device)
        first = rank * padded
        index[positions] = torch.arange(first, first + positions.numel(), dtype=torch.int32, device=device)
    return index


def _targets(
    layout: Layout, seq_len: int, world_size: int, rows: int, device: torch.device, group: int
) -> torch.Tensor:
    """(ranks * padded,): the position of each row of these shards; 0 for padding."""
    del rows
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
