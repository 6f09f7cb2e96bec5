"""What is kept of what has been made: the latest, and for good what a capture of a CUDA graph asks for or makes."""

import gc
import weakref
from unittest import mock

from cp_dtensor._torch import cache as kept_values
from cp_dtensor._torch.cache import LRUCache


class Value:
    pass


def test_the_latest_are_kept_and_the_first_that_comes_counts() -> None:
    kept = LRUCache[Value](most=2)
    one, two = kept.add(1, Value()), kept.add(2, Value())
    assert kept.add(1, Value()) is one
    assert kept.get(1) is one
    kept.add(3, Value())
    assert kept.get(2) is None  # asked for longest ago
    assert kept.get(1) is one
    assert kept.add(2, Value()) is not two


def test_what_captures_read_stays_also_if_its_key_has_another_value_since() -> None:
    kept = LRUCache[Value](most=1)
    alive = []
    for captured in (True, True, False):
        kept.add(0, Value())  # the key below has no value any more
        made = kept.add(1, Value())
        with mock.patch.object(kept_values, "capturing", lambda captured=captured: captured):
            assert kept.get(1) is made
        alive.append(weakref.ref(made))
        del made
    kept.add(0, Value())
    gc.collect()
    assert [value() is not None for value in alive] == [True, True, False]
