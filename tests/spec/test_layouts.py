"""Layouts: every position belongs to one rank, shards are even, and causal work is balanced where promised."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped, TorchChunk, chunk

LAYOUTS = [Contiguous(), HeadTail(), Striped(1), Striped(2), Striped(5), MirroredBatch(), TorchChunk()]
any_layout = st.sampled_from(LAYOUTS)
lengths = st.integers(0, 200)
rank_counts = st.integers(1, 9)
batch_sizes = st.integers(1, 5)


def positions(layout: Layout, seq_len: int, rank: int, world_size: int, group: int = 0) -> list[int]:
    return [p for segment in layout.segments(seq_len, rank, world_size, group) for p in segment.positions()]


def causal_pairs(layout: Layout, seq_len: int, world_size: int, batch: int = 1) -> list[int]:
    """Allowed (query, key) pairs of each rank's queries: a query at position i sees i + 1 keys."""
    return [
        sum(
            (stop - start) * (position + 1)
            for group, (start, stop) in enumerate(layout.batch_groups(batch))
            for position in positions(layout, seq_len, rank, world_size, group)
        )
        for rank in range(world_size)
    ]


@given(any_layout, lengths, rank_counts, batch_sizes)
def test_every_position_belongs_to_one_rank_in_order(layout: Layout, seq_len: int, ranks: int, batch: int) -> None:
    assert len({len(layout.segments(seq_len, rank, ranks)) for rank in range(ranks)}) == 1
    for group in range(len(layout.batch_groups(batch))):
        by_rank = [positions(layout, seq_len, rank, ranks, group) for rank in range(ranks)]
        assert sorted(p for owned in by_rank for p in owned) == list(range(seq_len))
        assert all(owned == sorted(owned) for owned in by_rank)
        assert [*map(len, by_rank)] == [layout.local_length(seq_len, rank, ranks) for rank in range(ranks)]


@given(any_layout, batch_sizes)
def test_batch_groups_are_the_whole_batch(layout: Layout, batch: int) -> None:
    groups = layout.batch_groups(batch)
    assert [row for start, stop in groups for row in range(start, stop)] == list(range(batch))
    assert all(start < stop for start, stop in groups)


@given(st.sampled_from([Contiguous(), HeadTail(), MirroredBatch(), *map(Striped, range(1, 8))]), lengths, rank_counts)
def test_shards_differ_by_at_most_one_token_or_block(layout: Layout, seq_len: int, ranks: int) -> None:
    local = [layout.local_length(seq_len, rank, ranks) for rank in range(ranks)]
    assert max(local) - min(local) <= getattr(layout, "block", 1)


@given(lengths, rank_counts)
def test_torch_chunk_divides_as_torch_does(seq_len: int, ranks: int) -> None:
    chunks = torch.arange(seq_len).chunk(ranks) if seq_len else ()
    expected = [chunk.tolist() for chunk in chunks] + [[]] * (ranks - len(chunks))
    assert [positions(TorchChunk(), seq_len, rank, ranks) for rank in range(ranks)] == expected


@given(lengths, rank_counts)
def test_chunks_follow_one_another(seq_len: int, chunks: int) -> None:
    spans = [chunk((7, 7 + seq_len), chunks, index) for index in range(chunks)]
    assert spans[0][0] == 7
    assert spans[-1][1] == 7 + seq_len
    assert all(one[1] == other[0] for one, other in pairwise(spans))
    sizes = [stop - start for start, stop in spans]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(rank_counts, st.integers(1, 6))
def test_head_tail_has_the_order_of_torchs_load_balancer(ranks: int, chunk: int) -> None:
    name = "torch.distributed.tensor.experimental._context_parallel._load_balancer"
    module = pytest.importorskip(name, reason="this torch has no such load balancer")
    seq_len = 2 * ranks * chunk
    theirs = module._HeadTailLoadBalancer(seq_len, ranks, "cpu")._generate_indices()
    assert [
        p for rank in range(ranks) for p in positions(HeadTail(), seq_len, rank, ranks)
    ] == theirs.flatten().tolist()


def test_the_second_half_of_a_mirrored_batch_runs_backwards() -> None:
    layout = MirroredBatch()
    assert layout.batch_groups(5) == ((0, 3), (3, 5))
    assert [positions(layout, 7, rank, 3, group=0) for rank in range(3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [positions(layout, 7, rank, 3, group=1) for rank in range(3)] == [[4, 5, 6], [2, 3], [0, 1]]


@pytest.mark.parametrize(("layout", "queries"), [(Striped(1), 1), (HeadTail(), 2)])
@given(seq_len=lengths, ranks=rank_counts)
def test_causal_work_differs_by_what_few_queries_see(layout: Layout, queries: int, seq_len: int, ranks: int) -> None:
    work = causal_pairs(layout, seq_len, ranks)
    assert max(work) - min(work) <= queries * seq_len


@given(lengths, rank_counts, st.integers(1, 3))
def test_mirrored_batch_gives_work_in_proportion_to_tokens(seq_len: int, ranks: int, pairs: int) -> None:
    work = causal_pairs(MirroredBatch(), seq_len, ranks, batch=2 * pairs)
    tokens = [MirroredBatch().local_length(seq_len, rank, ranks) for rank in range(ranks)]
    assert work == [pairs * count * (seq_len + 1) for count in tokens]


@pytest.mark.parametrize("block", [0, -1, 1.5, "2", None, True])
def test_stripes_need_a_block_of_at_least_one_token(block: object) -> None:
    with pytest.raises(ValueError, match=f"Striped expects block to be an integer >= 1, got {block!r}"):
        Striped(block)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_layouts_are_frozen_values(layout: Layout) -> None:
    assert dataclasses.is_dataclass(layout)
    reference = dataclasses.replace(layout)
    assert reference is not layout
    assert reference == layout
    assert {layout: "found"}[reference] == "found"
    assert [other for other in LAYOUTS if other == layout] == [layout]
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.block = 3  # type: ignore[attr-defined]
