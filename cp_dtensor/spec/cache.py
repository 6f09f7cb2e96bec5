"""LRU cache bounded by bytes, and a decorator for functions of masks, layouts and lengths.

Packed documents are new with every batch, and what is derived from them (intervals, tiles, plans, tables on devices)
takes megabytes for thousands of documents. Caches that count entries would keep all of it.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

V = TypeVar("V")
P = ParamSpec("P")

MOST_BYTES = 16 << 20
"""Bytes of a cache. A batch of 20,000 documents takes 1 to 6 MiB in each."""


class LRUCache(Generic[V]):
    """LRU cache that drops the least recently used entries while all take more than `most_bytes`.

    The size of an entry is that of key and value by `estimated_bytes`, when it is added and again when the next one is,
    since values may compute parts of themselves at first use. Objects that entries share count in each of them.

    Args:
        most_bytes: bytes of all entries together.
        least: entries that stay however large they are: the masks of a model's layers take turns.
        pins: entries that are used while it returns True stay for ever.

    >>> cache = LRUCache[str](most_bytes=0, least=1)
    >>> cache.add(1, "a"), cache.add(2, "b"), cache.get(1), cache.get(2)
    ('a', 'b', None, 'b')
    """

    def __init__(self, most_bytes: int = MOST_BYTES, *, least: int = 8, pins: Callable[[], bool] | None = None) -> None:
        self._most_bytes, self._least, self._pins = most_bytes, least, pins
        self._lock = threading.RLock()  # an estimate or a hash may end in code that uses the cache
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self._bytes: dict[Hashable, int] = {}
        self._total = 0
        self._newest: Hashable = None
        self._pinned: dict[int, V] = {}  # by identity: a key may have had other values

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Estimated bytes of all entries."""
        return self._total

    def get(self, key: Hashable) -> V | None:
        """The value of a key, None if there is none (any more)."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                if self._pins is not None and self._pins():
                    self._pinned[id(value)] = value
        return value

    def add(self, key: Hashable, value: V) -> V:
        """Adds a value unless another thread has added one for the key; returns the value in the cache."""
        with self._lock:
            value = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            for each in {self._newest, key} & self._entries.keys():
                size = estimated_bytes(each, self._entries[each])
                self._total += size - self._bytes.get(each, 0)
                self._bytes[each] = size
            self._newest = key
            while self._total > self._most_bytes and len(self._entries) > self._least:
                oldest, _ = self._entries.popitem(last=False)
                self._total -= self._bytes.pop(oldest)
            if self._pins is not None and self._pins():
                self._pinned[id(value)] = value
        return value

    def clear(self) -> None:
        """Drops all entries but the pinned ones."""
        with self._lock:
            self._entries.clear()
            self._bytes.clear()
            self._total, self._newest = 0, None


def lru_cached(function: Callable[P, V]) -> Callable[P, V]:
    """Decorator: results come from an `LRUCache` by the arguments, which are hashable. Equal calls get one object."""
    cache = LRUCache[tuple[V]]()

    entries, lock = cache._entries, cache._lock

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> V:
        key = (args, *kwargs.items())
        with lock:  # as `cache.get(key)`, without its frame: such functions are called at every attention call
            found = entries.get(key)
            if found is not None:
                entries.move_to_end(key)
                return found[0]
        return cache.add(key, (function(*args, **kwargs),))[0]

    call.cache_clear = cache.clear  # type: ignore[attr-defined]
    return call


# Sizes

_SAMPLE = 16
"""Entries of a long sequence that are looked at, half of them at its end: these stand for the rest."""


def estimated_bytes(*values: object) -> int:
    """Estimates the bytes of some values and all that they refer to, each object once.

    Tensors count with their elements, objects of this package with their attributes, objects of other packages with
    none. The time does not grow with the lengths of sequences.

    >>> estimated_bytes(tuple(range(1000, 9000))) // 8000  # a reference and an integer each
    36
    """
    seen = set[int]()
    return sum(_bytes_of(each, seen) for each in values)


def _bytes_of(value: Any, seen: set[int]) -> int:
    if value is None or isinstance(value, (bool, type)) or id(value) in seen:
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value, 64)
    if isinstance(value, (int, float, str, bytes)):
        return size
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        entries = list(value.items()) if isinstance(value, dict) else value if isinstance(value, tuple) else list(value)
        ends = entries if len(entries) <= _SAMPLE else (*entries[: _SAMPLE // 2], *entries[-_SAMPLE // 2 :])
        sizes = [_bytes_of(each, seen) for each in ends]
        return size + sum(sizes) + (len(entries) - len(sizes)) * sum(sizes[_SAMPLE // 2 :]) // (_SAMPLE // 2)
    elements = getattr(value, "nbytes", None)
    if isinstance(elements, int):
        return size + elements
    if type(value).__module__.startswith("cp_dtensor."):
        size += sum(_bytes_of(each, seen) for each in list(getattr(value, "__dict__", {}).values()))
    return size
