"""The rotations that a caller can name, and the default of the process."""

from __future__ import annotations

import torch
import torch.distributed as dist

from cp_dtensor.rotation.allgather import AllGather
from cp_dtensor.rotation.alltoall import AllToAll
from cp_dtensor.rotation.auto import Auto
from cp_dtensor.rotation.base import Rotation, RotationMethod
from cp_dtensor.rotation.symm_mem import SymmetricMemory
from cp_dtensor.rotation.workspace import why_unshared

ROTATIONS: dict[str, Rotation] = {
    rotation.name: rotation for rotation in (AllGather(), AllToAll(), SymmetricMemory())
}  # fmt: skip
ROTATE_METHODS: dict[str, RotationMethod] = {**ROTATIONS, "auto": Auto()}
_CHOICES = ", ".join(map(repr, ROTATE_METHODS))


class _ProcessDefault:
    """The one mutable setting of the library."""

    def __init__(self) -> None:
        self.name = "auto"


_process_default = _ProcessDefault()


def rotation_by_name(name: str | None) -> RotationMethod:
    """The rotation (or the way to choose one) called `name`; None means the default of the process.

    Raises:
        ValueError: none is called so.
    """
    if name is None:
        name = _process_default.name
    if not isinstance(name, str) or name not in ROTATE_METHODS:
        raise ValueError(f"unknown rotate method: got {name!r}, expected one of {_CHOICES}")
    return ROTATE_METHODS[name]


def rotation_of_all_rows(method: RotationMethod, group: dist.ProcessGroup, device: torch.device) -> Rotation:
    """The rotation for somebody who needs all rows of all ranks at once, so that there is no ring; alike on all ranks.

    The first call for a group may be a collective.
    """
    if isinstance(method, SymmetricMemory):
        return method.where_shared(group, device)
    shares_memory = isinstance(method, Auto) and why_unshared(group, device) is None
    return SymmetricMemory() if shares_memory else AllGather()


def set_rotate_method(rotate_method: str) -> None:
    """Sets how K/V travel by default in this process; every call and context may override it.

    Args:
        rotate_method: "auto" (what a cost model predicts to be fastest; the default of the default), "symm_mem" (all
            K/V by copy engines through memory that the GPUs of a node share; as "allgather" where they do not),
            "allgather" (all K/V of some heads at a time, few large attention calls) or "alltoall" (a ring: memory does
            not grow with the number of ranks, one attention step per rank).

    Raises:
        ValueError: anything else.
    """
    if rotate_method is None:
        raise ValueError(f"unknown rotate method: got None, expected one of {_CHOICES}")
    _process_default.name = rotation_by_name(rotate_method).name
