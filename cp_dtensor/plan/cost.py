"""Cost of work on a cluster: seconds from FLOPs, bytes and launches, and the speeds of GPUs and links.

A call on one rank is `Work`: steps of FLOPs, bytes and launches. A `Cluster` is a GPU and tiers of links. `seconds`
turns work into time. It follows the steps on three clocks: the host launches, the GPU computes, links transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import MappingProxyType
from typing import TypeVar

from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Step as TileStep
from cp_dtensor.plan.plan import TilePlan, Transfer
from cp_dtensor.plan.tiles import ShapedMask, Tile
from cp_dtensor.spec.layouts import Span

# Constants of the model, beside `Hardware.launch` and `Hardware.link_latency`. The first three are parts of the
# vendors' peaks, measured on H200s with NVLink 4 (2xH200 in docs/benchmarks/measured.csv) and assumed of all others.
FLOPS_REACHED = 620 / 989
"""FLOPs a second of attention over the peak: 620 of 989 TFLOP/s."""
MEMORY_REACHED = 3.5 / 4.8
"""Bytes a second of copies over the peak: 3.5 of 4.8 TB/s."""
LINK_REACHED = 330 / 450
"""Bytes a second of an all-gather over the peak: 330 of 450 GB/s."""
SINGLE_PRECISION = 0.05
"""Speed of attention in float32 or float64 over that in bfloat16 (assumed)."""
BACKWARD = 3.0
"""FLOPs and launches of backward over those of forward (rings of 8xH200-graphs; the host's time there)."""
TRIANGLE = 0.52
"""FLOPs that a triangle takes the time of, over those of its rectangle ("ideal" of 8xH200-graphs)."""
INTERVALS = 1.3
"""Time of interval-masked tiles over tiles by shape with as many pairs (2xH200-masks)."""
TRANSFER_TAX = 0.15
"""Fraction by which attention slows down while kernels of transfers take multiprocessors (measured on H200s)."""
TOLERANCE = 1.05
"""Predictions within this ratio count as equal: runs of one benchmark differ by as much."""


@dataclass(frozen=True)
class GPU:
    """Peaks of a GPU, from NVIDIA's data sheets."""

    flops: float
    """FLOPs per second in bfloat16, dense."""
    memory_speed: float
    """Bytes per second."""
    multiprocessors: int
    link: str
    """Name in `LINKS` of its NVLink."""


@dataclass(frozen=True)
class Link:
    """Peak of a link, from the standard or NVIDIA's data sheets."""

    speed: float
    """Bytes per second and direction of one GPU: all its NVLinks together, or one network port."""
    shares_memory: bool
    """True for NVLink, whose GPUs read each other's memory; False for networks."""


GPUS: Mapping[str, GPU] = MappingProxyType(
    {
        "A100": GPU(312e12, 2.0e12, 108, "NVLink 3"),  # SXM, 80 GB
        "H100": GPU(989e12, 3.35e12, 132, "NVLink 4"),  # SXM
        "H20": GPU(148e12, 4.0e12, 78, "NVLink 4"),
        "H200": GPU(989e12, 4.8e12, 132, "NVLink 4"),  # SXM
        "B200": GPU(2250e12, 8.0e12, 148, "NVLink 5"),  # HGX
    }
)
"""GPUs by the names that `Hardware.of` and `explain` take, with NVIDIA's peaks: `flops` a second in bfloat16 without
sparsity, `memory_speed` in bytes a second, `multiprocessors`, and the name of their `link`."""

LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "NVLink 3": Link(300e9, shares_memory=True),
        "NVLink 4": Link(450e9, shares_memory=True),
        "NVLink 5": Link(900e9, shares_memory=True),
        "InfiniBand HDR": Link(25e9, shares_memory=False),
        "InfiniBand NDR": Link(50e9, shares_memory=False),
        "InfiniBand XDR": Link(100e9, shares_memory=False),
        "Ethernet 25G": Link(3.125e9, shares_memory=False),
        "Ethernet 100G": Link(12.5e9, shares_memory=False),
        "Ethernet 200G": Link(25e9, shares_memory=False),
        "Ethernet 400G": Link(50e9, shares_memory=False),
    }
)
"""Links by the names that `Hardware.of` and `explain` take: `speed` in bytes a second and direction of one GPU, which
has a network port of its own, and whether GPUs that it connects read each other's memory (`shares_memory`)."""

NODE = 8
"""GPUs of a node, which NVLink connects (HGX and DGX systems of all `GPUS`)."""
NETWORK = "InfiniBand NDR"
"""The link between nodes where none is named."""


