"""The ranks that share a sequence, over one to three mesh axes."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cp_dtensor._torch import (
    all_gather_single,
    group_of_name,
    has_cpu_backend,
    name_of_group,
    no_modes,
    reduce_scatter_single,
)
from cp_dtensor.comm.faults import peer_errors

Mesh = DeviceMesh | dist.ProcessGroup
MOST_AXES = 3
"""Most mesh axes of one sequence: pods, nodes of a pod, GPUs of a node."""
# One of these words, alone or before a separator or digit: "sparse" and "split_dp" are no sequence axes.
_SEQUENCE_AXIS = re.compile(r"(ring|ulysses|cp|sp|seq|sequence|context)([_\d-].*)?")


@dataclass(frozen=True, init=False)
class SequenceRanks:
    """The ranks along some axes, the outer one first: rank = outer rank * inner size + inner rank.

    A collective of all ranks goes over one axis after the other.
    """

    axes: tuple[dist.ProcessGroup, ...]
    """The groups of this rank along the axes, the outer one first."""
    outer: dist.ProcessGroup = field(compare=False)
    """The first of them."""
    inner: SequenceRanks | None = field(compare=False)
    """The ranks along the others; None if there is one axis."""
    members: tuple[int, ...] = field(compare=False)
    """Global ranks along several axes, in their order; empty along one, and for groups that have only names."""
    rank: int = field(compare=False)
    """This rank's place among those that share the sequence."""
    size: int = field(compare=False)
    """Number of ranks that share the sequence."""

    def __init__(self, *axes: dist.ProcessGroup, members: tuple[int, ...] = ()) -> None:
        outer, inner = axes[0], SequenceRanks(*axes[1:]) if len(axes) > 1 else None
        rank, size = (0, 1) if inner is None else (inner.rank, inner.size)
        object.__setattr__(self, "axes", axes)
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "inner", inner)
        object.__setattr__(self, "members", members)
        object.__setattr__(self, "rank", outer.rank() * size + rank)
        object.__setattr__(self, "size", outer.size() * size)

    @classmethod
    def along(cls, mesh: DeviceMesh, axes: Sequence[int]) -> SequenceRanks:
        """Return the ranks along some dims of a mesh, the outer one first."""
        if len(axes) == 1:
            return cls(mesh.get_group(axes[0]))
        here = tuple(slice(None) if axis in axes else place for axis, place in enumerate(mesh.get_coordinate() or ()))
        # The mesh's tensor is real, also where other tensors are traced.
        with no_modes():
            members = mesh.mesh[here].permute([sorted(axes).index(axis) for axis in axes]).flatten().tolist()
        return cls(*map(mesh.get_group, axes), members=tuple(members))

    @classmethod
    def of_names(cls, names: Sequence[str]) -> SequenceRanks:
        """Return the ranks of groups of these names in this process, the outer one first."""
        return cls(*map(group_of_name, names))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the groups, the outer one first: equal in every process."""
        return tuple([name_of_group(group) for group in self.axes])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each axis, the outer one first."""
        return tuple([group.size() for group in self.axes])

    @property
    def have_cpu_backend(self) -> bool:
        """True if CPU tensors can be gathered."""
        return all(map(has_cpu_backend, self.groups))

    @property
    def are_of_this_thread(self) -> bool:
        """False in a thread that stands for another rank, as those of torch's threaded process groups do."""
        try:
            dist.get_process_group_ranks(self.outer)
        except (KeyError, ValueError):  # not among the groups of this thread
            return False
        return True

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups of this rank along the axes, the inner one first."""
        return self.axes[::-1]

    def global_ranks(self) -> list[int]:
        """Return the global ranks in their order; of groups that have only names, those on this rank's axes."""
        if self.members:
            return list(self.members)
        return [rank for group in self.groups for rank in dist.get_process_group_ranks(group)]

    def shares_sequence_with(self, other: SequenceRanks) -> bool:
        """Return whether both have the same ranks, along the same axes or others."""
        if self == other:
            return True
        mine, others = set(self.global_ranks()), set(other.global_ranks())
        return self.size == other.size and (mine <= others or others <= mine)

    def is_in_order_of(self, other: SequenceRanks) -> bool:
        """Return whether each of the ranks, which share a sequence, is known to have the same place in `other`."""
        if self == other:
            return True
        are_known = all(each.members or each.inner is None for each in (self, other))
        return are_known and self.global_ranks() == other.global_ranks()

    def gather(self, mine: torch.Tensor, what: str = "an all-gather") -> torch.Tensor:
        """All-gather (...), of equal shape on every rank, to (ranks, ...); `what` names the exchange in errors."""
        gathered = mine.new_empty(self.outer.size(), *mine.shape)
        with peer_errors(self.outer, what):
            all_gather_single(gathered.view(-1), mine.contiguous().view(-1), group=self.outer)
        if self.inner is None:
            return gathered
        # The outer axis first: later, each rank of a node would receive the same rows.
        return self.inner.gather(gathered, what).transpose(0, 1).flatten(0, 1)

    def gather_integers(self, mine: int | list[int], device: torch.device) -> list[Any]:
        """All-gather equally many integers of every rank.

        They travel in CPU tensors if the groups have a CPU backend, else in tensors on `device`, which is waited for.
        """
        where = "cpu" if self.have_cpu_backend else device  # whatever the user's default device is
        integers = torch.tensor(mine, dtype=torch.int64, device=where)
        return self.gather(integers, "a comparison of calls").tolist()

    def gather_objects(self, mine: Any, device: torch.device) -> list[Any]:
        """Return one picklable object of every rank. Two gathers of integers."""
        pickled = pickle.dumps(mine)
        longest = max(self.gather_integers(len(pickled), device))
        gathered = self.gather_integers(list(pickled.ljust(longest, b"\0")), device)
        return [pickle.loads(bytes(each)) for each in gathered]  # pickle ignores the padding

    def reduce_scatter(self, blocks: torch.Tensor) -> torch.Tensor:
        """Sum (ranks, ...) over the ranks, and return this rank's block (...)."""
        if self.inner is not None:  # the inner axes first, since their sums leave less to exchange over the outer one
            blocks = blocks.unflatten(0, (self.outer.size(), self.inner.size)).transpose(0, 1)
            blocks = self.inner.reduce_scatter(blocks)
        mine = blocks.new_empty(blocks.shape[1:])
        with peer_errors(self.outer, "a sum over ranks"):
            reduce_scatter_single(mine.view(-1), blocks.contiguous().view(-1), group=self.outer)
        return mine


