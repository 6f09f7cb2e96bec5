"""Partition of heads over a Ulysses axis: each head once, as evenly as possible, with little replication."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from cp_dtensor.plan.partition import HeadPartition, partition_heads
from cp_dtensor.spec.layouts import Span


@st.composite
def partitions(draw: st.DrawFn) -> HeadPartition:
    kv_heads = draw(st.integers(1, 12))
    return partition_heads(
        kv_heads * draw(st.integers(1, 12)), kv_heads, draw(st.integers(1, 9)), draw(st.integers(1, 6))
    )


def size(span: Span) -> int:
    return span[1] - span[0]


def load(partition: HeadPartition) -> int:
    """Query heads of the busiest rank."""
    return max(size(partition.query_heads(partition.kv_groups(rank))) for rank in range(partition.world_size))


def fewest_groups(partition: HeadPartition) -> int:
    return min(size(partition.kv_groups(rank)) for rank in range(partition.world_size))


def with_replication(partition: HeadPartition, times: int) -> HeadPartition:
    return replace(partition, replication=times)


def divisors(partition: HeadPartition) -> list[int]:
    ratio = partition.q_heads // partition.kv_heads
    return [times for times in range(1, ratio + 1) if ratio % times == 0]


@settings(max_examples=300)
@given(partitions())
def test_every_query_head_belongs_to_one_rank_and_stage(partition: HeadPartition) -> None:
    """In order: ranks have consecutive heads, and stages of a rank as well."""
    heads = [
        head
        for rank in range(partition.world_size)
        for stage in range(partition.stages)
        for head in range(*partition.query_heads(partition.kv_groups(rank, stage)))
    ]
    assert heads == list(range(partition.q_heads))


@settings(max_examples=300)
@given(partitions())
def test_the_key_head_of_a_group_is_the_one_that_its_query_heads_read(partition: HeadPartition) -> None:
    """Group g has key head g // replication; query head h reads key head h // (query heads / key heads)."""
    assert (partition.q_heads // partition.kv_heads) % partition.replication == 0
    for group in range(partition.kv_group_count):
        queries = range(*partition.query_heads((group, group + 1)))
        assert len(queries) == partition.q_heads // partition.kv_group_count
        assert {query * partition.kv_heads // partition.q_heads for query in queries} == {
            group // partition.replication
        }


@given(partitions())
def test_ranks_and_stages_differ_by_at_most_one_group(partition: HeadPartition) -> None:
    of_ranks = [size(partition.kv_groups(rank)) for rank in range(partition.world_size)]
    assert max(of_ranks) - min(of_ranks) <= 1
    for rank in range(partition.world_size):
        of_stages = [size(partition.kv_groups(rank, stage)) for stage in range(partition.stages)]
        assert max(of_stages) - min(of_stages) <= 1


@settings(max_examples=300)
@given(partitions(), st.integers(1, 6))
def test_replication_is_as_low_as_the_load_allows(partition: HeadPartition, stages: int) -> None:
    found = partition_heads(partition.q_heads, partition.kv_heads, partition.world_size, stages)
    assert load(found) == -(-found.q_heads // found.world_size), "as few query heads as possible on the busiest rank"
    lightest = [times for times in divisors(found) if load(with_replication(found, times)) == load(found)]
    assert found.replication == min(lightest)
    assert found.stages == max(1, min(stages, fewest_groups(found)))


@given(partitions())
def test_no_rank_has_an_empty_stage_unless_there_are_more_ranks_than_heads(partition: HeadPartition) -> None:
    """A stage in which a rank computed nothing would leave it waiting for the others."""
    empty = [
        (rank, stage)
        for rank in range(partition.world_size)
        for stage in range(partition.stages)
        if not size(partition.kv_groups(rank, stage))
    ]
    assert not empty or (partition.stages == 1 and partition.kv_group_count < partition.world_size)


def test_ranks_that_uneven_shards_left_without_heads_have_nothing_to_divide() -> None:
    partition = partition_heads(0, 0, 3, stages=2)
    assert (partition.stages, partition.kv_group_count) == (1, 0)
    assert {partition.kv_groups(rank, 0) for rank in range(3)} == {(0, 0)}
    assert {partition.query_heads(partition.kv_groups(rank)) for rank in range(3)} == {(0, 0)}
