"""Order of flags, copies and streams in transports through symmetric memory, under random interleavings.

No rank may wait for ever, read rows that are not written, or overwrite rows that a peer has yet to read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cp_dtensor.comm.triton_kernels")

from support.cases import examples
from support.stream_model.interleavings import run, run_with_death
from support.stream_model.programs import Program, gathered_kv, ring, ulysses
from support.stream_model.recording import Group, Rank, Stream

from cp_dtensor.comm.flags import Flag, Flags
from cp_dtensor.comm.symm_mem_workspace import Workspace
from cp_dtensor.spec.balanced_layouts import BalancedBlocks
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout
from cp_dtensor.spec.masks import Causal, Full, Mask, SlidingWindow

INTERLEAVINGS, TO_FIND_A_MISTAKE = examples(40), 100


def in_graphs(program: Program) -> Program:
    """Runs the program once, which uploads tables, then in two graphs one after the other."""

    def captured(rank: Rank) -> None:
        program(rank)
        for _ in range(2):
            with rank.capture():
                program(rank)

    return captured


def one_after_the_other(*programs: Program) -> Program:
    def together(rank: Rank) -> None:
        for program in programs:
            program(rank)

    return together


def on_streams_in_turns(program: Program) -> Program:
    """Makes calls on two streams of a user who does not order them."""

    def in_turns(rank: Rank) -> None:
        main, other = rank.current, Stream(rank)
        for stream in (main, other, main, other):
            with torch.cuda.stream(stream):
                program(rank)

    return in_turns


def recorded(ranks: int, program: Program) -> Group:
    group = Group(ranks)
    for rank in group.ranks:
        group.record(rank, program)
    return group


def check(ranks: int, program: Program) -> None:
    group = recorded(ranks, program)
    assert run(group, 0, shared_queues=True) is None
    for seed in range(INTERLEAVINGS):
        assert run(group, seed) is None, f"interleaving {seed}"


def check_that_it_goes_wrong(ranks: int, program: Program) -> None:
    group = recorded(ranks, program)
    assert any(run(group, seed) for seed in range(TO_FIND_A_MISTAKE)), "the mistake was not found"


all_worlds = pytest.mark.parametrize("ranks", [2, 3])
all_stages = pytest.mark.parametrize(
    ("stages", "two_streams"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
# A rank takes part even if no other rank attends to its rows: under a causal mask the last one, if the layout is
# contiguous.
MIXED = one_after_the_other(
    ulysses(2, True, backward=True),
    ring(2, Causal(), HeadTail(), backward=True),
    ulysses(4, True, backward=False),
    ring(2, Causal(), Contiguous(), backward=False),
    ring(1, Full(), Contiguous(), backward=True),
    gathered_kv(HeadTail()),
    ulysses(1, False, backward=True),
)


@all_stages
@all_worlds
def test_ulysses(ranks: int, stages: int, two_streams: bool) -> None:
    forward, both = (ulysses(stages, two_streams, backward) for backward in (False, True))
    check(ranks, one_after_the_other(forward, forward, both, both))
    check(ranks, in_graphs(both))


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (Full(), Contiguous()),
        (Causal(), HeadTail()),
        (Causal(), Contiguous()),
        (SlidingWindow(5, 0), Contiguous()),  # of some keys of some ranks, which lie elsewhere on each
        (SlidingWindow(2, 1), HeadTail()),
    ],
)
@pytest.mark.parametrize("stages", [1, 2, 4])
@all_worlds
def test_rings(ranks: int, stages: int, mask: Mask, layout: Layout) -> None:
    forward, both = (ring(stages, mask, layout, backward) for backward in (False, True))
    check(ranks, one_after_the_other(forward, both, both))
    check(ranks, in_graphs(both))


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), BalancedBlocks((1, 5, 2, 2, 3, 4), 4, 24)], ids=repr)
def test_kv_of_flex_attention(layout: Layout) -> None:
    call = gathered_kv(layout)
    check(3, one_after_the_other(call, call, call))
    check(3, in_graphs(call))


@pytest.mark.parametrize("how", [one_after_the_other, in_graphs, on_streams_in_turns])
@all_worlds
def test_rings_and_ulysses_share_a_workspace(ranks: int, how: Callable[[Program], Program]) -> None:
    check(ranks, how(MIXED))


def test_pulls_of_a_stage_wait_for_no_tile_of_the_one_before() -> None:
    """They are submitted after it, and their memory was free before it."""
    call = ring(4, Causal(), HeadTail(), backward=True)
    group, pulls = Group(2), list[tuple[int, int]]()
    mains, read = {rank: rank.current for rank in group.ranks}, Rank.read

    def recorded(rank: Rank, stream: Stream, source: int, target: int) -> None:
        if group.place(source)[1] == "kv":
            lane = mains[rank].lane
            awaited = stream.clock.get(lane, 0)
            uses = [place for place, op in enumerate(group.lanes[lane]) if op[0] == "use"]
            pulls.append((len(uses), sum(place < awaited for place in uses)))
        read(rank, stream, source, target)

    with mock.patch.object(Rank, "read", recorded):
        for rank in group.ranks:
            group.record(rank, call)
    under_tiles = [(launched, awaited) for launched, awaited in pulls if launched]
    assert under_tiles
    assert all(awaited < launched for launched, awaited in under_tiles)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_that_leave_under_attention_need_no_kernel(stages: int) -> None:
    """It would take a multiprocessor from the other stream's attention. Nothing overlaps with the last stage."""
    submit, beside_attention = Flags.submit, list[bool]()
    of_departures = {Flag.GRAD_TAKEN, Flag.GRAD_READY}

    def recorded(flags: Flags, stream: Any, *, overlaps: bool = False, **which: Any) -> None:
        if of_departures.intersection(which.values()):
            beside_attention.append(overlaps)
        submit(flags, stream, overlaps=overlaps, **which)

    group = Group(2)
    with mock.patch.object(Flags, "submit", recorded):
        group.record(group.ranks[0], ulysses(stages, True, backward=False))
    assert beside_attention == [True] * 4 * (stages - 1) + [False] * 3


