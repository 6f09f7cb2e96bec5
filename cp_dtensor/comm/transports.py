"""KV transports by name, and their choice by predicted time over measured links (`rotate_method="auto"`)."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.links import cluster_of
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.plan.cluster import Cluster, Hosts, Place
from cp_dtensor.plan.cost import Passes, nearly_fastest, ring_work, slowest
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.logs import log_once


@dataclass(frozen=True)
class Auto(TransportMethod):
    """Symmetric memory if the ranks can share it, otherwise all-gather or all-to-all by predicted time.

    On CPUs always all-gather: the cost model is one of GPUs.
    """

    name = "auto"

    def for_call(self, spec: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        if device.type != "cuda":
            log_once("comm", logging.INFO, "K/V by allgather: on CPUs nothing is predicted")
            return AllGather()
        obstacle = p2p_obstacle(group, device)
        if obstacle is None:
            log_once("comm", logging.INFO, f"K/V by symm_mem over {group.size()} ranks, which share memory")
            return SymmetricMemory()
        cluster = cluster_of(SequenceRanks(group), device, spec.itemsize)
        chosen = choose(spec, cluster.flat, cluster.hosts)
        log_once(
            "comm", logging.INFO,
            f"K/V by {chosen.name} over {group.size()} ranks at {cluster.tiers[0].speed / 1e9:.3g} GB/s: predicted "
            f"fastest without shared memory ({obstacle})",
        )  # fmt: skip
        return chosen


@lru_cached
def choose(spec: CallSpec, cluster: Cluster, place: Place = 0) -> KVTransport:
    """Return symmetric memory if the ranks of the first tier share it, else the transport that is predicted fastest.

    The time is that of forward and backward on the slowest rank. `place` is the tier of transfers, 0 for the ranks of
    several hosts if it is `Hosts`.
    """
    tier = cluster.tiers[0]
    if tier.shares_memory:  # never slower by prediction, which takes as long as planning the call
        return SymmetricMemory()
    transports: list[KVTransport] = [AllGather(), AllToAll()]  # the first, if equal: larger tiles
    works = [ring_works(each, spec, tier.ranks, place if isinstance(place, Hosts) else 0) for each in transports]
    return nearly_fastest(transports, [sum(slowest(each, cluster)) for each in works])


def ring_works(transport: KVTransport, spec: CallSpec, ranks: int, place: Place = 0) -> list[Passes]:
    """Return the work of a ring over a tier or several hosts on each of the ranks that may be the slowest."""
    plans = plans_of_some_ranks(transport, spec, ranks)
    return [ring_work(plan, spec, place, int(transport.slows_compute)) for plan in plans]


@lru_cached
def plans_of_some_ranks(transport: KVTransport, spec: CallSpec, world_size: int) -> tuple[TilePlan, ...]:
    """Return the plans of the ranks that may be the slowest; the choice of ranks is equal on all ranks."""
    # The first and the last rank receive the most and the least. Under masks by shape the others need the same time.
    busiest = None if spec.masking is Masking.BY_SHAPE else spec.busiest_rank
    between = world_size // 2 if busiest is None else busiest
    return tuple(transport.plan(spec, rank) for rank in sorted({0, between, world_size - 1}))


ROTATE_METHODS: dict[str, TransportMethod] = {
    each.name: each for each in (AllGather(), AllToAll(), SymmetricMemory(), Auto())
}
"""Values of `rotate_method`; those of `register_transport` come last."""


def register_transport(transport: TransportMethod) -> ExitStack:
    """Make a transport a value of `rotate_method`, by its name.

    Args:
        transport: a frozen value with a name of its own; every rank registers an equal one.

    Returns:
        a lease: the transport is removed by its `close()`, or at the end of a `with` block of it.

    Raises:
        TypeError: anything but a transport with a name.
        ValueError: a name that exists.
    """
    if not isinstance(transport, TransportMethod):
        raise TypeError(f"expected a transport, a TransportMethod, got {type(transport).__name__}")
    name = getattr(transport, "name", None)
    if not isinstance(name, str):
        raise TypeError(f"expected the name of a transport to be a str, got {name!r}")
    if name in ROTATE_METHODS:
        raise ValueError(f"expected a transport with a new name, got {name!r}, one of {_choices()}")
    ROTATE_METHODS[name] = transport
    lease = ExitStack()
    lease.callback(ROTATE_METHODS.pop, name)
    return lease


def _choices() -> str:
    return ", ".join(map(repr, ROTATE_METHODS))


@dataclass
class _ProcessDefault:
    """The default of `rotate_method`, which `set_rotate_method` changes."""

    name: str = "auto"


_process_default = _ProcessDefault()


def transport_by_name(name: str | None) -> TransportMethod:
    """Return the transport method with this name; None means the default of the process.

    Raises:
        ValueError: unknown name.
    """
    if name is None:
        name = _process_default.name
    if not isinstance(name, str) or name not in ROTATE_METHODS:
        raise ValueError(f"unknown rotate method: got {name!r}, expected one of {_choices()}")
    return ROTATE_METHODS[name]


def gathers_by_symm_mem(method: TransportMethod, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a call that needs all ranks' rows at once gathers them by symmetric memory, not all-gather.

    Equal on all ranks. The first call for a group may be a collective.
    """
    if isinstance(method, SymmetricMemory):
        return method.is_available(group, device)
    return isinstance(method, Auto) and p2p_obstacle(group, device) is None


def set_rotate_method(rotate_method: str) -> None:
    """Set the default of `rotate_method` in this process: how K/V travel between the ranks of a ring.

    A call or context with a `rotate_method` of its own does not use the default.

    Args:
        rotate_method: one of
            "auto": the transport that a cost model predicts to be fastest (the default at import).
            "symm_mem": all ranks' K/V at once, by copy engines through memory that the GPUs of a node share; where
            they cannot share memory, as "allgather".
            "allgather": all ranks' K/V of some heads at a time, for few large attention calls.
            "alltoall": a ring with one attention step for each rank; memory does not grow with the number of ranks;
            or the name of a transport of `register_transport`.

    Raises:
        ValueError: an unknown name, or None.

    Example:
        >>> set_rotate_method("alltoall")
        >>> set_rotate_method("auto")
    """
    if rotate_method is None:
        raise ValueError(f"unknown rotate method: got None, expected one of {_choices()}")
    _process_default.name = transport_by_name(rotate_method).name
