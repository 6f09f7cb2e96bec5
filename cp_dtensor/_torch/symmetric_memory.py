"""torch's symmetric memory: buffers that every rank of a group can address directly."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class SymmetricBuffer:
    """`bytes_of[rank]`: that rank's buffer, uint8, as this device addresses it (ours is local memory)."""

    bytes_of: tuple[torch.Tensor, ...]
    handle: object
    """Keeps the mapping alive."""


def symmetric_buffer(size: int, device: torch.device, group: dist.ProcessGroup) -> SymmetricBuffer:
    """Allocates `size` zeroed bytes on every rank, and maps everybody's. A collective of the group."""
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
