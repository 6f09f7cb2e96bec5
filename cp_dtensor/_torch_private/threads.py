"""State of the current thread that follows a backward to the threads in which autograd runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_plain = threading.local()


def get_thread_state(key: str) -> Any:
    """The object stored under `key` in this thread, or, in autograd's own threads, in the main thread."""
    value = getattr(_plain, key, None)
    if value is None and torch._C._is_key_in_tls(key):
        value = torch._C._get_obj_in_tls(key)
    return value


@contextmanager
def thread_state(key: str, value: Any) -> Iterator[None]:
    """Stores an object for `get_thread_state` while open.

    The state that autograd carries over cannot be removed from a thread again, and a thread that ends with some of it
    while the interpreter shuts down aborts the process. So only the main thread uses it; others have plain state.
    """
    before = get_thread_state(key) if in_main_thread() else getattr(_plain, key, None)
    _set(key, value)
    try:
        yield
    finally:
        _set(key, before)


def _set(key: str, value: Any) -> None:
    if in_main_thread():
        torch._C._stash_obj_in_tls(key, value)
    else:
        setattr(_plain, key, value)


def in_main_thread() -> bool:
    """Whether this is the thread that the interpreter started in."""
    return threading.current_thread() is threading.main_thread()


def in_autograd_thread() -> bool:
    """Whether this is a thread of autograd's own (CUDA backwards run there), in the middle of a backward."""
    if torch._C._current_graph_task_id() == -1:
        return False
    return isinstance(threading.current_thread(), threading._DummyThread)
