"""Deadlines of waits in shared memory: ranks that skip calls, raise, or are late."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from support.settings_state import PatchedTorch, thread_state
from support.shared_memory import shared_memory
from support.steps import Injected, Steps, raise_injected

from cp_dtensor import Contiguous, PeerError, ring_attention, ulysses_attention
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm import watchdog
from cp_dtensor.comm.flags import Flag, Flags, WaitStatus
from cp_dtensor.engine.ring import RingPlan

PROBLEM = Problem(16, 16, q_heads=2, kv_heads=2)
RANKS, ABSENT = 3, 2
METHODS = {
    "ring": lambda *qkv, **kwargs: ring_attention(*qkv, rotate_method="symm_mem", **kwargs),
    "ulysses": ulysses_attention,
}
all_methods = pytest.mark.parametrize("method", METHODS)


def attend(rank: int, method: str, group: Any, backward: bool = True) -> tuple[torch.Tensor, ...]:
    """Returns this rank's out and, with `backward`, its gradients."""
    *qkv, grad_out = (shard(x, Contiguous(), rank, RANKS) for x in PROBLEM.draw(seed=0))
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = METHODS[method](q, k, v, mesh=group, layout=Contiguous(), seq_len=16)
    return (out, *torch.autograd.grad(out, (q, k, v), grad_out)) if backward else (out,)


def attend_before_deadlines(rank: int, method: str, group: Any, seconds: float) -> None:
    """The first call, which maps memory, and may take its time; later waits of the group have a deadline."""
    attend(rank, method, group)
    waits = workspaces.memory_of(group).current._waits
    waits._seconds = seconds
    watchdog.watch(waits)  # looks now, and as often as the deadline asks for
    dist.barrier()


def check_right(results: list[tuple[torch.Tensor, ...]]) -> None:
    expected = reference(PROBLEM, *PROBLEM.draw(seed=0))
    for actual, whole in zip(zip(*results, strict=True), expected, strict=False):
        torch.testing.assert_close(torch.cat(actual, dim=2), whole, rtol=0, atol=1e-10)


@all_methods
@pytest.mark.parametrize("backward", [False, True], ids=["skips a call", "raises before backward"])
def test_the_others_get_an_error_that_names_the_rank(
    method: str, backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int) -> tuple[float, str]:
        group = dist.group.WORLD
        attend_before_deadlines(rank, method, group, 0.5)
        if rank == ABSENT:
            if backward:
                attend(rank, method, group, backward=False)
            return 0.0, ""
        begin = time.monotonic()
        with suppress(PeerError):
            results = attend(rank, method, group, backward)
            assert results[-1].isnan().any(), "results without the absent rank are not taken for right ones"
        with pytest.raises(PeerError) as raised:
            attend(rank, method, group)
        return time.monotonic() - begin, str(raised.value)

    with shared_memory(), caplog.at_level(logging.ERROR, "cp_dtensor"):
        for rank, (seconds, message) in enumerate(run_ranks(RANKS, body)):
            if rank != ABSENT:
                assert seconds < 5
                assert re.search(rf"rank {rank} of process group .* .global ranks \[0, 1, 2\]. waited \d", message)
                assert f"rank {ABSENT} (global rank {ABSENT}), whose process ended" in message
                assert re.search("The latest on this rank is (for|back)ward of attention of 16 .*, float64", message)
                assert message in caplog.text


def test_a_rank_that_comes_too_late_gets_an_error_too() -> None:
    def body(rank: int) -> None:
        attend_before_deadlines(rank, "ring", dist.group.WORLD, 0.5)
        if rank == ABSENT:
            time.sleep(1.2)
        with pytest.raises(PeerError, match="longer than the timeout"):
            again_and_again(rank)

    def again_and_again(rank: int) -> None:
        for _ in range(6):  # the first may find flags that the others set before they raised
            attend(rank, "ring", dist.group.WORLD)

    with shared_memory():
        run_ranks(RANKS, body)


@all_methods
@pytest.mark.parametrize("number", range(0, 12, 2))
def test_a_rank_raises_within_a_call(method: str, number: int) -> None:
    """Afterwards what torch has is as before, and another group is right."""
    steps = Steps()  # flags are set or waited for, tiles are computed

    def body(rank: int) -> tuple[torch.Tensor, ...]:
        group = dist.new_group(list(range(RANKS)))
        attend_before_deadlines(rank, method, group, 0.25)
        if rank == ABSENT:
            with pytest.raises(Injected), steps.acting_at(number, raise_injected):
                attend(rank, method, group)
        else:
            with suppress(PeerError):
                attend(rank, method, group)
            with pytest.raises(PeerError, match=rf"rank {ABSENT} \(global rank {ABSENT}\), whose process"):
                again_and_again(rank, group)
        return attend(rank, method, dist.group.WORLD)

    def again_and_again(rank: int, group: Any) -> None:
        for _ in range(3):  # an error at a late step leaves flags that are set
            attend(rank, method, group)

    before = PatchedTorch.now(), thread_state()
    with shared_memory(), steps.counted((Flags, "submit"), (RingPlan, "results"), (RingPlan, "gradients")):
        check_right(run_ranks(RANKS, body))
    assert (PatchedTorch.now(), thread_state()) == before


def test_calls_after_a_larger_workspace_was_mapped_raise_too() -> None:
    """The wait of a captured graph fails in the workspace that the graph holds."""

    def body(rank: int) -> None:
        group, device = dist.group.WORLD, torch.device("cpu")
        held = workspaces.workspace(group, device, 1024, 512)
        workspaces.memory_of(group).pinned.append(held)
        workspaces.workspace(group, device, 64 << 20, 512)
        held._waits.fail({Flag.KV_READY: 1}, 1.25)
        with pytest.raises(PeerError, match=r"waited 1\.25 s in shared memory"):
            attend(rank, "ring", group)

    with shared_memory():
        run_ranks(RANKS, body)


class Stuck(watchdog.WatchedWaits):
    """Waits that nothing releases."""

    def __init__(self, status: WaitStatus) -> None:
        super().__init__(status, seconds=0.01)
        self.failed: list[Flag] = []
        self.released = 0

    def fail(self, flags: Any, seconds: float) -> None:
        self.failed += flags

    def release(self) -> None:
        self.released += 1


def waiting_status(flag: Flag) -> WaitStatus:
    status = WaitStatus(torch.device("cpu"))
    status._words[flag] = 1
    return status


def test_the_process_is_aborted_if_the_streams_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[str] = []
    monkeypatch.setattr(watchdog, "_abort", aborted.append)
    monkeypatch.setattr(watchdog, "RECOVERY_SECONDS", 0.02)
    waits = Stuck(waiting_status(Flag.GRAD_READY))
    for _ in range(4):
        time.sleep(0.015)
        waits.look()
    assert waits.failed == [Flag.GRAD_READY]
    assert waits.released
    assert aborted


@pytest.mark.parametrize("ends", ["_words", "submitted"])
def test_waits_that_begin_anew_each_time_are_not_over_their_deadline(ends: str) -> None:
    """A rank that always waits when the thread looks, each time for a later call, makes progress."""
    status = waiting_status(Flag.KV_READY)
    waits = Stuck(status)
    progress: Callable[[], None] = {
        "_words": lambda: status._words[-1].add_(1),
        "submitted": lambda: setattr(status, "submitted", status.submitted + 1),
    }[ends]
    for _ in range(5):
        time.sleep(0.012)
        progress()
        waits.look()
    assert not waits.failed
