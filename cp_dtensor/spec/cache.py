"""LRU cache bounded by bytes, and a decorator for functions of masks, layouts and lengths.

Packed documents are new with every batch, and what is derived from them (intervals, tiles, plans, tables on devices)
takes megabytes for thousands of documents. Caches that count entries would keep all of it.
"""

from __future__ import annotations

import gc
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

    The size of an entry is that of key and value by `estimated_bytes` when the next one is added, since values may
    compute parts of themselves at first use. The newest stays however large it is. Objects that entries share count in
    each of them.

    Args:
        most_bytes: bytes of all entries together, but for the newest.
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
        with self._lock:
            return self._total + self._newest_bytes()

    def get(self, key: Hashable) -> V | None:
        """Return the value of a key, None if there is none (any more)."""
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
                if self._pins is not None and self._pins():
                    self._pinned[id(value)] = value
        return value

    def add(self, key: Hashable, value: V) -> V:
        """Add a value unless another thread has added one for the key; return the value in the cache."""
        with self._lock:
            if key not in self._entries:
                newest, size = self._newest, self._newest_bytes()
                if newest in self._entries:
                    self._total += size - self._bytes.get(newest, 0)
                    self._bytes[newest] = size
                self._newest = key
            value = self._entries.setdefault(key, value)
            self._entries.move_to_end(key)
            while self._total > self._most_bytes and len(self._entries) > self._least:
                oldest, _ = self._entries.popitem(last=False)
                self._total -= self._bytes.pop(oldest)
            if self._pins is not None and self._pins():
                self._pinned[id(value)] = value
        return value

    def clear(self) -> None:
        """Drop all entries but the pinned ones."""
        with self._lock:
            self._entries.clear()
            self._bytes.clear()
            self._total, self._newest = 0, None

    def _newest_bytes(self) -> int:
        return estimated_bytes(self._newest, self._entries.get(self._newest))


def lru_cached(function: Callable[P, V]) -> Callable[P, V]:
    """Decorate a function: results come from an `LRUCache` by the hashable arguments. Equal calls get one object."""
    cache = LRUCache[tuple[V]]()

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> V:
        key = (args, *kwargs.items())
        return (cache.get(key) or cache.add(key, (function(*args, **kwargs),)))[0]

    call.cache_clear = cache.clear  # type: ignore[attr-defined]
    return call


# Sizes

_ENDS = 8
"""Entries of a long sequence that are looked at, at its beginning and at its end; the latter stand for the rest."""
_INTEGER_BYTES = sys.getsizeof(1 << 20)


def estimated_bytes(*values: object) -> int:
    """Estimate the bytes of some values and all that they refer to, each object once, but for integers.

    Tensors count with their elements, objects of this package with their attributes, objects of other packages with
    none. The time does not grow with the lengths of sequences.

    >>> estimated_bytes(tuple(range(1000, 9000))) // 8000  # a reference and an integer each
    36
    """
    size, seen = 0.0, set[int]()
    found = [(1.0, values)]
    for times, entries in found:  # each entry counts so often; grows by what entries refer to
        for value in entries:
            if type(value) is int:
                size += times * _INTEGER_BYTES
            elif not (value is None or id(value) in seen or isinstance(value, type)):
                seen.add(id(value))
                size += times * sys.getsizeof(value, 64)
                if isinstance(value, dict):
                    found += _weighted(times, tuple(value)) + _weighted(times, tuple(value.values()))
                elif isinstance(value, (tuple, list, set, frozenset)):
                    found += _weighted(times, tuple(value))
                elif isinstance(elements := getattr(value, "nbytes", None), int):
                    size += times * elements
                elif type(value).__module__.startswith("cp_dtensor."):
                    found.append((times, tuple(gc.get_referents(value))))
    return int(size)


def _weighted(times: float, entries: tuple[Any, ...]) -> list[tuple[float, tuple[Any, ...]]]:
    """Return entries that count `times` times; of many the first, and the last for all others."""
    if len(entries) <= 2 * _ENDS:
        return [(times, entries)]
    return [(times, entries[:_ENDS]), (times * (len(entries) / _ENDS - 1), entries[-_ENDS:])]
