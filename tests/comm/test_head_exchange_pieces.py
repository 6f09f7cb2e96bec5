"""Pieces of a head exchange through symmetric memory, copied between buffers of one process by the kernel.

`tests/engine/test_masked_calls.py` exchanges heads through shared memory without it.
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
DIM = 4


def copied(pieces: tuple[Piece, ...], memory: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    rows = [(memory[piece.peer].data_ptr() + piece.source, piece.tensor, piece.target, *piece[4:]) for piece in pieces]
    if rows:
        table = torch.tensor(rows, dtype=torch.int64, device=memory[0].device)
        most = max(piece.rows for piece in pieces), max(piece.row_bytes for piece in pieces)
        kernel.launch_copies(table, *most, targets, programs=7)


def in_order(pieces: tuple[Piece, ...], rank: int, ranks: int) -> tuple[Piece, ...]:
    """Checks that pieces of the rank's own memory are last, and of each tensor those of the next rank first."""
    peers = [piece.peer for piece in pieces]
    assert peers == sorted(peers, key=lambda peer: peer == rank)
    for tensor in {piece.tensor for piece in pieces}:
        hops = [(piece.peer - rank - 1) % ranks for piece in pieces if piece.tensor == tensor]
        assert hops == sorted(hops)
    return pieces


def written(tensors: list[torch.Tensor], starts: list[int]) -> torch.Tensor:
    """Writes tensors (B, rows, heads, D) at these offsets, of which the last is their size together."""
    memory = torch.full((starts[-1],), 255, dtype=torch.uint8, device=tensors[0].device)
    for tensor, start in zip(tensors, starts, strict=False):
        memory[start : start + tensor.numel() * tensor.itemsize] = tensor.reshape(-1).view(torch.uint8)
    return memory


def check(length: int, batch: int, ranks: int, q_heads: int, kv_heads: int, stages: int, device: str) -> None:
    partition = LayoutPartition(HeadTail(), length, length, batch, ranks)
    merged = MergedPartition(partition, ranks)
    heads = partition_heads(q_heads, kv_heads, ranks, stages)
    generator = torch.Generator().manual_seed(length)
    whole = [torch.randn(batch, length, count, DIM, generator=generator).to(device) for count in (q_heads, kv_heads)]
    local = [[local_rows(merged, tensor, rank) for tensor in whole] for rank in range(ranks)]
    together = [
        torch.cat([local_part(merged, local, which, place) for place in merged.rows(0)[1].places], 1)
        for which in (0, 1)
    ]
    returned = [
        [
            torch.full((batch, mine[0].size(1), count, DIM), float("nan"), device=device)
            for count in (q_heads, heads.kv_group_count)
        ]
        for mine in local
    ]
    for kinds in exchange_stages(heads, merged, 0):
        layouts = [
            tuple(Written(kind, batch, count, DIM * 4) for kind, count in zip(kinds, (q_heads, kv_heads), strict=True))
        ] * ranks
        memory = [written(mine, offsets(layouts[0], True)) for mine in local]
        arrived = []
        for rank in range(ranks):
            targets = [
                torch.full((batch, kind.rows.total, kind.head_counts[rank], DIM), float("nan"), device=device)
                for kind in kinds
            ]
            copied(in_order(pieces_of(layouts[rank], rank, True), rank, ranks), memory, targets)
            for target, kind, tensor in zip(targets, kinds, together, strict=True):
                units = range(*kind.heads[rank])
                expected = tensor[:, :, [unit // kind.copies for unit in units]]
                torch.testing.assert_close(target, expected, rtol=0, atol=0)
            arrived.append(targets)
        back = tuple(
            Written(kind, batch, count, DIM * 4)
            for kind, count in zip(kinds, (q_heads, heads.kv_group_count), strict=True)
        )
        memory = [written(mine, offsets(back, False)) for mine in arrived]
        for rank in range(ranks):
            copied(in_order(pieces_of(back, rank, False), rank, ranks), memory, returned[rank])
    for mine, found in zip(local, returned, strict=True):
        torch.testing.assert_close(found[0], mine[0], rtol=0, atol=0)
        torch.testing.assert_close(found[1], mine[1].repeat_interleave(heads.replication, 2), rtol=0, atol=0)


def local_rows(merged: MergedPartition, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's rows of (B, S, H, D)."""
    lengths = [sum(row) for row in merged.rows(0)[1].lengths]
    return tensor[:, sum(lengths[:rank]) : sum(lengths[: rank + 1])].contiguous()


def local_part(
    merged: MergedPartition, local: list[list[torch.Tensor]], which: int, place: tuple[int, int]
) -> torch.Tensor:
    rank, part = place
    start, stop = merged.rows(0)[1].local_span(rank, part)
    return local[rank][which][:, start:stop]


@all_devices
@pytest.mark.parametrize(("q_heads", "kv_heads", "stages"), [(4, 2, 1), (5, 5, 2), (8, 1, 2), (2, 1, 1)])
def test_the_kernel_exchanges_heads_and_rows_and_back(q_heads: int, kv_heads: int, stages: int, device: str) -> None:
    for ranks, length in ((3, 40), (2, 1)):
        check(length, 2, ranks, q_heads, kv_heads, stages, device)
