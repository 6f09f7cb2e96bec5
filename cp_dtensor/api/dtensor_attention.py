"""Scaled dot product attention of DTensors: exactly that of their full tensors, wherever they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_dtensor import _torch
from cp_dtensor.api.interception import TORCHS_TOO, SdpaArguments
from cp_dtensor.comm.faults import peer_errors
from cp_dtensor.comm.groups import MOST_AXES, Mesh, SequenceRanks, is_ulysses_axis
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.engine.arguments import check_bias, check_qkv, checked_of_heads, drawn_seed, four_dims_of_mask
from cp_dtensor.engine.attend import attend
from cp_dtensor.engine.base import Tensors
from cp_dtensor.engine.call import Call, checked_factors, checked_mask, checked_method
from cp_dtensor.plan.partition import SequencePartition
from cp_dtensor.plan.tiling import GroupSegments
from cp_dtensor.spec.layouts import CachedHash, Contiguous, Layout, Segment, TorchChunk
from cp_dtensor.spec.masks import Batched, Causal, Mask

BATCH_DIM, HEAD_DIM, SEQ_DIM = 0, 1, 2
_CAUSAL = Causal()


def dtensor_sdpa(arguments: SdpaArguments, mask: Mask | None = None, **options: Any) -> torch.Tensor | None:
    """Compute SDPA of DTensors (B, H, S, D) that are sharded along the sequence, or on a CPU; else return None.

    The output has the placements of q, and is sharded along the sequence wherever q, k or v are. Gradients have the
    placements of their inputs. A placement other than plain `Shard`, such as `_StridedShard`, counts as not sharded and
    is redistributed. `mask` and `options` are those of the open context (`Call.of_dtensors`).
    """
    q, k, v = arguments.q, arguments.k, arguments.v
    sharded = [tensor.placements for tensor in (q, k, v) if isinstance(tensor, DTensor)]
    if not sharded or not q.dim() == k.dim() == v.dim() == 4:
        return None
    on_cpu = q.device.type == "cpu" and mask is None  # DTensor has no rule for torch's fused op of CPUs
    if not is_seq_sharded(*sharded) and not on_cpu:
        return None
    if _torch.torchs_context_parallel_is_open():  # since; asked here, which is one frame less a call
        raise RuntimeError(TORCHS_TOO)
    if mask is not None and _torch.is_traced(arguments.q):
        raise NotImplementedError(
            f"in compiled code, the mask of this context ({mask}) is for plain tensors: got DTensors over the ranks of "
            "the context; call attention of DTensors outside of compiled code"
        )
    both = _CAUSAL if mask is None and arguments.is_causal else checked_mask(mask, arguments.is_causal)
    out, _ = dtensor_attention(
        q, k, v, mask=both, attn_mask=arguments.attn_mask,
        dropout_p=arguments.dropout_p, scale=arguments.scale, enable_gqa=arguments.enable_gqa,
        **options,
    )  # fmt: skip
    return out


def dtensor_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: Mask | None, attn_mask: torch.Tensor | None = None,
    beside: Mapping[str, torch.Tensor] | None = None, enable_gqa: bool = True, needs_lse: bool = False,
    method: str = "auto", rotate_method: str | None = None, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return `(out, lse)` of DTensors on one mesh: (B, H, S, Dv) and (B, H, S), placed as `plan_placements` places q.

    Args:
        q, k, v: (B, H, S, D), (B, Hkv, T, D) and (B, Hkv, T, Dv), placed in any way; redistributed where necessary.
        mask: by global position; None for none.
        attn_mask: a DTensor on the same mesh, placed in any way.
        beside: others, (H,), by the names of `Tensors`.
        needs_lse: False if lse may be empty.
        method: "auto" is a ring, Ulysses or a hybrid, by the names and placements of the mesh axes; methods that the
            placements do not permit are refused.
        enable_gqa, rotate_method, options: as for `context_parallel_attention`; options are those of `checked_factors`.
    """
    q, k, v = on_one_mesh(q, k, v)
    check_qkv(q, k, v, enable_gqa)
    checked_method(method)
    values = checked_factors(**options)
    mesh, shape = q.device_mesh, tuple(q.device_mesh.shape)
    by_placements = plan_placements if _torch.is_traced(q) else _cached_placements  # sizes in a trace have no hash
    names = mesh.mesh_dim_names
    placed = by_placements(q.placements, k.placements, v.placements, shape, q.size(1), k.size(1), names)
    if method == "auto":
        method = "ring" if placed.ulysses_axis is None else "hybrid"
    elif (method == "ulysses" and len(placed.axes) != 1) or (method == "hybrid" and len(placed.axes) < 2):
        axes = "one mesh axis" if method == "ulysses" else "two mesh axes or three"
        raise ValueError(
            f'method "{method}" expects DTensors whose keys and values are sharded along the sequence over {axes}; '
            f"{_received(q, k, v)}"
        )
    local_q = to_local(q, placed.q)
    t = Tensors(local_q, to_local(k, placed.kv, placed.grad_kv), to_local(v, placed.kv, placed.grad_kv))
    pair, rows = (q.size(2), k.size(2)), local_q.size(0)
    call = Call(
        # Without such an axis each rank is alone; its plans are cached for any of its groups.
        SequenceRanks.along(mesh, placed.axes or [0]), Contiguous(), method=method,
        mask=mask if mask is None else _of_local_rows(mask, q, rows, placed),
        transport=transport_by_name(rotate_method), pair=pair,
        first=_first_of(q, placed) if values["dropout_p"] else (0, 0), **values,
        placed=PlacedPartition(*pair, rows, placed, shape, tuple(mesh.get_coordinate() or ())),
    )  # fmt: skip
    if attn_mask is not None:
        bias = _local_bias(q, attn_mask, placed)
        check_bias(q, bias, pair)
        t = t._replace(bias=bias)
    for name, tensor in (beside or {}).items():
        whole: Any = checked_of_heads(name, _on_mesh_of(q, name, tensor), q)
        t = t._replace(**{name: local_beside(whole, placed.q, lambda dim: 0 if dim == HEAD_DIM else None)})
    if call.dropout_p:
        t = t._replace(seed=_seed_of_all(local_q, mesh))
    out, lse = attend(call, t, needs_lse=needs_lse)
    result = from_local(out, mesh, placed.q, (*q.shape[:3], out.size(3)))
    return result, from_local(lse, mesh, placed.q, tuple(q.shape[:3])) if needs_lse else lse


