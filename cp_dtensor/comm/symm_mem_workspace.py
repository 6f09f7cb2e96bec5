"""Whether the ranks of a group can read each other's memory."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

from cp_dtensor._torch import SymmetricBuffer, prepared, symmetric_buffer, uses_nccl
from cp_dtensor._torch import cuda_driver as device_streams
from cp_dtensor._torch.cuda_driver import FlagOperations, await_flags, raise_flags
from cp_dtensor._torch.tensors import TRITON_AVAILABLE, current_stream

if TRITON_AVAILABLE:
    from cp_dtensor._torch.triton_launch import BoundLaunch
    from cp_dtensor.comm.triton_kernels import flag_launch, padded_count


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


# The flags by which ranks order their use of shared memory, and the two ways to raise them and to wait for them. A
# flag is a 32-bit word in the memory of the rank that waits for it, one for each rank that may raise it, 0 or 1.
# Who waits takes it down, so there is no counter, and a captured CUDA graph can be replayed.


class Flag(IntEnum):
    """What a flag says of the rank that raised it, to the rank in whose memory it lies."""

    KV_READY = 0
    KV_TAKEN = 1
    GRAD_READY = 2
    GRAD_TAKEN = 3


@dataclass(frozen=True, eq=False)
class Flags:
    """Those of one group, which begin at the same offset in the memory of each of its ranks."""

    rank: int
    addresses: tuple[int, ...]
    """Where those in each rank's memory begin, as this device sees it."""
    device: torch.device

    def submit(
        self,
        stream: torch.cuda.Stream,
        *,
        tell: Flag | None = None,
        wait: Flag | None = None,
        beside: bool = False,
    ) -> None:
        """Raises a flag for all ranks; then waits until all have raised one for this rank, and takes it down.

        Args:
            stream: the current one, unless it is beside.
            tell: what to raise.
            wait: what to wait for.
            beside: whether attention runs meanwhile, on another stream. It leaves a kernel no multiprocessor, so the
                front end of the GPU does it. Otherwise, if there is Triton, a kernel does: with many ranks it is
                several times as fast.
        """
        if TRITON_AVAILABLE and not beside:
            self._launches[tell, wait](stream.cuda_stream)
            return
        if tell is not None:
            self._raises[tell].submit(stream.cuda_stream)
        if wait is not None:
            self._waits[wait].submit(stream.cuda_stream)

    def prepare(self) -> None:
        """Uploads what the kernel has to know and loads it, since a CUDA graph cannot capture that."""
        if TRITON_AVAILABLE:
            self._launches[None, None](current_stream(self.device).cuda_stream)

    @cached_property
    def _raises(self) -> list[FlagOperations]:
        return [raise_flags(self._here_raised(flag)) for flag in Flag]

    @cached_property
    def _waits(self) -> list[FlagOperations]:
        return [await_flags(self._here_awaited(flag)) for flag in Flag]

    @cached_property
    def _launches(self) -> dict[tuple[Flag | None, Flag | None], BoundLaunch]:
        """By what is raised and what is waited for; None is no flag."""
        count, flags = padded_count(len(self.addresses)), [*Flag, None]

        def uploaded(of_flags: list[list[int]]) -> Iterable[torch.Tensor]:
            padded = [addresses + [0] * (count - len(addresses)) for addresses in [*of_flags, []]]
            return torch.tensor(padded, device=self.device).unbind()

        told = dict(zip(flags, uploaded([self._here_raised(flag) for flag in Flag]), strict=True))
        awaited = dict(zip(flags, uploaded([self._here_awaited(flag) for flag in Flag]), strict=True))
        return {(tell, wait): flag_launch(told[tell], awaited[wait]) for tell in flags for wait in flags}

    def _here_raised(self, flag: Flag) -> list[int]:
        return [self._address(holder, flag, self.rank) for holder in self._ranks]

    def _here_awaited(self, flag: Flag) -> list[int]:
        return [self._address(self.rank, flag, raised_by) for raised_by in self._ranks]

    @property
    def _ranks(self) -> Sequence[int]:
        # With this rank among them: it publishes and reads on different streams, which nothing else orders.
        return range(len(self.addresses))

    def _address(self, holder: int, flag: Flag, raised_by: int) -> int:
        return self.addresses[holder] + 4 * (flag * len(self.addresses) + raised_by)


# Symmetric memory of a process group: where ranks publish rows for one another, and the flags that order its reuse.
# | flags | rows of K/V | gradients of rows | One workspace per group serves all its calls, in all layers, forward
# and backward; it grows when a call needs more.

