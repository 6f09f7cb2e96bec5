"""State of the current thread that follows a backward to the threads in which autograd runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_plain = threading.local()
_of_main_thread: dict[str, Any] = {}
_MARK = "cp_dtensor.follows_main_thread"


def get_thread_state(key: str) -> Any:
    """The object stored under `key` in this thread, or, in autograd's own threads, in the main thread."""
    value = getattr(_plain, key, None)
    if value is None and torch._C._is_key_in_tls(_MARK):
        value = _of_main_thread.get(key)
    return value


@contextmanager
def thread_state(key: str, value: Any) -> Iterator[None]:
    """Stores an object for `get_thread_state` while open.

    Of what autograd carries over from thread to thread only a mark is used, and only in the main thread: such state
    cannot be removed from a thread again, a thread that ends with some of it while the interpreter shuts down aborts
    the process, and torch 2.11 loses a reference to an object that is replaced.
    """
    if in_main_thread():
        if not torch._C._is_key_in_tls(_MARK):
            torch._C._stash_obj_in_tls(_MARK, True)
        before = _of_main_thread.get(key)
        _of_main_thread[key] = value
        try:
            yield
        finally:
            _of_main_thread[key] = before
    else:
        before = getattr(_plain, key, None)
        setattr(_plain, key, value)
        try:
            yield
        finally:
            setattr(_plain, key, before)


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
