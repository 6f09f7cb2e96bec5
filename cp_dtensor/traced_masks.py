"""What stands for masks in compiled code: text where they are constants, a number where they are found at run time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Causal, Full, Mask

_MOST_NUMBERS = 4096


class Found(NamedTuple):
    """What a call has found where it ran."""

    mask: Mask
    layout: Layout | None
    """None: that of the recipe."""


class TracedMasks:
    """Masks by their text, as long as the process lives; the latest that were found by number, for their backward."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_token: dict[str, Mask] = {repr(mask): mask for mask in (Full(), Causal())}
        self._numbers: OrderedDict[Found, int] = OrderedDict()
        self._by_number: dict[int, Found] = {}
        self._next = 0

    def token_of(self, mask: Mask) -> str:
        """The text of a mask that code is traced with."""
        token = name = repr(mask)
        with self._lock:
            others = 1
            while self._by_token.setdefault(token, mask) != mask:  # values of somebody's own that look alike
                others += 1
                token = f"{name} #{others}"
        return token

    def of(self, token: str) -> Mask:
        """The mask of a text."""
        if token not in self._by_token:
            raise RuntimeError(f"compiled code wants a mask that this process has not traced yet: {token}")
        return self._by_token[token]

    def number_of(self, found: Found) -> int:
        """A number for what a call has found; good until thousands of others have been found."""
        with self._lock:
            number = self._numbers.get(found)
            if number is None:
                number = self._numbers[found] = self._next
                self._next += 1
                self._by_number[number] = found
                if len(self._numbers) > _MOST_NUMBERS:
                    _, oldest = self._numbers.popitem(last=False)
                    del self._by_number[oldest]
            else:
                self._numbers.move_to_end(found)
        return number

    def of_number(self, number: int) -> Found:
        """What a number stands for."""
        if number not in self._by_number:
            raise RuntimeError(
                f"the mask of a forward pass is no longer known: {_MOST_NUMBERS} others came before its backward"
            )
        return self._by_number[number]


masks = TracedMasks()
