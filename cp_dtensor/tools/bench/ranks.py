"""The ranks as hosts: values and failures exchanged through the store, whatever the devices are doing.

A rank that waits here keeps its device idle, and learns of another rank's failure before it waits for a collective
that the other never joined.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_PATIENCE = timedelta(minutes=60)  # one GPU alone takes long over a sequence that is meant for many
_LONGEST_MESSAGE = 300


class Failed(Exception):
    """Some rank raised; raised on all ranks alike.

    Args:
        message: type and first line of the error; of every rank's where they differ.
        alike: whether all ranks that took part raised the same. If not, some have launched collectives that others
            never joined, or have waited for them in vain: the process group is lost.
    """

    def __init__(self, message: str, alike: bool) -> None:
        super().__init__(message)
        self.alike = alike


class Ranks:
    """This rank and how it talks to the others.

    Args:
        store: shared by all ranks.
        rank: this one.
        world_size: how many.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._round = 0

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, in rank order. Waits on the host; values must survive pickling."""
        self._round += 1
        self._store.set(self._key(self._round, self.rank), base64.b64encode(pickle.dumps(value)).decode())
        keys = [self._key(self._round, rank) for rank in range(self.world_size)]
        self._store.wait(keys, _PATIENCE)
        values = [pickle.loads(base64.b64decode(self._store.get(key))) for key in keys]
        # Everyone is in this round, so everyone has read the one before.
        self._store.delete_key(self._key(self._round - 1, self.rank))
        return values

    def together(self, function: Callable[[], T], taking_part: bool = True) -> list[T]:
        """Calls a function on all ranks that take part and waits for them; results in rank order.

        Raises:
            Failed: the function raised on some rank; on every rank, also those that do not take part.
        """
        value, error = None, None
        if taking_part:
            try:
                value = function()
            except Exception as caught:
                error = first_line(caught)
        everyone = [answer for answer in self.gather((taking_part, value, error)) if answer[0]]
        errors = [error for _, _, error in everyone]
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failed:
            if len({None if error is None else _kind(error) for error in errors}) == 1:
                raise Failed(failed[min(failed)], alike=True)
            raise Failed("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()), alike=False)
        return [value for _, value, _ in everyone]

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"cp_dtensor.tools.bench/{number}/{rank}"


def first_line(error: BaseException) -> str:
    """An error's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_LONGEST_MESSAGE]


def _kind(error: str) -> str:
    """What errors of one cause have in common: how they begin, but for sizes and device numbers."""
    return "".join(letter for letter in error if not letter.isdigit())[:50]
