"""Head exchange on ranks that are threads: every element arrives at its place, and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collectives import kinds as collective_kinds
from support.collectives import recorded_collectives, rows_in_place
from support.problems import shard
from support.ranks import run_ranks
from support.schedules import any_layout

from cp_dtensor.comm import collective
from cp_dtensor.comm import head_exchange as heads
from cp_dtensor.comm.head_exchange import CollectiveHeads, HeadRows
from cp_dtensor.comm.transport import HeadBlocks
from cp_dtensor.plan.tiling import rows_in_order
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, Span

Bundle = list[torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """Tensors of one bundle: length, layout, and the heads of each rank."""

    length: int
    layout: Layout
    heads: tuple[Span, ...]
    dims: tuple[int, ...]
    """Head dims, one for each tensor."""

    @property
    def ranks(self) -> int:
        return len(self.heads)

    @property
    def head_rows(self) -> HeadRows:
        return HeadRows(rows_in_order(self._by_rank), self.heads)

    def in_order(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns all rows in their order after the exchange: parts of shards by their first position."""
        rows = self.head_rows.rows
        pieces = [
            shard(whole, self.layout, rank, self.ranks)[:, :, slice(*rows.local_span(rank, part))]
            for rank, part in rows.places
        ]
        return torch.cat([whole[:, :, :0], *pieces], dim=2)

    def whole(self, batch: int, dtype: torch.dtype) -> Bundle:
        """Returns tensors whose elements are their positions."""
        shapes = [(batch, self.heads[-1][1], self.length, dim) for dim in self.dims]
        return [
            (torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * index + 1).to(dtype)
            for index, shape in enumerate(shapes)
        ]

    @property
    def _by_rank(self) -> list[Any]:
        return [self.layout.segments(self.length, rank, self.ranks) for rank in range(self.ranks)]


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# Memory in other orders than that of the dims; the last one has no unit stride anywhere.
MEMORY: dict[str, Change] = {
    "as it is": as_it_is,
    "row after row": lambda tensor: tensor.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "as projections leave it": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a larger one": lambda tensor: torch.nn.functional.pad(tensor, (1, 2, 1, 0, 1, 1))[:, 1:-1, 1:, 1:-2],
    "every other element": lambda tensor: tensor.repeat_interleave(2, dim=3)[..., ::2],
    "head dim first": lambda tensor: tensor.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
}
any_memory = st.sampled_from(list(MEMORY.values()))
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def there_and_back(
    rank: int, kinds: Sequence[Kind], batch: int, dtype: torch.dtype, before: Change, after: Change
) -> None:
    """Checks an exchange and its reverse; `before` and `after` set the memory order of inputs and targets."""
    group, world_size = dist.group.WORLD, kinds[0].ranks
    whole = [kind.whole(batch, dtype) for kind in kinds]
    mine = [
        [before(shard(tensor, kind.layout, rank, world_size)) for tensor in tensors]
        for kind, tensors in zip(kinds, whole, strict=True)
    ]
    head_rows = [kind.head_rows for kind in kinds]
    exchange = CollectiveHeads()
    by_heads = exchange.to_heads(mine, [head_rows], group)()
    for kind, got, tensors in zip(kinds, by_heads, whole, strict=True):
        start, stop = kind.heads[rank]
        for actual, tensor in zip(got, tensors, strict=True):
            assert torch.equal(actual, kind.in_order(tensor)[:, start:stop])
    targets = [[after(torch.full_like(tensor, -1)) for tensor in tensors] for tensors in mine]
    returned = [[after(tensor) for tensor in tensors] for tensors in by_heads]
    exchange.to_rows(returned, targets, head_rows, group, is_last=True)()
    for got, tensors in zip(targets, mine, strict=True):
        assert all(map(torch.equal, got, tensors))


each_way = pytest.mark.parametrize("in_place", [False, True], ids=["packed", "in place"])


def travelling(in_place: bool) -> AbstractContextManager[None]:
    """Rows travel in one contiguous collective or, as with NCCL, directly between their places."""
    return rows_in_place() if in_place else nullcontext()


