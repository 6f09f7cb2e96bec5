"""Text that stands for values in compiled code, which holds constants and may be kept on disk."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

V = TypeVar("V")


class Tokens(Generic[V]):
    """Values by their `repr`, the same in every process, as long as this one lives.

    >>> tokens = Tokens[float]("numbers")
    >>> tokens.of(tokens.token_of(1.5))
    1.5
    """

    def __init__(self, what: str, prefix: str = "") -> None:
        self._what = what  # the values are, in messages
        self._prefix = prefix
        self._lock = threading.Lock()
        self._by_token: dict[str, V] = {}

    def token_of(self, value: V) -> str:
        """What stands for a value."""
        token = name = f"{self._prefix}{value!r}"
        with self._lock:
            others = 1
            while self._by_token.setdefault(token, value) != value:  # values of somebody's own that look alike
                others += 1
                token = f"{name} #{others}"
        return token

    def of(self, token: str) -> V:
        """What the token stands for."""
        if token not in self._by_token:
            raise RuntimeError(
                f"compiled code wants {self._what} {token}, which this process has not traced yet: it came from "
                "another one, by a way that skips tracing"
            )
        return self._by_token[token]
