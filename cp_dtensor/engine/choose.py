"""Choice of a method: the work of each by its plans, its time and memory, and its bytes. The same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from cp_dtensor.comm.collective import OUTER_TRANSPORT, AllGather
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.comm.transports import choose, plans_of_some_ranks, ring_works
from cp_dtensor.engine.latent import EXPANDED_BYTES
from cp_dtensor.plan.cluster import NETWORK_TOLERANCE, TOLERANCE, Cluster, Hosts, Place, Tier
from cp_dtensor.plan.cost import (
    Passes,
    Step,
    Work,
    expansion,
    nearly_fastest,
    ring_work,
    rows_read,
    seconds,
    slowest_work,
    transferred,
)
from cp_dtensor.plan.partition import (
    CallSpec,
    HeadPartition,
    InnerPartition,
    MergedPartition,
    OuterPartition,
    head_stages,
    hides_exchanges,
    nested_rings,
    partition_call,
    with_heads,
)
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiling import Masking, rows_in_order

EXPANDED = "expanded "
"""Prefix of a method that sends K/V, where ranks have latents."""
SPLIT = "split "
"""Prefix of a method over an axis for each tier (hosts, the ranks of a host), where the mesh has one axis of all."""


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
    axis_bytes: tuple[int, ...] = (0,)
    """Bytes that the busiest rank receives over each axis in both passes, the outer one first; 0 until `counted`."""
    work: Passes = field(default=((), ()), compare=False, repr=False)
    """Of the slowest rank."""

    @classmethod
    def of(cls, transport: str, works: Sequence[Passes], cluster: Cluster, memory: float) -> Estimate:
        """Return the estimate of some ranks' work."""
        work, times = slowest_work(works, cluster)
        return cls(transport, *times, memory, work=work)

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def outer_bytes(self) -> int:
        """Bytes over the outer axis, or over the only one."""
        return self.axis_bytes[0]

    def bytes_over(self, tier: int) -> float:
        """Return the bytes over a tier in both passes, on the slowest rank."""
        return sum(
            sum(bytes_of[tier : tier + 1])
            for steps in self.work for step in steps for bytes_of in (step.received, step.sent)
        )  # fmt: skip


def estimates(
    spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, *, one_axis: bool = False
) -> dict[str, Estimate]:
    """Return an estimate for each method that the tiers allow; the first is preferred if times are equal.

    For latents also of each method (with the prefix `EXPANDED`) if ranks expand their own latents and send K/V: that is
    n times fewer rows to expand on n ranks, and none again in backward.

    Args:
        one_axis: True if all ranks are along one axis; tiers are its hosts and the ranks of a host then. Methods over
            an axis for each tier have the prefix `SPLIT`.
    """
    found = _estimates(spec, cluster, transport_method)
    if one_axis and isinstance(cluster.hosts, Hosts):
        along_one = _estimates(spec, cluster.flat, transport_method, cluster.hosts)
        found = {SPLIT + name: each for name, each in found.items()} | along_one
    if spec.latent_dims is not None:
        own_rows = rows_in_order(spec.partition.groups()[0].kv_by_rank).longest
        expanding = seconds((expansion(own_rows, spec, 1),), cluster)
        of_expanded = estimates(expanded(spec), cluster, transport_method, one_axis=one_axis)
        for name, each in of_expanded.items():
            forward, backward = each.forward + expanding, each.backward + 2 * expanding
            found[EXPANDED + name] = replace(each, forward=forward, backward=backward)
    return found


def _estimates(
    spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, hosts: Hosts | None = None
) -> dict[str, Estimate]:
    if hosts is not None or len(cluster.tiers) == 1:
        return {
            "ring": ring_estimate(spec, cluster, transport_method, hosts or 0),
            "ulysses": ulysses_estimate(spec, cluster, transport_method, hosts),
        }
    found = {
        "ring": ring_estimate(spec, cluster, transport_method),
        "hybrid": ulysses_estimate(spec, cluster, transport_method),
    }
    return found if cluster.tolerance == NETWORK_TOLERANCE else dict(reversed(found.items()))


