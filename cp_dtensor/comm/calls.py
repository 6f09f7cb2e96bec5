"""Calls of a process group, counted on each rank, so that ranks that make different calls find out.

Each pass of a call, and each end of a context, adds a number to a rolling hash. A rank writes its latest hashes to the
store of the group, and then looks at what the others have written. So of two ranks that are at different calls, the
later one sees the other. A collective could not compare them: it would meet another exchange on a rank that has
skipped a call.

A write takes 2 us, since the store does not answer it; a look takes 50 us or more. Passes of CPU tensors do both before
they exchange anything, since gloo aborts a process that receives more than it expects. For CUDA tensors, a rank writes
and looks at the end of a step, and looks for at most 1% of its time. With `debug=True`, every pass does both, and a
rank waits for the others, so that all of them see a difference.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import torch.distributed as dist
from torch import Tensor

from cp_dtensor._torch import current_backward, group_store
from cp_dtensor._torch.cache import GroupCache, capturing
from cp_dtensor.comm import faults
from cp_dtensor.comm.groups import SequenceRanks

_KEPT = 256
"""Latest events whose hashes other ranks can compare; the first difference is named if it is among them."""
_WAITS_PER_LOOK = 100
"""Time between two looks at the ends of steps, in times of a look."""
_FACTOR, _WORD = 1000003, 0xFFFFFFFF


@dataclass(frozen=True)
class Signature:
    """The facts of a call that are equal on all ranks, in words and as a number."""

    text: str
    number: int = field(init=False)
    """Even and below 2^30; the odd number after it is that of backward."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", 2 + 2 * (crc32(self.text.encode()) >> 4))
        if len(self.text) > 300:  # documents of a batch may be thousands
            object.__setattr__(self, "text", f"{self.text[:260]} ... {self.text[-35:]}")


COMPARISON = Signature("a call that ranks compare first")
END_OF_CONTEXT = Signature("the end of a context")