@dataclass(frozen=True)
class Hardware:
    """Speeds of a GPU and its links, in seconds, bytes and floating-point operations.

    >>> Hardware.of("H100").link_speed / 1e9
    330.0
    >>> slow = Hardware(flops=600e12, memory_speed=3e12, multiprocessors=132, link_speed=10e9, shares_memory=False)
    """

    flops: float
    """FLOPs per second of a large attention call."""
    memory_speed: float
    """Bytes read or written per second."""
    multiprocessors: int
    """Number of streaming multiprocessors."""
    link_speed: float
    """Bytes per second into a rank, all ranks together sending and receiving."""
    link_latency: float = 20e-6
    """Seconds until the first byte of a transfer arrives."""
    launch: float = 180e-6
    """Seconds of host time to launch a step of attention, each of its tiles, or an exchange of heads, in forward (the
    host's time at 8,192 tokens in docs/benchmarks/measured.csv: 120 to 250 on six machines)."""
    shares_memory: bool = True
    """False if the link is a network, across which ranks cannot read each other's memory. Read by `explain` only:
    calls look at the GPUs themselves."""

    def of_itemsize(self, itemsize: int) -> Hardware:
        """Return the hardware for tensors with elements of that many bytes, if `flops` is for 16-bit ones."""
        return self if itemsize <= 2 else replace(self, flops=self.flops * SINGLE_PRECISION)

    @classmethod
    def of(cls, name: str) -> Hardware:
        """Return the hardware of a GPU by name, such as "H100" with its NVLink, or "H100, InfiniBand NDR".

        The speeds are the parts of the peaks in `GPUS` and `LINKS` that H200s with NVLink reach.

        Raises:
            ValueError: an unknown name.

        >>> Hardware.of("B200, Ethernet 400G").shares_memory
        False
        """
        gpu, link = named(name)
        return cls(
            GPUS[gpu].flops * FLOPS_REACHED,
            GPUS[gpu].memory_speed * MEMORY_REACHED,
            GPUS[gpu].multiprocessors,
            LINKS[link or GPUS[gpu].link].speed * LINK_REACHED,
            shares_memory=LINKS[link or GPUS[gpu].link].shares_memory,
        )


def named(name: str) -> tuple[str, str | None]:
    """Return the GPU and the link of a name such as "H100" or "h100, infiniband ndr"; None for no link.

    Raises:
        ValueError: an unknown name.
    """
    gpu, comma, link = (part.strip().casefold() for part in name.partition(","))
    gpus = {each.casefold(): each for each in GPUS}
    links = {each.casefold(): each for each in LINKS}
    if gpu not in gpus or (comma and link not in links):
        raise ValueError(
            f"expected hardware to be a GPU, one of {', '.join(GPUS)}, with a link or without, one of "
            f"{', '.join(LINKS)}, such as 'H100, InfiniBand NDR'; got {name!r}"
        )
    return gpus[gpu], links[link] if comma else None


@dataclass(frozen=True)
class Tier:
    """The links between ranks along one mesh axis."""

    ranks: int
    speed: float
    """Bytes a second into a rank."""
    latency: float
    """Seconds until the first byte of a transfer arrives."""
    shares_memory: bool
    """True if all ranks of the tier read each other's memory, by copies that take no multiprocessors."""

    @classmethod
    def of(cls, hardware: Hardware, ranks: int) -> Tier:
        """Return a tier of the links of some hardware."""
        return cls(ranks, hardware.link_speed, hardware.link_latency, hardware.shares_memory)


@dataclass(frozen=True)
class Cluster:
    """GPUs, and the links between them by tier."""

    gpu: Hardware
    tiers: tuple[Tier, ...]
    """The innermost first."""


