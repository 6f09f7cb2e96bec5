"""Stages of Ulysses in Inductor's last run before it captures a CUDA graph, on a machine without GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("cp_dtensor.comm.triton_kernels")

from support.stream_model.programs import ulysses
from support.stream_model.recording import Group, Rank, Stream

from cp_dtensor._torch import cache, streams


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_they_stay_on_the_stream_of_graphs(stages: int) -> None:
    """By which Inductor's last run is known, that is: that what outlives it must not lie in the memory of graphs."""
    group = Group(2)
    made_on: list[bool] = []
    for rank in group.ranks:
        main = rank.current

        def is_of_graphs(*_: Any, rank: Rank = rank, main: Stream = main) -> bool:
            return rank.current is main

        def prepared(make: Callable[[], Any], is_of_graphs: Callable[[], bool] = is_of_graphs) -> Any:
            made_on.append(is_of_graphs())
            return make()

        with (
            mock.patch.object(cache, "_is_in_memory_of_graphs", is_of_graphs),
            mock.patch.object(streams, "prepared", prepared),
        ):
            group.record(rank, ulysses(stages, True, True))
            tables = len(made_on)
            with rank.capture():
                group.record(rank, ulysses(stages, True, True))
        assert len(made_on) == tables > 0, "a capture finds all that it needs"
    assert all(made_on)
