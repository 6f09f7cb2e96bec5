"""Scaled dot product attention of DTensors: exactly that of their full tensors, wherever they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
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
    plan_placements,
)
from cp_dtensor.api.interception import SdpaArguments
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.select import Allowed, allowed_backends, choose_backend, is_deterministic
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.select import transport_by_name
from cp_dtensor.comm.transport import TransportMethod
from cp_dtensor.engine.autograd import Attention, AttentionCall
from cp_dtensor.engine.compiled_spec import CompiledCallSpec, Found, token_of
from cp_dtensor.engine.custom_op import backends_token, traced_attention
from cp_dtensor.engine.planner import (
    CallRequest,
    Decision,
    decide_ring,
    decide_ulysses,
    describe_problem,
    masking_of,
    remembered,
)
from cp_dtensor.engine.validation import (
    check_bias,
    check_qkv,
    checked_dropout_p,
    checked_mask,
    four_dims_of_mask,
    positive_scale,
    softmax_scale,
)
from cp_dtensor.plan.partition import Partition
from cp_dtensor.plan.tiling import GroupSegments, Masking
from cp_dtensor.spec.documents import PackedEdges
from cp_dtensor.spec.layouts import Segment
from cp_dtensor.spec.masks import Mask


def dtensor_sdpa(call: SdpaArguments) -> torch.Tensor | None:
    """Ring attention if any of q, k and v is a DTensor (B, H, S, D) that is sharded along the sequence, else None.

    The output is placed as `plan_placements` says: as q, and sharded along the sequence wherever q, k or v are.
    Gradients have the placements of their inputs. What is sharded by a placement that is no plain `Shard` counts as
    not sharded, and is redistributed.
    """
    sharded = [tensor for tensor in (call.q, call.k, call.v) if isinstance(tensor, DTensor)]
    if not sharded or any(tensor.dim() != 4 for tensor in (call.q, call.k, call.v)):
        return None
    if not is_seq_sharded(*(tensor.placements for tensor in sharded)):
        # DTensor has no rule for the fused CPU op, and ours has none for masks: plain operations have.
        masked_on_cpu = call.attn_mask is not None and call.q.device.type == "cpu"
        return _torch.math_sdpa(call) if masked_on_cpu else None
    q, k, v = _on_one_mesh(call.q, call.k, call.v)
    check_qkv(q, k, v, call.enable_gqa)
    mesh = q.device_mesh
    plan = plan_placements(
        q.placements, k.placements, v.placements, mesh.shape, q.size(1), k.size(1), mesh.mesh_dim_names
    )
    local_q, scale = positive_scale(_to_local(q, plan.q, plan.q), softmax_scale(q, call.scale))
    modifiers = local_modifiers(q, k.size(2), call.attn_mask, call.dropout_p, plan)
    local_k, local_v = (_to_local(tensor, plan.kv, plan.grad_kv) for tensor in (k, v))
    if _torch.is_traced(local_q):
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        groups = tuple(_torch.name_of_group(mesh.get_group(axis)) for axis in plan.axes)
        call_spec = _DTensorCallSpec(groups, plan, tuple(mesh.shape), tuple(coordinate), transport_by_name(None))
        out, _ = traced_attention(
            local_q, local_k, local_v, modifiers, token_of(call_spec), backends_token(),
            checked_mask(None, call.is_causal), scale, (q.size(2), k.size(2)), False,
        )  # fmt: skip
        return from_local(out, mesh, plan.q, (*q.shape[:3], v.size(3)))
    decided = plan_dtensor_call(
        local_q, local_k, local_v, q.size(2), k.size(2), mesh, plan, call.is_causal, scale, modifiers=modifiers
    )
    out, *_ = Attention.apply(local_q, local_k, local_v, modifiers.bias, None, modifiers, decided, False)
    return from_local(out, mesh, plan.q, (*q.shape[:3], v.size(3)))


def plan_dtensor_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_len: int,
    kv_len: int,
    mesh: DeviceMesh,
    plan: AttentionPlacements,
    is_causal: bool,
    scale: float,
    backend: AttentionBackend | None = None,
    modifiers: Modifiers = NO_MODIFIERS,
) -> AttentionCall:
    """The call on local tensors that are placed as `plan` says; lengths are global. `backend` None: the policy's."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    partition = _DTensorPartition(q_len, kv_len, q.size(0), plan, tuple(mesh.shape), tuple(coordinate))
    groups = [mesh.get_group(axis) for axis in plan.axes]
    mask, lengths = checked_mask(None, is_causal), (q_len, kv_len)
    allowed = allowed_backends()
    # A fused operator that is called by its name masks by shape, whatever would be chosen for SDPA.
    masking = Masking.BY_SHAPE
    if backend is None:
        masking = masking_of(mask, modifiers, lengths, is_deterministic(q, allowed))
    request = _request(q, k, v, partition, transport_by_name(None), mask, masking, backend, allowed)
    return _decide(request, plan, groups).call(SequenceRanks.over(groups) if groups else None, scale)