# Meshes


def sequence_ranks(mesh: Mesh | None) -> SequenceRanks:
    """Return the ranks that share a sequence.

    Args:
        mesh: a DeviceMesh of one dim or a process group; or a DeviceMesh of two or three dims whose names begin with
            the word "ring", "ulysses", "cp", "sp", "seq", "sequence" or "context" (as "cp_node" and "cp2" do, and
            "sparse" does not). Other names are refused, since they may be those of data parallelism. The outer axes
            come first. The inner one, whose ranks own adjacent parts of the sequence, is the one whose name begins with
            "ulysses", else the last.

    Raises:
        TypeError: anything else.
        ValueError: a mesh of other dims, one of several inner axes, or one that this rank is not part of.
        NotImplementedError: a mesh of other devices than CPUs and CUDA devices.
    """
    if isinstance(mesh, dist.ProcessGroup):
        return SequenceRanks(mesh)
    if mesh is cast(Any, dist.GroupMember.NON_GROUP_MEMBER):  # an object of no documented type
        raise ValueError("this rank is not part of the process group: new_group returned no group here")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "expected mesh to be a DeviceMesh of one dim or a ProcessGroup, or a DeviceMesh of two or three axes that "
            f"share the sequence; got {type(mesh).__name__}"
        )
    if mesh.device_type not in ("cpu", "cuda"):
        raise NotImplementedError(f"expected a mesh of CPUs or CUDA devices, got {mesh.device_type}")
    ndim, names = mesh.ndim, mesh.mesh_dim_names or ()
    if ndim > MOST_AXES or (ndim > 1 and not (names and all(map(_SEQUENCE_AXIS.fullmatch, names)))):
        sequence = [name for name in names if _SEQUENCE_AXIS.fullmatch(name)][-MOST_AXES:] or list(names[-1:])
        hint = "init_device_mesh(..., mesh_dim_names=...) and mesh['cp']"
        if sequence:
            hint = f"mesh[{', '.join(map(repr, sequence))}]"
        raise ValueError(
            "expected a mesh of one dim, the context-parallel axis, or of two or three whose names say that they share "
            f"the sequence, such as ('ring', 'ulysses') or ('cp_pod', 'cp_node', 'cp_gpu'); got {ndim} dims "
            f"(names {mesh.mesh_dim_names}, shape {tuple(mesh.shape)}). Pass those axes of it, such as {hint}"
        )
    if ndim > 1 and sum(map(is_ulysses_axis, names)) > 1:
        raise ValueError(
            'expected at most one axis whose name begins with "ulysses", the inner one, beside outer ones such as '
            f"'ring'; got names {mesh.mesh_dim_names}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of the mesh {mesh}")
    return SequenceRanks(mesh.get_group()) if ndim == 1 else SequenceRanks.along(mesh, _in_order(mesh))


def axis_names(mesh: Mesh) -> tuple[str, ...]:
    """Return the names of the axes of a mesh that `sequence_ranks` takes, the outer one first."""
    if isinstance(mesh, dist.ProcessGroup) or not mesh.mesh_dim_names:
        return ("the group",)
    return tuple(mesh.mesh_dim_names[axis] for axis in _in_order(mesh))


def _in_order(mesh: DeviceMesh) -> list[int]:
    """Return the dims of a mesh, the outer one first; that of Ulysses is the last."""
    names: tuple[str, ...] = mesh.mesh_dim_names or ()
    return sorted(range(mesh.ndim), key=lambda axis: bool(names) and is_ulysses_axis(names[axis]))


def is_ulysses_axis(name: str) -> bool:
    """Return whether a name begins with the word "ulysses"."""
    found = _SEQUENCE_AXIS.fullmatch(name)
    return found is not None and found[1] == "ulysses"