def spans(counts: Sequence[int]) -> tuple[Span, ...]:
    """Consecutive spans of these lengths."""
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return tuple((start, start + count) for start, count in zip(starts, counts, strict=True))


@st.composite
def any_kind(draw: st.DrawFn, ranks: int) -> Kind:
    """Draws any number of heads for each rank, equal or not."""
    counts = draw(st.one_of(st.integers(0, 3).map(lambda count: [count] * ranks), _counts(ranks)))
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    return Kind(draw(st.integers(0, 12)), draw(any_layout), spans(counts), tuple(dims))


def _counts(ranks: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)


@each_way
@settings(max_examples=80)
@given(data=st.data())
def test_rows_for_heads_and_back_is_the_identity(in_place: bool, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 4))
    bundles = data.draw(st.lists(any_kind(ranks), min_size=1, max_size=3))
    before, after = data.draw(any_memory), data.draw(any_memory)
    batch, dtype = data.draw(st.integers(0, 2)), data.draw(st.sampled_from(DTYPES))
    with travelling(in_place):
        run_ranks(ranks, there_and_back, bundles, batch, dtype, before, after)


@given(st.data())
def test_one_copy_of_all_blocks_equals_copies_of_each_block(data: st.DataObject) -> None:
    """Blocks of equally many heads at equal distances take one copy for each tensor."""
    ranks, count, rows = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    distance = count + data.draw(st.integers(0, 2))
    heads = [(rank * distance, rank * distance + count) for rank in range(ranks)]
    is_regular = data.draw(st.booleans())
    if not is_regular:
        heads[-1] = (heads[-1][0], heads[-1][1] + 1)
    memory = data.draw(any_memory)
    tensors = [
        memory(torch.randn(2, heads[-1][1], rows, dim, dtype=torch.float64))
        for dim in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    ]
    blocks = HeadBlocks(tensors, [stop - start for start, stop in heads], rows)
    pairs = list(blocks.pairs(tensors, heads))
    assert len(pairs) == len(tensors) * (1 if is_regular else ranks)
    for of_tensor, of_block in pairs:
        of_block.copy_(of_tensor)
    for block, (start, stop) in enumerate(heads):
        for tensor, view in zip(tensors, blocks.tensors(block), strict=True):
            assert torch.equal(view, tensor[:, start:stop])


def test_each_direction_takes_one_collective() -> None:
    """Also if this rank has neither heads nor rows."""
    kinds = [Kind(2, HeadTail(), spans([2, 0, 1]), (4,)), Kind(1, HeadTail(), spans([0, 0, 1]), (4, 2))]
    with recorded_collectives() as collectives:
        run_ranks(3, there_and_back, kinds, 1, torch.float64, as_it_is, as_it_is)
    assert [collective_kinds(collectives, rank) for rank in range(3)] == [["AllToAllBase"] * 2] * 3


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_row_major_memory_is_sent_without_a_copy(memory: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in other orders is copied first."""
    sent: list[torch.Tensor] = []

    class Recorded(collective.Exchange):
        def __init__(self, incoming: Any, outgoing: Any, *args: Any) -> None:
            sent.extend(memory for memory, *_ in outgoing)
            super().__init__(incoming, outgoing, *args)

    def body(rank: int) -> None:
        kind = Kind(6, Contiguous(), spans([2]), (4,))
        (whole,) = kind.whole(2, torch.float64)
        by_heads, target = memory(whole), torch.full_like(whole, -1)
        CollectiveHeads().to_rows([[by_heads]], [[target]], [kind.head_rows], dist.group.WORLD, is_last=True)()
        assert torch.equal(target, whole)
        in_place = by_heads.permute(2, 0, 1, 3).is_contiguous()
        assert in_place == (memory is MEMORY["row after row"])
        (rows,) = sent
        assert (rows.data_ptr() == by_heads.data_ptr()) == in_place

    monkeypatch.setattr(heads, "Exchange", Recorded)
    run_ranks(1, body)