def _request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partition: _DTensorPartition, transport: TransportMethod,
    mask: Mask,
    masking: Masking, backend: AttentionBackend | None, allowed: Allowed,
) -> CallRequest:  # fmt: skip
    """What is asked for. `backend` None: the policy's, of those that are `allowed`."""
    problem = describe_problem(q, k, v, by_row=masking is not Masking.BY_SHAPE)
    return CallRequest(
        partition=partition,
        mask=mask,
        problem=problem,
        batch_size=q.size(0),
        itemsize=q.element_size(),
        device=q.device,
        backend=backend or choose_backend(problem, allowed),
        transport=transport,
        masking=masking,
    )


def _decide(request: CallRequest, plan: AttentionPlacements, groups: list[dist.ProcessGroup]) -> Decision:
    """How the work is spread; `groups` are those of the axes whose ranks share the sequence."""
    if not groups:
        return decide_ring(request, None, 0)
    ranks = SequenceRanks.over(groups)
    if plan.ulysses_axis is None:
        return decide_ring(request, ranks.outer, ranks.rank)
    key = (request, plan, tuple(map(_torch.name_of_group, groups)))
    return remembered(groups[0], key, lambda: decide_ulysses(request, ranks))


@dataclass(frozen=True)
class _DTensorCallSpec(CompiledCallSpec):
    """How to decide calls on local tensors of DTensors, with groups by their names."""

    groups: tuple[str, ...]
    plan: AttentionPlacements
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    transport: TransportMethod

    def __repr__(self) -> str:
        plan = self.plan
        return (
            f"DTensor ({self.transport.name}) over {' x '.join(self.groups)}, {plan.q} {plan.kv} {plan.grad_kv}, axes "
            f"{plan.ring_axis} {plan.ulysses_axis} of {self.mesh_shape} at {self.coordinate}"
        )

    @property
    def finds_mask(self) -> bool:
        return False

    @property
    def compares(self) -> bool:
        return False

    def resolve(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, modifiers: Modifiers, scale: float,
        known: tuple[int, int] | None, edges: PackedEdges | None = None, *, gives_lse: bool = False,
    ) -> tuple[tuple[int, int], Found]:  # fmt: skip
        assert known is not None
        assert edges is None
        return known, Found(mask, None)

    def decide(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, int], found: Found,
        modifiers: Modifiers,
        scale: float, allowed: Allowed,
    ) -> AttentionCall:  # fmt: skip
        partition = _DTensorPartition(*lengths, q.size(0), self.plan, self.mesh_shape, self.coordinate)
        masking = masking_of(found.mask, modifiers, lengths, is_deterministic(q, allowed))
        request = _request(q, k, v, partition, self.transport, found.mask, masking, None, allowed)
        groups = [_torch.group_of_name(name) for name in self.groups]
        return _decide(request, self.plan, groups).call(SequenceRanks.over(groups) if groups else None, scale)

    def decide_known(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, int], mask: Mask,
        modifiers: Modifiers,
        scale: float, allowed: Allowed, constants: Hashable,
    ) -> AttentionCall:  # fmt: skip
        return self.decide(q, k, v, lengths, Found(mask, None), modifiers, scale, allowed)


