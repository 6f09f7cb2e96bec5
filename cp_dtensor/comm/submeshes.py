"""Meshes of neighbouring ranks of a mesh, whose process groups are made once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor._torch.cache import GroupCache

_SUBMESHES = GroupCache[DeviceMesh | None]()
"""By first rank and size; None for ranks that this one is not among."""


def submesh(mesh: DeviceMesh, sizes: Sequence[int]) -> DeviceMesh:
    """Return this rank's part, with one axis "cp", of a one-dimensional mesh that is cut into parts of these sizes.

    All ranks of the mesh call this with equal sizes, in the same order. Process groups are kept as long as that of the
    mesh: n ranks make n (n + 1) / 2 of them at most.
    """
    whole, rank = mesh.get_group(), mesh.get_local_rank()
    members = dist.get_process_group_ranks(whole)

    def make(first: int, size: int) -> DeviceMesh | None:
        if not first <= rank < first + size:
            return None
        # Other ranks need not take part.
        group = dist.new_group(members[first : first + size], use_local_synchronization=True)
        return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("cp",))

    parts = [(end - size, size) for end, size in zip(accumulate(sizes), sizes, strict=True)]
    mine = next((first, size) for first, size in parts if first <= rank < first + size)
    if _SUBMESHES.has(whole, mine) and not all(_SUBMESHES.has(whole, part) for part in parts):
        # Torch names a group by the number of groups that a rank has, so every rank makes one when some do.
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    found = {part: _SUBMESHES.get(whole, part, lambda part=part: make(*part)) for part in parts}  # type: ignore[misc]
    made = found[mine]
    assert made is not None
    return made
