"""Process groups of parts of a group, and meshes of neighbouring ranks of a mesh, made once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor._torch import group_count, local_group
from cp_dtensor._torch.cache import GroupCache
from cp_dtensor.comm.groups import SequenceRanks

_SUBMESHES = GroupCache[DeviceMesh | None]()
"""By first rank and size; None for ranks that this one is not among."""


def groups_within(
    whole: dist.ProcessGroup, parts: Sequence[Sequence[int]], device: torch.device
) -> list[dist.ProcessGroup]:
    """Make groups of parts of a group, each with this rank, with the backends and the timeout of the whole.

    A collective of the whole group and of no other rank. Each rank makes equally many, also of parts without others.

    Args:
        parts: global ranks, ascending.
    """
    if dist.get_backend(whole) != "fake":
        # Ranks name a group alike if they have equally many. Some may have split another axis, and others not.
        most = max(SequenceRanks(whole).gather_integers(group_count(), device))
        for _ in range(most - group_count()):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    return [local_group(part, whole, device) for part in parts]


def submesh(mesh: DeviceMesh, sizes: Sequence[int]) -> DeviceMesh:
    """Return this rank's part, with one axis "cp", of a one-dimensional mesh that is cut into parts of these sizes.

    All ranks of the mesh call this with equal sizes, in the same order. Process groups are kept as long as that of the
    mesh: n ranks make n (n + 1) / 2 of them at most.
    """
    whole, rank = mesh.get_group(), mesh.get_local_rank()
    members = dist.get_process_group_ranks(whole)
    parts = [(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    mine = next((first, size) for first, size in parts if first <= rank < first + size)
    if new := [part for part in parts if not _SUBMESHES.has(whole, part)]:
        of_mine = members[mine[0] : sum(mine)] if mine in new else [dist.get_rank()]
        (group,) = groups_within(whole, [of_mine], torch.device(mesh.device_type))
        made = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("cp",))
        for part in new:
            _SUBMESHES.get(whole, part, lambda part=part: made if part == mine else None)  # type: ignore[misc]
    found = _SUBMESHES.get(whole, mine, lambda: None)
    assert found is not None
    return found
