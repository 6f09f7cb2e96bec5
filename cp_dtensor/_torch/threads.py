"""State of the current thread that follows a backward to the threads in which autograd runs it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_Stack = tuple[Any, ...]
_plain = threading.local()
_of_main_thread: dict[str, _Stack] = {}
_MARK = "cp_dtensor.follows_main_thread"


def get_thread_state(key: str) -> Any:
    """The object stored last under `key` in this thread, or, in autograd's own threads, in the main thread."""
    values: _Stack = getattr(_plain, key, ())
    if not values and torch._C._is_key_in_tls(_MARK):
        values = _of_main_thread.get(key, ())
    return values[-1] if values else None


@contextmanager
def thread_state(key: str, value: Any) -> Iterator[None]:
    """Stores an object for `get_thread_state` while open; takes back this one alone.

    What is not left in the reverse order of entering it, such as a generator that somebody has dropped, leaves the
    states that others have entered since as they are.

    Of what autograd carries over from thread to thread only a mark is used, and only in the main thread: such state
    cannot be removed from a thread again, a thread that ends with some of it while the interpreter shuts down aborts
    the process, and torch 2.11 loses a reference to an object that is replaced.
    """
    if in_main_thread():
        if not torch._C._is_key_in_tls(_MARK):
            torch._C._stash_obj_in_tls(_MARK, True)
        stacks = _of_main_thread
    else:
        stacks = vars(_plain)  # of this thread
    stacks[key] = (*stacks.get(key, ()), value)
    try:
        yield
    finally:
        stacks[key] = _without_last(stacks.get(key, ()), value)


def _without_last(values: _Stack, value: Any) -> _Stack:
    place = max((index for index, each in enumerate(values) if each is value), default=len(values))
    return values[:place] + values[place + 1 :]


def _forget() -> None:
    _of_main_thread.clear()
    vars(_plain).clear()


if hasattr(os, "register_at_fork"):  # a forked process, such as a DataLoader's worker, has nobody to talk to
    os.register_at_fork(after_in_child=_forget)


def current_backward() -> int | None:
    """Identifies the backward that is running in this thread, None outside of any."""
    identity = torch._C._current_graph_task_id()
    return None if identity == -1 else identity


def backward_may_come_again() -> bool:
    """Whether the backward that is running in this thread keeps its graph for another one (`retain_graph=True`)."""
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return current_backward() is not None and keeps


def in_main_thread() -> bool:
    """Whether this is the thread that the interpreter started in."""
    return threading.current_thread() is threading.main_thread()


def in_autograd_thread() -> bool:
    """Whether this is a thread of autograd's own (CUDA backwards run there), in the middle of a backward."""
    if current_backward() is None:
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)
