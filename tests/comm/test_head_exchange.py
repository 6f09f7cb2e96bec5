"""Head exchange by collectives: how many there are, and which memory is copied (`test_masked_calls`: what arrives)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.collectives import kinds, recorded_collectives
from support.memory_orders import MEMORY
from support.problems import shard
from support.ranks import run_ranks

from cp_dtensor.comm import collective
from cp_dtensor.comm import head_exchange as heads
from cp_dtensor.comm.head_exchange import CollectiveHeads, HeadRows
from cp_dtensor.comm.transport import HeadBlocks
from cp_dtensor.plan.tiling import rows_in_order
from cp_dtensor.spec.layouts import HeadTail


def head_rows(length: int, counts: Sequence[int]) -> HeadRows:
    """Return the rows and heads of ranks that have so many heads each, one after the other."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    spans = tuple((start, start + count) for start, count in zip(starts, counts, strict=True))
    return HeadRows(
        rows_in_order([HeadTail().segments(length, rank, len(counts)) for rank in range(len(counts))]), spans
    )


@given(st.data())
def test_one_copy_of_all_blocks_equals_copies_of_each_block(data: st.DataObject) -> None:
    """Blocks of equally many heads at equal distances take one copy for each tensor."""
    ranks, count, rows = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    distance = count + data.draw(st.integers(0, 2))
    spans = [(rank * distance, rank * distance + count) for rank in range(ranks)]
    is_regular = data.draw(st.booleans())
    if not is_regular:
        spans[-1] = (spans[-1][0], spans[-1][1] + 1)
    memory = MEMORY[data.draw(st.sampled_from([*MEMORY]))]
    tensors = [
        memory(torch.randn(2, spans[-1][1], rows, dim, dtype=torch.float64))
        for dim in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    ]
    blocks = HeadBlocks(tensors, [stop - start for start, stop in spans], rows)
    pairs = list(blocks.pairs(tensors, spans))
    assert len(pairs) == len(tensors) * (1 if is_regular else ranks)
    for of_tensor, of_block in pairs:
        of_block.copy_(of_tensor)
    for block, (start, stop) in enumerate(spans):
        for tensor, view in zip(tensors, blocks.tensors(block), strict=True):
            assert torch.equal(view, tensor[:, start:stop])


def test_each_direction_takes_one_collective() -> None:
    """Also if this rank has neither heads nor rows."""
    bundles = [(2, (2, 0, 1), (4,)), (1, (0, 0, 1), (4, 2))]

    def body(rank: int) -> None:
        mine = [
            [shard(torch.randn(1, sum(counts), length, dim), HeadTail(), rank, 3) for dim in dims]
            for length, counts, dims in bundles
        ]
        parts, targets = (
            [head_rows(length, counts) for length, counts, _ in bundles],
            [[*map(torch.empty_like, x)] for x in mine],
        )
        exchange = CollectiveHeads()
        by_heads = exchange.to_heads(mine, [parts], dist.group.WORLD)()
        for tensors, (length, counts, dims) in zip(by_heads, bundles, strict=True):
            assert [tuple(x.shape) for x in tensors] == [(1, counts[rank], length, dim) for dim in dims]
        exchange.to_rows(by_heads, targets, parts, dist.group.WORLD, is_last=True)()
        assert all(all(map(torch.equal, *pair)) for pair in zip(targets, mine, strict=True))

    with recorded_collectives() as collectives:
        run_ranks(3, body)
    assert [kinds(collectives, rank) for rank in range(3)] == [["AllToAllBase"] * 2] * 3


@pytest.mark.parametrize("memory", MEMORY)
def test_row_major_memory_is_sent_without_a_copy(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in other orders is copied first."""
    sent: list[torch.Tensor] = []

    class Recorded(collective.Exchange):
        def __init__(self, incoming: Any, outgoing: Any, *args: Any) -> None:
            sent.extend(memory for memory, *_ in outgoing)
            super().__init__(incoming, outgoing, *args)

    def body(rank: int) -> None:
        whole = torch.randn(2, 2, 6, 4)
        by_heads, target = MEMORY[memory](whole), torch.full_like(whole, -1)
        CollectiveHeads().to_rows([[by_heads]], [[target]], [head_rows(6, [2])], dist.group.WORLD, is_last=True)()
        assert torch.equal(target, whole)
        (rows,) = sent
        assert (rows.data_ptr() == by_heads.data_ptr()) == (memory == "row after row")

    monkeypatch.setattr(heads, "Exchange", Recorded)
    run_ranks(1, body)
