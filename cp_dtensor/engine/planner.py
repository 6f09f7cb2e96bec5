"""Planner: the plan of a call, as a ring, by heads, by both, or as a nested ring. Plans are cached."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor._torch.cache import capturing
from cp_dtensor._torch.tensors import on_device
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.select import (
    Allowed,
    allowed_backends,
    choose_backend,
    is_deterministic,
    masked_by_shape,
    with_wide_gradients,
)
from cp_dtensor.comm.calls import Calls, Signature, calls_of
from cp_dtensor.comm.collective import OUTER_TRANSPORT, AllGather
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.head_exchange import CollectiveHeads, HeadRows
from cp_dtensor.comm.head_exchange_symm_mem import obstacle_to_shared_memory, shared_memory_heads
from cp_dtensor.comm.links import cluster_of, split_over_hosts
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.engine.agreement import agreed_pair, warn_of_zeros_and_ones
from cp_dtensor.engine.arguments import check_batch_size
from cp_dtensor.engine.base import Done, Plan, Tensors
from cp_dtensor.engine.call import Call, plan_fields
from cp_dtensor.engine.choose import EXPANDED, SPLIT, estimates, expanded, fastest
from cp_dtensor.engine.latent import ExpandedPlan, LatentRingPlan
from cp_dtensor.engine.ring import NestedRingPlan, Ring, RingPlan
from cp_dtensor.engine.ulysses import UlyssesPlan
from cp_dtensor.plan.partition import (
    CallSpec,
    HeadPartition,
    MergedPartition,
    SequencePartition,
    head_stages,
    masking_of,
    nested_rings,
    partition_call,
    with_heads,
)
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import LRUCache, lru_cached
from cp_dtensor.spec.logs import is_logged, log_once
from cp_dtensor.spec.masks import Full, Mask, as_plain

_WIDE_GRADIENTS_FROM = 4
"""Fewest ranks whose gradients of own tiles stay float32. With fewer, the slower kernel costs 10% of backward."""
_Planned = tuple[Plan, tuple[int, int], Signature, tuple[Calls, ...], SequenceRanks | None]
_plans: WeakKeyDictionary[dist.ProcessGroup, LRUCache[_Planned]] = WeakKeyDictionary()


def planned(
    call: Call, t: Tensors, rows: int = 1, needs_lse: bool = False, needs_grads: tuple[bool, ...] | None = None
) -> Done:
    """Return the plan of a call and its global lengths; one like an earlier one costs one look-up.

    `rows` are batch rows that make up the one row of packed tensors. Other arguments and errors are those of `run`.
    """
    q, k, v, ranks = t.q, t.k, t.v, call.ranks
    allowed = call.backends or allowed_backends()
    properties = (
        q.shape, k.shape, v.shape, q.dtype, q.device, t.bias is not None, call.changes_weights,
        is_deterministic(q, allowed, call.deterministic),
        None if t.up is None else t.up.size(1) + v.size(3) - q.size(3),
    )  # fmt: skip
    inner = None if ranks.inner is None else ranks.inner.names
    key = plan_fields(call), properties, allowed, ranks.rank, inner
    plans = _plans.get(ranks.outer)
    if plans is None:
        plans = _plans[ranks.outer] = LRUCache()
    found = plans.get(key)
    if found is None or call.debug:
        pair = agreed_pair(call, t, needs_lse, needs_grads)
        if found is None:
            found = _planned(call, pair, properties, allowed)
            if t.bias is not None:
                warn_of_zeros_and_ones(t.bias)
            if not capturing():  # ranks compare nothing then, so a later call must not find the plan
                plans.add(key, found)
    plan, pair, signature, calls, split = found
    scale = 1.0 / math.sqrt(q.size(3)) if call.scale is None else call.scale
    return Done(call, plan, pair, scale, signature, calls, rows, split or ranks)


def _planned(call: Call, pair: tuple[int, int], properties: tuple[Any, ...], allowed: Allowed) -> _Planned:
    q_shape, mask, ranks = properties[0], call.mask or Full(), call.ranks
    check_batch_size(q_shape, call)
    spec = call_spec(call.partition(pair, q_shape[0]), mask, *properties)
    if spec.deterministic:
        spec = masked_by_shape(spec, allowed)
    method, split = _method(spec, call, ranks)
    plan = plan_call(spec, method, call.transport, choose_backend(expanded(spec), allowed), split or ranks)
    # What is equal on all ranks and decides what they exchange.
    signature = Signature(
        f"attention of {pair[0]:,} queries to {pair[1]:,} keys, batch {spec.batch_size}, {spec.q_heads}:"
        f"{spec.kv_heads} heads of {spec.dims}, {spec.dtype}, method {call.method!r}, "
        f"{'DTensors' if call.placed is not None else call.layout}, {mask}"
    )
    if is_logged("engine"):
        sizes = " x ".join(map(str, ranks.sizes))
        how = f"{_described(plan)} (rotate_method {call.transport.name!r})"
        log_once("engine", logging.INFO, f"{signature.text}, on {sizes} ranks: {how}")
    return plan, pair, signature, () if _is_alone(spec) else calls_of(ranks), split


def _is_alone(spec: CallSpec) -> bool:
    """Return whether one rank has all rows."""
    return len(spec.partition.groups()[0].kv_by_rank) == 1


def _described(plan: Plan) -> str:
    """Return a plan in words."""
    if isinstance(plan, ExpandedPlan):
        return f"latents expanded before sending, {_described(plan.inner)}"
    if isinstance(plan, UlyssesPlan):
        by = "collectives" if isinstance(plan.exchange, CollectiveHeads) else "shared memory"
        return f"heads exchanged by {by} in {len(plan.stages)} stages, then {_described(plan.inner[0])}"
    assert isinstance(plan, Ring)
    if isinstance(plan, NestedRingPlan):
        inner = (_described(each) for each in plan.inner.values() if each is not None)
        return f"nested ring of {next(inner, 'no tiles')}"
    size = plan.tile_plan.world_size
    where = "one rank's rows" if size == 1 else f"ring of {size}, K/V by {plan.transport.name}"
    return f"{where}, tiles by {plan.backend.name}"


def call_spec(
    partition: SequencePartition, mask: Mask, q: torch.Size, k: torch.Size, v: torch.Size, dtype: torch.dtype,
    device: torch.device, has_bias: bool = False, changes_weights: bool = False, deterministic: bool = False,
    value_dim: int | None = None,
) -> CallSpec:  # fmt: skip
    """Return the `CallSpec` of shards of these shapes. With `value_dim`, k and v are latents and rotary keys."""
    masking = masking_of(partition, mask, has_bias, changes_weights, deterministic)
    return CallSpec(
        partition=partition, mask=as_plain(mask) if masking is Masking.BY_SHAPE else mask, batch_size=q[0],
        q_heads=q[1], kv_heads=k[1], head_dim=q[3], v_head_dim=v[3] if value_dim is None else value_dim,
        dtype=str(dtype).removeprefix("torch."), masking=masking, device=str(device),
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        latent_dims=None if value_dim is None else (k[3], v[3]), deterministic=deterministic,
    )  # fmt: skip


def _method(spec: CallSpec, call: Call, ranks: SequenceRanks) -> tuple[str, SequenceRanks | None]:
    """Return the method of a call, and its ranks along two axes if "auto" splits the one of the call over hosts.

    "auto" takes what is predicted to be fastest. It may expand latents before K/V are sent, as a rank that is alone
    does; other methods send latents.
    """
    if call.method != "auto":
        return call.method, None
    if _is_alone(spec):
        return "ring" if spec.latent_dims is None else EXPANDED + "ring", None
    device = torch.device(spec.device)
    with on_device(device):
        split = split_over_hosts(ranks, device)
        if spec.masking is Masking.INTERVALS_UNBROKEN and split is None:
            return "ring", None  # by heads, the rows of a bias would have to travel
        method = _predicted_fastest(spec, call.transport, ranks, split)
    return method.replace(SPLIT, ""), split if SPLIT in method else None


def _predicted_fastest(
    spec: CallSpec, transport: TransportMethod, ranks: SequenceRanks, split: SequenceRanks | None
) -> str:
    if spec.device_type != "cuda":  # the cost model is of GPUs
        method = ("ring" if split is None else SPLIT + "ring") if ranks.inner is None else "hybrid"
        log_once("engine", logging.INFO, f'"auto" takes {method}, as always on CPUs')
        return method
    cluster = cluster_of(ranks, torch.device(spec.device), spec.itemsize)
    found = estimates(spec, cluster, transport, one_axis=ranks.inner is None)
    if spec.masking is Masking.INTERVALS_UNBROKEN:
        found = {name: each for name, each in found.items() if name.endswith("ring")}
    chosen = fastest(found, cluster.tolerance)
    times = ", ".join(f"{name} {1e3 * each.seconds:.3g} ms" for name, each in found.items())
    within = f"the first within {cluster.tolerance - 1:.0%} of the fastest"
    log_once("engine", logging.INFO, f'"auto" takes {chosen}, {within}: {times}')
    return chosen


def plan_call(
    spec: CallSpec, method: str, transport: TransportMethod, backend: AttentionBackend, ranks: SequenceRanks
) -> Plan:
    """Return the plan for a method that fits the ranks; with the prefix `EXPANDED`, ranks expand their own latents."""
    if method.startswith(EXPANDED):
        inner = plan_call(expanded(spec), method.removeprefix(EXPANDED), transport, backend, ranks)
        return ExpandedPlan(inner, inner.saves_rows_of_others)
    if _is_alone(spec):
        return plan_ring(spec, transport, backend, None)
    if method != "ring":
        return plan_ulysses(spec, transport, backend, ranks)
    return plan_ring(spec, transport, backend, ranks)


def plan_ring(
    spec: CallSpec, transport: TransportMethod, backend: AttentionBackend, ranks: SequenceRanks | None
) -> Ring:
    """Return a ring of the ranks of the partition, nested if they are along several axes.

    `ranks` is None for a rank that is alone.
    """
    if ranks is not None and ranks.inner is not None:
        groups = OUTER_TRANSPORT.head_groups(spec, ranks.outer.size())
        tile_plan, rings = nested_rings(spec, ranks.outer.rank(), ranks.inner.size, ranks.inner.rank, groups)
        inner = {
            key: plan_ring(each, transport, backend, ranks.inner) if _has_tiles(each) else None
            for key, each in rings.items()
        }
        return NestedRingPlan(tile_plan, spec, OUTER_TRANSPORT, backend, _state_dtype(spec), inner)
    group, rank = (None, 0) if ranks is None else (ranks.outer, ranks.rank)
    device = torch.device(spec.device)
    alone = group is None or group.size() == 1
    with on_device(device):
        chosen = AllGather() if group is None or alone else transport.for_call(spec, group, device)
    own = None
    if group is not None and group.size() >= _WIDE_GRADIENTS_FROM and chosen.keeps_own_gradients_wide:
        own = with_wide_gradients(backend, spec)
    kind = RingPlan if spec.latent_dims is None else LatentRingPlan
    # Only tiles depend on a rank's kernels. Predictions and transfers are equal on all ranks.
    of_tiles = replace(spec, masking=Masking.INTERVALS_TOGETHER) if backend.joins_intervals else spec
    return kind(_tile_plan(chosen, of_tiles, rank), spec, chosen, backend, _state_dtype(spec), own or backend)


def plan_ulysses(
    spec: CallSpec, transport: TransportMethod, backend: AttentionBackend, ranks: SequenceRanks
) -> UlyssesPlan:
    """Return a plan by heads over the innermost axis, as a ring over the others if there are any."""
    axis, ring = ranks.axes[-1], None if ranks.inner is None else SequenceRanks(*ranks.axes[:-1])
    rank, ring_rank = axis.rank(), 0 if ring is None else ring.rank
    device = torch.device(spec.device)
    with on_device(device):
        obstacle = obstacle_to_shared_memory(spec, axis, device)
    if obstacle is not None:
        log_once("comm", logging.INFO, f"heads are exchanged by collectives, not through shared memory: {obstacle}")
    # Not in a hybrid: all ranks of its ring need the same stages, and ranks of other groups may share no memory.
    stage_count = head_stages(spec, axis.size(), publishes=ring is None and obstacle is None)
    heads = partition_call(spec, axis.size(), stage_count)
    merged = MergedPartition(spec.partition, axis.size())
    merged_spec = replace(spec, partition=merged)
    stages = exchange_stages(heads, merged, ring_rank)
    by_stage = [with_heads(merged_spec, heads, heads.kv_groups(rank, stage)) for stage in range(heads.stages)]
    return UlyssesPlan(
        heads=heads,
        stages=stages,
        inner=tuple(plan_ring(each, transport, backend, ring) for each in by_stage),
        exchange=shared_memory_heads(spec, stages) if obstacle is None else CollectiveHeads(),
        overlaps_stages=ring is None and heads.stages > 1,
        state_dtype=_state_dtype(spec),
    )


@lru_cached  # one object for equal ones: tables on devices are cached by identity
def exchange_stages(
    heads: HeadPartition, merged: MergedPartition, ring_rank: int
) -> tuple[tuple[HeadRows, HeadRows], ...]:
    """Return for each stage the rows and heads of the ranks: of queries, and of keys and values."""
    query_rows, key_rows = merged.rows(ring_rank)
    by_stage = [
        tuple(heads.kv_groups(rank, stage) for rank in range(heads.world_size)) for stage in range(heads.stages)
    ]
    return tuple(
        (HeadRows(query_rows, tuple(map(heads.query_heads, units))), HeadRows(key_rows, units, heads.replication))
        for units in by_stage
    )


@lru_cached
def _has_tiles(spec: CallSpec) -> bool:
    """Return whether any rank's queries may attend to any rank's keys; alike on each rank."""
    tiling = spec.tiling
    own = (tiling.tiles_against(rank, rank) for rank in range(tiling.world_size))
    return any(tiling.reading.received_rows()) or any(own)


@lru_cached
def _tile_plan(transport: KVTransport, spec: CallSpec, rank: int) -> TilePlan:
    plan = transport.plan(spec, rank)
    if is_logged("plan"):
        log_once("plan", logging.INFO, f"{plan.summary}, {transport.name}")
    return plan


def _state_dtype(spec: CallSpec) -> torch.dtype:
    return torch.float64 if spec.dtype == "float64" else torch.float32
