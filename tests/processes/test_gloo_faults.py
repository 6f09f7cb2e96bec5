"""Ranks that die, raise, skip a call or are late: gloo processes. No rank waits for ever, and errors name the rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, reference, shard
from support.processes import Processes
from support.ranks import RanksFailed
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor import HeadTail, PeerError, context_parallel, ring_attention, shift, ulysses_attention
from cp_dtensor.comm import faults
from cp_dtensor.comm.collective import Exchange

RANKS, FAULTY, SECONDS = 3, 1, 1.0
PROBLEM = Problem(14, 14, q_heads=3, kv_heads=3, is_causal=True)


def _attend(rank: int, group: Any, method: str, length: int | None = 14) -> list[torch.Tensor]:
    """Returns this rank's out and gradients."""
    *qkv, grad_out = (shard(x, HeadTail(), rank, RANKS) for x in PROBLEM.draw(seed=0))
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    if method == "ulysses":
        out = ulysses_attention(q, k, v, mesh=group, is_causal=True, seq_len=length)
    else:
        out = ring_attention(q, k, v, mesh=group, is_causal=True, seq_len=length, rotate_method=method)
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]


def _check_right(rank: int, group: Any, method: str) -> None:
    expected = reference(PROBLEM, *PROBLEM.draw(seed=0))
    for actual, whole in zip(_attend(rank, group, method), expected, strict=True):
        torch.testing.assert_close(actual, shard(whole, HeadTail(), rank, RANKS), rtol=0, atol=1e-10)


class Injected(Exception):
    pass


@contextmanager
def _raises_at_exchange(number: int) -> Iterator[None]:
    """Context in which the start or the end of an exchange raises: each counts as a step."""
    steps, init = iter(range(1000)), Exchange.__init__

    def step() -> None:
        if next(steps) == number:
            raise Injected

    def counted(exchange: Any, *args: Any) -> None:
        step()
        init(exchange, *args)
        wait = exchange.wait

        def waited() -> None:
            step()
            wait()

        exchange.wait = waited

    with mock.patch.object(Exchange, "__init__", counted):
        yield


def _skips(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method)


def _skips_a_shift(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        shift(torch.zeros(1, 5, 2), 1, mesh=group, dim=1, seq_len=15)


def _is_too_late(rank: int, group: Any, method: str) -> None:
    if rank == FAULTY:
        time.sleep(2 * SECONDS)
    _attend(rank, group, method)


def _skips_an_exchange_of_lengths(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method, length=None)


def _raises_at(number: int) -> Callable[[int, Any, str], None]:
    def raises(rank: int, group: Any, method: str) -> None:
        if rank != FAULTY:
            _attend(rank, group, method)
            return
        with pytest.raises(Injected), _raises_at_exchange(number):
            _attend(rank, group, method)

    return raises


def _has_another_shape(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method)
        return
    q, k, v = (torch.zeros(1, 3, 9, 8, dtype=torch.float64) for _ in "qkv")
    with pytest.raises(ValueError, match="got 9 local tokens on rank 1"):
        ring_attention(q, k, v, mesh=group, is_causal=True, seq_len=14, rotate_method=method)


def _is_out_of_memory(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method)
        return
    with (
        mock.patch.object(Exchange, "__init__", side_effect=torch.OutOfMemoryError),
        pytest.raises(torch.OutOfMemoryError),
    ):
        _attend(rank, group, method)


def _destroys_the_group(rank: int, group: Any, method: str) -> None:
    if rank != FAULTY:
        _attend(rank, group, method)
        return
    dist.destroy_process_group(group)


def _raises_in_the_body(rank: int, group: Any, method: str) -> None:
    """Every rank gets an error, and buffers and torch are as before."""
    whole = [x.clone() for x in PROBLEM.draw(seed=0)[:3]]
    buffers, sdpa = [x.clone() for x in whole], F.scaled_dot_product_attention
    mesh = DeviceMesh.from_group(group, "cpu")
    error = None
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3, rotate_method=method):
            if rank == FAULTY:
                raise Injected
            F.scaled_dot_product_attention(*buffers)
    except (PeerError, Injected) as raised:
        error = raised
    assert F.scaled_dot_product_attention is sdpa
    for buffer, expected in zip(buffers, whole, strict=True):
        assert torch.equal(buffer, expected)
    if isinstance(error, PeerError):
        raise error


def _check_arguments_keep_their_error() -> None:
    """All ranks report them at once, and no connection is lost."""
    group = dist.new_group(group_desc="cp")
    with pytest.raises(RuntimeError, match=r"(?i)split sizes") as raised:
        faults.all_to_all_single(torch.zeros(4), torch.zeros(4), group, "an exchange", ([1] * RANKS, [2] * RANKS))
    assert not isinstance(raised.value, PeerError)


def _faults(rank: int) -> list[str]:
    """Returns the errors of this rank, fault after fault, each in a group of its own."""
    _check_arguments_keep_their_error()
    errors = []
    cases = [*product((_skips,), ("allgather", "alltoall", "ulysses")), (_is_too_late, "alltoall")]
    cases += [(_skips_a_shift, "alltoall")]
    cases += [(_skips_an_exchange_of_lengths, "allgather"), (_has_another_shape, "alltoall")]
    cases += [(_is_out_of_memory, "alltoall"), (_destroys_the_group, "allgather"), (_raises_in_the_body, "allgather")]
    cases += [(_raises_at(step), "alltoall") for step in (1, 4, 7)]  # in forward and in backward
    for fault, method in cases:
        group = dist.new_group(timeout=timedelta(seconds=SECONDS), group_desc="cp")
        begin = time.monotonic()
        try:
            with mock.patch.object(faults, "REPORT_SECONDS", 0.3):
                fault(rank, group, method)
        except PeerError as error:
            assert time.monotonic() - begin < SECONDS + 10
            errors.append(str(error))
        else:
            assert rank == FAULTY, "a rank that waited for the faulty one must raise"
            errors.append("")
    _check_right(rank, dist.new_group(group_desc="cp"), "alltoall")
    return errors


def test_the_others_raise_and_name_the_rank() -> None:
    processes = Processes(RANKS, timeout=60)
    try:
        errors = processes.run(_faults)
    finally:
        processes.stop()
    for rank in set(range(RANKS)) - {FAULTY}:
        for error in errors[rank]:
            assert f"failed on rank {rank} of process group 'cp' (global ranks [0, 1, 2])" in error
        named = [
            f"rank {FAULTY} (global rank {FAULTY}), whose process ended, raised" in error for error in errors[rank]
        ]
        assert sum(named) >= len(named) - 2, "who was late, or lost its group, may have reported in time"


def _dies(rank: int) -> None:
    _check_right(rank, dist.group.WORLD, "alltoall")
    if rank == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    with mock.patch.object(faults, "REPORT_SECONDS", 0.3):
        _attend(rank, dist.group.WORLD, "alltoall")


def test_a_rank_is_killed() -> None:
    processes = Processes(RANKS, timeout=30)
    begin = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        processes.run(_dies)
    assert time.monotonic() - begin < 25
    for rank, error in enumerate(failed.value.errors):
        if rank != FAULTY:
            assert isinstance(error, PeerError)
            assert f"it waited for rank {FAULTY} (global rank {FAULTY})" in str(error)


def test_a_rank_may_be_late() -> None:
    processes = Processes(RANKS, timeout=60)
    try:
        processes.run(_comes_late)
    finally:
        processes.stop()


def _comes_late(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=3 * SECONDS))
    if rank == FAULTY:
        time.sleep(1.5 * SECONDS)
    _check_right(rank, group, "alltoall")
