"""Declared global lengths: all ranks find the one of their shards, or at least one rank refuses."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from cp_dtensor.engine.agreement import length_of
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, MirroredBatch, Striped, shard_lengths

LAYOUTS = st.sampled_from([Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch()])
DECLARED = st.sets(st.integers(0, 40), max_size=3).map(lambda lengths: tuple(sorted(lengths)))
REFUSED = "refused"


def answers(shards: tuple[int, ...], declared: tuple[int, ...], layout: Layout) -> list[Any]:
    """What each rank concludes from its local length."""
    concluded: list[Any] = []
    for rank, local in enumerate(shards):
        sharding = Mock(layout=layout, lengths=declared, ranks=Mock(rank=rank, size=len(shards)))
        try:
            concluded.append(length_of(sharding, local))
        except ValueError:
            concluded.append(REFUSED)
    return concluded


@given(layout=LAYOUTS, ranks=st.integers(1, 8), declared=DECLARED, length=st.integers(0, 60))
def test_all_ranks_find_the_length_of_their_shards_or_some_refuse(
    layout: Layout, ranks: int, declared: tuple[int, ...], length: int
) -> None:
    shards = shard_lengths(layout, length, ranks)
    found = answers(shards, declared, layout)
    look_alike = any(
        other != length and any(x == y for x, y in zip(shards, shard_lengths(layout, other, ranks), strict=True))
        for other in declared
    )
    if length in declared:
        assert found == [REFUSED if look_alike else length] * ranks
    elif not look_alike and len({*shards}) == 1:  # ranks x local length, unless each has as much as a whole buffer
        assert found == [REFUSED if ranks > 1 and shards[0] in declared else length] * ranks
    else:  # found by comparing the ranks' lengths
        assert len({*found}) > 1 or found[0] in (REFUSED, length)
