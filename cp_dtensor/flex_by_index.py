"""Keys and values that are gathered rank by rank and put in the order of their positions by an index.

For layouts of many short ranges or stripes, for batch rows that are divided differently, and for two axes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor.flex_rows import Pair, kept, shard_lengths
from cp_dtensor.layouts import Layout
from cp_dtensor.rotation.ranks import SequenceRanks
from cp_dtensor.tensors import in_words, positions_of


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