def _of_local_rows(mask: Mask, q: DTensor, rows: int, placed: AttentionPlacements) -> Mask:
    """Return the mask of this rank's batch rows."""
    if mask.batch_size is None or rows == q.size(0):
        return mask
    if mask.batch_size != q.size(0):
        raise ValueError(f"expected a mask for {q.size(0)} batch rows, got one for {mask.batch_size}: {mask}")
    first, _ = _first_of(q, placed)
    return Batched([mask.of_batch_row(first + row) for row in range(rows)]) if rows else mask.of_batch_row(0)


def sequence_ranks_of(*tensors: torch.Tensor) -> SequenceRanks:
    """Return the ranks over which any of these is sharded along the sequence; this rank's first axis if none is."""
    sharded = on_one_mesh(*tensors)
    by_axis = zip(*(tensor.placements for tensor in sharded), strict=True)
    axes = [axis for axis, placements in enumerate(by_axis) if any(map(on_seq, placements))]
    return SequenceRanks.along(sharded[0].device_mesh, axes[:MOST_AXES] or [0])


@dataclass(frozen=True)
class PlacedPartition(CachedHash, SequencePartition):
    """Rows of DTensors as placed, over the ranks of some mesh axes; the last axis counts fastest."""

    q_len: int
    kv_len: int
    batch_size: int
    placed: AttentionPlacements
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    def find_groups(self) -> tuple[GroupSegments, ...]:
        q_by_rank, kv_by_rank = [], []
        for place in product(*(range(self.mesh_shape[axis]) for axis in self.placed.axes)):
            at = dict(zip(self.placed.axes, place, strict=True))
            coordinate = [at.get(axis, index) for axis, index in enumerate(self.coordinate)]
            q_by_rank.append((local_segment(self.q_len, self.placed.q, self.mesh_shape, coordinate),))
            kv_by_rank.append((local_segment(self.kv_len, self.placed.kv, self.mesh_shape, coordinate),))
        return (GroupSegments((0, self.batch_size), tuple(q_by_rank), tuple(kv_by_rank)),)


