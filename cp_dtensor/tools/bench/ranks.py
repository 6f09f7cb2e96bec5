"""Exchange of values and failures between the ranks' host processes, through a store and not through the devices.

A rank that waits here keeps its device idle, and learns of another rank's failure before it waits for a collective
that the other rank never joined.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
_TIMEOUT = timedelta(minutes=60)  # one GPU takes long for a sequence that is made for many
_LONGEST_MESSAGE = 300


class Failed(Exception):
    """A rank raised an exception; every rank raises this one.

    Args:
        message: type and first line of the error; of each rank's error if they differ.
        alike: True if all ranks that took part raised the same error. If not, some ranks have launched collectives that
            others never joined, or have waited for them in vain: the process group is lost.
    """

    def __init__(self, message: str, alike: bool) -> None:
        super().__init__(message)
        self.alike = alike


class Ranks:
    """This rank, and its exchange of values with the other ranks.

    Args:
        store: shared by all ranks.
        rank: rank of this process.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._round = 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in rank order. Waits on the host; values must be picklable."""
        self._round += 1
        self._store.set(self._key(self._round, self.rank), base64.b64encode(pickle.dumps(value)).decode())
        keys = [self._key(self._round, rank) for rank in range(self.world_size)]
        self._store.wait(keys, _TIMEOUT)
        values = [pickle.loads(base64.b64decode(self._store.get(key))) for key in keys]
        # All ranks are in this round, so all ranks have read the values of the round before.
        self._store.delete_key(self._key(self._round - 1, self.rank))
        return values

    def together(self, function: Callable[[], T], taking_part: bool = True) -> list[T]:
        """Calls a function on the ranks that take part, waits for all, and returns the results in rank order.

        Raises:
            Failed: on every rank, also on ranks that do not take part, if the function raised on any rank.
        """
        value, error = None, None
        if taking_part:
            try:
                value = function()
            except Exception as caught:
                error = first_line(caught)
        answers = [answer for answer in self.gather((taking_part, value, error)) if answer[0]]
        errors = [error for _, _, error in answers]
        failed = {rank: error for rank, error in enumerate(errors) if error is not None}
        if failed:
            if len({None if error is None else _kind(error) for error in errors}) == 1:
                raise Failed(failed[min(failed)], alike=True)
            raise Failed("; ".join(f"rank {rank}: {error}" for rank, error in failed.items()), alike=False)
        return [value for _, value, _ in answers]

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"bench/{number}/{rank}"


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_LONGEST_MESSAGE]


def _kind(error: str) -> str:
    """Returns the beginning of an error message without digits: equal for errors with one cause on several ranks."""
    return "".join(letter for letter in error if not letter.isdigit())[:50]
