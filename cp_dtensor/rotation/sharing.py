"""Whether the ranks of a group can read each other's memory."""

from __future__ import annotations

import socket
from pathlib import Path

import torch
import torch.distributed as dist

from cp_dtensor._torch_private import symmetric_buffer, uses_nccl
from cp_dtensor.rotation import device_streams

GRANULE = 2 << 20
"""Bytes that CUDA maps at a time."""


def obstacle_to_sharing(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks cannot share memory, None if they can; found out together, so alike on every rank. A collective."""
    if device.type != "cuda":
        return f"it needs CUDA devices, the tensors are on {device.type}"
    if not uses_nccl(group, device):
        return "it needs a process group with an NCCL backend"
    local = None if device_streams.is_available() else "the CUDA driver has no stream memory operations"
    facts = (_host(), str(torch.cuda.get_device_properties(device).uuid), local or _unreachable_peer(device))
    everyone: list[tuple[str, str, str | None]] = [facts] * group.size()
    dist.all_gather_object(everyone, facts, group=group)
    hosts, devices, reasons = zip(*everyone, strict=True)
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} hosts"
    if len(set(devices)) < group.size():
        return "some ranks share a device"
    return next((reason for reason in reasons if reason is not None), None) or _failed_trial(group, device)


def _host() -> str:
    """What tells hosts apart, also where they are called alike."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _failed_trial(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Maps a little memory: what processes may share, containers among them, shows only so."""
    reason = None
    try:
        symmetric_buffer(GRANULE, device, group)
    except RuntimeError as error:
        reason = f"mapping memory failed: {error}"
    everyone: list[str | None] = [reason] * group.size()
    dist.all_gather_object(everyone, reason, group=group)
    return next((each for each in everyone if each is not None), None)


def _unreachable_peer(device: torch.device) -> str | None:
    index = torch.cuda.current_device() if device.index is None else device.index
    peers = [peer for peer in range(torch.cuda.device_count()) if peer != index]
    unreachable = [peer for peer in peers if not torch.cuda.can_device_access_peer(index, peer)]
    return f"device {index} cannot access device {unreachable[0]}" if unreachable else None
