"""Speeds of GPUs and of the links between them, from vendors' tables and from what was measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

# Parts of the peaks that attention, copies and all-gathers reach. Measured on H200s with NVLink 4 (docs/benchmarks):
# 620 of 989 TFLOP/s, 3.5 of 4.8 TB/s, 330 of 450 GB/s. Assumed of all others.
_FLOPS_REACHED = 620 / 989
_MEMORY_REACHED = 3.5 / 4.8
_LINK_REACHED = 330 / 450
_SINGLE_PRECISION = 0.05
"""Speed of attention in float32 or float64, as a part of the speed in bfloat16."""


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
    launch: float = 60e-6
    """Seconds of host time for a tile in forward."""
    shares_memory: bool = True
    """False if the link is a network, across which ranks cannot read each other's memory. Read by `explain` only:
    calls look at the GPUs themselves."""

    def of_itemsize(self, itemsize: int) -> Hardware:
        """The hardware for tensors with elements of that many bytes, if `flops` is for 16-bit ones."""
        return self if itemsize <= 2 else replace(self, flops=self.flops * _SINGLE_PRECISION)

    @classmethod
    def of(cls, name: str) -> Hardware:
        """The hardware of a GPU by name, such as "H100", with its NVLink, or "H100, InfiniBand NDR" with another link.

        The speeds are the parts of the peaks in `GPUS` and `LINKS` that H200s with NVLink reach.

        Raises:
            ValueError: an unknown name.

        >>> Hardware.of("B200, Ethernet 400G").shares_memory
        False
        """
        gpu, link = named(name)
        return cls(
            GPUS[gpu].flops * _FLOPS_REACHED,
            GPUS[gpu].memory_speed * _MEMORY_REACHED,
            GPUS[gpu].multiprocessors,
            LINKS[link or GPUS[gpu].link].speed * _LINK_REACHED,
            shares_memory=LINKS[link or GPUS[gpu].link].shares_memory,
        )


def named(name: str) -> tuple[str, str | None]:
    """The GPU and the link of a name such as "H100" or "h100, infiniband ndr"; None for a link that is not named.

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
