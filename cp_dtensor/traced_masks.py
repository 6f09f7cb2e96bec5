"""What stands for masks in compiled code: text where they are constants, a number where they are found at run time."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import NamedTuple

from cp_dtensor import _torch_private
from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Causal, Full, Mask
from cp_dtensor.tokens import Tokens

_MOST_NUMBERS = 4096
_NOT_IN_BACKWARD = -1


class Ambient(NamedTuple):
    """What a call finds in the region that it runs in."""

    mask: Mask | None
    layout: Layout
    lengths: tuple[int, ...] | None
    """Global lengths that are known there."""


class Found(NamedTuple):
    """What a call has found where it ran."""

    mask: Mask
    layout: Layout | None
    """None: that of the recipe."""
    ambient: Ambient | None = None
    """What of it is the region's, if anything."""
    rows: int = 1
    """Batch rows that the tokens of the call's one row are of, one after the other."""


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


class Outstanding:
    """Of which regions there are forward passes whose backward has not come, by what is theirs of a mask.

    Compiled code that computes attention again in a backward is not told for which forward pass: if all that are
    outstanding were of one kind of region, it is known nevertheless.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: Counter[Ambient] = Counter()

    def begin(self, found: Found, needs_backward: bool) -> int:
        """A forward pass whose backward may come; not counted if it is a recompute, in the backward of one.

        Returns:
            which backward that is, to be told to `end`.
        """
        running = _torch_private.current_backward()
        if running is not None:
            return running
        if found.ambient is not None and needs_backward:
            with self._lock:
                self._passes[found.ambient] += 1
        return _NOT_IN_BACKWARD

    def end(self, found: Found, begun_in: int) -> None:
        """Its backward has come, and may keep its graph for another one."""
        # A reentrant checkpoint recomputes in one backward, begins another, and has run forward without gradients.
        is_reentrant = begun_in not in (_NOT_IN_BACKWARD, _torch_private.current_backward())
        ambient = found.ambient
        if ambient is None or is_reentrant or _torch_private.backward_may_come_again():
            return
        with self._lock:
            if self._passes[ambient] <= 1:
                del self._passes[ambient]
            else:
                self._passes[ambient] -= 1

    def only(self) -> Ambient | None:
        """What all that are outstanding have in common; None if there are several kinds, or none."""
        with self._lock:
            return next(iter(self._passes)) if len(self._passes) == 1 else None


found_numbers = FoundNumbers()
outstanding = Outstanding()