class Calls:
    """The calls of a group on this rank."""

    nbytes = 0
    """Caches of plans refer to it, and do not count its bytes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.number = 1
        """That of the present pass: of its signature and direction."""
        self._count = self._rolled = 0
        """Events, and their rolling hash."""
        self._hashes: list[int] = []
        """The rolling hash after each of the latest events."""
        self._events: list[tuple[int, str]] = []
        """Number and text of each of them."""
        self._failure: faults.PeerError | None = None
        self._has_run_backward, self._all_have_written, self._next_look = False, False, 0.0
        self._rank, self._described, self._keys = group.rank(), faults.described(group), list[str]()
        # None for ranks that are not real, and once a CUDA graph may replay calls.
        self._store: Any = None if dist.get_backend(group) == "fake" else group_store(group)
        if self._store is not None:
            # A store may outlive a group, and serve another one of the same name.
            session = self._store.add(f"cp_dtensor/calls/{self._rank}", 1)
            self._keys = [f"cp_dtensor/calls/{rank}/{session}" for rank in range(group.size())]

    @property
    def texts(self) -> dict[int, str]:
        """The latest events in words, by number."""
        texts = {number: f"{'backward' if number % 2 else 'forward'} of {text}" for number, text in self._events}
        return {**texts, END_OF_CONTEXT.number: END_OF_CONTEXT.text}

    def begin(
        self, signature: Signature, *, backward: bool = False, ends_step: bool = False, on_cpu: bool = False,
        debug: bool = False,
    ) -> None:  # fmt: skip
        """Count a pass that begins, or the end of a context.

        Args:
            ends_step: True for the end of a context. A forward after a backward begins a step, too.
            on_cpu: True for a pass of CPU tensors: the ranks compare their calls now.
            debug: True to compare now, and to wait until the other ranks have counted as much.

        Raises:
            PeerError: the ranks have made different calls.
        """
        if self._failure is not None:
            raise faults.PeerError(str(self._failure)) from self._failure
        if backward:
            self._has_run_backward = True
        elif self._has_run_backward and current_backward() is None:  # else a checkpoint is recomputed
            self._has_run_backward, ends_step = False, True
        if not on_cpu and self._store is not None and capturing():
            self._store = None  # replays of the graph are not counted, and other ranks may not make one
        self.number = signature.number + backward
        self._count += 1
        self._rolled = (self._rolled * _FACTOR + self.number) & _WORD
        self._hashes.append(self._rolled)
        self._events.append((self.number, signature.text))
        if len(self._hashes) == 2 * _KEPT:
            del self._hashes[:_KEPT], self._events[:_KEPT]
        if on_cpu or debug or ends_step:
            self.compare(now=on_cpu or debug, waits=debug)

    def compare(self, now: bool = True, waits: bool = False) -> None:
        """Write this rank's hashes for the others; compare them with those that the others have written by then.

        Args:
            now: False to look at those of others only if the latest look is long ago.
            waits: True to wait for ranks that have counted less.

        Raises:
            PeerError: the ranks have made different calls.
        """
        if self._store is None or self._failure is not None:
            return
        begin = time.monotonic()
        try:
            record = self._count.to_bytes(8, "little") + array("I", self._hashes[-_KEPT:]).tobytes()
            self._store.set(self._keys[self._rank], record)
            if begin < self._next_look and not now:
                return
            latest, differs = self._look()
            # A rank that comes later than that sees this one.
            while waits and not differs and time.monotonic() < begin + faults.REPORT_SECONDS:
                if latest and self._count <= min(count for count, _ in latest):
                    break
                time.sleep(0.001)
                latest, differs = self._look()
        except (RuntimeError, OSError):  # the process of the store has ended, which the next exchange reports
            self._store = None
            return
        self._next_look = begin + _WAITS_PER_LOOK * (time.monotonic() - begin)
        if differs:
            self._failure = self._error(latest)
            raise faults.PeerError(str(self._failure))

    def _look(self) -> tuple[list[tuple[int, array[int]]], bool]:
        """Return count and latest hashes of each rank, if all have written; and whether one has made other calls."""
        latest: list[tuple[int, array[int]]] = []
        self._all_have_written = self._all_have_written or self._store.check(self._keys)
        differs = False
        for record in self._store.multi_get(self._keys) if self._all_have_written else ():
            count, hashes = int.from_bytes(record[:8], "little"), array("I", record[8:])
            latest.append((count, hashes))
            last = min(count, self._count) - 1  # hashes are of all events up to theirs
            if last >= max(count - len(hashes), self._count - len(self._hashes)):
                differs = differs or hashes[last - count] != self._hashes[last - self._count]
        return latest, differs

    def _first_difference(self, count: int, hashes: array[int]) -> int:
        """Return the first event that differs on a rank with these latest hashes; this rank's next one if none does."""
        for place in range(max(count - len(hashes), self._count - len(self._hashes)), min(count, self._count)):
            if self._hashes[place - self._count] != hashes[place - count]:
                return place
        return self._count

    def _error(self, latest: list[tuple[int, array[int]]]) -> faults.PeerError:
        """Return the error of different calls, given the count and the hashes of every rank."""
        place = min(self._first_difference(*of_rank) for of_rank in latest)
        index = place - self._count + len(self._hashes)
        before = self._hashes[index - 1] if index else 0  # so that a hash tells the number of its event
        by_text: dict[str, list[str]] = {}
        for rank, (count, hashes) in enumerate(latest):
            if count - len(hashes) <= place < count:
                number = (hashes[place - count] - before * _FACTOR) & _WORD
                begins_here = place == 0 or (index and place > count - len(hashes))
                text = self.texts.get(number, "another call") if begins_here else "different ones before it"
                by_text.setdefault(text, []).append(str(rank))
        found = "; ".join(f"rank {', '.join(ranks)}: {text}" for text, ranks in by_text.items())
        numbers = [number for number, _ in self._events[:index]][::-1]
        has_end = END_OF_CONTEXT.number in numbers
        of_step = numbers[: numbers.index(END_OF_CONTEXT.number)] if has_end else numbers
        passes = sum(number % 2 == 0 and number != COMPARISON.number for number in of_step)
        since = "since the end of a context" if has_end else "of the group"
        consequence = "" if place == self._count - 1 else " Results since then are wrong."
        return faults.PeerError(
            f"the ranks of {self._described} make different calls. After {passes} forward passes {since}, the next is "
            f"different: {found}.{consequence} Does a layer run on some ranks only?"
        )


_calls = GroupCache[Calls]()


def counted_calls(group: dist.ProcessGroup) -> Calls | None:
    """Return the calls of a group on this rank; None if none was counted."""
    return _calls.get(group, None, partial(Calls, group)) if _calls.has(group, None) else None


def calls_of(ranks: SequenceRanks) -> tuple[Calls, ...]:
    """Return the calls of the groups of some ranks, on this rank; () for a rank that is alone."""
    groups = () if ranks.size == 1 else ranks.groups
    return tuple([_calls.get(group, None, partial(Calls, group)) for group in groups])


def begin_pass(
    ranks: SequenceRanks, signature: Signature, x: Tensor, *, backward: bool = False, debug: bool = False
) -> None:
    """Count a pass of some ranks before it exchanges anything; `x` is a tensor of the pass.

    Raises:
        PeerError: the ranks have made different calls.
    """
    for calls in calls_of(ranks):
        calls.begin(signature, backward=backward, on_cpu=not x.is_cuda, debug=debug)
