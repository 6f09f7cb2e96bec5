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
_uses_nccl: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors run on this group."""
    return any(device.type == "cpu" for device in group._device_types)


def uses_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether collectives of tensors on `device` go through NCCL in this group."""
    if device.type != "cuda":
        return False
    if group not in _uses_nccl:  # asking takes longer than a launch
        _uses_nccl[group] = group._get_backend(device).name() in _NCCL_BACKENDS
    return _uses_nccl[group]


def start_all_to_all(
    incoming: Sequence[list[torch.Tensor]], outgoing: Sequence[list[torch.Tensor]], group: dist.ProcessGroup
) -> Callable[[], object]:
    """Several NCCL exchanges as one launch: `outgoing[i][rank]` goes to rank, `incoming[i][rank]` comes from it.

    It is what `dist.all_to_all` calls, whose own checks take as long as the launch. Returns what waits for all.
    """
    options = dist.AllToAllOptions()
    options.asyncOp = True
    if len(incoming) == 1:
        return group.alltoall(incoming[0], outgoing[0], options).wait
    device = incoming[0][0].device
    group._start_coalescing(device)
    for tensors_in, tensors_out in zip(incoming, outgoing, strict=True):
        group.alltoall(tensors_in, tensors_out, options)
    return group._end_coalescing(device).wait