@pytest.mark.parametrize("how", [one_after_the_other, in_graphs])
@all_worlds
def test_the_others_end_when_a_rank_dies(ranks: int, how: Callable[[Program], Program]) -> None:
    """Wherever it stops, each wait of the others that is over its deadline misses a flag of the rank that died."""
    group = recorded(ranks, how(MIXED))
    waits = 0
    for seed in range(INTERLEAVINGS):
        dead = seed % ranks
        missing = run_with_death(group, seed, dead)
        waits += len(missing)
        assert all(dead in of_wait for of_wait in missing), f"interleaving {seed}: {missing}"
    assert waits


# Mistakes that the checks above find


@pytest.mark.parametrize("how", [one_after_the_other, in_graphs])
@pytest.mark.parametrize("stages", [2, 4])
@all_worlds
def test_a_rank_needs_flags_for_itself(ranks: int, stages: int, how: Callable[[Program], Program]) -> None:
    def of_others(every: Any) -> property:
        return property(lambda self: [of[: self.rank] + of[self.rank + 1 :] for of in every.fget(self)])

    with mock.patch.multiple(Flags, **{name: of_others(vars(Flags)[name]) for name in ("_signalled", "_awaited")}):
        check_that_it_goes_wrong(ranks, how(ulysses(stages, True, backward=False)))
        check(ranks, how(ulysses(stages, False, backward=False)))  # a rank with one stream would need none


@all_worlds
def test_writes_wait_for_earlier_writes(ranks: int) -> None:
    """In graphs, too, and on streams of the user."""
    follow = Workspace.follow

    def unless_capturing(workspace: Workspace, stream: Any) -> None:
        if not stream.is_capturing:
            follow(workspace, stream)

    with mock.patch.object(Workspace, "follow", unless_capturing):
        check_that_it_goes_wrong(ranks, in_graphs(ulysses(4, True, backward=False)))
    with mock.patch.object(Workspace, "follow"):
        check_that_it_goes_wrong(ranks, on_streams_in_turns(ring(1, Full(), Contiguous(), backward=False)))


EVERY_FLAG = [ulysses(4, False, backward=True), ring(4, Causal(), HeadTail(), backward=True)]


@pytest.mark.parametrize("missing", Flag)
@pytest.mark.parametrize("call", EVERY_FLAG)
@all_worlds
def test_every_wait_is_needed(ranks: int, call: Program, missing: Flag) -> None:
    submit = Flags.submit

    def all_but_one(flags: Flags, stream: Any, *, wait: Flag | None = None, **others: Any) -> None:
        submit(flags, stream, wait=None if wait is missing else wait, **others)

    with mock.patch.object(Flags, "submit", all_but_one):
        check_that_it_goes_wrong(ranks, one_after_the_other(call, call))