@dataclass(frozen=True)
class _DTensorPartition(Partition):
    """Rows as placed, over the ranks of some mesh axes; the last axis counts fastest."""

    q_len: int
    kv_len: int
    batch_size: int
    plan: AttentionPlacements
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.kv_len

    def groups(self) -> tuple[GroupSegments, ...]:
        places = list(product(*(range(self.mesh_shape[axis]) for axis in self.plan.axes)))
        q_by_rank, kv_by_rank = (
            tuple(self._rows(length, placements, place) for place in places)
            for length, placements in ((self.q_len, self.plan.q), (self.kv_len, self.plan.kv))
        )
        return (GroupSegments((0, self.batch_size), q_by_rank, kv_by_rank),)

    def _rows(self, length: int, placements: tuple[Placement, ...], place: tuple[int, ...]) -> tuple[Segment, ...]:
        there = list(self.coordinate)
        for axis, index in zip(self.plan.axes, place, strict=True):
            there[axis] = index
        return (local_segment(length, placements, self.mesh_shape, there),)


def from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    """A DTensor of the given global shape, without communication."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _to_local(
    tensor: DTensor, placements: tuple[Placement, ...], grad_placements: tuple[Placement, ...]
) -> torch.Tensor:
    # Redistributing is a no-op where the placements are already right, but its backward brings Partial gradients home
    # to the placements of the input.
    return tensor.redistribute(placements=placements).to_local(grad_placements=grad_placements)


def _on_one_mesh(*tensors: torch.Tensor) -> tuple[DTensor, ...]:
    """All as DTensors of one mesh.

    Raises:
        ValueError: plain tensors among DTensors, or different meshes.
    """
    kinds = ", ".join(
        f"{name} {tensor.device_mesh} {tensor.placements}" if isinstance(tensor, DTensor) else f"{name} torch.Tensor"
        for name, tensor in zip("qkv", tensors, strict=True)
    )
    sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    if len(sharded) < len(tensors):
        raise ValueError(f"expected q, k and v all to be DTensors, got {kinds}; wrap with DTensor.from_local")
    if any(tensor.device_mesh != sharded[0].device_mesh for tensor in sharded):
        raise ValueError(f"expected q, k and v on one mesh, got {kinds}")
    return tuple(sharded)


def local_only_sdpa(
    call: SdpaArguments, ring_ranks: Collection[int], plain_sdpa: Callable[[SdpaArguments], torch.Tensor]
) -> torch.Tensor | None:
    """SDPA of DTensors whose mesh crosses the ring in one rank only (over heads or batch): of their local tensors.

    Returns None if the mesh shares more ranks with the ring, or the ring has but one.

    Raises:
        NotImplementedError: such DTensors that are not sharded (or replicated) alike over batch or heads.
    """
    q, k, v = _on_one_mesh(call.q, call.k, call.v)
    with _torch.no_modes():  # the mesh's tensor is real, also where all others are being traced
        shared_ranks = set(q.device_mesh.mesh.flatten().tolist()) & set(ring_ranks)
    if len(shared_ranks) > 1 or len(ring_ranks) == 1:
        return None
    if q.dim() != 4:
        raise NotImplementedError(f"inside of context_parallel, DTensors must have four dims, got {tuple(q.shape)}")
    plan = plan_placements(q.placements, k.placements, v.placements, q.device_mesh.shape, q.size(1), k.size(1))
    if is_seq_sharded(plan.q) or not q.placements == k.placements == v.placements == plan.q:
        raise NotImplementedError(
            "inside of context_parallel, DTensors over other ranks than those of the context must be sharded alike "
            f"over batch (Shard(0)) or whole groups of heads (Shard(1)), or replicated; got "
            f"q {q.placements}, k {k.placements}, v {v.placements}"
        )
    mask = local_bias(q, call.attn_mask, plan) if isinstance(call.attn_mask, DTensor) else call.attn_mask
    local = replace(call, q=q.to_local(), k=k.to_local(), v=v.to_local(), attn_mask=mask, first=first_of(q, plan))
    return from_local(plain_sdpa(local), q.device_mesh, plan.q, (*q.shape[:3], v.size(3)))


# Biases and dropout of attention on DTensors.


def local_modifiers(
    q: DTensor, kv_len: int, attn_mask: torch.Tensor | None, dropout_p: float, plan: AttentionPlacements
) -> Modifiers:
    """What a rank's queries have besides the mask by positions. With dropout, a collective of the whole mesh.

    Args:
        q: (B, H, S, D).
        kv_len: keys of the whole sequence.
        attn_mask: a DTensor on the same mesh that broadcasts to (B, H, S, kv_len), placed in any way.
        dropout_p: the pattern is that of all batch rows, heads and positions together, however they are placed.
        plan: where the computation is placed.

    Raises:
        ValueError, TypeError: a mask that does not fit, or is no DTensor on the mesh of q.
    """
    dropout_p = checked_dropout_p(dropout_p)
    if attn_mask is None and not dropout_p:
        return NO_MODIFIERS
    bias = None if attn_mask is None else local_bias(q, attn_mask, plan)
    check_bias(q, bias, (q.size(2), kv_len))
    if not dropout_p:
        return Modifiers(bias)
    return Modifiers(bias, dropout_p, _seed_of_all(q.to_local(), q.device_mesh), *first_of(q, plan))


def _seed_of_all(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The first rank's: ranks that hold the same must drop the same."""
    seed = torch.randint(1 << 62, (), dtype=torch.int64, device=local.device)
    for axis in range(mesh.ndim):
        if _torch.is_traced(local):
            seed = _torch.traced_broadcast(seed, mesh.get_group(axis))
        else:
            dist.broadcast(seed, group=mesh.get_group(axis), group_src=0)
    return seed