def expanded(spec: CallSpec) -> CallSpec:
    """Return the shape of attention to K/V, as tiles compute it, of that of attention to K/V or latents."""
    return spec if spec.latent_dims is None else replace(spec, kv_heads=spec.q_heads, latent_dims=None)


def fastest(found: dict[str, Estimate], tolerance: float = TOLERANCE) -> str:
    """Return the first method whose predicted time is (nearly) the least."""
    return nearly_fastest(list(found), [estimate.seconds for estimate in found.values()], tolerance)


def ring_estimate(spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, place: Place = 0) -> Estimate:
    """Return the estimate of a ring: over one tier, nested over several, or over all ranks of several hosts."""
    name, works, memory = _ring(spec, cluster, transport_method, place)
    return Estimate.of(name, works, cluster, memory)


def ulysses_estimate(
    spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, hosts: Hosts | None = None
) -> Estimate:
    """Return the estimate by heads over the inner tier, as a ring over the others unless all ranks are in the inner.

    With `hosts`, those of all ranks, the outer tiers are those between hosts.
    """
    inner, *outer = cluster.tiers
    if hosts is not None:
        outer = []
    stages = head_stages(spec, inner.ranks, publishes=inner.shares_memory and not outer)
    heads = partition_call(spec, inner.ranks, stages)
    merged = replace(spec, partition=MergedPartition(spec.partition, inner.ranks))
    stage = with_heads(merged, heads, heads.kv_groups(0, 0))  # of the first rank, which has the most heads
    around = replace(cluster, tiers=tuple(outer or (replace(inner, ranks=1),)))
    name, rings, memory = _ring(stage, around, transport_method, 1)
    group = spec.partition.groups()[0]
    queries, keys = (
        rows_in_order(by_rank).longest * spec.batch_size * spec.itemsize
        for by_rank in (group.q_by_rank, group.kv_by_rank)
    )
    q, out = (float(queries * spec.q_heads * dim) for dim in (spec.head_dim, spec.v_head_dim))
    kv = float(keys * heads.kv_group_count * sum(spec.kv_dims))
    hides = hides_exchanges(spec, inner.shares_memory)
    works = [
        (
            _by_heads(forward, q + kv, out, heads.stages, inner, hides, hosts),
            _by_heads(backward, out, q + kv, heads.stages, inner, hides, hosts),
        )
        for forward, backward in rings
    ]
    # Exchanged tensors are saved for backward; with shared memory they are in symmetric buffers, too.
    memory += (q + kv + out) * (2 if inner.shares_memory else 1)
    return Estimate.of(name if outer else "-", works, cluster, memory)


def _by_heads(
    ring: Work, towards: float, away: float, stages: int, tier: Tier, hides: bool, hosts: Hosts | None = None
) -> Work:
    """Return the work of a pass whose rows are exchanged for heads, stage by stage.

    Args:
        ring: a stage after its exchange.
        towards, away: bytes of this rank's tensors, exchanged for heads and back for rows.
        hides: see `hides_exchanges`; if False, all stages wait for one exchange.
        hosts: of the ranks of the tier, if there are several.
    """
    copies = 2 if tier.shares_memory else 4
    blocks = (1, *(() if hosts is None else hosts.ranks), tier.ranks)  # within a host, and between hosts

    def exchange(size: float) -> tuple[float, ...]:
        return tuple((wide - near) / tier.ranks * size for near, wide in pairwise(blocks))

    exchanges = stages if hides else 1
    arriving = Step(moved=copies * towards / exchanges, received=exchange(towards / exchanges))
    leaving = Step(moved=copies * away / exchanges, sent=exchange(away / exchanges))
    call, *others = ring
    work: list[Step] = []
    for index in range(stages):
        # What the outer ring sends has arrived before.
        steps = [replace(call, launches=1.0 + (call.launches if index == 0 else 0.0)), *others]
        if hides or index == 0:
            steps[0] += arriving
        if hides or index == stages - 1:
            steps[-1] += leaving
        work += [*steps, Step(launches=1)]
    return tuple(work)


