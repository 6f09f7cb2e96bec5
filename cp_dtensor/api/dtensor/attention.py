"""Scaled dot product attention of DTensors: exactly that of their full tensors, wherever they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from cp_dtensor import _torch
from cp_dtensor.api.dtensor.placements import (
    BATCH_DIM,
    HEAD_DIM,
    AttentionPlacements,
    is_seq_sharded,
    local_segment,
    on_seq,
    plan_placements,
)
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.engine.attend import attend
from cp_dtensor.engine.config import (
    AttentionConfig,
    check_bias,
    check_qkv,
    checked_dropout_p,
    checked_mask,
    checked_sinks,
    four_dims_of_mask,
)
from cp_dtensor.plan.partition import SequencePartition
from cp_dtensor.plan.tiling import GroupSegments
from cp_dtensor.spec.layouts import CachedHash, Contiguous, Segment
from cp_dtensor.spec.masks import Batched, Mask


def dtensor_sdpa(call: SdpaArguments, mask: Mask | None = None, deterministic: bool = False) -> torch.Tensor | None:
    """SDPA of DTensors (B, H, S, D); None unless q, k or v is one that is sharded along the sequence.

    The output has the placements of q, and is sharded along the sequence wherever q, k or v are. Gradients have the
    placements of their inputs. A placement other than plain `Shard`, such as `_StridedShard`, counts as not sharded and
    is redistributed.

    Args:
        mask: the mask of the open context, besides that of the call.
        deterministic: True if results must be equal in every run.
    """
    q, k, v = call.q, call.k, call.v
    sharded = [tensor.placements for tensor in (q, k, v) if isinstance(tensor, DTensor)]
    if not sharded or not q.dim() == k.dim() == v.dim() == 4:
        return None
    if not is_seq_sharded(*sharded):
        # DTensor has no rule for the fused CPU op, and ours has none for masks: plain operations have.
        masked_on_cpu = call.attn_mask is not None and call.q.device.type == "cpu" and mask is None
        return _torch.math_sdpa(call) if masked_on_cpu else None
    if mask is not None and _torch.is_traced(call.q):
        raise NotImplementedError(
            f"in compiled code, the mask of this context ({mask}) is for plain tensors: got DTensors over the ranks of "
            "the context; call attention of DTensors outside of compiled code"
        )
    out, _ = dtensor_attention(
        q, k, v, mask=checked_mask(mask, call.is_causal), attn_mask=call.attn_mask,
        dropout_p=call.dropout_p, scale=call.scale, enable_gqa=call.enable_gqa, deterministic=deterministic,
    )  # fmt: skip
    return out


def dtensor_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    method: str = "auto",
    rotate_method: str | None = None,
    deterministic: bool = False,
    needs_lse: bool = False,
) -> tuple[DTensor, DTensor | None]:
    """`(out, lse)` of DTensors on one mesh: (B, H, S, Dv) and (B, H, S), placed as `plan_placements` places q.

    Args:
        q, k, v: (B, H, S, D), (B, Hkv, T, D) and (B, Hkv, T, Dv), placed in any way.
        mask: by global position.
        attn_mask, sinks: DTensors on the same mesh, placed in any way; sinks (H,).
        method: "auto" is a ring, Ulysses or a hybrid, by the names and placements of the mesh axes.
        rotate_method: None for the process default.
        needs_lse: False if lse may be None.

    Raises:
        ValueError, TypeError: tensors that do not fit, or a method that the placements do not permit.
    """
    q, k, v = _on_one_mesh(q, k, v)
    check_qkv(q, k, v, enable_gqa)
    mesh, shape = q.device_mesh, tuple(q.device_mesh.shape)
    by_placements = plan_placements if _torch.is_traced(q) else _cached_placements  # sizes in a trace have no hash
    placed = by_placements(q.placements, k.placements, v.placements, shape, q.size(1), k.size(1), mesh.mesh_dim_names)
    local_q = _to_local(q, placed.q, placed.q)
    local_k, local_v = _to_local(k, placed.kv, placed.grad_kv), _to_local(v, placed.kv, placed.grad_kv)
    modifiers = local_modifiers(q, k.size(2), attn_mask, dropout_p, sinks, placed)
    groups = [mesh.get_group(axis) for axis in placed.axes]
    if method == "auto":
        method = "ring" if placed.ulysses_axis is None else "hybrid"
    elif len(groups) != {"ulysses": 1, "hybrid": 2}.get(method, len(groups)):
        axes = "one mesh axis" if method == "ulysses" else "two mesh axes"
        raise ValueError(
            f'method "{method}" expects DTensors whose keys and values are sharded along the sequence over {axes}; '
            f"{_received(q, k, v)}"
        )
    config = AttentionConfig(
        # Without such an axis each rank is alone; its plans are cached for any of its groups.
        SequenceRanks.over(groups or [mesh.get_group(0)]), Contiguous(), method, transport_by_name(rotate_method),
        deterministic, placed=placed_partition(q.size(2), k.size(2), local_q.size(0), placed, mesh),
    )  # fmt: skip
    out, lse = attend(
        local_q, local_k, local_v, config, mask=_of_local_rows(mask, q, placed, local_q.size(0)), scale=scale,
        modifiers=modifiers, lengths=(q.size(2), k.size(2)), needs_lse=needs_lse,
    )  # fmt: skip
    wrapped_lse = from_local(lse, mesh, placed.q, tuple(q.shape[:3])) if needs_lse else None
    return from_local(out, mesh, placed.q, (*q.shape[:3], v.size(3))), wrapped_lse


def _of_local_rows(mask: Mask, q: DTensor, placed: AttentionPlacements, rows: int) -> Mask:
    """The mask of this rank's batch rows; `rows` is their number."""
    if mask.batch_size is None or rows == q.size(0):
        return mask
    if mask.batch_size != q.size(0):
        raise ValueError(f"expected a mask for {q.size(0)} batch rows, got one for {mask.batch_size}: {mask}")
    first, _ = first_of(q, placed)
    return Batched([mask.of_batch_row(first + row) for row in range(rows)]) if rows else mask.of_batch_row(0)