def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    """Return a DTensor of the given global shape, without communication."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def to_local(
    tensor: DTensor, placements: Sequence[Placement], grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Return the local part in these placements; its gradient is placed alike unless `grad_placements` differ."""
    if tensor.placements == placements and grad_placements in (None, placements):
        return tensor.to_local(grad_placements=placements)
    # Where the placements are right, redistributing does nothing, and its backward reduces Partial gradients to the
    # placements of the input.
    # In inference mode torch 2.11 does not redistribute a tensor that requires grad. Dynamo cannot trace the question.
    if not torch.compiler.is_dynamo_compiling() and torch.is_inference_mode_enabled():
        tensor = cast("DTensor", tensor.detach())
    return tensor.redistribute(placements=placements).to_local(grad_placements=grad_placements or placements)


def on_one_mesh(*tensors: torch.Tensor) -> tuple[DTensor, ...]:
    """Return all as DTensors of one mesh; refuse plain tensors among DTensors, and different meshes."""
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if len(sharded) < len(tensors):
        raise ValueError(f"expected q, k and v all to be DTensors, {_received(*tensors)}; wrap with DTensor.from_local")
    if len({*map(attrgetter("device_mesh"), sharded)}) > 1:
        raise ValueError(f"expected q, k and v on one mesh, {_received(*tensors)}")
    return tuple(sharded)


def _received(*tensors: torch.Tensor) -> str:
    """Return the placements of q, k and v in messages."""
    kinds = (
        f"{name} {tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else f"{name} torch.Tensor"
        for name, tensor in zip("qkv", tensors, strict=True)
    )
    return f"got {', '.join(kinds)}"


def refuse_other_place(
    owner: str, x: DTensor, mesh: Mesh | None, layout: Layout | None, lengths: object, of_x: object
) -> None:
    """Refuse a mesh, a layout and lengths (`seq_len`) besides those of a DTensor, which are `of_x`."""
    if mesh is not None and mesh != x.device_mesh:
        raise ValueError(
            f"{owner} expects mesh to be None or that of the DTensors, {x.device_mesh}, got {mesh}; pass their local "
            "tensors (to_local()) if these are shards of a sequence over another mesh"
        )
    if layout not in (None, Contiguous()):
        raise ValueError(
            f"{owner} expects layout to be None or Contiguous(), since DTensors are sharded in contiguous chunks, got "
            f"{layout}"
        )
    if lengths not in (None, of_x):
        raise ValueError(f"{owner} expects seq_len to be None or that of the DTensors, {of_x}, got {lengths}")


def local_only_sdpa(
    call: SdpaArguments, ring_ranks: Collection[int], plain_sdpa: Callable[[SdpaArguments], torch.Tensor]
) -> torch.Tensor | None:
    """Compute SDPA of local tensors of DTensors (over heads or batch) whose mesh shares one rank with the context.

    Return None if the mesh shares more ranks with the context. DTensors that are not sharded (or replicated) alike over
    batch or heads are refused, or None is returned if the context has a single rank, which has the whole sequence.
    """
    q, k, v = on_one_mesh(call.q, call.k, call.v)
    with _torch.no_modes():  # the mesh's tensor is real, also where other tensors are traced
        shared_ranks = set(q.device_mesh.mesh.flatten().tolist()) & set(ring_ranks)
    if len(shared_ranks) > 1:
        return None
    placed = None
    if q.dim() == 4:
        planned = plan_placements(q.placements, k.placements, v.placements, q.device_mesh.shape, q.size(1), k.size(1))
        is_local = not is_seq_sharded(planned.q) and q.placements == k.placements == v.placements == planned.q
        placed = planned if is_local else None
    if placed is None:
        if len(ring_ranks) == 1:
            return None
        raise NotImplementedError(
            "inside of context_parallel, DTensors over other ranks than those of the context must have four dims and "
            "be sharded alike over batch (Shard(0)) or whole groups of heads (Shard(1)), or replicated; got "
            f"q {tuple(q.shape)} {q.placements}, k {k.placements}, v {v.placements}"
        )
    mask = _local_bias(q, call.attn_mask, placed) if isinstance(call.attn_mask, DTensor) else call.attn_mask
    local = replace(call, q=q.to_local(), k=k.to_local(), v=v.to_local(), attn_mask=mask, first=_first_of(q, placed))
    return from_local(plain_sdpa(local), q.device_mesh, placed.q, (*q.shape[:3], v.size(3)))


