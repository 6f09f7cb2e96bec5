"""Ranks as threads of a threaded process group, which start in milliseconds."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

T = TypeVar("T")
_IDLE_SECONDS = 120 if torch.cuda.is_available() else 10  # on GPUs other processes compile kernels
"""Time without work after which ranks wait for a collective that not all have joined. A loaded machine makes them slow,
but not idle."""
_PATIENCE_SECONDS = 3  # time for other ranks to end by themselves after an error, before they are woken

if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 forgot it, and looks for it on destruction
    threaded.ThreadLocalWorld.comms = []

if torch.backends.cuda.is_built() and not torch.cuda.is_available():
    # Entering a fake mode, as DTensor does, replaces the guard of devices that are not there, and other threads crash
    # in the old one. Once is enough.
    torch._C._ensureCUDADeviceGuardSet()
    torch._C._ensureCUDADeviceGuardSet = lambda: None


class RanksFailed(Exception):
    """Error of some ranks; `errors` has the exception of each rank, None for ranks that returned.

    The message begins with errors of the ranks themselves: pytest's summary shows its first line. Other ranks were
    waiting for them in a collective, which SystemExit ends.
    """

    def __init__(self, errors: list[BaseException | None]) -> None:
        by_rank = sorted(enumerate(errors), key=lambda each: each[1] is None or isinstance(each[1], SystemExit))
        super().__init__("\n".join(f"rank {rank}: {error!r}" for rank, error in by_rank))
        self.errors = errors


def run_ranks(world_size: int, body: Callable[..., T], *args: Any) -> list[T]:
    """Calls `body(rank, *args)` on every rank, with a default process group; returns the results in rank order.

    Raises:
        the error itself, if every rank raised the same type of error with the same message, else RanksFailed.
    """
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size
    store = dist.HashStore()

    ended = threading.Barrier(world_size)

    def rank_main(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            results[rank] = body(rank, *args)
        except BaseException as error:  # raised below
            errors[rank] = error
        try:
            ended.wait(_PATIENCE_SECONDS if errors[rank] else None)
        except threading.BrokenBarrierError:  # other ranks wait for this one, or failed because of another
            if errors[rank]:
                threaded.ProcessLocalGroup.exception_handle(errors[rank])  # wakes waiting ranks
        finally:
            if dist.is_initialized():  # a program of the documents ends it itself
                dist.destroy_process_group()

    with _threaded_world(), _one_core():
        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        if not _end(threads):
            late = TimeoutError(f"ranks have waited for {_IDLE_SECONDS} s: a collective that not all have joined")
            threaded.ProcessLocalGroup.exception_handle(late)  # or they would join collectives of the next test
            for each in threads:
                each.join(_PATIENCE_SECONDS)
            raise late
    _raise(errors)
    return results


def _end(threads: list[threading.Thread]) -> bool:
    """Waits until threads end; returns whether they have, False once the process has done nothing for a while."""
    idle, spent = 0, time.process_time()
    for thread in threads:
        while idle < _IDLE_SECONDS:
            thread.join(1)
            if not thread.is_alive():
                break
            before, spent = spent, time.process_time()
            idle = idle + 1 if spent - before < 0.01 else 0
    return not any(thread.is_alive() for thread in threads)


def _raise(errors: list[BaseException | None]) -> None:
    own = [error for error in errors if error is not None and not isinstance(error, SystemExit)]
    if not own:
        return
    if len(own) == len(errors) and len({(type(error), str(error)) for error in own}) == 1:
        raise own[0]
    if len(errors) == 1:
        raise own[0]
    raise RanksFailed(errors) from own[0]


@contextmanager
def _one_core() -> Iterator[None]:
    """Pins threads that start in the context to one core; they take turns anyway, by Python's global lock.

    On several cores they wake one another whenever one of them enters or leaves torch, which makes them twice as slow.
    Each worker of pytest-xdist has its own core; a single worker stays on its current core. Where a process may not
    choose its cores, nothing changes.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if len(cores) < 2 or torch.cuda.is_available():  # torch has its own threads for GPUs
        yield
        return
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    core = sorted(cores)[int(worker[1]) % len(cores)] if worker and workers > 1 else _current_core()
    with suppress(OSError):
        os.sched_setaffinity(0, {core} & cores or cores)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


def _current_core() -> int:
    """Returns the current core, -1 if the C library has no function for it."""
    ask = getattr(ctypes.CDLL(None), "sched_getcpu", None)
    return -1 if ask is None else int(ask())


@contextmanager
def _threaded_world() -> Iterator[None]:
    excepthook = sys.excepthook  # which init_process_group replaces
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        sys.excepthook = excepthook
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