def _ring(
    spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, place: Place = 0
) -> tuple[str, list[Passes], float]:
    """Return the transport, the work on some ranks, and the memory of a ring, nested over several tiers.

    `place`: the number of the first of these tiers, or `Hosts` for one ring over all ranks.
    """
    if len(cluster.tiers) == 1 or isinstance(place, Hosts):
        ranks = cluster.tiers[0].ranks
        transport = _transport(spec, cluster, transport_method, place)
        plans = plans_of_some_ranks(transport, spec, ranks)
        memory = max(_ring_memory(plan, spec, transport) for plan in plans)
        return transport.name, ring_works(transport, spec, ranks, place), memory
    busiest = None if spec.masking is Masking.BY_SHAPE else spec.busiest_rank
    ends, block = {0}, 1
    for tier in cluster.tiers:  # the first and the last rank of each tier
        ends |= {rank + (tier.ranks - 1) * block for rank in ends}
        block *= tier.ranks
    some = sorted(ends if busiest is None else {*ends, busiest})
    found = [_ring_on(rank, spec, cluster, transport_method, place) for rank in some]
    return found[0][0], [work for _, work, _ in found], max(memory for *_, memory in found)


def _ring_on(
    rank: int, spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, place: int
) -> tuple[str, Passes, float]:
    """Return the transport, the work and the memory of a rank of a ring, nested if there are several tiers."""
    *inner_tiers, outer = cluster.tiers
    if not inner_tiers:
        transport = _transport(spec, cluster, transport_method)
        plan = transport.plan(spec, rank)
        work = ring_work(plan, spec, place, int(transport.slows_compute))
        return transport.name, work, _ring_memory(plan, spec, transport)
    within = replace(cluster, tiers=tuple(inner_tiers))
    outer_rank, inner_rank = divmod(rank, within.ranks)
    groups = OUTER_TRANSPORT.head_groups(spec, outer.ranks)
    plan, of_rings = nested_rings(spec, outer_rank, within.ranks, inner_rank, groups)
    rings = {key: _ring_on(inner_rank, of_ring, within, transport_method, place) for key, of_ring in of_rings.items()}
    passes: tuple[list[Step], list[Step]] = ([], [])
    for is_backward, steps in enumerate((plan.forward, plan.backward)):
        for step in steps:
            name, works, _ = rings[step.hop, step.heads[1] - step.heads[0]]
            ring = list(works[is_backward])
            tier = place + len(inner_tiers)
            arriving = () if step.transfer is None else transferred(step.transfer, plan, spec, tier)[0]
            ring[0] += Step(received=arriving)
            if is_backward:
                ring[-1] += Step(sent=arriving)  # gradients
            passes[is_backward].extend(ring)
    held = max(memory for *_, memory in rings.values())
    return name, (tuple(passes[0]), tuple(passes[1])), held + _ring_memory(plan, spec, OUTER_TRANSPORT)


def _transport(spec: CallSpec, cluster: Cluster, transport_method: TransportMethod, place: Place = 0) -> KVTransport:
    links = cluster.tiers[0]
    if links.ranks == 1 or (isinstance(transport_method, SymmetricMemory) and not links.shares_memory):
        return AllGather()
    return transport_method if isinstance(transport_method, KVTransport) else choose(spec, cluster, place)


def _ring_memory(plan: TilePlan, spec: CallSpec, transport: KVTransport) -> float:
    """Return the bytes of a ring's buffers.

    These are K/V of a step and of the steps ahead, gradients of two transfers, one contribution of another rank, and
    this rank's own K/V (all heads in a symmetric buffer, or the packed heads).
    """
    group = 0.0
    if spec.latent_dims is not None:  # K/V of a group of heads, their gradients, and these side by side
        row = spec.batch_size * spec.q_heads * (spec.head_dim + spec.v_head_dim) * spec.itemsize
        group = 3.0 * min(EXPANDED_BYTES, row * max(map(rows_read, plan.backward)))
    transfers = [step.transfer for step in plan.backward if step.transfer is not None]
    if not transfers:
        return group
    all_heads = isinstance(transport, SymmetricMemory)
    packed = spec.kv_heads if all_heads else max(x.heads[1] - x.heads[0] for x in transfers)
    own = plan.rows.longest * spec.head_bytes * packed
    held = min(1 + transport.transfers_ahead, len(transfers)) + 3
    buffer = max(plan.buffer_rows(transfer) * (transfer.heads[1] - transfer.heads[0]) for transfer in transfers)
    return group + float(own + held * buffer * spec.head_bytes)