def sequence_ranks_of(*tensors: torch.Tensor) -> SequenceRanks:
    """The ranks over which any of some DTensors is sharded along the sequence; this rank's first axis if none is."""
    sharded = _on_one_mesh(*tensors)
    by_axis = zip(*(tensor.placements for tensor in sharded), strict=True)
    axes = [axis for axis, placements in enumerate(by_axis) if any(map(on_seq, placements))]
    return SequenceRanks.over([sharded[0].device_mesh.get_group(axis) for axis in axes[:2] or [0]])


_cached_placements = lru_cache(maxsize=1024)(plan_placements)


@dataclass(frozen=True)
class PlacedPartition(CachedHash, SequencePartition):
    """Rows of DTensors as placed, over the ranks of some mesh axes; the last axis counts fastest."""

    q_len: int
    kv_len: int
    batch_size: int
    placed: AttentionPlacements
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    __hash__ = CachedHash.__hash__

    def groups(self) -> tuple[GroupSegments, ...]:
        places = list(product(*(range(self.mesh_shape[axis]) for axis in self.placed.axes)))
        q_by_rank, kv_by_rank = (
            tuple(self._rows(length, placements, place) for place in places)
            for length, placements in ((self.q_len, self.placed.q), (self.kv_len, self.placed.kv))
        )
        return (GroupSegments((0, self.batch_size), q_by_rank, kv_by_rank),)

    def _rows(self, length: int, placements: tuple[Placement, ...], place: tuple[int, ...]) -> tuple[Segment, ...]:
        coordinate = list(self.coordinate)
        for axis, index in zip(self.placed.axes, place, strict=True):
            coordinate[axis] = index
        return (local_segment(length, placements, self.mesh_shape, coordinate),)


