"""What is made once and wanted again: the latest of it, and for good what CUDA graphs read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

V = TypeVar("V")


def capturing() -> bool:
    """Whether a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class KeptValues(Generic[V]):
    """The latest `most` values, by key; those that a capture asks for or makes stay, since replays read their memory.

    >>> kept = KeptValues[str](most=1)
    >>> kept.add(1, "a"), kept.add(2, "b"), kept.get(1), kept.get(2)
    ('a', 'b', None, 'b')
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._latest: OrderedDict[Hashable, V] = OrderedDict()
        self._captured: dict[int, V] = {}  # by identity: a key may have had other values, which other graphs read

    def get(self, key: Hashable) -> V | None:
        """The value of a key, None if there is none (any more)."""
        with self._lock:
            value = self._latest.get(key)
            if value is not None:
                self._latest.move_to_end(key)
                self._pin(value)
        return value

    def add(self, key: Hashable, value: V) -> V:
        """What is kept by the key from now on: the value, or that of another thread which came first."""
        with self._lock:
            value = self._latest.setdefault(key, value)
            if len(self._latest) > self._most:
                self._latest.popitem(last=False)
            self._pin(value)
        return value

    def _pin(self, value: V) -> None:
        if capturing():
            self._captured[id(value)] = value
