"""Choice of the KV transport: by name, or by a cost model of the measured bandwidth (`rotate_method="auto"`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist

from cp_dtensor._torch import all_gather_single, prepared
from cp_dtensor._torch.cache import GroupCache, refuse_capture
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.symm_mem_workspace import p2p_obstacle
from cp_dtensor.comm.transport import KVTransport, TransportMethod
from cp_dtensor.plan.cost import nearly_fastest, predicted_seconds
from cp_dtensor.plan.hardware import Hardware
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.plan import TilePlan
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.cache import lru_cached
from cp_dtensor.spec.logs import log_once

_GATHERED_BYTES = 256 << 20
"""0.4 ms and more over NVLink 4, longer than the host takes to submit an all-gather."""
_PART = 4096
"""Bytes of which the parts of the ranks are multiples: NCCL is slow with others."""
_REPEATS = 4

_BY_CAPABILITY = {8: Hardware.of("A100"), 9: Hardware.of("H200"), 10: Hardware.of("B200")}
"""Hardware by the major CUDA compute capability; links are measured."""

_measured = GroupCache[Hardware]()


def hardware_of(group: dist.ProcessGroup, device: torch.device, itemsize: int) -> Hardware:
    """The speed of the group's devices and links, equal on all ranks; each value is the smallest of any rank.

    The first call for a group is a collective, which measures the links: milliseconds over NVLink, up to a second over
    Ethernet.

    Raises:
        RuntimeError: the first call is in the capture of a CUDA graph.
    """

    def measure() -> Hardware:
        refuse_capture('"auto" has to measure the links of this group', "name a transport, or run one call")
        return prepared(lambda: measure_bandwidth(group, device))

    hardware = _measured.get(group, None, measure)
    return hardware.of_itemsize(itemsize)


def measure_bandwidth(group: dist.ProcessGroup, device: torch.device) -> Hardware:
    """The hardware of a group for 16-bit dtypes, with the bandwidth of an all-gather that it measures.

    All-gathers are submitted one after the other. The time of one is that from the end of the one before it to its own
    end, so that the host's time to submit it does not count. The first one, which makes connections, is left out.
    """
    count = _GATHERED_BYTES // group.size() // _PART * _PART
    rows = torch.zeros(count, dtype=torch.uint8, device=device)
    gathered = torch.empty(group.size() * count, dtype=torch.uint8, device=device)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(1 + _REPEATS)]
    for end in ends:
        all_gather_single(gathered, rows, group=group)
        end.record()
    ends[-1].synchronize()
    best = min(one.elapsed_time(next_one) for one, next_one in pairwise(ends)) / 1e3
    properties = torch.cuda.get_device_properties(device)
    speed = (group.size() - 1) * count / best if group.size() > 1 else float("inf")
    mine = [speed, properties.major, properties.multi_processor_count]
    weakest = torch.tensor(mine, dtype=torch.float64, device=device)
    dist.all_reduce(weakest, dist.ReduceOp.MIN, group=group)
    speed, capability, multiprocessors = weakest.tolist()
    hardware = _BY_CAPABILITY[min(max(int(capability), min(_BY_CAPABILITY)), max(_BY_CAPABILITY))]
    return replace(hardware, multiprocessors=int(multiprocessors), link_speed=speed)


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
        hardware = hardware_of(group, device, spec.itemsize)
        chosen = choose(spec, group.size(), hardware, shares_memory=False)
        log_once(
            "comm", logging.INFO,
            f"K/V by {chosen.name} over {group.size()} ranks at {hardware.link_speed / 1e9:.3g} GB/s: predicted "
            f"fastest without shared memory ({obstacle})",
        )  # fmt: skip
        return chosen


@lru_cached
def choose(spec: CallSpec, world_size: int, hardware: Hardware, shares_memory: bool) -> KVTransport:
    """Symmetric memory if the ranks share it, else the transport with (nearly) the least predicted time.

    The time is that of forward and backward on the slowest rank.
    """
    if shares_memory:  # never slower than all-gather by prediction, and a prediction takes as long as planning the call
        return SymmetricMemory()
    transports: list[KVTransport] = [AllGather(), AllToAll()]  # the first, if equal: larger tiles
    seconds = [slowest_seconds(transport, spec, world_size, hardware, backward=True) for transport in transports]
    return nearly_fastest(transports, seconds)


def slowest_seconds(
    transport: KVTransport, spec: CallSpec, world_size: int, hardware: Hardware, *, backward: bool
) -> float:
    """The predicted time of forward, or of forward and `backward`, on the slowest rank."""
    passes = (False, True) if backward else (False,)
    return max(
        sum(predicted_seconds(plan, spec, hardware, each, transport.slows_compute) for each in passes)
        for plan in plans_of_some_ranks(transport, spec, world_size)
    )


@lru_cached
def plans_of_some_ranks(transport: KVTransport, spec: CallSpec, world_size: int) -> tuple[TilePlan, ...]:
    """The plans of the ranks that may be the slowest; the choice of ranks is equal on all ranks."""
    # The first and the last rank receive the most and the least. Under masks by shape the others need the same time.
    busiest = None if spec.masking is Masking.BY_SHAPE else spec.busiest_rank
    between = world_size // 2 if busiest is None else busiest
    return tuple(transport.plan(spec, rank) for rank in sorted({0, between, world_size - 1}))


TRANSPORTS: dict[str, KVTransport] = {each.name: each for each in (AllGather(), AllToAll(), SymmetricMemory())}
ROTATE_METHODS: dict[str, TransportMethod] = {**TRANSPORTS, "auto": Auto()}
_CHOICES = ", ".join(map(repr, ROTATE_METHODS))


@dataclass
class _ProcessDefault:
    """The default of `rotate_method`, which `set_rotate_method` changes."""

    name: str = "auto"


_process_default = _ProcessDefault()


def transport_by_name(name: str | None) -> TransportMethod:
    """The transport method with this name; None means the default of the process.

    Raises:
        ValueError: unknown name.
    """
    if name is None:
        name = _process_default.name
    if not isinstance(name, str) or name not in ROTATE_METHODS:
        raise ValueError(f"unknown rotate method: got {name!r}, expected one of {_CHOICES}")
    return ROTATE_METHODS[name]


def gathers_by_symm_mem(method: TransportMethod, group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if a call that needs all ranks' rows at once gathers them by symmetric memory, not all-gather.

    Equal on all ranks. The first call for a group may be a collective.
    """
    if isinstance(method, SymmetricMemory):
        return method.is_available(group, device)
    return isinstance(method, Auto) and p2p_obstacle(group, device) is None


def set_rotate_method(rotate_method: str) -> None:
    """Sets the default of `rotate_method` in this process: how K/V travel between the ranks of a ring.

    A call or context with a `rotate_method` of its own does not use the default.

    Args:
        rotate_method: one of
            "auto": the transport that a cost model predicts to be fastest (the default at import).
            "symm_mem": all ranks' K/V at once, by copy engines through memory that the GPUs of a node share; where
            they cannot share memory, as "allgather".
            "allgather": all ranks' K/V of some heads at a time, for few large attention calls.
            "alltoall": a ring with one attention step for each rank; memory does not grow with the number of ranks.

    Raises:
        ValueError: an unknown name, or None.

    Example:
        >>> set_rotate_method("alltoall")
        >>> set_rotate_method("auto")
    """
    if rotate_method is None:
        raise ValueError(f"unknown rotate method: got None, expected one of {_CHOICES}")
    _process_default.name = transport_by_name(rotate_method).name
