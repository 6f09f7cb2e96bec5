"""The speed of the links between the ranks of a group, measured once."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor._torch import all_gather_single, prepared
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.symm_mem_workspace import why_unshared
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.plan.cost import Hardware, nearly_fastest, predicted_seconds
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import Plan
from cp_dtensor.plan.tiling import Masking

_MOST_BYTES_A_RANK, _MOST_BYTES = 16 << 20, 256 << 20
_REPEATS = 4


@dataclass(frozen=True)
class Links:
    """What the ranks of a group have in common, by the weakest of them."""

    speed: float
    """Bytes per second into each rank while all ranks gather from all others."""
    capability: int
    """Major CUDA compute capability."""
    multiprocessors: int


class _Measured:
    """What has been measured in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: WeakKeyDictionary[dist.ProcessGroup, Links] = WeakKeyDictionary()

    def of(self, group: dist.ProcessGroup, device: torch.device) -> Links:
        with self._lock:
            links = self._links.get(group)
        if links is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    'rotate_method "auto" has to measure the links of this group, which a CUDA graph cannot '
                    "capture: run one call before capturing, or name a rotation"
                )
            links = prepared(lambda: _measure(group, device))  # a collective: other groups must not wait for it
            with self._lock:
                self._links[group] = links
        return links


_measured = _Measured()


def links_of(group: dist.ProcessGroup, device: torch.device) -> Links:
    """The same value on all ranks. The first call for a group is a collective and takes some milliseconds.

    Raises:
        RuntimeError: that first call is in the capture of a CUDA graph.
    """
    return _measured.of(group, device)