@dataclass(frozen=True)
class Step:
    """Part of a call: bytes that the GPU waits for, what it computes then, and bytes that leave after that."""

    flops: float = 0.0
    moved: float = 0.0
    """Bytes that kernels other than attention read and write."""
    received: tuple[float, ...] = ()
    """Bytes that the step waits for, by tier; none of the tiers that are left out."""
    sent: tuple[float, ...] = ()
    """Bytes that leave after the step, by tier."""
    launches: float = 0.0
    """Host time of the step, in launches of a tile in forward."""

    def __add__(self, other: Step) -> Step:
        """Return a step with the numbers of both."""

        def added(mine: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(map(sum, zip_longest(mine, others, fillvalue=0.0)))

        return Step(
            self.flops + other.flops, self.moved + other.moved, added(self.received, other.received),
            added(self.sent, other.sent), self.launches + other.launches,
        )  # fmt: skip


Work = tuple[Step, ...]
Passes = tuple[Work, Work]
"""Forward and backward."""


def seconds(work: Work, cluster: Cluster) -> float:
    """Return the time of work on one rank, if the other ranks are in step.

    A step starts when the host has launched it, the GPU is free and its bytes have arrived. A tier transfers for one
    step at a time: for the first step from the beginning, and for the next one that waits for the tier from the start
    of the step before. (With two transfers in flight predictions differ by 3% at most, where links are slow.)
    """
    gpu, tiers = cluster.gpu, cluster.tiers
    begun, left = [0.0] * len(tiers), [0.0] * len(tiers)
    host = busy = 0.0

    def transfer(tier: int, size: float) -> float:
        return tiers[tier].latency + size / tiers[tier].speed

    for index, step in enumerate(work):
        arrived, awaited = 0.0, [tier for tier, size in enumerate(step.received) if size]
        for tier in awaited:
            lasts = transfer(tier, step.received[tier])
            arrived = max(arrived, begun[tier] + lasts)
            if not tiers[tier].shares_memory:  # collectives are kernels, which take multiprocessors
                busy += TRANSFER_TAX * min(lasts, busy - begun[tier])
        start = max(host + gpu.launch * step.launches / 2, busy, arrived)
        for tier in awaited if index else range(len(tiers)):
            begun[tier] = start
        host += gpu.launch * step.launches
        busy = start + step.flops / gpu.flops + step.moved / gpu.memory_speed
        for tier, size in enumerate(step.sent):
            if size:
                left[tier] = max(left[tier], busy) + transfer(tier, size)
    return max(host, busy, *left)


def slowest(works: Iterable[Passes], cluster: Cluster) -> tuple[float, float]:
    """Return the time of forward and of backward on the rank, of some, that needs the most for both."""
    times = [(seconds(forward, cluster), seconds(backward, cluster)) for forward, backward in works]
    return max(times, key=sum)


Choice = TypeVar("Choice")


def nearly_fastest(choices: Sequence[Choice], times: Sequence[float]) -> Choice:
    """Return the first choice whose predicted time is the least, within the tolerance of predictions."""
    return next(choice for choice, time in zip(choices, times, strict=True) if time <= TOLERANCE * min(times))


# Rings


def ring_work(plan: TilePlan, spec: CallSpec, tier: int = 0, transfer_launches: int = 0) -> Passes:
    """Return the work of a ring over one tier on the plan's rank.

    Args:
        transfer_launches: launches of each transfer by kernels; 0 for copy engines.
    """
    forward, backward = (
        tuple(_ring_step(step, plan, spec, bool(is_backward), tier, transfer_launches) for step in steps)
        for is_backward, steps in enumerate((plan.forward, plan.backward))
    )
    return forward, backward


def _ring_step(
    step: TileStep, plan: TilePlan, spec: CallSpec, backward: bool, tier: int, transfer_launches: int
) -> Step:
    factor = BACKWARD if backward else 1.0
    heads = _length(step.heads) * spec.q_heads // max(spec.kv_heads, 1)  # DTensor shards may have none
    flops = 2.0 * heads * (spec.head_dim + spec.v_head_dim) * sum(map(_pairs, step.tiles))
    found = Step(factor * flops, launches=factor * (1 + len(step.tiles)))
    if spec.latent_dims is not None:
        found += expansion(rows_read(step), spec, 3 if backward else 1)
    if step.transfer is None:
        return found
    # Merging reads the partial result of the step, and reads and writes the sum, in float32 or narrower.
    rows = sum(_length(tile.q) * _length(tile.batch) for tile in step.tiles)
    merged = rows * heads * spec.v_head_dim * (spec.itemsize + (2 * spec.itemsize if step.is_last else 8))
    carried = over(tier, transfer_bytes(step.transfer, plan, spec))
    found += Step(moved=merged, received=carried, launches=factor * transfer_launches if carried else 0.0)
    return found + Step(moved=4 * sum(carried), sent=carried) if backward else found  # gradients return


def over(tier: int, size: float) -> tuple[float, ...]:
    """Return bytes by tier of which all go over one."""
    return (0.0,) * tier + (size,) if size else ()


def expansion(rows: int, spec: CallSpec, products: int) -> Step:
    """Return the products that expand rows of latents, or their gradients.

    Each makes K/V of all heads, and copies these and the rotary keys next to one another.
    """
    assert spec.latent_dims is not None
    latent, rotary = spec.latent_dims
    tokens = float(products * rows * spec.batch_size * spec.q_heads)
    return Step(
        flops=2 * tokens * latent * (spec.head_dim - rotary + spec.v_head_dim),
        moved=3 * tokens * (spec.head_dim + spec.v_head_dim) * spec.itemsize,
    )


def rows_read(step: TileStep) -> int:
    """Return the number of key rows that the tiles of a step read."""
    return sum(map(_length, step.spans_read))


def _pairs(tile: Tile) -> float:
    """Return the pairs of queries and keys that a tile takes the time of, of one head."""
    batch = _length(tile.batch)
    if isinstance(tile.mask, ShapedMask):
        return batch * _length(tile.q) * _length(tile.kv) * (1.0 if tile.mask.is_full else TRIANGLE)
    return batch * INTERVALS * tile.mask.pairs


def transfer_bytes(transfer: Transfer, plan: TilePlan, spec: CallSpec) -> int:
    """Return the bytes of K/V that a rank receives or sends, whichever are more."""
    lengths = plan.rows.lengths
    sources = transfer.sources(plan.rank, plan.world_size)
    readers = transfer.readers(plan.rank, plan.world_size)
    incoming = sum(lengths[source][part] for source in sources for part in plan.recv_parts[source])
    outgoing = sum(lengths[plan.rank][part] for reader in readers for part in plan.send_parts[reader])
    return max(incoming, outgoing) * _length(transfer.heads) * spec.head_bytes


def _length(span: Span) -> int:
    return span[1] - span[0]
