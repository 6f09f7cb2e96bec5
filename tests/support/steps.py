"""Errors injected at a step of one thread's attention call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


class Injected(Exception):
    """An error of a test."""


class Steps(threading.local):
    """Counter of the steps of the current thread's call, of which one may do something else before."""

    def __init__(self) -> None:
        self.count = 0
        self._number, self._act = -1, raise_injected

    def step(self) -> None:
        if self.count == self._number:
            self._act()
        self.count += 1

    @contextmanager
    def counted(self, *functions: tuple[Any, str]) -> Iterator[None]:
        """Context in which calls of functions `owner.name` are steps, in all threads."""

        def counting(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.step()
                return original(*args, **kwargs)

            return call

        with ExitStack() as stack:
            for owner, name in functions:
                stack.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name))))
            yield

    @contextmanager
    def acting_at(self, number: int, act: Callable[[], object]) -> Iterator[None]:
        """Context in which this thread calls `act` before a step. The first is 0."""
        self.count, self._number, self._act = 0, number, act
        try:
            yield
        finally:
            self._number = -1


def raise_injected() -> None:
    raise Injected
