"""GPUs, links, and clusters of them: their peaks, and the speeds that attention and exchanges reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from operator import mul
from types import MappingProxyType

# Constants of the model, beside `Kernels` and the fields of `Hardware`, from tables of docs/benchmarks/measured.csv.
MEMORY_REACHED = 3.5 / 4.8
"""Bytes a second of copies over the peak of an H200, assumed of all others: 3.5 of 4.8 TB/s (2xH200)."""
LINK_REACHED = 330 / 450
"""Bytes a second of an all-gather over the peak of NVLink 4, assumed of networks: 330 of 450 GB/s (2xH200)."""
SINGLE_PRECISION = 0.05
"""Speed of attention in float32 or float64 over that in bfloat16 (assumed)."""
TOLERANCE = 1.02
"""Predictions within this ratio count as equal."""
NETWORK_TOLERANCE = 1.3
"""As `TOLERANCE`, across a network, where hybrids and flat rings took up to 2.5 times the prediction (nodes-trial).
Nested rings, which come first, took least."""


@dataclass(frozen=True)
class Kernels:
    """Speeds of attention kernels on long tiles of head dim 128, in FLOPs a second over the peak of the GPU."""

    forward: float
    backward: float
    masked_forward: float
    """Of tiles that are masked by row, of which masked pairs do not count."""
    masked_backward: float

    def speeds(self, flops: float) -> tuple[float, ...]:
        """Return the speeds in the order of the fields, if that of forward is `flops`."""
        return tuple(flops * speed / self.forward for speed in vars(self).values())


# Sustained in calls of 2 to 8 H200s; single kernels (kernels-tiles, kernels-masks) are up to 8% faster.
TORCH_KERNELS = Kernels(590 / 989, 525 / 989, 450 / 989, 400 / 989)
"""cuDNN through torch, and this library's Triton kernels for masks."""
PACKAGE_KERNELS = Kernels(675 / 989, 590 / 989, 600 / 989, 515 / 989)
"""FlashAttention-4, and cuDNN's FlexAttention for masks (the extra `kernels`)."""


@dataclass(frozen=True)
class GPU:
    """Peaks of a GPU, from NVIDIA's data sheets, and how many of them share a fast link."""

    flops: float
    """FLOPs per second in bfloat16, dense."""
    memory_speed: float
    """Bytes per second."""
    multiprocessors: int
    link: str
    """Name in `LINKS` of its NVLink, or of PCIe."""
    node: int = 8
    """GPUs that this link connects."""


@dataclass(frozen=True)
class Link:
    """A link: its peak from the standard or NVIDIA's data sheets, and the part of it that exchanges reach."""

    speed: float
    """Bytes per second and direction of one GPU: all its NVLinks together, or one network port."""
    shares_memory: bool
    """True for NVLink and PCIe, whose GPUs read each other's memory; False for networks."""
    reached: float = LINK_REACHED
    """Bytes a second into a rank over `speed`, all ranks together sending and receiving."""


# Peaks: NVIDIA's data sheets, and `systems/*.yaml` of aiconfigurator-core 0.12 (Apache-2.0) for GB200, GB300 and RTX
# PRO 6000 (at 2,430 MHz). Its tables of attention (sglang) have 58 to 79% of these peaks in forward.
GPUS: Mapping[str, GPU] = MappingProxyType(
    {
        "A100": GPU(312e12, 2.0e12, 108, "NVLink 3"),  # SXM, 80 GB
        "H100": GPU(989e12, 3.35e12, 132, "NVLink 4"),  # SXM
        "H20": GPU(148e12, 4.0e12, 78, "NVLink 4"),
        "H200": GPU(989e12, 4.8e12, 132, "NVLink 4"),  # SXM
        "B200": GPU(2250e12, 8.0e12, 148, "NVLink 5"),  # HGX
        "GB200": GPU(2500e12, 8.0e12, 152, "NVL72", node=72),
        "GB300": GPU(2500e12, 8.0e12, 160, "NVL72", node=72),
        "RTX PRO 6000": GPU(468e12, 1.79e12, 188, "PCIe 5"),  # Blackwell Server Edition
    }
)
"""GPUs by the names that `Hardware.of`, `Cluster` and `explain` take, with NVIDIA's peaks: `flops` a second in bfloat16
without sparsity, `memory_speed` in bytes a second, `multiprocessors`, the name of their `link`, and `node`, the GPUs
that it connects."""

