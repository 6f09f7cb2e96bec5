"""Plans of batches against the best of all plans, which small cases allow to find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cp_dtensor.plan.batch import plan_steps


def seconds(lengths: Sequence[int], ranks: int) -> float:
    """A cost: attention by squares, all else by tokens, exchanges from two ranks on."""
    exchange = 300 + 0.6 * max(lengths) * (ranks - 1) / ranks if ranks > 1 else 0.0
    return 100 + exchange + sum(length * length / 8192 + length for length in lengths) / ranks


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield all ways to put items into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions(rest):
        yield [[first], *groups]
        for place, group in enumerate(groups):
            yield [*groups[:place], [first, *group], *groups[place + 1 :]]


def best_total(lengths: list[int], ranks: int, tokens_per_rank: int) -> float:
    """Return the least sum of steps over all plans."""

    @cache
    def step(documents: tuple[int, ...]) -> float:
        found = float("inf")
        for groups in partitions(list(documents)):
            for sizes in product(range(1, ranks + 1), repeat=len(groups)):
                of_groups = [[lengths[document] for document in group] for group in groups]
                if sum(sizes) == ranks and all(
                    sum(group) <= size * tokens_per_rank for group, size in zip(of_groups, sizes, strict=True)
                ):
                    found = min(found, max(map(seconds, of_groups, sizes)))
        return found

    @cache
    def total(documents: tuple[int, ...]) -> float:
        if not documents:
            return 0.0
        first, *rest = documents
        chosen = [(first, *others) for count in range(len(documents)) for others in combinations(rest, count)]
        return min(step(some) + total(tuple(each for each in rest if each not in some)) for some in chosen)

    return total(tuple(range(len(lengths))))


batches = st.tuples(st.integers(2, 4), st.sampled_from([4096, 8192])).flatmap(
    lambda limits: st.tuples(
        st.lists(
            st.floats(5, 10).map(lambda power: min(int(2.718**power), limits[0] * limits[1])), min_size=1, max_size=5
        ),
        st.just(limits[0]),
        st.just(limits[1]),
    )
)


@example(([148, 148, 148], 3, 4096))  # an idle rank would make a group slower
@settings(max_examples=60, deadline=None)
@given(batches)
def test_small_batches_are_within_5_percent_of_the_best(batch: tuple[list[int], int, int]) -> None:
    lengths, ranks, tokens_per_rank = batch
    steps = plan_steps(lengths, ranks, tokens_per_rank, seconds)
    documents = [document for groups in steps for group in groups for document in group.documents]
    assert sorted(documents) == list(range(len(lengths)))
    for groups in steps:
        assert [group.first for group in groups] == [sum(g.size for g in groups[:i]) for i in range(len(groups))]
        assert sum(group.size for group in groups) == ranks
        for group in groups:
            of_group = [lengths[document] for document in group.documents]
            assert sum(of_group) <= group.size * tokens_per_rank
            assert group.seconds == seconds(of_group, group.size)
    total = sum(max(group.seconds for group in groups) for groups in steps)
    assert total <= 1.05 * best_total(lengths, ranks, tokens_per_rank)


@pytest.mark.parametrize("size", [4, 8])
def test_no_plan_is_slower_than_groups_of_one_size(size: int) -> None:
    lengths = [int(2 ** (7 + 8 * ((37 * index) % 101) / 101)) for index in range(120)]
    steps = plan_steps(lengths, 8, 8192, seconds)
    places = 8 // size
    loads: list[list[int]] = []  # of groups, eight ranks a step: each document goes to the first group it fits into
    for length in sorted(lengths, reverse=True):
        fits = next((load for load in loads if sum(load) + length <= size * 8192), None)
        if fits is None:
            loads.append(fits := [])
        fits.append(length)
    fixed = sum(max(seconds(load, size) for load in loads[i : i + places]) for i in range(0, len(loads), places))
    assert sum(max(group.seconds for group in groups) for groups in steps) <= fixed
