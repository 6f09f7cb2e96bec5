"""Process groups: collectives, backends, names, and symmetric memory."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import broadcast
from torch.distributed.distributed_c10d import _resolve_process_group

from cp_dtensor._torch.cache import GroupCache

# Renamed in torch 2.13:
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def traced_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Broadcast the tensor of the group's first rank, in a program that is being captured."""
    return broadcast(tensor, 0, group)


_NCCL_BACKENDS = ("nccl", "nccl2", "nccl-lazy")
"""Names of NCCL's backends. From torch 2.15 on `init_process_group("nccl")` makes the one with the name nccl2."""
_backend_names = GroupCache[str]()


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Return whether the group has collectives of CPU tensors."""
    return torch.device("cpu") in group._device_types


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether collectives of tensors on `device` go through NCCL in this group."""
    return device.type == "cuda" and _backend_name(group, device) in _NCCL_BACKENDS


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend of CUDA tensors, "" if there is none."""

    def name() -> str:
        return group._get_backend(device).name() if torch.device("cuda") in group._device_types else ""

    return _backend_names.get(group, None, name)  # a look-up in torch takes longer than a launch


def start_all_to_all(
    incoming: Sequence[list[torch.Tensor]], outgoing: Sequence[list[torch.Tensor]], group: dist.ProcessGroup
) -> Callable[[], object]:
    """Start several NCCL all-to-all collectives, as one launch if possible.

    It calls what `dist.all_to_all` calls, whose own checks take as long as the launch. For each collective there is a
    tensor that comes from each rank, and one that goes to it. Return a function that waits for all of them.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = True
    device = incoming[0][0].device
    pairs = list(zip(incoming, outgoing, strict=True))
    if len(pairs) > 1 and _backend_name(group, device) == "nccl":
        group._start_coalescing(device)
        try:
            for tensors_in, tensors_out in pairs:
                group.alltoall(tensors_in, tensors_out, options)
        except BaseException:
            group._end_coalescing(device)  # else NCCL would queue all later collectives of this thread for ever
            raise
        return group._end_coalescing(device).wait
    # Other backends coalesce only sends and receives into one launch, and may not wait for other collectives.
    waits = [group.alltoall(tensors_in, tensors_out, options).wait for tensors_in, tensors_out in pairs]
    return waits[0] if len(waits) == 1 else lambda: [wait() for wait in waits]


_THREADS = Path("/proc/self/task")
_LOOKS, _SECONDS_BETWEEN_LOOKS, _MOST_SECONDS = 3, 1e-3, 5.0


def _gloo_thread_states() -> Iterator[str]:
    """Yield the state of each thread in which gloo runs collectives: "S" where it sleeps."""
    for thread in _THREADS.iterdir():
        with suppress(OSError):  # a thread that has ended meanwhile
            name, _, numbers = (thread / "stat").read_text(errors="replace").rpartition(") ")
            if name.endswith("(pt_gloo_runloop"):
                yield numbers[0]


def _wait_for_gloo_threads() -> None:
    """Wait until gloo's threads have freed the tensors of collectives that have ended.

    A thread needs Python's lock to free a tensor. Python aborts the process if a thread asks for the lock after exit
    handlers have run. `destroy_process_group` ends these threads only if nothing else refers to the group, but a
    `DeviceMesh` does (torch 2.13), and so do FSDP2's modules and autograd nodes.
    """
    deadline, quiet = time.monotonic() + _MOST_SECONDS, 0
    while quiet < _LOOKS and time.monotonic() < deadline:
        states = {*_gloo_thread_states()}
        if not states:
            return
        quiet = quiet + 1 if states == {"S"} else 0
        time.sleep(_SECONDS_BETWEEN_LOOKS)  # without Python's lock, so a thread that waits for it does not sleep


if _THREADS.is_dir():  # Linux
    atexit.register(_wait_for_gloo_threads)


def name_of_group(group: dist.ProcessGroup) -> str:
    """Return torch's name of a group, equal in every process of the program; refuse groups of other makers."""
    name: str = group.group_name
    try:
        group_of_name(name)  # Dynamo may pass a stand-in for the group, which has the group's name
    except (RuntimeError, LookupError) as error:
        raise ValueError(
            f"expected a group that torch.distributed has made, got one that torch does not find by its name {name!r}"
        ) from error
    return name


def group_of_name(name: str) -> dist.ProcessGroup:
    """Return the group with this name that this thread's rank is part of."""
    resolve: Callable[[str], dist.ProcessGroup] = _resolve_process_group  # type: ignore[assignment]
    return resolve(name)


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """Return the store through which the ranks of a group have met; keys of other groups are not seen."""
    store: dist.Store = distributed_c10d._world.pg_map[group][1]  # tests with ranks as threads replace `_world`
    return store


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds after which a collective of tensors on `device` fails in this group."""
    seconds: float = group._get_backend(device).options._timeout.total_seconds()
    return seconds


def group_count() -> int:
    """Return the number of groups that this rank has, by which torch names those of `local_group`."""
    return len(distributed_c10d._world.pg_names)


def local_group(ranks: Sequence[int], like: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Make a group of some ranks, this one among them, with the backends and the timeout of another group.

    No other rank takes part. All ranks of the group have equally many groups before, else they would wait for groups of
    different names.
    """
    world = distributed_c10d._get_default_group()
    has_backend = device.type in [each.type for each in like._device_types]  # groups of threads have none
    options = getattr(like._get_backend(device), "options", None) if has_backend else None
    # NCCL would split the communicator of a default group that is bound to a device, with all ranks of that group.
    bound, world.bound_device_id = world.bound_device_id, None
    try:
        return dist.new_group(
            ranks, None if options is None else options._timeout, dist.get_backend_config(like),
            use_local_synchronization=True,
        )  # fmt: skip
    finally:
        world.bound_device_id = bound


@dataclass(frozen=True)
class SymmetricBuffer:
    """A buffer of each rank of a group that every rank can address directly."""

    bytes_of: tuple[torch.Tensor, ...]
    """By rank: the rank's buffer, uint8, as mapped on this device."""
    handle: object
    """Keeps the mapping alive."""


def symmetric_buffer(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricBuffer:
    """Allocate `size` zeroed bytes on every rank and map those of all ranks. A collective of the group."""
    import torch.distributed._symmetric_memory as symmetric_memory

    local = symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    local.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric_memory.rendezvous(local, group)
    views = tuple(
        local if rank == group.rank() else handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())
    )
    dist.barrier(group)
    torch.cuda.synchronize(device)
    return SymmetricBuffer(views, handle)
