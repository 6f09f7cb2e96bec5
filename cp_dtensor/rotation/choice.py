"""The rotations that a caller can name, and the default of the process."""

from __future__ import annotations

from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.alltoall import AllToAll
from cp_dtensor.rotation.base import Rotation

ROTATIONS: dict[str, Rotation] = {rotation.name: rotation for rotation in (AllGather(), AllToAll())}


class _ProcessDefault:
    """The one mutable setting of the library."""

    def __init__(self) -> None:
        self.name = "allgather"


_process_default = _ProcessDefault()


def rotation_by_name(name: str | None) -> Rotation:
    """The rotation called `name`; None means the default of the process.

    Raises:
        ValueError: no rotation is called so.
    """
    if name is None:
        name = _process_default.name
    if not isinstance(name, str) or name not in ROTATIONS:
        choices = ", ".join(repr(choice) for choice in ROTATIONS)
        raise ValueError(f"unknown rotate method: got {name!r}, expected one of {choices}")
    return ROTATIONS[name]


def set_rotate_method(rotate_method: str) -> None:
    """Sets how K/V travel by default in this process; every call and context may override it.

    Args:
        rotate_method: "allgather" (all K/V once, few large attention calls, memory grows with the number of ranks)
            or "alltoall" (a ring: memory of two shards, one attention step per rank).

    Raises:
        ValueError: anything else.
    """
    if rotate_method is None:
        raise ValueError("unknown rotate method: got None, expected one of " + ", ".join(map(repr, ROTATIONS)))
    _process_default.name = rotation_by_name(rotate_method).name
