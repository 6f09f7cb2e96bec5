"""LRU cache: eviction, and values pinned by the capture of a CUDA graph."""

import gc
import weakref
from unittest import mock

from cp_dtensor._torch import cache as caches
from cp_dtensor._torch.cache import LRUCache


class Value:
    pass


def test_the_latest_stay_and_the_first_value_of_a_key_counts() -> None:
    cache = LRUCache[Value](most=2)
    one, two = cache.add(1, Value()), cache.add(2, Value())
    assert cache.add(1, Value()) is one
    assert cache.get(1) is one
    cache.add(3, Value())
    assert cache.get(2) is None  # the least recently used
    assert cache.get(1) is one
    assert cache.add(2, Value()) is not two


def test_values_of_captures_stay_after_eviction() -> None:
    cache = LRUCache[Value](most=1)
    alive = []
    for captured in (True, True, False):
        cache.add(0, Value())  # evicts the key below
        made = cache.add(1, Value())
        with mock.patch.object(caches, "capturing", lambda captured=captured: captured):
            assert cache.get(1) is made
        alive.append(weakref.ref(made))
        del made
    cache.add(0, Value())
    gc.collect()
    assert [value() is not None for value in alive] == [True, True, False]
