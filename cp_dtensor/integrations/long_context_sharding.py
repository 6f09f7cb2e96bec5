"""How long-context-attention (yunchang, USP) divides a sequence over a ring and Ulysses axes, and the mesh of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor.layouts import Contiguous, HeadTail, Layout, Segment, Span, Striped, chunk_length, chunk_start
from cp_dtensor.sharding import context_parallel_shard, context_parallel_unshard, take_shard


@dataclass(frozen=True)
class UlyssesCut(Layout):
    """The tokens of each ring rank, cut into adjacent parts for its Ulysses axis; rank = ring rank * degree + part.

    Args:
        ring_layout: the layout of the ring: one of contiguous segments, or `Striped(1)`.
        ulysses_degree: ranks of the Ulysses axis.

    >>> layout = UlyssesCut(HeadTail(), ulysses_degree=2)
    >>> [[p for s in layout.segments(8, rank, 4) for p in s.positions()] for rank in range(4)]
    [[0, 1], [6, 7], [2, 3], [4, 5]]
    """

    ring_layout: Layout
    ulysses_degree: int

    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> tuple[Segment, ...]:
        ring_rank, part = divmod(rank, self.ulysses_degree)
        whole = self.ring_layout.segments(seq_len, ring_rank, world_size // self.ulysses_degree, group)
        rows = sum(segment.length for segment in whole)
        start = chunk_start(rows, self.ulysses_degree, part)
        stop = start + chunk_length(rows, self.ulysses_degree, part)
        cut = []
        for segment in whole:
            cut.append(_cut(segment, start, stop))
            start, stop = start - segment.length, stop - segment.length
        return tuple(cut)

    def batch_groups(self, batch_size: int) -> tuple[Span, ...]:
        return self.ring_layout.batch_groups(batch_size)

    def local_length(self, seq_len: int, rank: int, world_size: int) -> int:
        ring_rank, part = divmod(rank, self.ulysses_degree)
        rows = self.ring_layout.local_length(seq_len, ring_rank, world_size // self.ulysses_degree)
        return chunk_length(rows, self.ulysses_degree, part)

    @property
    def only_length(self) -> int | None:
        return self.ring_layout.only_length

    @property
    def alignment(self) -> int:
        return 1


def _cut(segment: Segment, start: int, stop: int) -> Segment:
    """What `segment` has of its tokens `start, ..., stop - 1`."""
    start, stop = (min(max(index, 0), segment.length) for index in (start, stop))
    if segment.block == 1:  # stripes stay stripes, however short
        return Segment(segment.start + start * segment.period, stop - start, 1, segment.period)
    if not segment.is_contiguous:
        raise NotImplementedError(f"expected contiguous segments or blocks of 1 token, got {segment}")
    return Segment.contiguous(segment.start + start, segment.start + stop)


_RING_LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"basic": Contiguous(), "zigzag": HeadTail(), "strip": Striped(1)}
)


def _ring_layout(ring_impl_type: str) -> Layout:
    if ring_impl_type not in _RING_LAYOUTS:
        expected = ", ".join(map(repr, _RING_LAYOUTS))
        raise ValueError(f"expected ring_impl_type to be one of {expected}; got {ring_impl_type!r}")
    return _RING_LAYOUTS[ring_impl_type]


def set_seq_parallel_pg(
    sp_ulysses_degree: int,
    sp_ring_degree: int,
    rank: int,
    world_size: int,
    use_ulysses_low: bool = True,
    *,
    device_type: str | None = None,
) -> DeviceMesh:
    """The ranks that share a sequence, as the mesh that layers are given. A collective over all ranks.

    Args:
        sp_ulysses_degree: ranks of the Ulysses axis.
        sp_ring_degree: ranks of the ring. Consecutive ulysses * ring ranks share a sequence; with more ranks in all,
            there are several such groups (data parallelism).
        rank, world_size: those of the default process group.
        use_ulysses_low: neighbours in rank, which are often on one node, are neighbours in the Ulysses axis.
        device_type: "cuda" or "cpu"; if None, "cuda" where there is a GPU.

    Returns:
        this rank's mesh with the axes "ring" and "ulysses".

    Raises:
        ValueError: degrees that do not divide the world; a rank or world size that is not the process group's.
    """
    actual = (dist.get_rank(), dist.get_world_size())
    if (rank, world_size) != actual:
        raise ValueError(f"expected the default group's rank and world size {actual}, got {(rank, world_size)}")
    degrees = (sp_ulysses_degree, sp_ring_degree)
    if min(degrees) < 1 or world_size % (sp_ulysses_degree * sp_ring_degree):
        raise ValueError(
            f"expected sp_ulysses_degree * sp_ring_degree to divide the world size {world_size}; got {degrees}"
        )
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"ring": sp_ring_degree, "ulysses": sp_ulysses_degree}
    axes = ("ring", "ulysses") if use_ulysses_low else ("ulysses", "ring")
    replicas = world_size // (sp_ulysses_degree * sp_ring_degree)
    if replicas == 1:
        return init_device_mesh(device_type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
    shape = (replicas, *(sizes[axis] for axis in axes))
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicas", *axes))[axes]


def layout_of(ring_impl_type: str, mesh: DeviceMesh) -> UlyssesCut:
    """Which tokens each rank of a mesh has.

    Raises:
        TypeError, ValueError: an unknown type; a mesh without the two axes.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a DeviceMesh, as from set_seq_parallel_pg; got {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["ring", "ulysses"]:
        raise ValueError(f'expected a mesh with the axes "ring" and "ulysses", got {names or "one without names"}')
    return UlyssesCut(_ring_layout(ring_impl_type), mesh.size(names.index("ulysses")))


def shard(tensor: torch.Tensor, ring_impl_type: str, mesh: DeviceMesh, dim: int = 1) -> torch.Tensor:
    """This rank's shard of a tensor that every rank has whole.

    Args:
        tensor: of any dtype and shape: q, k, v, packed ones, token ids.
        ring_impl_type: "basic", "zigzag" or "strip".
        mesh: as from `set_seq_parallel_pg`.
        dim: the sequence dim, negative counts from the end.

    Returns:
        a new tensor. Differentiable: gradients of other ranks' tokens are zero here, so that the sum over ranks is the
        gradient of the whole tensor.

    Raises:
        TypeError, ValueError: arguments that do not fit.
    """
    (local,) = context_parallel_shard(mesh, [tensor], [dim], layout_of(ring_impl_type, mesh))
    return local


def unshard(
    tensor: torch.Tensor,
    ring_impl_type: str,
    mesh: DeviceMesh,
    dim: int = 1,
    *,
    grad: Literal["replicated", "partial"] = "replicated",
) -> torch.Tensor:
    """The whole tensor, on every rank, from the ranks' shards: the inverse of `shard`.

    Args:
        tensor: this rank's shard.
        ring_impl_type, mesh, dim: as for `shard`.
        grad: "replicated" if all ranks compute the same from the result, "partial" if each computes its own share of
            the loss (see `context_parallel_unshard`).

    Returns:
        a new tensor, differentiable.

    Raises:
        TypeError, ValueError: arguments that do not fit; shards whose lengths are not the layout's.
    """
    (whole,) = context_parallel_unshard(mesh, [tensor], [dim], layout_of(ring_impl_type, mesh), grad=grad)
    return whole


def _extract_local(
    ring_impl_type: str, value: torch.Tensor, rank: int, world_size: int, rd: int, ud: int, dim: int = 1
) -> torch.Tensor:
    if rd * ud != world_size:
        raise ValueError(f"expected rd * ud to be the world size {world_size}, got rd={rd} and ud={ud}")
    return take_shard(value, dim, UlyssesCut(_ring_layout(ring_impl_type), ud), rank, world_size)


EXTRACT_FUNC_DICT: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {name: partial(_extract_local, name) for name in _RING_LAYOUTS}
)
"""By `ring_impl_type`, `(value, rank, world_size, rd, ud, dim=1)` to a rank's shard of a whole tensor.

`rd` and `ud` are the degrees of the ring and of Ulysses, `rank` is ring rank * ud + Ulysses rank (`use_ulysses_low`).
"""