_NDR, _XDR = Link(50e9, shares_memory=False), Link(100e9, shares_memory=False)
_ROCE, _FAST = Link(50e9, shares_memory=False), Link(100e9, shares_memory=False)
# Parts reached: all-gathers of 8 GPUs (4 of PCIe) in `data/*/comm/nccl` of aiconfigurator-core 0.12, 512 MiB: 205 GB/s
# over NVLink 3, 330 to 337 over NVLink 4, 610 over NVLink 5, 570 in an NVL72 (4 GPUs), 23 over PCIe 5.
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        "NVLink 3": Link(300e9, shares_memory=True, reached=205 / 300),
        "NVLink 4": Link(450e9, shares_memory=True),
        "NVLink 5": Link(900e9, shares_memory=True, reached=610 / 900),
        "NVL72": Link(900e9, shares_memory=True, reached=610 / 900),
        "PCIe 5": Link(64e9, shares_memory=True, reached=23 / 64),
        "InfiniBand HDR": Link(25e9, shares_memory=False),
        "InfiniBand NDR": _NDR, "NDR400": _NDR,
        "InfiniBand XDR": _XDR, "XDR800": _XDR,
        "RoCE 400G": _ROCE, "RoCE 800G": _FAST,
        "Ethernet 25G": Link(3.125e9, shares_memory=False),
        "Ethernet 100G": Link(12.5e9, shares_memory=False),
        "Ethernet 200G": Link(25e9, shares_memory=False),
        "Ethernet 400G": _ROCE,
    }
)  # fmt: skip
"""Links by the names that `Hardware.of`, `Cluster` and `explain` take: `speed` in bytes a second and direction of one
GPU, which has a network port of its own, whether GPUs that it connects read each other's memory (`shares_memory`), and
the part of the speed that is `reached`."""

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
    kernels: Kernels = TORCH_KERNELS
    """The attention kernels of an installation; `flops` is their speed in forward."""
    ramp: float = 15e-6
    """Seconds of the GPU that each launch of a tile takes beside its work: it starts, and its last blocks leave
    multiprocessors idle (kernels-tiles: 14 us for 512 tokens, 24 to 33 for 2,048)."""
    launch: float = 160e-6
    """Seconds of host time to launch a step of attention, each of its tiles, or an exchange of heads, in forward (the
    host's time at 8,192 tokens in docs/benchmarks/measured.csv: 80 to 180 on six machines)."""
    shares_memory: bool = True
    """False if the link is a network, across which ranks cannot read each other's memory. Read by `explain` only:
    calls look at the GPUs themselves."""

    def of_itemsize(self, itemsize: int) -> Hardware:
        """Return the hardware for tensors with elements of that many bytes, if `flops` is for 16-bit ones."""
        return self if itemsize <= 2 else replace(self, flops=self.flops * SINGLE_PRECISION)

    def with_kernels(self, kernels: Kernels) -> Hardware:
        """Return the same GPU with other attention kernels."""
        return replace(self, flops=self.flops * kernels.forward / self.kernels.forward, kernels=kernels)

    @classmethod
    def of(cls, name: str) -> Hardware:
        """Return the hardware of a GPU by name, such as "H100" with its NVLink, or "H100, InfiniBand NDR".

        The speeds are the parts of the peaks in `GPUS` and `LINKS` that H200s with NVLink reach.

        Raises:
            ValueError: an unknown name.

        >>> Hardware.of("B200, Ethernet 400G").shares_memory
        False
        """
        gpu_name, link_name = named(name)
        gpu = GPUS[gpu_name]
        link = LINKS[link_name or gpu.link]
        return cls(
            gpu.flops * TORCH_KERNELS.forward, gpu.memory_speed * MEMORY_REACHED, gpu.multiprocessors,
            link.speed * link.reached, shares_memory=link.shares_memory,
        )  # fmt: skip


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
class Hosts:
    """Place of exchanges along one axis over hosts, whose ranks are neighbours: tier 0 within a host, 1 beyond.

    Tier 2 is that beyond a pod of hosts, if there are pods.
    """

    ranks: tuple[int, ...]
    """Of a host, and of a pod of hosts if there are several."""

    def tier(self, rank: int, peer: int) -> int:
        """Return the tier between two ranks.

        >>> [Hosts((2, 4)).tier(0, peer) for peer in (1, 2, 3, 4, 7)]
        [0, 1, 1, 2, 2]
        """
        return sum(rank // ranks != peer // ranks for ranks in self.ranks)


Place = int | Hosts
"""A tier, or the rule that tells it."""


@dataclass(frozen=True, init=False)
class Cluster:
    """GPUs, and the links between them by tier.

    Args:
        gpu: the name of a GPU in `GPUS`, or a `Hardware`, whose link is that within a node.
        tiers: of links, the innermost first, in place of the arguments below.
        gpus_per_node: GPUs that the link of the GPU connects; None is what is usual for it, 8 of a `Hardware`.
        nodes: number of nodes, of each pod if there are pods.
        pods: number of pods, groups of nodes.
        internode: the name in `LINKS` of the network, of which each GPU has a port.
        oversubscription: of the network, between pods if there are pods: how many times more GPUs it has than it can
            serve at the speed of their ports.
        packages: True if the extra `kernels` is installed.

    Raises:
        ValueError: an unknown name, or a number below 1.

    >>> cluster = Cluster("H100", nodes=16, internode="NDR400", oversubscription=2)
    >>> [(tier.ranks, round(tier.speed / 1e9)) for tier in cluster.tiers]
    [(8, 330), (16, 18)]
    >>> cluster = Cluster("GB200", nodes=4, pods=2, internode="XDR800", oversubscription=4)
    >>> [(tier.ranks, round(tier.speed / 1e9)) for tier in cluster.tiers]
    [(72, 610), (4, 73), (2, 18)]
    """

    gpu: Hardware
    tiers: tuple[Tier, ...]
    """The innermost first."""

    def __init__(
        self, gpu: Hardware | str, tiers: tuple[Tier, ...] = (), *, gpus_per_node: int | None = None, nodes: int = 1,
        pods: int = 1, internode: str = NETWORK, oversubscription: float = 1.0, packages: bool = False,
    ) -> None:  # fmt: skip
        usual = 8
        if isinstance(gpu, str):
            usual, gpu = GPUS[named(gpu)[0]].node, Hardware.of(gpu)
        if packages:
            gpu = gpu.with_kernels(PACKAGE_KERNELS)
        if not tiers:
            ranks = usual if gpus_per_node is None else gpus_per_node
            if min(ranks, nodes, pods, oversubscription) < 1:
                raise ValueError(
                    "expected gpus_per_node, nodes, pods and oversubscription of at least 1, got "
                    f"{ranks}, {nodes}, {pods} and {oversubscription}"
                )
            network = Hardware.of(f"H100, {internode}")  # whatever the GPU
            outer = [Tier.of(network, count) for count in (nodes, pods) if count > 1]
            outer[-1:] = [replace(tier, speed=tier.speed / oversubscription) for tier in outer[-1:]]
            inner = [Tier.of(gpu, ranks)] if ranks > 1 or not outer else []
            tiers = *inner, *outer
        object.__setattr__(self, "gpu", gpu)
        object.__setattr__(self, "tiers", tiers)

    def part(self, ranks: int) -> Cluster | None:
        """Return so many neighbours of the GPUs; None if they neither divide a node, nor fill nodes that divide a pod.

        >>> [part and part.ranks for part in map(Cluster("H100", nodes=3).part, (3, 4, 12, 16, 24))]
        [None, 4, None, None, 24]
        """
        tiers: list[Tier] = []
        for tier in self.tiers:
            count = min(ranks, tier.ranks)
            if ranks % count or tier.ranks % count:
                return None
            tiers += [replace(tier, ranks=count)] * (count > 1 or not tiers)
            ranks //= count
        return replace(self, tiers=tuple(tiers)) if ranks == 1 else None

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return prod(tier.ranks for tier in self.tiers)

    @property
    def hosts(self) -> Place:
        """The place of exchanges between all ranks at once."""
        blocks = tuple(accumulate((tier.ranks for tier in self.tiers), mul))
        return Hosts(blocks[:-1]) if len(blocks) > 1 else 0

    @property
    def flat(self) -> Cluster:
        """The cluster for exchanges between all ranks at once, which are collectives where there are several hosts."""
        if len(self.tiers) == 1:
            return self
        inner, *outer = self.tiers
        return replace(self, tiers=(replace(inner, ranks=self.ranks, shares_memory=False), *outer))

    @property
    def tolerance(self) -> float:
        """The ratio within which predictions count as equal."""
        return TOLERANCE if all(tier.shares_memory for tier in self.tiers[1:]) else NETWORK_TOLERANCE