def _measure(group: dist.ProcessGroup, device: torch.device) -> Links:
    count = min(_MOST_BYTES_A_RANK, _MOST_BYTES // group.size())
    rows = torch.zeros(count, dtype=torch.uint8, device=device)
    gathered = torch.empty(group.size() * count, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(_REPEATS):  # the first makes connections
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        all_gather_single(gathered, rows, group=group)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3)
    properties = torch.cuda.get_device_properties(device)
    mine = [
        (group.size() - 1) * count / best if group.size() > 1 else float("inf"),
        properties.major,
        properties.multi_processor_count,
    ]
    weakest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(weakest, dist.ReduceOp.MIN, group=group)
    speed, capability, multiprocessors = weakest.tolist()
    return Links(speed, int(capability), int(multiprocessors))


# `rotate_method="auto"`: the rotation that the cost model finds fastest for a call.

# By the major compute capability.
_FLOPS = {8: 190e12, 9: 620e12, 10: 1200e12}
"""Operations per second of attention in bfloat16, forward."""
_MEMORY_SPEED = {8: 1.7e12, 9: 3.5e12, 10: 6e12}
"""Bytes per second, read or written."""


@dataclass(frozen=True)
class Auto(TransportMethod):
    """Symmetric memory where the ranks share it, otherwise all-gather or all-to-all, by predicted time.

    On CPUs all-gather: a cost model of a GPU says nothing there.
    """

    @property
    def name(self) -> str:
        return "auto"

    def for_call(self, shape: CallSpec, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
        if device.type != "cuda":
            return AllGather()
        shares_memory = workspaces.why_unshared(group, device) is None
        return choose(shape, group.size(), hardware_of(group, device, shape.itemsize), shares_memory)


def hardware_of(group: dist.ProcessGroup, device: torch.device, itemsize: int) -> Hardware:
    """What the ranks of a group compute and communicate with. The first call for a group is a collective."""
    return _hardware(itemsize, links_of(group, device))


@lru_cache(maxsize=4096)
def choose(shape: CallSpec, world_size: int, hardware: Hardware, shares_memory: bool) -> KVTransport:
    """Symmetric memory if ranks share it, else the rotation of (nearly) the least predicted time on the slowest rank.

    Of forward and backward together.
    """
    if shares_memory:  # never predicted to be slower than all-gather: predicting takes as long as planning the call
        return SymmetricMemory()
    transports: list[KVTransport] = [AllGather(), AllToAll()]  # the first, if equal: larger tiles
    seconds = [slowest_seconds(transport, shape, world_size, hardware, backward=True) for transport in transports]
    return nearly_fastest(transports, seconds)


def slowest_seconds(
    transport: KVTransport, shape: CallSpec, world_size: int, hardware: Hardware, *, backward: bool
) -> float:
    """Predicted time of forward (with `backward`: and backward) on the slowest rank."""
    plans = plans_of_some_ranks(transport, shape, world_size)
    passes = (False, True) if backward else (False,)
    return max(
        sum(predicted_seconds(plan, shape, hardware, each, transport.slows_compute) for each in passes)
        for plan in plans
    )


@lru_cache(maxsize=64)
def plans_of_some_ranks(transport: KVTransport, shape: CallSpec, world_size: int) -> tuple[Plan, ...]:
    """The plans from which the slowest rank's time is predicted; every rank asks about the same ones."""
    # The first and the last rank have the most and the least to receive. What masks by shape is alike on the others.
    busiest = None if shape.masking is Masking.BY_SHAPE else shape.busiest_rank
    between = world_size // 2 if busiest is None else busiest
    return tuple(transport.plan(shape, rank) for rank in sorted({0, between, world_size - 1}))


@lru_cache(maxsize=64)
def _hardware(itemsize: int, links: Links) -> Hardware:
    generation = min(max(links.capability, min(_FLOPS)), max(_FLOPS))
    flops = _FLOPS[generation] * (1.0 if itemsize <= 2 else 0.05)
    return Hardware(flops, _MEMORY_SPEED[generation], links.multiprocessors, links.speed)


# The rotations that a caller can name, and the default of the process.

TRANSPORTS: dict[str, KVTransport] = {
    transport.name: transport for transport in (AllGather(), AllToAll(), SymmetricMemory())
}  # fmt: skip
ROTATE_METHODS: dict[str, TransportMethod] = {**TRANSPORTS, "auto": Auto()}
_CHOICES = ", ".join(map(repr, ROTATE_METHODS))


class _ProcessDefault:
    """The one mutable setting of the library."""

    def __init__(self) -> None:
        self.name = "auto"


_process_default = _ProcessDefault()


def transport_by_name(name: str | None) -> TransportMethod:
    """The rotation (or the way to choose one) called `name`; None means the default of the process.

    Raises:
        ValueError: none is called so.
    """
    if name is None:
        name = _process_default.name
    if not isinstance(name, str) or name not in ROTATE_METHODS:
        raise ValueError(f"unknown rotate method: got {name!r}, expected one of {_CHOICES}")
    return ROTATE_METHODS[name]


def transport_of_all_rows(method: TransportMethod, group: dist.ProcessGroup, device: torch.device) -> KVTransport:
    """The rotation for somebody who needs all rows of all ranks at once, so that there is no ring; alike on all ranks.

    The first call for a group may be a collective.
    """
    if isinstance(method, SymmetricMemory):
        return method.where_shared(group, device)
    shares_memory = isinstance(method, Auto) and why_unshared(group, device) is None
    return SymmetricMemory() if shares_memory else AllGather()


def set_rotate_method(rotate_method: str) -> None:
    """Sets how K/V travel by default in this process; every call and context may override it.

    Args:
        rotate_method: "auto" (what a cost model predicts to be fastest; the default of the default), "symm_mem" (all
            K/V by copy engines through memory that the GPUs of a node share; as "allgather" where they do not),
            "allgather" (all K/V of some heads at a time, few large attention calls) or "alltoall" (a ring: memory does
            not grow with the number of ranks, one attention step per rank).

    Raises:
        ValueError: anything else.
    """
    if rotate_method is None:
        raise ValueError(f"unknown rotate method: got None, expected one of {_CHOICES}")
    _process_default.name = transport_by_name(rotate_method).name