def first_of(q: DTensor, plan: AttentionPlacements) -> tuple[int, int]:
    """Where a rank's batch rows and query heads begin."""
    coordinate = q.device_mesh.get_coordinate()
    assert coordinate is not None
    batch, head = (
        local_segment(q.size(dim), plan.q, tuple(q.device_mesh.shape), coordinate, dim).start
        for dim in (BATCH_DIM, HEAD_DIM)
    )
    return batch, head


def local_bias(q: DTensor, attn_mask: torch.Tensor, plan: AttentionPlacements) -> torch.Tensor:
    """The part of an attn_mask that a rank's queries have, (B or 1, H or 1, S or 1, key positions or 1).

    Raises:
        ValueError, TypeError: a mask that does not fit, or is no DTensor on the mesh of q.
    """
    if not isinstance(attn_mask, DTensor) or attn_mask.device_mesh != q.device_mesh:
        kind = f"a DTensor on {attn_mask.device_mesh}" if isinstance(attn_mask, DTensor) else type(attn_mask).__name__
        raise ValueError(
            f"expected attn_mask to be a DTensor on the mesh of q, {q.device_mesh}, got {kind}; "
            "distribute_tensor(attn_mask, mesh, [Replicate()] * mesh.ndim) makes one"
        )
    mask = four_dims_of_mask(attn_mask, q)
    placements: list[Placement] = []
    of_gradient: list[Placement] = []
    for placement in plan.q:
        goes_along = isinstance(placement, Shard) and mask.size(placement.dim) > 1
        placements.append(placement if goes_along else Replicate())
        is_partial = isinstance(placement, Shard) and not goes_along
        of_gradient.append(Partial() if is_partial else placements[-1])
    assert isinstance(mask, DTensor)
    return mask.redistribute(placements=placements).to_local(grad_placements=of_gradient)
