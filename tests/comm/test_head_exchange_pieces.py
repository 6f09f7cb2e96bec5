"""Pieces of a head exchange through symmetric memory: their order, and the kernel that copies them.

That the pieces are the right ones is what `tests/engine/test_masked_calls.py` shows, without the kernel.
"""

from __future__ import annotations

import pytest
import torch
from support.devices import all_devices

from cp_dtensor.comm.head_exchange_symm_mem import Piece, Written, offsets, pieces_of
from cp_dtensor.engine.planner import exchange_stages
from cp_dtensor.plan.partition import LayoutPartition, MergedPartition, partition_heads
from cp_dtensor.spec.layouts import HeadTail

kernel = pytest.importorskip("cp_dtensor.comm.triton_kernels")
DIM, BATCH = 4, 2
Tensors = list[torch.Tensor]


def copied_by_hand(pieces: tuple[Piece, ...], memory: Tensors, targets: Tensors) -> None:
    """Copies byte by byte, as `Piece` defines."""
    flat = [target.view(-1).view(torch.uint8) for target in targets]
    for piece in pieces:
        for row in range(piece.rows):
            source, target = (
                first + row * pitch
                for first, pitch in ((piece.source, piece.source_pitch), (piece.target, piece.target_pitch))
            )
            from_peer = memory[piece.peer][source : source + piece.row_bytes]
            flat[piece.tensor][target : target + piece.row_bytes] = from_peer


def copied_by_kernel(pieces: tuple[Piece, ...], memory: Tensors, targets: Tensors) -> None:
    rows = [(memory[piece.peer].data_ptr() + piece.source, piece.tensor, piece.target, *piece[4:]) for piece in pieces]
    if rows:
        table = torch.tensor(rows, dtype=torch.int64, device=memory[0].device)
        most = max(piece.rows for piece in pieces), max(piece.row_bytes for piece in pieces)
        kernel.launch_copies(table, *most, targets, programs=7)


def check_order(pieces: tuple[Piece, ...], rank: int, ranks: int) -> None:
    """Pieces of the rank's own memory are last, and of each tensor those of the next rank first."""
    peers = [piece.peer for piece in pieces]
    assert peers == sorted(peers, key=lambda peer: peer == rank)
    for tensor in {piece.tensor for piece in pieces}:
        hops = [(piece.peer - rank - 1) % ranks for piece in pieces if piece.tensor == tensor]
        assert hops == sorted(hops)


@all_devices
@pytest.mark.parametrize("to_heads", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "stages"), [(4, 2, 1), (5, 5, 2), (8, 1, 2), (2, 1, 1)])
def test_the_kernel_copies_the_same(q_heads: int, kv_heads: int, stages: int, to_heads: bool, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for ranks, length in ((3, 40), (2, 1)):
        merged = MergedPartition(LayoutPartition(HeadTail(), length, length, BATCH, ranks), ranks)
        heads = partition_heads(q_heads, kv_heads, ranks, stages)
        for kinds in exchange_stages(heads, merged, 0):
            counts = q_heads, kv_heads if to_heads else heads.kv_group_count
            written = tuple(Written(kind, BATCH, count, DIM * 4) for kind, count in zip(kinds, counts, strict=True))
            size = offsets(written, to_heads)[-1]
            memory = [torch.randint(256, (size,), generator=generator).to(device, torch.uint8) for _ in range(ranks)]
            for rank in range(ranks):
                pieces = pieces_of(written, rank, to_heads)
                check_order(pieces, rank, ranks)
                shapes = [
                    (BATCH, kind.rows.total, kind.head_counts[rank], DIM) if to_heads
                    else (BATCH, sum(kind.rows.lengths[rank]), count, DIM)
                    for kind, count in zip(kinds, counts, strict=True)
                ]  # fmt: skip
                by_hand, by_kernel = ([torch.full(shape, 7.0, device=device) for shape in shapes] for _ in range(2))
                copied_by_hand(pieces, memory, by_hand)
                copied_by_kernel(pieces, memory, by_kernel)
                for one, other in zip(by_hand, by_kernel, strict=True):
                    assert torch.equal(one.view(torch.int32), other.view(torch.int32))