# Modifiers


def _seed_of_all(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the first rank's seed, for all: ranks with equal shards must drop equal weights."""
    seed = drawn_seed(local.device)
    for axis in range(mesh.ndim):
        if _torch.is_traced(local):
            seed = _torch.traced_broadcast(seed, mesh.get_group(axis))
        else:
            with peer_errors(mesh.get_group(axis), "the exchange of a dropout seed"):
                dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    return seed


def _first_of(q: DTensor, placed: AttentionPlacements) -> tuple[int, int]:
    """Return the first of a rank's batch rows, and of its query heads."""
    shape, coordinate = q.device_mesh.shape, q.device_mesh.get_coordinate() or ()
    batch, head = (local_segment(q.size(dim), placed.q, shape, coordinate, dim).start for dim in (BATCH_DIM, HEAD_DIM))
    return batch, head


def _local_bias(q: DTensor, attn_mask: torch.Tensor, placed: AttentionPlacements) -> torch.Tensor:
    """Return the part of an attn_mask for a rank's queries, (B or 1, H or 1, S or 1, key positions or 1)."""
    mask = four_dims_of_mask(_on_mesh_of(q, "attn_mask", attn_mask), q)
    assert isinstance(mask, DTensor)
    return local_beside(mask, placed.q, lambda dim: dim if mask.size(dim) > 1 else None)


def _on_mesh_of(q: DTensor, name: str, tensor: torch.Tensor) -> DTensor:
    if isinstance(tensor, DTensor) and tensor.device_mesh == q.device_mesh:
        return tensor
    kind = f"a DTensor on {tensor.device_mesh}" if isinstance(tensor, DTensor) else type(tensor).__name__
    raise ValueError(
        f"expected {name} to be a DTensor on the mesh of q, {q.device_mesh}, got {kind}; "
        f"distribute_tensor({name}, mesh, [Replicate()] * mesh.ndim) makes one"
    )


def local_beside(
    tensor: DTensor, placements_of_x: Sequence[Placement], dim_of: Callable[[int], int | None]
) -> torch.Tensor:
    """Return the local part of a DTensor that belongs to a rank's part of another one, x.

    `dim_of` gives its dim for a dim of x, or None where the tensor is the same along that dim: the ranks along it then
    have shares of the gradient.
    """
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in placements_of_x:
        dim = dim_of(placement.dim) if isinstance(placement, Shard) else None
        placements.append(Replicate() if dim is None else Shard(dim))
        is_partial = isinstance(placement, Shard) and dim is None
        of_gradient.append(Partial() if is_partial else placements[-1])
    return to_local(tensor, placements, of_gradient)


# Placements of the computation


@dataclass(frozen=True)
class AttentionPlacements:
    """Placements of the local computation, one per mesh axis. `out` and `dq` are placed as `q`."""

    q: tuple[Placement, ...]
    kv: tuple[Placement, ...]
    grad_kv: tuple[Placement, ...]
    """As `kv`, but Partial where ranks with different queries hold the same keys."""
    ring_axes: tuple[int, ...]
    """The mesh axes around which K/V travel; without such an axis, Ulysses may be alone."""
    ulysses_axis: int | None = None
    """The mesh axis over which rows are exchanged for heads, if there is one."""

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Return the axes whose ranks share the sequence, the outer one first."""
        return self.ring_axes if self.ulysses_axis is None else (*self.ring_axes, self.ulysses_axis)


def on_seq(placement: Placement) -> bool:
    """Return whether a placement shards the sequence."""
    return _on(SEQ_DIM, placement)


def is_seq_sharded(*placements: Sequence[Placement]) -> bool:
    """Return whether any of the tensors is sharded along the sequence on any mesh axis."""
    return any(on_seq(placement) for each in placements for placement in each)


def plan_placements(
    q: Sequence[Placement], k: Sequence[Placement], v: Sequence[Placement], mesh_shape: Sequence[int], q_heads: int,
    kv_heads: int, axis_names: Sequence[str] | None = None,
) -> AttentionPlacements:  # fmt: skip
    """Return the placements of the computation, axis by axis.

    Sequence: q stays or becomes sharded. If q, k and v are all sharded along it on an axis whose name begins with
    "ulysses" (the first of several), or on two axes or three, then that axis, or the last of them, is for Ulysses. K/V
    that are sharded along the sequence stay so there and on other such axes, the ring, up to three axes in all, and are
    gathered over further ones; K/V that are replicated stay so. Batch and heads: all three sharded alike (heads only if
    every rank gets whole groups of query heads with their key head). Anything else: replicated.
    """
    by_axis: list[tuple[Placement, Placement, Placement]] = []  # of q, K/V, and gradients of K/V
    ring_axes: tuple[int, ...] = ()
    head_shards = 1
    ulysses_axis = _ulysses_axis(q, k, v, axis_names)
    for axis, (on_q, on_k, on_v) in enumerate(zip(q, k, v, strict=True)):
        kv_on_seq = on_seq(on_k) or on_seq(on_v)
        if on_seq(on_q) or kv_on_seq:
            if axis == ulysses_axis or (kv_on_seq and len(ring_axes) < MOST_AXES - (ulysses_axis is not None)):
                ring_axes += () if axis == ulysses_axis else (axis,)
                by_axis.append((Shard(SEQ_DIM),) * 3)
            else:
                by_axis.append((Shard(SEQ_DIM), Replicate(), Partial()))
            continue
        choice: Placement = Replicate()
        if any(_on(BATCH_DIM, placement) for placement in (on_q, on_k, on_v)):
            choice = Shard(BATCH_DIM)
        elif any(_on(HEAD_DIM, placement) for placement in (on_q, on_k, on_v)):
            shards = head_shards * mesh_shape[axis]
            if q_heads == kv_heads or (q_heads % shards == 0 and kv_heads % shards == 0):
                head_shards = shards
                choice = Shard(HEAD_DIM)
        by_axis.append((choice,) * 3)
    of_q, of_kv, of_grad_kv = zip(*by_axis, strict=True)
    return AttentionPlacements(of_q, of_kv, of_grad_kv, ring_axes, ulysses_axis)


_cached_placements = lru_cache(maxsize=1024)(plan_placements)


def _ulysses_axis(
    q: Sequence[Placement], k: Sequence[Placement], v: Sequence[Placement], axis_names: Sequence[str] | None
) -> int | None:
    """Return the axis for Ulysses: one on which q, k and v are all sharded along the sequence."""
    axes = [axis for axis, placements in enumerate(zip(q, k, v, strict=True)) if all(map(on_seq, placements))]
    named = [axis for axis in axes if axis_names and is_ulysses_axis(axis_names[axis])]
    if named:
        return named[0]
    return axes[:MOST_AXES][-1] if len(axes) > 1 else None


def local_segment(
    length: int, placements: Sequence[Placement], mesh_shape: Sequence[int], coordinate: Sequence[int],
    dim: int = SEQ_DIM,
) -> Segment:  # fmt: skip
    """Return a rank's range of a dim of that length. Shards over several axes nest from left to right."""
    start, stop = 0, length
    for placement, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if _on(dim, placement):
            (chunk,) = TorchChunk().segments(stop - start, index, size)
            start, stop = start + chunk.start, start + chunk.start + chunk.length
    return Segment.contiguous(start, stop)


def _on(dim: int, placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == dim
