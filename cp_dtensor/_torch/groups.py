"""Process groups by name, as compiled code refers to them."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


def name_of_group(group: dist.ProcessGroup) -> str:
    """The name under which torch knows a group, the same in every process of the program.

    Raises:
        ValueError: a group that torch does not know.
    """
    name: str = group.group_name
    try:
        group_of_name(name)  # Dynamo may have given us a stand-in for the group, which has its name
    except (RuntimeError, LookupError) as error:
        raise ValueError(
            f"expected a group that torch.distributed has made, got one that it does not know as {name!r}"
        ) from error
    return name


def group_of_name(name: str) -> dist.ProcessGroup:
    """The group of that name that this thread's rank is part of."""
    resolve: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]
    return resolve(name)
