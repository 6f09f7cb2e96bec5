"""Errors of calls whose peers did not take part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cp_dtensor._torch import group_store

ROLL_CALL_SECONDS = 5.0
"""Time in which every rank that lives notices that an exchange has failed."""


class PeerError(RuntimeError):
    """A rank did not take part in an exchange before the process group's timeout, or its process ended.

    The group cannot be used any more: destroy it, and make another one of the ranks that are left.
    """


def raise_peer_error(error: RuntimeError, group: dist.ProcessGroup, what: str) -> NoReturn:
    """Raises the error of a collective as a `PeerError` that names the ranks that did not come.

    Args:
        error: the error that torch raised; `PeerError` and `torch.OutOfMemoryError` are raised again as they are.
        group: the group of the collective.
        what: the exchange, such as "an exchange of K/V".
    """
    if isinstance(error, (PeerError, torch.OutOfMemoryError)):
        raise error
    missing = roll_call(group, ROLL_CALL_SECONDS)
    if missing is None:
        cause = "the store of the group does not answer, so the process that holds it may have ended"
    elif missing:
        cause = f"it waited for {named(missing, dist.get_process_group_ranks(group))}"
    else:
        cause = "it failed on every rank, so one of them was late or a connection was lost"
    reported = (str(error).splitlines() or [repr(error)])[0]
    raise PeerError(
        f"{what} failed on rank {group.rank()} of {described(group)}: {cause}. Torch reported: {reported}"
    ) from error


def described(group: dist.ProcessGroup) -> str:
    """Describes a group by its name and its global ranks."""
    name = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    return f"process group {name!r} (global ranks {dist.get_process_group_ranks(group)})"


def named(ranks_of_group: Sequence[int], members: Sequence[int]) -> str:
    """Names ranks of a group whose global ranks are `members`, and what may have happened to them.

    >>> named([1], members=[4, 6])
    'rank 1 (global rank 6), whose process ended, raised an error, skipped a call or is late'
    """
    ranks = ", ".join(f"rank {rank} (global rank {members[rank]})" for rank in ranks_of_group)
    return f"{ranks}, whose process ended, raised an error, skipped a call or is late"


def roll_call(group: dist.ProcessGroup, seconds: float) -> list[int] | None:
    """The ranks of the group that do not report the same failure within `seconds`.

    Returns None if the group's store does not answer. A group fails once: its keys in the store are never removed.
    """
    try:
        store: Any = group_store(group)
        keys = [f"cp_dtensor/failed/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], "")
        end = time.monotonic() + seconds
        while True:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(0.05)
    except (RuntimeError, OSError, KeyError):  # also of groups that torch does not know by now
        return None
