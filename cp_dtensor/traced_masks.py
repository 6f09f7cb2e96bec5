"""What stands for masks in compiled code: text where they are constants, a number where they are found at run time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple

from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Causal, Full, Mask
from cp_dtensor.tokens import Tokens

_MOST_NUMBERS = 4096


class Found(NamedTuple):
    """What a call has found where it ran."""

    mask: Mask
    layout: Layout | None
    """None: that of the recipe."""


mask_tokens = Tokens[Mask]("a mask,")
for _plain in (Full(), Causal()):  # which code from disk may want first
    mask_tokens.token_of(_plain)


class FoundNumbers:
    """Numbers for the latest that were found, for their backward."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: OrderedDict[Found, int] = OrderedDict()
        self._by_number: dict[int, Found] = {}
        self._next = 0

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

    def of(self, number: int) -> Found:
        """What a number stands for."""
        if number not in self._by_number:
            raise RuntimeError(
                f"the mask of a forward pass is no longer known: {_MOST_NUMBERS} others came before its backward"
            )
        return self._by_number[number]


found_numbers = FoundNumbers()
