"""Meshes of neighbouring ranks of a mesh, whose process groups are made once."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor._torch.cache import GroupCache

_SUBMESHES = GroupCache[DeviceMesh]()


def submesh(mesh: DeviceMesh, first: int, size: int) -> DeviceMesh:
    """Return the mesh, with one axis "cp", of `size` ranks of a one-dimensional mesh from its rank `first` on.

    Only these ranks call this, all of them. The process group is kept as long as that of the mesh: n ranks have
    n (n + 1) / 2 of them at most.
    """

    def make() -> DeviceMesh:
        members = dist.get_process_group_ranks(mesh.get_group())[first : first + size]
        group = dist.new_group(members, use_local_synchronization=True)  # other ranks need not take part
        return DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=("cp",))

    return _SUBMESHES.get(mesh.get_group(), (first, size), make)