def placed_partition(
    q_len: int, kv_len: int, batch_size: int, placed: AttentionPlacements, mesh: DeviceMesh
) -> PlacedPartition:
    """The partition of DTensors with these placements; lengths are global, `batch_size` is local."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return PlacedPartition(q_len, kv_len, batch_size, placed, tuple(mesh.shape), tuple(coordinate))


def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    """A DTensor of the given global shape, without communication."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _to_local(
    tensor: DTensor, placements: tuple[Placement, ...], grad_placements: tuple[Placement, ...]
) -> torch.Tensor:
    # Where the placements are right, redistributing does nothing, and its backward reduces Partial gradients to the
    # placements of the input.
    return tensor.redistribute(placements=placements).to_local(grad_placements=grad_placements)


def _on_one_mesh(*tensors: torch.Tensor) -> tuple[DTensor, ...]:
    """All as DTensors of one mesh.

    Raises:
        ValueError: plain tensors among DTensors, or different meshes.
    """
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if len(sharded) < len(tensors):
        raise ValueError(f"expected q, k and v all to be DTensors, {_received(*tensors)}; wrap with DTensor.from_local")
    if len({*[tensor.device_mesh for tensor in sharded]}) > 1:
        raise ValueError(f"expected q, k and v on one mesh, {_received(*tensors)}")
    return tuple(sharded)


def _received(*tensors: torch.Tensor) -> str:
    """The placements of q, k and v in messages."""
    kinds = (
        f"{name} {tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else f"{name} torch.Tensor"
        for name, tensor in zip("qkv", tensors, strict=True)
    )
    return f"got {', '.join(kinds)}"


def local_only_sdpa(
    call: SdpaArguments, ring_ranks: Collection[int], plain_sdpa: Callable[[SdpaArguments], torch.Tensor]
) -> torch.Tensor | None:
    """SDPA of local tensors of DTensors (over heads or batch) whose mesh shares one rank with the context.

    Returns None if the mesh shares more ranks with the context. DTensors that are not sharded (or replicated) alike
    over batch or heads: None if the context has a single rank, which has the whole sequence.

    Raises:
        NotImplementedError: such DTensors in a context of several ranks.
    """
    q, k, v = _on_one_mesh(call.q, call.k, call.v)
    with _torch.no_modes():  # the mesh's tensor is real, also where other tensors are traced
        shared_ranks = set(q.device_mesh.mesh.flatten().tolist()) & set(ring_ranks)
    is_one_rank = len(ring_ranks) == 1
    if len(shared_ranks) > 1 or (is_one_rank and q.dim() != 4):
        return None
    if q.dim() != 4:
        raise NotImplementedError(f"inside of context_parallel, DTensors must have four dims, got {tuple(q.shape)}")
    placed = plan_placements(q.placements, k.placements, v.placements, q.device_mesh.shape, q.size(1), k.size(1))
    if is_seq_sharded(placed.q) or not q.placements == k.placements == v.placements == placed.q:
        if is_one_rank:
            return None
        raise NotImplementedError(
            "inside of context_parallel, DTensors over other ranks than those of the context must be sharded alike "
            f"over batch (Shard(0)) or whole groups of heads (Shard(1)), or replicated; got "
            f"q {q.placements}, k {k.placements}, v {v.placements}"
        )
    mask = local_bias(q, call.attn_mask, placed) if isinstance(call.attn_mask, DTensor) else call.attn_mask
    local = replace(call, q=q.to_local(), k=k.to_local(), v=v.to_local(), attn_mask=mask, first=first_of(q, placed))
    return from_local(plain_sdpa(local), q.device_mesh, placed.q, (*q.shape[:3], v.size(3)))


# Modifiers


