"""Cost model of methods: time and memory of a call. The same on every rank. `engine.traffic` counts bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cp_dtensor.comm.collective import OUTER_TRANSPORT, AllGather
from cp_dtensor.comm.select import choose, plans_of_some_ranks, slowest_seconds
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.engine.latent import EXPANDED_BYTES, rows_of_tiles
from cp_dtensor.plan.cost import TRANSFER_TAX, buffer_bytes, nearly_fastest, transfer_bytes
from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.partition import (
    CallSpec,
    HeadPartition,
    MergedPartition,
    OuterPartition,
    head_stages,
    hides_exchanges,
    inner_partitions,
    partition_call,
    with_heads,
)
from cp_dtensor.plan.plan import Step, TilePlan, ring_plan
from cp_dtensor.plan.tiling import rows_in_order

EXPANDED = "expanded "
"""Prefix of a method that sends K/V, where ranks have latents."""
_EXCHANGE_LAUNCHES = 4
"""Launches of the exchange of heads and of the exchange back."""
_CALL_LAUNCHES = 2.5
"""Host time of a pass before its first launch, in launches (from the benchmark tables)."""


@dataclass(frozen=True)
class Axis:
    """The ranks along one mesh axis, and the links between them."""

    size: int
    hardware: Hardware
    shares_memory: bool
    """True if all its ranks can read each other's memory."""


