"""What a rank copies from its peers' memory in an exchange of heads, as integers.

Every tensor is published as (B, rows, heads, D), without gaps, one after the other; each begins where it would begin
for the longest shard, or for the rank with the most heads, so that every rank knows where to look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from cp_dtensor.rotation.heads import HeadRows

_TENSOR_ALIGNMENT = 256


class Piece(NamedTuple):
    """Rows of equal length. Sizes in bytes."""

    peer: int
    source: int
    """Offset in what the peer has published."""
    tensor: int
    """Which tensor it goes to."""
    target: int
    """Offset in that tensor."""
    rows: int
    row_bytes: int
    source_pitch: int
    target_pitch: int


@dataclass(frozen=True)
class Published:
    """A tensor (B, rows, heads, D) as ranks publish it in one direction."""

    kind: HeadRows
    batch: int
    all_heads: int
    """Heads of the tensor before an exchange to heads; units after one to rows."""
    head_bytes: int

    @property
    def whole_bytes(self) -> int:
        """Of all heads of the longest shard."""
        return self.batch * self.kind.rows.longest * self.all_heads * self.head_bytes

    @property
    def stage_bytes(self) -> int:
        """Of all rows of the most heads that a rank has."""
        return self.batch * self.kind.rows.total * max(self.kind.head_counts) * self.head_bytes


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where tensors of these sizes begin, and, last, how much they take together."""
    return list(accumulate((-(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT for size in sizes), initial=0))


def pieces_to_heads(tensors: tuple[Published, ...], rank: int) -> tuple[Piece, ...]:
    """This rank's heads of all rows, its own rows last."""
    starts = offsets([tensor.whole_bytes for tensor in tensors])
    pieces = []
    for index, (tensor, start) in enumerate(zip(tensors, starts, strict=False)):
        kind, size = tensor.kind, tensor.head_bytes
        first, last = kind.heads[rank]
        source_pitch, target_pitch = tensor.all_heads * size, (last - first) * size
        for peer in _peers(rank, kind):
            length = sum(kind.rows.lengths[peer])
            for part in range(len(kind.rows.lengths[peer])):
                here, there = kind.rows.local_span(peer, part), kind.rows.span(peer, part)
                for head, unit, count in _runs(first, last, kind.copies):
                    for batch in range(tensor.batch):
                        source = start + (batch * length + here[0]) * source_pitch + head * size
                        target = (batch * kind.rows.total + there[0]) * target_pitch + unit * size
                        rows = here[1] - here[0]
                        pieces.append(
                            Piece(peer, source, index, target, rows, count * size, source_pitch, target_pitch)
                        )
    return _own_last(pieces, rank)


def pieces_to_rows(tensors: tuple[Published, ...], rank: int) -> tuple[Piece, ...]:
    """All heads of this rank's rows, its own heads last; those of one stage."""
    starts = offsets([tensor.stage_bytes for tensor in tensors])
    pieces = []
    for index, (tensor, start) in enumerate(zip(tensors, starts, strict=False)):
        kind, size = tensor.kind, tensor.head_bytes
        length = sum(kind.rows.lengths[rank])
        target_pitch = tensor.all_heads * size
        for peer in _peers(rank, kind):
            first, last = kind.heads[peer]
            source_pitch = (last - first) * size
            for part in range(len(kind.rows.lengths[rank])):
                here, there = kind.rows.local_span(rank, part), kind.rows.span(rank, part)
                for batch in range(tensor.batch):
                    source = start + (batch * kind.rows.total + there[0]) * source_pitch
                    target = (batch * length + here[0]) * target_pitch + first * size
                    rows = here[1] - here[0]
                    pieces.append(Piece(peer, source, index, target, rows, source_pitch, source_pitch, target_pitch))
    return _own_last(pieces, rank)


def _peers(rank: int, kind: HeadRows) -> list[int]:
    """Each rank begins with the next one, so that not all read from one."""
    world_size = len(kind.heads)
    return [(rank + hop) % world_size for hop in range(1, world_size + 1)]


def _own_last(pieces: Sequence[Piece], rank: int) -> tuple[Piece, ...]:
    """A copy within a GPU is a kernel, which may have to wait for a multiprocessor; no other should wait for it."""
    return tuple(sorted((piece for piece in pieces if piece.rows and piece.row_bytes), key=lambda it: it.peer == rank))


def _runs(first: int, last: int, copies: int) -> list[tuple[int, int, int]]:
    """`(head, unit among these, count)` of heads that lie together on both sides."""
    if copies == 1:
        return [(first, 0, last - first)]
    return [(unit // copies, unit - first, 1) for unit in range(first, last)]
