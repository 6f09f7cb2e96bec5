"""Changes to torch that last as long as anybody needs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


class SharedInstallation:
    """Context managers that the first holder enters and the last one exits, in whatever order and thread they come.

    Args:
        parts: makes the context managers, in the order in which they are entered. If one fails, those before it are
            exited and nobody holds anything.
    """

    def __init__(self, parts: Callable[[], Iterable[AbstractContextManager[object]]]) -> None:
        self._parts = parts
        self._lock = threading.RLock()
        self._holders = 0
        self._installed = ExitStack()

    def acquire(self) -> None:
        """Becomes a holder."""
        with self._lock:
            if self._holders == 0:
                with ExitStack() as stack:
                    for part in self._parts():
                        stack.enter_context(part)
                    self._installed = stack.pop_all()
            self._holders += 1

    def release(self) -> None:
        """Ends one holding."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._installed.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds while open."""
        self.acquire()
        try:
            yield
        finally:
            self.release()