@dataclass(frozen=True)
class Estimate:
    """Estimate of one call on the slowest rank."""

    transport: str
    """KV transport of its rings, "-" if it has none."""
    forward: float
    backward: float
    """Seconds."""
    memory: float
    """Bytes of buffers at the peak of backward, without inputs, results and workspaces of kernels."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def estimates(
    spec: CallSpec, outer: Axis, inner: Axis | None, transport_method: TransportMethod
) -> dict[str, Estimate]:
    """An estimate for each method that the axes allow; the first is preferred if times are equal.

    For latents also of each method (with the prefix `EXPANDED`) if ranks expand their own latents and send K/V: that is
    n times fewer rows to expand on n ranks, and none again in backward.
    """
    if inner is None:
        found = {
            "ring": ring_estimate(spec, outer, transport_method),
            "ulysses": ulysses_estimate(spec, outer, None, transport_method),
        }
    else:
        places = sorted({0, outer.size - 1})
        nested = (nested_ring_estimate(spec, outer, inner, transport_method, place) for place in places)
        found = {
            "hybrid": ulysses_estimate(spec, inner, outer, transport_method),
            "ring": max(nested, key=lambda estimate: estimate.seconds),
        }
    if spec.latent_dims is not None:
        expanding = _expanding(rows_in_order(spec.partition.groups()[0].kv_by_rank).longest, spec, outer)
        for name, each in estimates(expanded(spec), outer, inner, transport_method).items():
            forward, backward = each.forward + expanding, each.backward + 2 * expanding
            found[EXPANDED + name] = replace(each, forward=forward, backward=backward)
    return found


def expanded(spec: CallSpec) -> CallSpec:
    """The shape of attention to K/V, as tiles compute it, of the shape of attention to K/V or latents."""
    return spec if spec.latent_dims is None else replace(spec, kv_heads=spec.q_heads, latent_dims=None)


def _expanding(rows: int, spec: CallSpec, axis: Axis) -> float:
    """Seconds to expand latents of some rows; 0 if keys and values travel. Each product of backward is alike.

    The product, and the copies of its result and of the rotary keys next to one another.
    """
    if spec.latent_dims is None:
        return 0.0
    latent, rotary = spec.latent_dims
    tokens = float(rows * spec.batch_size * spec.q_heads)
    flops = 2 * tokens * latent * (spec.head_dim - rotary + spec.v_head_dim)
    moved = 3 * tokens * (spec.head_dim + spec.v_head_dim) * spec.itemsize
    return flops / axis.hardware.flops + moved / axis.hardware.memory_speed


def _expanding_in(plans: Iterable[TilePlan], spec: CallSpec, axis: Axis) -> float:
    """Seconds to expand what the slowest of some ranks sees in forward; backward takes three times as many."""
    return _expanding(max(sum(map(_rows_read, plan.forward)) for plan in plans), spec, axis)


def _rows_read(step: Step) -> int:
    """The rows that the tiles of a step read."""
    return sum(stop - start for start, stop in rows_of_tiles(step))


def fastest(found: dict[str, Estimate]) -> str:
    """The first method whose predicted time is (nearly) the least."""
    return nearly_fastest(list(found), [estimate.seconds for estimate in found.values()])


def ring_estimate(spec: CallSpec, axis: Axis, transport_method: TransportMethod) -> Estimate:
    """A ring over one axis."""
    transport = _transport(transport_method, spec, axis)
    forward, backward = (seconds + _begun(axis) for seconds in _passes(transport, spec, axis))
    plans = plans_of_some_ranks(transport, spec, axis.size)
    expanding = _expanding_in(plans, spec, axis)
    return Estimate(
        transport=transport.name,
        forward=forward + expanding,
        backward=backward + 3 * expanding,
        memory=max(_ring_memory(plan, spec, transport) for plan in plans),
    )


def ulysses_estimate(spec: CallSpec, inner: Axis, outer: Axis | None, transport_method: TransportMethod) -> Estimate:
    """By heads over the inner axis, as a ring over the outer one if there is one."""
    stages = head_stages(spec, inner.size, publishes=outer is None and inner.shares_memory)
    heads = partition_call(spec, inner.size, stages)
    merged = replace(spec, partition=MergedPartition(spec.partition, inner.size))
    # Of the first rank, which has the most heads.
    by_stage = [with_heads(merged, heads, heads.kv_groups(0, stage)) for stage in range(heads.stages)]
    around = Axis(1, inner.hardware, shares_memory=True) if outer is None else outer
    ring = _transport(transport_method, by_stage[0], around)
    if outer is None:  # kernels are launched while heads are exchanged
        around = replace(around, hardware=replace(inner.hardware, launch=0.0))
    computed = [_passes(ring, each, around) for each in by_stage]
    if outer is None and heads.stages > 1 and inner.shares_memory:  # stages overlap
        together = _passes(ring, with_heads(merged, heads, heads.kv_groups(0)), around)
        computed = [(together[0] / heads.stages, together[1] / heads.stages)] * heads.stages
    exchanged = _exchanged(spec, heads)
    hides = hides_exchanges(spec, inner.shares_memory)
    times = []
    for index, (towards_heads, towards_rows) in enumerate(exchanged):
        arriving, leaving = (_exchange_seconds(size / heads.stages, inner) for size in (towards_heads, towards_rows))
        computing = [passes[index] for passes in computed]
        times.append(_begun(inner) + _pipeline(computing, arriving, leaving, inner, backward=index == 1, hides=hides))
    plans = [plan for each in by_stage for plan in plans_of_some_ranks(ring, each, around.size)]
    ring_memory = max(_ring_memory(plan, by_stage[0], ring) for plan in plans)
    expanding = _expanding_in(plans, by_stage[0], around)
    # Exchanged tensors are saved for backward; with shared memory they are in symmetric buffers, too.
    memory = sum(exchanged[0]) * (2 if inner.shares_memory else 1) + ring_memory
    return Estimate(
        transport="-" if outer is None else ring.name,
        forward=times[0] + expanding,
        backward=times[1] + 3 * expanding,
        memory=memory,
    )


def nested_ring_estimate(
    spec: CallSpec, outer: Axis, inner: Axis, transport_method: TransportMethod, outer_rank: int
) -> Estimate:
    """A ring over the outer axis of rings over the inner one, on the ranks with that outer rank."""
    tiling = replace(spec, partition=OuterPartition(spec.partition, inner.size, 0)).tiling
    plan = ring_plan(tiling, outer_rank, spec.kv_heads)
    forward = backward = _begun(inner)
    memory = 0.0
    name = "-"
    for step, partition in zip(plan.forward, inner_partitions(spec.partition, plan, inner.size), strict=True):
        within = replace(spec, partition=partition)
        transport = _transport(transport_method, within, inner)
        arriving = 0.0
        if step.transfer is not None:
            arriving = transfer_bytes(step.transfer, plan, spec) / outer.hardware.link_speed
        seconds, backward_seconds = _passes(transport, within, inner)
        forward += max(seconds, arriving)
        backward += max(backward_seconds, 2 * arriving)
        plans = plans_of_some_ranks(transport, within, inner.size)
        expanding = _expanding_in(plans, within, inner)
        forward, backward = forward + expanding, backward + 3 * expanding
        memory = max(memory, *(_ring_memory(each, within, transport) for each in plans))
        name = transport.name
    return Estimate(
        transport=name,
        forward=forward,
        backward=backward,
        memory=memory + _ring_memory(plan, spec, OUTER_TRANSPORT),
    )


def _transport(transport_method: TransportMethod, spec: CallSpec, axis: Axis) -> KVTransport:
    """The KV transport that the method takes on an axis, without a collective."""
    needs_memory = isinstance(transport_method, SymmetricMemory)
    if axis.size == 1 or (needs_memory and not axis.shares_memory):
        return AllGather()
    if isinstance(transport_method, KVTransport):
        return transport_method
    return choose(spec, axis.size, axis.hardware, axis.shares_memory)


def _passes(transport: KVTransport, spec: CallSpec, axis: Axis) -> tuple[float, float]:
    """Seconds of forward and of backward."""
    forward = slowest_seconds(transport, spec, axis.size, axis.hardware, backward=False)
    return forward, slowest_seconds(transport, spec, axis.size, axis.hardware, backward=True) - forward


def _begun(axis: Axis) -> float:
    return _CALL_LAUNCHES * axis.hardware.launch


def _ring_memory(plan: TilePlan, spec: CallSpec, transport: KVTransport) -> float:
    """The bytes of a ring's buffers.

    These are K/V of a step and of the steps ahead, gradients of two transfers, one contribution of another rank, and
    this rank's own K/V (all heads in a symmetric buffer, or the packed heads).
    """
    group = 0.0
    if spec.latent_dims is not None:  # K/V of a group of heads, their gradients, and these side by side
        row = spec.batch_size * spec.q_heads * (spec.head_dim + spec.v_head_dim) * spec.itemsize
        group = 3.0 * min(EXPANDED_BYTES, row * max(map(_rows_read, plan.backward)))
    transfers = [step.transfer for step in plan.backward if step.transfer is not None]
    if not transfers:
        return group
    all_heads = isinstance(transport, SymmetricMemory)
    packed = spec.kv_heads if all_heads else max(x.heads[1] - x.heads[0] for x in transfers)
    own = plan.rows.longest * spec.head_bytes * packed
    held = min(1 + transport.transfers_ahead, len(transfers)) + 3
    return group + float(own + held * max(buffer_bytes(transfer, plan, spec) for transfer in transfers))


def _exchanged(spec: CallSpec, heads: HeadPartition) -> tuple[tuple[float, float], tuple[float, float]]:
    """Bytes of a rank's tensors in forward and in backward, each for the exchange to heads and back to rows."""
    group = spec.partition.groups()[0]
    queries, keys = (
        rows_in_order(by_rank).longest * spec.batch_size * spec.itemsize
        for by_rank in (group.q_by_rank, group.kv_by_rank)
    )
    q, out = (float(queries * spec.q_heads * dim) for dim in (spec.head_dim, spec.v_head_dim))
    kv = float(keys * heads.kv_group_count * sum(spec.kv_dims))
    return (q + kv, out), (out, q + kv)


def _exchange_seconds(size: float, axis: Axis) -> float:
    """Seconds to exchange `size` bytes on every rank, its own share included."""
    hardware = axis.hardware
    copies = 2 if axis.shares_memory else 4
    link = size * (axis.size - 1) / axis.size / hardware.link_speed if axis.size > 1 else 0.0
    return 2 * hardware.link_latency + link + copies * size / hardware.memory_speed


def _pipeline(
    computed: list[float], arriving: float, leaving: float, axis: Axis, *, backward: bool, hides: bool
) -> float:
    """Seconds of all stages. The first arrival and the last departure do not overlap attention.

    The others do if `hides` is True (see `hides_exchanges`).
    """
    host = axis.hardware.launch * _EXCHANGE_LAUNCHES * len(computed) * (2 if backward else 1)
    tax = 0.0 if axis.shares_memory else TRANSFER_TAX
    total = arriving + leaving
    for index, seconds in enumerate(computed):
        meanwhile = (arriving if index + 1 < len(computed) else 0.0) + (leaving if index else 0.0)
        total += max(seconds + tax * min(meanwhile, seconds), meanwhile) if hides else seconds + meanwhile
    return max(total, host + axis.hardware.launch * 2 * len(computed))