# Bytes over each axis, of the rank that receives most over it. What a rank keeps does not travel.


def counted(found: dict[str, Estimate], spec: CallSpec, sizes: Sequence[int]) -> dict[str, Estimate]:
    """Add bytes to the estimates of a call, by the plans of all ranks; `sizes` are those of the axes, outer first."""
    return {name: replace(each, axis_bytes=attention_bytes(spec, name, sizes)) for name, each in found.items()}


def attention_bytes(spec: CallSpec, method: str, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes over each axis, the outer one first, of a method of attention, a key of `estimates`."""
    if method.startswith(EXPANDED):
        return attention_bytes(expanded(spec), method.removeprefix(EXPANDED), sizes)
    if method == "ring":
        rows = _ring_rows(spec, sizes)
        return tuple(max(of_axis) * spec.kv_heads * spec.head_bytes for of_axis in zip(*rows, strict=True))
    *outer, inner = sizes
    heads = partition_call(spec, inner, 1)
    exchanged = _exchanged_bytes(spec, heads)
    if not outer:
        return (exchanged,)
    most_heads = max(stop - start for start, stop in map(heads.kv_groups, range(inner)))
    merged = replace(spec, partition=MergedPartition(spec.partition, inner))
    rows = _ring_rows(merged, outer)
    return *(max(of_axis) * most_heads * spec.head_bytes for of_axis in zip(*rows, strict=True)), exchanged


def _ring_rows(spec: CallSpec, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return by rank the rows over each axis, the outer one first, of both passes, gradients included.

    In a nested ring, each outer rank's K/V go around a ring within the inner axes.
    """
    outer_size, *inner_sizes = sizes
    if not inner_sizes:
        reading = spec.tiling.reading  # K/V in forward and again in backward, and gradients, which come from readers
        both = zip(reading.received_rows(), reading.sent_rows(), strict=True)
        return [(2 * come + back,) for come, back in both]
    size = prod(inner_sizes)
    by_place = [replace(spec, partition=OuterPartition(spec.partition, size, place)) for place in range(size)]
    readings = [each.tiling.reading for each in by_place]
    over_outer = [_ring_rows(each, (outer_size,)) for each in by_place]
    found = list[tuple[int, ...]]()
    for outer_rank in range(outer_size):
        sources = [
            source
            for source in range(outer_size)
            if source == outer_rank or any(reading.parts(outer_rank, source) for reading in readings)
        ]
        partitions = (InnerPartition(spec.partition, size, outer_rank, source) for source in sources)
        by_source = [_ring_rows(replace(spec, partition=each), inner_sizes) for each in partitions]
        for place in range(size):
            over_inner = map(sum, zip(*(rows[place] for rows in by_source), strict=True))
            found.append((*over_outer[place][outer_rank], *over_inner))
    return found


def _exchanged_bytes(spec: CallSpec, heads: HeadPartition) -> int:
    """Return the bytes over the axis on which rows are exchanged for heads, of the busiest of all ranks."""
    group = spec.partition.groups()[0]
    queries, keys = (
        [sum(segment.length for segment in segments) for segments in by_rank]
        for by_rank in (group.q_by_rank, group.kv_by_rank)
    )
    size, most = heads.world_size, 0
    for first_rank in range(0, len(queries), size):
        here = slice(first_rank, first_rank + size)
        for rank, (q_rows, kv_rows) in enumerate(zip(queries[here], keys[here], strict=True)):
            groups = heads.kv_groups(rank)
            first, last = heads.query_heads(groups)
            of_q, of_kv = last - first, groups[1] - groups[0]
            # Of forward and of backward: rows of others to this rank's heads, and own rows from the heads of others.
            q_heads = (sum(queries[here]) - q_rows) * of_q + q_rows * (spec.q_heads - of_q)
            kv_heads = (sum(keys[here]) - kv_rows) * of_kv + kv_rows * (heads.kv_group_count - of_kv)
            most = max(most, q_heads * (spec.head_dim + spec.v_head_dim) + kv_heads * sum(spec.kv_dims))
    return most * spec.batch_size * spec.itemsize