_log = logging.getLogger("cp_dtensor")
_FLAG_BYTES = 64 * 1024
_BEFORE_ATTENTION = -1
"""Priority of a stream whose copies, where they are kernels, get the first multiprocessors that attention leaves."""


@dataclass(frozen=True, eq=False)
class Workspace:
    """Symmetric memory of one group. Addresses are those of this device."""

    rank: int
    world_size: int
    buffer: SymmetricBuffer
    addresses: tuple[int, ...]
    flags: Flags
    kv_bytes: int
    grad_bytes: int
    kv_stream: torch.cuda.Stream
    grad_stream: torch.cuda.Stream
    side_stream: torch.cuda.Stream
    # Each is waited for before it is recorded again.
    memory_is_free: torch.cuda.Event
    kv_arrived: torch.cuda.Event
    grads_arrived: tuple[torch.cuda.Event, torch.cuda.Event]
    tables: dict[object, Any] = field(default_factory=dict)
    """What users of this memory keep on the device, with addresses in it."""
    captured: list[Any] = field(default_factory=list)
    """Those of them that captured graphs read."""
    _kv_views: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _last_stream: list[torch.cuda.Stream] = field(default_factory=list)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Orders what is published on `stream` behind what was published before, on whatever stream.

        Peers pull in the order of calls, so that is the order in which rows have to be written.
        """
        last = self._last_stream[0] if self._last_stream else stream
        if last != stream and _is_capturing(last) == _is_capturing(stream):  # a graph cannot wait for what is not in it
            stream.wait_stream(last)
        self._last_stream[:] = [stream]

    def kv(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The memory in which this rank publishes rows of K/V, flat."""
        view = self._kv_views.get(dtype)
        if view is None:
            memory = self.buffer.bytes_of[self.rank][_FLAG_BYTES : _FLAG_BYTES + self.kv_bytes]
            with torch.inference_mode(False):  # training may follow inference, and cannot write to what that has made
                view = self._kv_views[dtype] = memory.view(dtype)
        return view

    def grads(self) -> torch.Tensor:
        """The bytes in which this rank publishes its contributions to everybody's gradients."""
        start = _FLAG_BYTES + self.kv_bytes
        return self.buffer.bytes_of[self.rank][start : start + self.grad_bytes]

    def kv_address(self, rank: int) -> int:
        """Where `rank` publishes rows of K/V."""
        return self.addresses[rank] + _FLAG_BYTES

    def grads_address(self, rank: int) -> int:
        """Where `rank` publishes contributions to gradients."""
        return self.addresses[rank] + _FLAG_BYTES + self.kv_bytes


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class _Workspaces:
    """The workspaces of the process. They cannot be values: mapping memory is a collective and takes a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By type of device: a group may have tensors of several.
        self._reasons: WeakKeyDictionary[dist.ProcessGroup, dict[str, str | None]] = WeakKeyDictionary()
        self._told: WeakSet[dist.ProcessGroup] = WeakSet()
        self._current: WeakKeyDictionary[dist.ProcessGroup, Workspace] = WeakKeyDictionary()
        # What a captured graph uses, whose replays have these very addresses, and what was abandoned half-way, which
        # peers may still be reading.
        self._kept: WeakKeyDictionary[dist.ProcessGroup, list[Workspace]] = WeakKeyDictionary()

    # The lock is not held during collectives: calls of several groups may be in another order on other ranks.

    def why_unshared(self, group: dist.ProcessGroup, device: torch.device) -> str | None:
        with self._lock:
            reasons = self._reasons.setdefault(group, {})
        if device.type not in reasons:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the ranks have to find out whether they share memory, which a CUDA graph cannot capture: run "
                    "one call before capturing"
                )
            reasons[device.type] = prepared(lambda: obstacle_to_sharing(group, device))
        return reasons[device.type]

    def tell_fallback(self, group: dist.ProcessGroup, reason: str) -> None:
        with self._lock:
            if group not in self._told:
                self._told.add(group)
                _log.warning("symmetric memory is not available (%s): using the all-gather rotation", reason)

    def get(self, group: dist.ProcessGroup, device: torch.device, kv_bytes: int, grad_bytes: int) -> Workspace:
        capturing = torch.cuda.is_current_stream_capturing()
        with self._lock:
            held = self._current.get(group)
        if held is None or held.kv_bytes < kv_bytes or held.grad_bytes < grad_bytes:
            if capturing:
                raise RuntimeError(
                    "the ranks have to map shared memory, which a CUDA graph cannot capture: run one forward and "
                    "backward of this size before capturing"
                )
            if held is not None:
                kv_bytes, grad_bytes = _grown(kv_bytes, held.kv_bytes), _grown(grad_bytes, held.grad_bytes)
                # Peers may be reading the old memory until all have come here.
                prepared(lambda: _meet(group, device))
                with self._lock:
                    del self._current[group], held
            held = prepared(lambda: _map(group, device, _round_up(kv_bytes), _round_up(grad_bytes)))
            with self._lock:
                self._current[group] = held
        if capturing:
            self._keep(group, held)
        return held

    def abandon(self, group: dist.ProcessGroup) -> None:
        with self._lock:
            held = self._current.pop(group, None)
        if held is not None:
            self._keep(group, held)

    def _keep(self, group: dist.ProcessGroup, workspace: Workspace) -> None:
        with self._lock:
            kept = self._kept.setdefault(group, [])
            if workspace not in kept:
                kept.append(workspace)

    def allocated_bytes(self, device: torch.device) -> int:
        with self._lock:
            held = [*self._current.values(), *(one for several in self._kept.values() for one in several)]
            own = {id(one): one.buffer.bytes_of[one.rank] for one in held}
            return sum(memory.numel() for memory in own.values() if memory.device == device)


_workspaces = _Workspaces()


def why_unshared(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of a group cannot share memory, None if they can. The first call for a group is a collective.

    Raises:
        RuntimeError: that first call is in the capture of a CUDA graph.
    """
    return _workspaces.why_unshared(group, device)