def local_modifiers(
    q: DTensor,
    kv_len: int,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    sinks: torch.Tensor | None,
    placed: AttentionPlacements,
) -> Modifiers:
    """The modifiers of a rank's queries. With dropout, a collective of the whole mesh.

    Args:
        q: (B, H, S, D).
        kv_len: keys of the whole sequence.
        attn_mask: a DTensor on the same mesh that broadcasts to (B, H, S, kv_len), placed in any way.
        sinks: a DTensor (H,) on the same mesh, placed in any way.
        dropout_p: the pattern depends on global batch rows, heads and positions, not on placements.
        placed: the placements of the computation.

    Raises:
        ValueError, TypeError: a mask that does not fit, or is no DTensor on the mesh of q.
    """
    dropout_p = checked_dropout_p(dropout_p)
    if attn_mask is None and not dropout_p and sinks is None:
        return NO_MODIFIERS
    bias = None if attn_mask is None else local_bias(q, attn_mask, placed)
    check_bias(q, bias, (q.size(2), kv_len))
    of_heads = None if sinks is None else local_sinks(q, sinks, placed)
    if not dropout_p:
        return Modifiers(bias, sinks=of_heads)
    return Modifiers(bias, dropout_p, _seed_of_all(q.to_local(), q.device_mesh), *first_of(q, placed), of_heads)


def _seed_of_all(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The first rank's seed, for all: ranks with equal shards must drop equal weights."""
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device=local.device)
    for axis in range(mesh.ndim):
        if _torch.is_traced(local):
            seed = _torch.traced_broadcast(seed, mesh.get_group(axis))
        else:
            dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    return seed


def first_of(q: DTensor, placed: AttentionPlacements) -> tuple[int, int]:
    """The first of a rank's batch rows, and of its query heads."""
    coordinate = q.device_mesh.get_coordinate()
    assert coordinate is not None
    batch, head = (
        local_segment(q.size(dim), placed.q, tuple(q.device_mesh.shape), coordinate, dim).start
        for dim in (BATCH_DIM, HEAD_DIM)
    )
    return batch, head


def local_bias(q: DTensor, attn_mask: torch.Tensor, placed: AttentionPlacements) -> torch.Tensor:
    """The part of an attn_mask for a rank's queries, (B or 1, H or 1, S or 1, key positions or 1).

    Raises:
        ValueError, TypeError: a mask that does not fit, or is no DTensor on the mesh of q.
    """
    _check_on_mesh("attn_mask", attn_mask, q)
    mask = four_dims_of_mask(attn_mask, q)
    return _beside_queries(mask, placed, lambda dim: dim if mask.size(dim) > 1 else None)


def local_sinks(q: DTensor, sinks: torch.Tensor, placed: AttentionPlacements) -> torch.Tensor:
    """The sinks of a rank's query heads, (local heads,).

    Raises:
        ValueError, TypeError: sinks that do not fit, or are no DTensor on the mesh of q.
    """
    _check_on_mesh("sinks", sinks, q)
    return _beside_queries(checked_sinks(sinks, q), placed, lambda dim: 0 if dim == HEAD_DIM else None)


def _check_on_mesh(name: str, tensor: torch.Tensor, q: DTensor) -> None:
    if not isinstance(tensor, DTensor) or tensor.device_mesh != q.device_mesh:
        kind = f"a DTensor on {tensor.device_mesh}" if isinstance(tensor, DTensor) else type(tensor).__name__
        raise ValueError(
            f"expected {name} to be a DTensor on the mesh of q, {q.device_mesh}, got {kind}; "
            f"distribute_tensor({name}, mesh, [Replicate()] * mesh.ndim) makes one"
        )


def _beside_queries(
    tensor: torch.Tensor, placed: AttentionPlacements, dim_of: Callable[[int], int | None]
) -> torch.Tensor:
    """The local part of a DTensor that belongs to a rank's queries.

    `dim_of` gives its dim for a dim of q, or None where the tensor is the same along that dim: the ranks along it then
    have shares of the gradient.
    """
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in placed.q:
        dim = dim_of(placement.dim) if isinstance(placement, Shard) else None
        placements.append(Replicate() if dim is None else Shard(dim))
        is_partial = isinstance(placement, Shard) and dim is None
        of_gradient.append(Partial() if is_partial else placements[-1])
    assert isinstance(tensor, DTensor)
    return _to_local(tensor, tuple(placements), tuple(of_gradient))
