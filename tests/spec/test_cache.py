"""LRU cache: eviction by bytes, values that stay, sizes, and one object for equal calls."""

import gc
import random
import weakref
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch

from cp_dtensor.spec.cache import LRUCache, estimated_bytes, lru_cached
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.masks import Causal


class Value:
    pass


def numbers(count: int, first: int = 1000) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def test_the_latest_stay_and_the_first_value_of_a_key_counts() -> None:
    cache = LRUCache[Value](most_bytes=0, least=2)
    one, two = cache.add(1, Value()), cache.add(2, Value())
    assert cache.add(1, Value()) is one
    assert cache.get(1) is one
    cache.add(3, Value())
    assert cache.get(2) is None  # the least recently used
    assert cache.get(1) is one
    assert cache.add(2, Value()) is not two


def test_entries_are_dropped_by_bytes() -> None:
    cache = LRUCache[object](most_bytes=1 << 20, least=1)
    for index in range(50):  # 36 KiB each
        cache.add(index, numbers(1000, index << 20))
        assert cache.nbytes <= (1 << 20) + 40_000, "all but the newest"
    assert 25 < len(cache) < 31
    assert cache.get(49) is not None
    assert cache.get(0) is None
    cache.add("large", numbers(1 << 16))
    assert cache.get("large") is not None, "the newest"
    assert cache.nbytes > 36 << 16
    cache.add("next", numbers(1))
    assert len(cache) == 1, "an entry that is too large by itself"
    assert cache.get("large") is None
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)
    cache.add(1, numbers(10))
    assert 0 < cache.nbytes < 1000


def test_an_entry_is_measured_once_when_the_next_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []

    def estimated(key: object, value: object) -> int:
        measured.extend([key] if key else [])
        return 100

    monkeypatch.setattr("cp_dtensor.spec.cache.estimated_bytes", estimated)
    cache = LRUCache[str](most_bytes=250, least=1)
    for key in (1, 1, 2, 1, 2, 3, 3):
        cache.add(key, "value")
        assert cache.get(1) == "value"
    assert measured == [1, 2]
    assert (cache.nbytes, len(cache)) == (300, 3)
    cache.add(4, "value")
    assert measured == [1, 2, 3, 3], "for nbytes, too"
    assert len(cache) == 3
    assert cache.get(2) is None, "the least recently used"


def test_many_small_entries_stay() -> None:
    cache = LRUCache[int]()
    for index in range(5000):
        cache.add(index, index + 1)
    assert len(cache) == 5000


def test_values_that_are_used_while_pinned_stay() -> None:
    pinned = False
    cache = LRUCache[Value](most_bytes=0, least=1, pins=lambda: pinned)
    alive = []
    for pinned in (True, True, False):
        made = cache.add(1, Value())
        assert cache.get(1) is made
        alive.append(weakref.ref(made))
        pinned = False
        del made
        cache.add(0, Value())  # evicts key 1
    gc.collect()
    assert [value() is not None for value in alive] == [True, True, False]


@dataclass(eq=False)
class Lazy:
    count: int

    @cached_property
    def found(self) -> tuple[int, ...]:
        return numbers(self.count)


Lazy.__module__ = "cp_dtensor.test"


def test_what_a_value_computes_later_counts_too() -> None:
    cache = LRUCache[Lazy](most_bytes=1 << 20, least=1)
    for index in range(100):
        assert len(cache.add(index, Lazy(1000)).found) == 1000
    assert 25 < len(cache) <= 31


def test_estimates() -> None:
    count = random.randint(5_000, 20_000)
    shared = numbers(count)
    alone = estimated_bytes(shared)
    assert abs(alone / (36 * count) - 1) < 0.02
    assert estimated_bytes(shared, shared) == alone
    assert estimated_bytes(*[(index, shared) for index in range(100)]) < 1.1 * alone + 20_000, "an object counts once"
    assert estimated_bytes([(index, shared) for index in range(1000)]) < 1.1 * alone + 200_000
    assert estimated_bytes(torch.zeros(count, dtype=torch.int32)) >= 4 * count
    cycle: list[object] = []
    cycle.append(cycle)
    assert 0 < estimated_bytes(cycle) < 200
    documents = Documents([0, *numbers(count)], within=Causal())
    assert 0.9 < estimated_bytes(documents) / (36 * count) < 1.2


def test_equal_calls_get_one_object() -> None:
    calls: list[int] = []

    @lru_cached
    def squares(count: int, *, first: int = 0) -> list[int]:
        """Squares."""
        calls.append(count)
        return [n * n for n in range(first, count)]

    assert squares(3) is squares(3)
    assert squares(3, first=1) == [1, 4]
    assert calls == [3, 3]
    assert squares.__doc__ == "Squares."
    squares.cache_clear()  # type: ignore[attr-defined]
    assert squares(3) == [0, 1, 4]
    assert calls == [3, 3, 3]


def test_a_result_may_be_none() -> None:
    calls: list[int] = []
    nothing = lru_cached(lambda number: calls.append(number))
    assert nothing(1) is nothing(1) is None
    assert calls == [1]