def tell_fallback(group: dist.ProcessGroup, reason: str) -> None:
    """Logs, once for a group, that somebody who asked for symmetric memory gets all-gather."""
    _workspaces.tell_fallback(group, reason)


def workspace(group: dist.ProcessGroup, device: torch.device, kv_bytes: int, grad_bytes: int) -> Workspace:
    """The workspace of a group, with at least so many bytes. Mapping a larger one is a collective, alike on all ranks.

    Raises:
        RuntimeError: memory has to be mapped while a CUDA graph is captured.
    """
    return _workspaces.get(group, device, kv_bytes, grad_bytes)


def abandon(group: dist.ProcessGroup) -> None:
    """Gives the group's workspace up, whose flags are in an unknown state, so that the next call maps another."""
    _workspaces.abandon(group)


def allocated_bytes(device: torch.device) -> int:
    """Bytes of symmetric memory that are held on a device; torch's allocator does not count them."""
    return _workspaces.allocated_bytes(device)


def _map(group: dist.ProcessGroup, device: torch.device, kv_bytes: int, grad_bytes: int) -> Workspace:
    buffer = symmetric_buffer(_FLAG_BYTES + kv_bytes + grad_bytes, device, group)
    addresses = tuple(memory.data_ptr() for memory in buffer.bytes_of)
    made = Workspace(
        rank=group.rank(),
        world_size=group.size(),
        buffer=buffer,
        addresses=addresses,
        flags=Flags(group.rank(), addresses, device),
        kv_bytes=kv_bytes,
        grad_bytes=grad_bytes,
        kv_stream=torch.cuda.Stream(device, _BEFORE_ATTENTION),
        grad_stream=torch.cuda.Stream(device, _BEFORE_ATTENTION),
        side_stream=torch.cuda.Stream(device),
        memory_is_free=torch.cuda.Event(),
        kv_arrived=torch.cuda.Event(),
        grads_arrived=(torch.cuda.Event(), torch.cuda.Event()),
    )
    # At first everything counts as taken: there is nothing to wait for before the first use.
    words = made.buffer.bytes_of[made.rank][:_FLAG_BYTES].view(torch.int32)
    for flag in (Flag.KV_TAKEN, Flag.GRAD_TAKEN):
        words[flag * made.world_size : (flag + 1) * made.world_size] = 1
    made.flags.prepare()
    _meet(group, device)
    return made


def _meet(group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits until all ranks have done what they have launched."""
    torch.cuda.synchronize(device)
    dist.barrier(group)
    torch.cuda.synchronize(device)


def _grown(needed: int, held: int) -> int:
    """Half as much again where it does not suffice: masks that change with every step want a little more each time."""
    return held if needed <= held else max(needed, held + held // 2)


def _round_up(count: int) -> int:
    return -(-count // GRANULE) * GRANULE
