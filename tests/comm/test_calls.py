"""Counted calls: what ranks write for each other, and when they look."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from cp_dtensor import PeerError
from cp_dtensor.comm import calls as module
from cp_dtensor.comm.calls import END_OF_CONTEXT, Calls, Signature

SHORT, LONG = Signature("short attention"), Signature("long attention")
RANKS = 3


def on_ranks(body: Callable[[int, Calls], Any]) -> list[Any]:
    def of_rank(rank: int) -> Any:
        return body(rank, Calls(dist.group.WORLD))  # type: ignore[arg-type]

    return run_ranks(RANKS, of_rank)


def error_of(calls: Calls) -> str:
    """The error of this rank, after the others have written their calls at the latest."""
    errors = []
    for _ in range(2):
        try:
            calls.compare()
        except PeerError as error:
            errors.append(str(error))
        dist.barrier()
    (text,) = errors
    return text


@pytest.mark.parametrize("kept", [0, 3, 200, 600])
def test_the_first_pass_that_differs_is_named_on_every_rank(kept: int) -> None:
    """After any number of equal passes; each rank says what those do that have come so far."""

    def body(rank: int, calls: Calls) -> str:
        for number in range(kept):
            calls.begin(SHORT, backward=number % 2 == 1)
        calls.begin(END_OF_CONTEXT, ends_step=True)
        calls.begin(SHORT)
        calls.begin(LONG if rank != 1 else SHORT, backward=rank == 1)
        return error_of(calls)

    for text in on_ranks(body):
        assert "After 1 forward passes since the end of a context" in text
        assert re.search("rank (0|2|0, 2): (forward of long attention|another call)", text), text
        assert re.search("rank 1: (backward of short attention|another call)", text), text
        assert "Results since then" not in text


def test_a_difference_long_ago_is_found() -> None:
    def body(rank: int, calls: Calls) -> str:
        calls.begin(LONG if rank == 2 else SHORT)
        for _ in range(3 * module._KEPT):
            calls.begin(SHORT)
        return error_of(calls)

    for text in on_ranks(body):
        assert "different ones before it" in text
        assert "Results since then are wrong" in text


def test_later_passes_of_a_group_that_has_failed_raise_too() -> None:
    def body(rank: int, calls: Calls) -> None:
        calls.begin(LONG if rank else SHORT)
        text = error_of(calls)
        with pytest.raises(PeerError) as again:
            calls.begin(SHORT)
        assert str(again.value) == text

    on_ranks(body)


def test_ranks_that_are_ahead_or_behind_differ_in_nothing() -> None:
    """Also by more passes than are kept."""

    def body(rank: int, calls: Calls) -> None:
        for passes in (1, module._KEPT // 2, 3 * module._KEPT):
            for _ in range(passes * rank):
                calls.begin(SHORT)
            calls.compare()
            dist.barrier()
            calls.compare()
            for _ in range(passes * (RANKS - rank)):
                calls.begin(SHORT)
            calls.compare()
            dist.barrier()

    on_ranks(body)


def test_calls_before_a_group_was_made_again_are_not_compared() -> None:
    """A store may outlive a process group, and have what an earlier one of the same name has written."""

    def body(rank: int, calls: Calls) -> None:
        for _ in range(4):
            calls.begin(SHORT)
        calls.compare()
        dist.barrier()
        later = Calls(dist.group.WORLD)  # type: ignore[arg-type]
        for _ in range(4):
            later.begin(LONG)
            later.compare()
        dist.barrier()
        later.compare()

    on_ranks(body)


def test_with_debug_a_rank_waits_for_the_others() -> None:
    """All of them get the error, and none has exchanged anything."""

    def body(rank: int, calls: Calls) -> str:
        with pytest.raises(PeerError) as raised:
            calls.begin(LONG if rank else SHORT, debug=True)
        return str(raised.value)

    assert all("forward of" in text for text in on_ranks(body))


def test_a_look_takes_one_percent_of_the_time() -> None:
    """At the ends of steps. What is written takes less, and is written at each of them."""

    def body(rank: int, calls: Calls) -> None:
        store = mock.Mock(wraps=calls._store)
        calls._store = store
        seconds = iter([0.0, 0.5, 1.0, 49.0, 51.0, 52.0])
        with mock.patch.object(module, "time", SimpleNamespace(monotonic=lambda: next(seconds))):
            for step in range(4):  # looks in the first, which takes 0.5 s, and in the last
                calls.begin(SHORT)
                calls.begin(END_OF_CONTEXT, ends_step=True)
                assert store.set.call_count == step + 1
                assert store.multi_get.call_count == 1 + (step == 3)

    run_ranks(1, lambda rank: body(rank, Calls(dist.group.WORLD)))  # type: ignore[arg-type]


def test_a_forward_after_a_backward_begins_a_step_but_for_recomputed_ones() -> None:
    def body(rank: int, calls: Calls) -> None:
        with mock.patch.object(calls, "compare") as compare:
            for backward in (False, False, True, True, False, False, True):
                calls.begin(SHORT, backward=backward)
            assert compare.call_count == 1
            with mock.patch.object(module, "current_backward", return_value=1):
                calls.begin(SHORT)
            assert compare.call_count == 1
            calls.begin(SHORT)
            assert compare.call_count == 2

    run_ranks(1, lambda rank: body(rank, Calls(dist.group.WORLD)))  # type: ignore[arg-type]


def test_captured_passes_end_the_comparison() -> None:
    """Ranks need not replay the same graphs by the same calls of their hosts."""

    def body(rank: int, calls: Calls) -> None:
        calls.begin(SHORT)
        calls.begin(LONG if rank == 1 else SHORT)
        calls.compare()
        dist.barrier()
        calls.compare()

    def capturing() -> bool:
        return dist.get_rank() == 1

    with mock.patch.object(module, "capturing", capturing):
        on_ranks(body)


def test_a_store_that_ends_is_not_used_any_more() -> None:
    def body(rank: int, calls: Calls) -> None:
        calls._store = mock.Mock()
        calls._store.set.side_effect = dist.DistNetworkError("connection reset")
        calls.begin(SHORT)
        calls.compare()
        calls.compare()
        assert calls._store is None

    run_ranks(1, lambda rank: body(rank, Calls(dist.group.WORLD)))  # type: ignore[arg-type]
