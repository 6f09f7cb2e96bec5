"""Ranks as real processes over gloo or NCCL, which run many test bodies.

Starting processes takes time, and processes keep their imports and compiled code, so tests share the fixtures
`two_processes` and `four_processes` where they can. torch.compile takes seconds to import: once, before the forks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from support.nan_memory import poisoned_empty
from support.ranks import RanksFailed

T = TypeVar("T")
_START_SECONDS = 120
_GRACE_SECONDS = 30
"""For the other ranks to end after one has raised or died: longer than any deadline of ranks in tests."""
GPU_RANKS = int(os.environ.get("CP_DTENSOR_TEST_GPU_RANKS", "2"))
"""Number of ranks of the fixture `gpus`, 2 or more."""
if GPU_RANKS < 2:
    raise ValueError(f"expected CP_DTENSOR_TEST_GPU_RANKS to be 2 or more, got {GPU_RANKS}")
_IMPORTED_ONCE = [
    "torch.distributed.tensor.parallel",
    "torch._inductor.compile_fx",
    "pytest",
    "hypothesis",
    "cp_dtensor",
]


class RemoteTraceback(Exception):
    """Cause of an error in another process: its traceback as text."""


class Processes:
    """`world_size` processes with a default process group, from the first `run` until `stop`.

    The processes end after a body has raised on any rank, since ranks may have missed a collective; the next `run`
    starts new ones.

    Args:
        world_size: number of processes.
        timeout: limit in seconds for a body, and for a collective that waits for other ranks.
        backend: "gloo", or with one GPU a rank "nccl", which has no backend for CPU tensors, or "cpu:gloo,cuda:nccl".
            Where ranks outnumber GPUs, they share them, with gloo: NCCL refuses two ranks on one GPU, symmetric memory
            does not.
        nodes: number of nodes that the ranks stand for. With "nccl", ranks of different nodes may share a GPU.
        enter: called first in each process, with its rank: it may enter a network namespace.
    """

    def __init__(
        self, world_size: int, timeout: float = 60, backend: str = "gloo", *, nodes: int = 1,
        enter: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        self.world_size = world_size
        self.backend = backend
        self.nodes, self.enter = nodes, enter
        self.timeout = timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # of the store, which every new group needs

    def run(self, body: Callable[..., T], *args: Any) -> list[T]:
        """Calls `body(rank, *args)` on every rank; returns the results in rank order.

        The other processes find `body` by name, so it must be a top-level function of a module.

        Raises:
            RanksFailed: a rank raised, died or did not finish in time (a TimeoutError among its `errors`).
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((body, args))
        results, errors = self._answers(self.timeout)
        if any(errors):
            self.stop()
            raise RanksFailed(errors) from next(error for error in errors if error)
        return results

    def stop(self) -> None:
        """Stops the processes, also in the middle of a body."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        context = way_to_start(self.backend)
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, store, self.timeout, self.backend, theirs, self.nodes, self.enter)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        _, errors = self._answers(_START_SECONDS)
        if any(errors):
            self.stop()
            raise RanksFailed(errors)

    def _answers(self, timeout: float) -> tuple[list[Any], list[BaseException | None]]:
        """Returns results and errors, in rank order."""
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException | None] = [
            TimeoutError(f"rank {rank} has not finished after {timeout} s") for rank in range(self.world_size)
        ]
        waiting = list(self._pipes)
        while waiting:
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                waiting.remove(pipe)
                rank = self._pipes.index(pipe)
                try:
                    results[rank], errors[rank], text = pipe.recv()
                except (EOFError, ConnectionResetError):
                    errors[rank] = RuntimeError(f"the process of rank {rank} died")
                else:
                    if errors[rank] is not None:
                        errors[rank].__cause__ = RemoteTraceback(f"rank {rank}:\n{text}")
                if errors[rank] is not None:  # others may wait for this rank until the deadline, on the GPU for ever
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        return results, errors


_frozen = 0
"""Modules when garbage collection left them out."""


def freeze_modules() -> None:
    """Take modules that were imported out of garbage collection, which takes 0.2 s with torch's and is often asked for.

    Tests import more of them, such as the compiler's.
    """
    global _frozen
    if len(sys.modules) > _frozen + 100:
        gc.collect()
        gc.freeze()
        _frozen = len(sys.modules)


def started(count: int, timeout: float, backend: str = "gloo", **options: Any) -> Iterator[Processes]:
    """Yields processes to the tests of a fixture, and stops them after these."""
    processes = Processes(count, timeout, backend, **options)
    yield processes
    processes.stop()


def way_to_start(backend: str) -> Any:
    """Forks of a process that has imported torch start in a hundredth of the time, but CUDA may not survive a fork."""
    if "nccl" in backend:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED_ONCE)
    return context


def _serve(
    rank: int, world_size: int, store: str, timeout: float, backend: str, pipe: Connection, nodes: int,
    enter: Callable[[int], None] | None,
) -> None:  # fmt: skip
    """Main loop of a process: returns (result, error, traceback) of each body, until one raises or the pipe closes."""
    freeze_modules()
    if enter is not None:
        enter(rank)
    torch.set_num_threads(1)
    device = None
    if "nccl" in backend:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if nodes > 1:
            # imports kernels, which `TRITON_INTERPRET` decides about
            from cp_dtensor.tools.ranks import stand_for_nodes

            os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
            stand_for_nodes(nodes)
        elif world_size > torch.cuda.device_count():
            backend, os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "gloo", "1"
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device if "nccl" in backend else None,
    )
    dist.barrier()
    pipe.send((None, None, ""))
    with poisoned_empty():
        while True:
            freeze_modules()  # those that the last body imported
            try:
                body, args = pipe.recv()
            except EOFError:
                return
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    # torch's warning of the first matrix product in an autograd thread
                    warnings.filterwarnings("ignore", "Attempting to run cuBLAS")
                    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")  # torch 2.15
                    warnings.filterwarnings("ignore", ".*torch.jit.script")  # torch's own code: Inductor, forward mode
                    # torch's no_grad of a generator that raises, from Python 3.12 on
                    warnings.filterwarnings("ignore", r"the \(type, exc, tb\) signature of throw", DeprecationWarning)
                    result = body(rank, *args)
            except BaseException as error:  # raised by `run`
                pipe.send((None, _picklable(error), traceback.format_exc()))
                return  # connections close, so that ranks that wait for this one raise as well
            pipe.send((result, None, ""))


def _picklable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
