"""Collectives that were renamed in torch 2.13, and what a process group can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def traced_broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensor of the group's first rank, in a program that is being captured."""
    from torch.distributed._functional_collectives import broadcast

    return broadcast(tensor, 0, group)


_NCCL_BACKENDS = ("nccl", "nccl2", "nccl-lazy")
"""What NCCL's backends call themselves. From torch 2.15 on `init_process_group("nccl")` makes the one called nccl2."""
_backend_names: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors run on this group."""
    return torch.device("cpu") in group._device_types


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of tensors on `device` go through NCCL in this group."""
    return device.type == "cuda" and _backend_name(group, device) in _NCCL_BACKENDS


def _backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """What the backend of CUDA tensors calls itself."""
    if group not in _backend_names:  # asking takes longer than a launch
        _backend_names[group] = group._get_backend(device).name()
    return _backend_names[group]


def start_all_to_all(
    incoming: Sequence[list[torch.Tensor]], outgoing: Sequence[list[torch.Tensor]], group: dist.ProcessGroup
) -> Callable[[], object]:
    """Several NCCL exchanges, as one launch if possible: `outgoing[i][rank]` goes to rank, `incoming[i][rank]` comes
    from it.

    It is what `dist.all_to_all` calls, whose own checks take as long as the launch. Returns what waits for all.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = True
    device = incoming[0][0].device
    pairs = list(zip(incoming, outgoing, strict=True))
    if len(pairs) > 1 and _backend_name(group, device) == "nccl":
        group._start_coalescing(device)
        for tensors_in, tensors_out in pairs:
            group.alltoall(tensors_in, tensors_out, options)
        return group._end_coalescing(device).wait
    # Other backends make one launch of sends and receives only, and may not wait for what else there is.
    waits = [group.alltoall(tensors_in, tensors_out, options).wait for tensors_in, tensors_out in pairs]
    return waits[0] if len(waits) == 1 else lambda: [wait() for wait in waits]
