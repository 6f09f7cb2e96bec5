"""Partition of heads over a Ulysses axis: each head once, as evenly as possible, with little replication."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cp_dtensor.plan.partition import HeadPartition, partition_heads
from cp_dtensor.spec.layouts import Span


@st.composite
def partitions(draw: st.DrawFn) -> tuple[HeadPartition, int]:
    """Draw a partition, and the number of stages that was asked for."""
    kv_heads, stages = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    q_heads = kv_heads * draw(st.integers(1, 12))
    return partition_heads(q_heads, kv_heads, draw(st.integers(1, 9)), stages), stages


def size(span: Span) -> int:
    return span[1] - span[0]


def load(partition: HeadPartition) -> int:
    """Query heads of the busiest rank."""
    return max(size(partition.query_heads(partition.kv_groups(rank))) for rank in range(partition.world_size))


@settings(max_examples=300)
@given(partitions())
@example((partition_heads(0, 0, 3, stages=2), 1))  # ranks that uneven DTensor shards left without heads
def test_every_head_belongs_to_one_rank_and_stage_evenly(case: tuple[HeadPartition, int]) -> None:
    """In order: ranks have consecutive heads, and stages of a rank as well."""
    partition, _ = case
    ranks, stages = range(partition.world_size), range(partition.stages)
    by_stage = [[partition.kv_groups(rank, stage) for stage in stages] for rank in ranks]
    heads = [head for of_rank in by_stage for span in of_rank for head in range(*partition.query_heads(span))]
    assert heads == list(range(partition.q_heads))
    for spans in ([partition.kv_groups(rank) for rank in ranks], *by_stage):
        assert max(map(size, spans)) - min(map(size, spans)) <= 1
    # A stage in which a rank computed nothing would leave it waiting for the others.
    is_empty = not all(size(span) for of_rank in by_stage for span in of_rank)
    assert not is_empty or (partition.stages == 1 and partition.kv_group_count < partition.world_size)


@settings(max_examples=300)
@given(partitions())
def test_the_key_head_of_a_group_is_the_one_that_its_query_heads_read(case: tuple[HeadPartition, int]) -> None:
    """Group g has key head g // replication; query head h reads key head h // (query heads / key heads)."""
    partition, _ = case
    assert (partition.q_heads // partition.kv_heads) % partition.replication == 0
    for group in range(partition.kv_group_count):
        queries = range(*partition.query_heads((group, group + 1)))
        assert len(queries) == partition.q_heads // partition.kv_group_count
        assert {query * partition.kv_heads // partition.q_heads for query in queries} == {
            group // partition.replication
        }


@settings(max_examples=300)
@given(partitions())
def test_replication_is_as_low_as_the_load_allows(case: tuple[HeadPartition, int]) -> None:
    found, stages = case
    assert load(found) == -(-found.q_heads // found.world_size), "as few query heads as possible on the busiest rank"
    ratio = found.q_heads // found.kv_heads
    divisors = [times for times in range(1, ratio + 1) if ratio % times == 0]
    assert found.replication == min(each for each in divisors if load(replace(found, replication=each)) == load(found))
    fewest = min(size(found.kv_groups(rank)) for rank in range(found.world_size))
    assert found.stages == max(1, min(stages, fewest))
