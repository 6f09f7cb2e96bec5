"""The order of flags, copies and streams of the transports through shared memory, in random interleavings.

Every rank runs the calls themselves; attention only says on which stream it has used what. No rank may wait for ever,
read what has not been written, or overwrite what a peer has still to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("cp_dtensor.kernels.copy_pieces")

from interleavings import run
from streams import Group, Rank, Stream

from cp_dtensor.attention_call import AttentionCall, Tensors
from cp_dtensor.division import CallShape, LayoutDivision
from cp_dtensor.extras import NO_EXTRAS, Extras
from cp_dtensor.head_division import divide_heads
from cp_dtensor.layouts import Contiguous, HeadTail, Layout
from cp_dtensor.local_attention.base import LocalAttention
from cp_dtensor.masks import Causal, Full, Mask, SlidingWindow, is_plain
from cp_dtensor.plan import Stages, gathered_plan
from cp_dtensor.planning import exchange_stages
from cp_dtensor.ring import RingCall
from cp_dtensor.rotation.device_streams import FlagOperations
from cp_dtensor.rotation.head_exchange_symm_mem import SharedMemoryHeads, shared_memory_heads
from cp_dtensor.rotation.symm_mem import SymmetricMemory
from cp_dtensor.rotation.workspace import Flag, Workspace
from cp_dtensor.tiling import Masking
from cp_dtensor.two_axes import UnitedDivision
from cp_dtensor.ulysses import UlyssesCall

INTERLEAVINGS = 100
DIM = 4
Program = Callable[[Rank], None]


@dataclass(frozen=True)
class Stage(AttentionCall):
    """Attention with some heads to all rows, as far as streams see it."""

    rank: Rank
    saved: list[torch.Tensor] = field(default_factory=list)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[Any, Any, Any]:
        self.rank.use(q, k, v)
        self.saved[:] = [q, k, v]
        return torch.empty_like(q), q.new_empty(q.shape[:3]), ()

    def backward(self, grad_out: torch.Tensor, _: Extras, saved: Tensors, grad_bias: object) -> tuple[Any, Any, Any]:
        self.rank.use(grad_out, *saved)
        q, k, v = map(torch.empty_like, saved)
        return q, k, v

    saves_rows_of_others = False

    def saved_again(self, *tensors: Any) -> Any:
        self.rank.use(*tensors[:4])  # lse is a copy of what came with out
        return ()


@dataclass(frozen=True)
class Tiles(LocalAttention):
    """Attention of tiles, as far as streams see it."""

    rank: Rank
    name = "none"

    def refusal(self, problem: object) -> None:
        return None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        self.rank.use(k, v)
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    def backward(self, _grad_out: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        self.rank.use(k, v)
        return tuple(map(torch.zeros_like, (q, k, v)))


def shape_of(ranks: int, layout: Layout, mask: Mask) -> CallShape:
    length = 8 * ranks
    masking = Masking.BY_SHAPE if is_plain(mask, length, length) else Masking.BY_ROW
    division = LayoutDivision(layout, length, length, 1, ranks)
    return CallShape(division, mask, 1, 4 * ranks, 4 * ranks, DIM, DIM, 4, masking)


def tensors(rank: Rank, count: int) -> list[torch.Tensor]:
    made = [torch.zeros(1, 4 * rank.size(), 8, DIM) for _ in range(count)]
    rank.kept += made
    return made


def ulysses(stages: int, two_streams: bool, backward: bool) -> Program:
    def program(rank: Rank) -> None:
        ranks = rank.size()
        shape = shape_of(ranks, Contiguous(), Full())
        heads = divide_heads(shape.q_heads, shape.kv_heads, ranks, stages)
        assert heads.stages == stages
        kinds = exchange_stages(heads, UnitedDivision(shape.division, ranks), 0)
        exchange = shared_memory_heads(shape, kinds, rank, torch.device("cpu"))
        assert isinstance(exchange, SharedMemoryHeads)
        inner = tuple(Stage(rank) for _ in range(stages))
        call = UlyssesCall(rank, heads, kinds, inner, exchange, two_streams and stages > 1, torch.float32)
        q, k, v = tensors(rank, 3)
        out, lse, _ = call.forward(q, k, v, NO_EXTRAS, needs_lse=backward)
        rank.use(out)
        if backward:
            call.saved_again(q, k, v, out, lse)  # as compiled code does in graphs
            saved = tuple(tensor for stage in inner for tensor in stage.saved)
            rank.use(*call.backward(*tensors(rank, 1), NO_EXTRAS, saved, None))

    return program


def ring(stages: int, mask: Mask, layout: Layout, backward: bool) -> Program:
    def program(rank: Rank) -> None:
        shape = shape_of(rank.size(), layout, mask)
        by_heads = Stages(1, stages)
        plan = gathered_plan(shape.tiling, rank.rank(), shape.kv_heads, by_heads, by_heads)
        tiles = Tiles(rank)
        call = RingCall(plan, rank, SymmetricMemory(), tiles, tiles, 1.0, torch.float32)
        q, k, v, grad_out = tensors(rank, 4)
        _, _, saved = call.forward(q, k, v, NO_EXTRAS, needs_lse=False)
        if backward:
            call.backward(grad_out, NO_EXTRAS, saved, None)

    return program


def in_graphs(program: Program) -> Program:
    """Once as it is, which prepares tables; then in two graphs, which run one after the other."""

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
    """Calls on two streams of a user who does not order them."""

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
    assert any(run(group, seed) for seed in range(INTERLEAVINGS)), "the mistake was not found"


all_worlds = pytest.mark.parametrize("ranks", [2, 3])
all_stages = pytest.mark.parametrize(
    ("stages", "two_streams"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
# A rank whose rows nobody sees still takes part: under causal the last one, if the layout is contiguous.
MIXED = one_after_the_other(
    ulysses(2, True, backward=True),
    ring(2, Causal(), HeadTail(), backward=True),
    ulysses(4, True, backward=False),
    ring(2, Causal(), Contiguous(), backward=False),
    ring(1, Full(), Contiguous(), backward=True),
    ulysses(1, False, backward=True),
)


@pytest.mark.parametrize("backward", [False, True])
@all_stages
@all_worlds
def test_ulysses(ranks: int, stages: int, two_streams: bool, backward: bool) -> None:
    call = ulysses(stages, two_streams, backward)
    check(ranks, one_after_the_other(call, call, call))


@all_stages
@all_worlds
def test_ulysses_in_graphs(ranks: int, stages: int, two_streams: bool) -> None:
    check(ranks, in_graphs(ulysses(stages, two_streams, backward=True)))


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


@pytest.mark.parametrize("how", [one_after_the_other, in_graphs, on_streams_in_turns])
@all_worlds
def test_rings_and_ulysses_share_a_workspace(ranks: int, how: Callable[[Program], Program]) -> None:
    check(ranks, how(MIXED))


# What the checks above would find.


@pytest.mark.parametrize("how", [one_after_the_other, in_graphs])
@pytest.mark.parametrize("stages", [2, 4])
@all_worlds
def test_a_rank_needs_flags_for_itself(ranks: int, stages: int, how: Callable[[Program], Program]) -> None:
    others = property(lambda self: [rank for rank in range(self.world_size) if rank != self.rank])
    with mock.patch.object(Workspace, "_ranks", others):
        check_that_it_goes_wrong(ranks, how(ulysses(stages, True, backward=False)))
        check(ranks, how(ulysses(stages, False, backward=False)))  # a rank with one stream would need none


@all_worlds
def test_publishing_follows_in_graphs_too(ranks: int) -> None:
    follow = Workspace.follow

    def unless_capturing(workspace: Workspace, stream: Any) -> None:
        if not stream.is_capturing:
            follow(workspace, stream)

    with mock.patch.object(Workspace, "follow", unless_capturing):
        check_that_it_goes_wrong(ranks, in_graphs(ulysses(4, True, backward=False)))


@all_worlds
def test_publishing_follows_on_streams_of_the_user(ranks: int) -> None:
    with mock.patch.object(Workspace, "follow"):
        check_that_it_goes_wrong(ranks, on_streams_in_turns(ring(1, Full(), Contiguous(), backward=False)))


@pytest.mark.parametrize("missing", Flag)
@pytest.mark.parametrize("call", [ulysses(4, False, backward=True), ring(4, Causal(), HeadTail(), backward=True)])
@all_worlds
def test_every_wait_is_needed(ranks: int, call: Program, missing: Flag) -> None:
    wait = Workspace.wait

    def all_but_one(workspace: Workspace, flag: Flag) -> FlagOperations:
        return FlagOperations([]) if flag is missing else wait(workspace, flag)

    with mock.patch.object(Workspace, "wait", all_but_one):
        check_that_it_goes_wrong(ranks, one_after_the_other(call, call))
