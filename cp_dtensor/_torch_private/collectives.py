"""Collectives that were renamed in torch 2.13, and what a process group can do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Whether collectives of CPU tensors run on this group."""
    return any(device.type == "cpu" for device in group._device_types)
