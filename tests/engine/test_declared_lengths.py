"""Declared global lengths: all ranks find the same one for their shards, or at least one rank refuses."""

from __future__ import annotations

from cp_dtensor.engine.lengths import known_length
from hypothesis import given
from hypothesis import strategies as st

from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped

LAYOUTS = st.sampled_from([Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch()])
DECLARED = st.sets(st.integers(0, 40), min_size=1, max_size=3).map(lambda lengths: tuple(sorted(lengths)))


def answers(length: int, declared: tuple[int, ...], layout: Layout, world_size: int) -> list[int | str | None]:
    """What each rank concludes from its share of `length` tokens."""
    concluded: list[int | str | None] = []
    for rank in range(world_size):
        share = layout.local_length(length, rank, world_size)
        try:
            concluded.append(known_length(share, declared, layout, rank, world_size))
        except ValueError:
            concluded.append("refused")
    return concluded


@given(layout=LAYOUTS, world_size=st.integers(1, 8), declared=DECLARED, data=st.data())
def test_declared_lengths_are_known_or_exchanged_by_all_ranks_alike(
    layout: Layout, world_size: int, declared: tuple[int, ...], data: st.DataObject
) -> None:
    length = data.draw(st.sampled_from(declared))
    assert set(answers(length, declared, layout, world_size)) in ({length}, {None})


@given(layout=LAYOUTS, world_size=st.integers(1, 8), declared=DECLARED, length=st.integers(0, 60))
def test_other_lengths_are_exchanged_by_all_ranks_or_refused_by_some(
    layout: Layout, world_size: int, declared: tuple[int, ...], length: int
) -> None:
    concluded = answers(length, declared, layout, world_size)
    if length not in declared:
        assert set(concluded) == {None} or "refused" in concluded


def test_one_declared_length_needs_no_exchange() -> None:
    assert answers(1000, (1000,), HeadTail(), 8) == [1000] * 8


def test_lengths_far_from_the_declared_are_exchanged() -> None:
    assert answers(500, (1000,), HeadTail(), 8) == [None] * 8


def test_lengths_that_look_alike_on_some_ranks_are_always_exchanged() -> None:
    assert answers(1000, (1000, 1001), HeadTail(), 8) == [None] * 8
