"""Errors of exchanges: peers that did not take part, or made different calls."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from cp_dtensor._torch import group_store

REPORT_SECONDS = 5.0
"""Time after an error for which a rank waits for the reports of others. One that began to wait later by more than that
has not reported yet, and is named as well."""
_OF_CONNECTIONS = re.compile("timed? ?out|connection|transport", re.IGNORECASE)
"""Words in errors of gloo that are not of arguments; NCCL has classes of errors."""


class PeerError(RuntimeError):
    """Ranks made different calls, a rank did not take part in an exchange before the group's timeout, or it ended.

    The group cannot be used any more: destroy it, and make another one of the ranks that are left.
    """


@contextmanager
def peer_errors(group: dist.ProcessGroup, what: str) -> Iterator[None]:
    """Open the context of a collective, whose errors `raise_for_peers` names."""
    try:
        yield
    except RuntimeError as error:
        raise_for_peers(error, group, what)


def raise_for_peers(error: RuntimeError, group: dist.ProcessGroup, what: str) -> NoReturn:
    """Raise a `PeerError` that names the ranks that did not come to a collective, from the error of this rank.

    Wrong arguments, which all ranks report at once, keep torch's error, as do `PeerError` and `torch.OutOfMemoryError`.

    Args:
        error: the error that is handled now.
        group: the group of the collective.
        what: the exchange, such as "an exchange of K/V".
    """
    if isinstance(error, (PeerError, torch.OutOfMemoryError)):
        raise error
    reported = (str(error).splitlines() or [repr(error)])[0]
    reports = reports_of(group, what, REPORT_SECONDS)
    if reports is None:
        cause = "the store of the group does not answer: its process has ended, or the group is destroyed"
    elif missing := [rank for rank in range(group.size()) if rank not in reports]:
        cause = f"it waited for {named(missing, dist.get_process_group_ranks(group))}"
    elif len({*reports.values()}) > 1:
        waited = "; ".join(f"rank {rank} for {each}" for rank, each in sorted(reports.items()))
        cause = f"the ranks waited for different exchanges, as where only some of them have debug=True: {waited}"
    elif isinstance(error, dist.DistError) or _OF_CONNECTIONS.search(reported):
        cause = "it failed on every rank, so one of them was late or a connection was lost"
    else:
        group_store(group).add(_survived(group), 1)
        raise error
    raise PeerError(
        f"{what} failed on rank {group.rank()} of {described(group)}: {cause}. Torch reported: {reported}"
    ) from error


def exchanged(
    rows: torch.Tensor, group: dist.ProcessGroup, what: str,
    sizes: tuple[Sequence[int], Sequence[int]] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Send each rank of a group its rows of a tensor; return the rows that come from each.

    Args:
        rows: (rows, ...), of any dtype: those for rank 0 first, then those for rank 1, and so on, as in the result.
        what: the exchange, for the error, a `PeerError`.
        sizes: numbers of rows to each rank, and from each rank; None for equally many.
    """
    to, come = sizes or (None, None)
    received = rows.new_empty(rows.size(0) if come is None else sum(come), *rows.shape[1:])
    # As bytes: process groups do not support every dtype.
    into, out_of = (x.unsqueeze(-1).flatten(1).view(torch.uint8) for x in (received, rows.contiguous()))
    with peer_errors(group, what):
        dist.all_to_all_single(into, out_of, come, to, group=group)
    return received


def described(group: dist.ProcessGroup) -> str:
    """Describe a group by its name and its global ranks."""
    name = group.group_desc if group.group_desc not in ("", "undefined") else group.group_name
    try:
        ranks = f"global ranks {dist.get_process_group_ranks(group)}"
    except KeyError:
        ranks = "destroyed by this process"
    return f"process group {name!r} ({ranks})"


def named(ranks_of_group: Sequence[int], members: Sequence[int]) -> str:
    """Name ranks of a group whose global ranks are `members`, and what may have happened to them.

    >>> named([1], members=[4, 6])
    'rank 1 (global rank 6), whose process ended, raised an error, skipped a call or is late'
    """
    if not ranks_of_group:
        return "ranks that the device did not name in time"
    ranks = ", ".join(f"rank {rank} (global rank {members[rank]})" for rank in ranks_of_group)
    return f"{ranks}, whose process ended, raised an error, skipped a call or is late"


def _survived(group: dist.ProcessGroup) -> str:
    """Return the key of the number of wrong arguments that this rank has survived; other ranks count theirs."""
    return f"cp_dtensor/survived/{group.rank()}"


def reports_of(group: dist.ProcessGroup, what: str, seconds: float) -> dict[int, str] | None:
    """Report that an exchange, `what`, has failed on this rank; what has failed on the ranks that report in time.

    Reports are in the group's store; None if that does not answer. A group fails once, so its keys are never removed;
    wrong arguments, which all ranks report and survive, are counted, and later errors have other keys.
    """
    try:
        store: Any = group_store(group)
        survived = store.add(_survived(group), 0)
        keys = [f"cp_dtensor/failed/{survived}/{rank}" for rank in range(group.size())]
        store.set(keys[group.rank()], what)
        end = time.monotonic() + seconds
        while True:
            found = {rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])}
            if len(found) == len(keys) or time.monotonic() > end:
                return found
            time.sleep(0.05)
    except (RuntimeError, OSError, KeyError):  # also of groups that torch does not know by now
        return None
