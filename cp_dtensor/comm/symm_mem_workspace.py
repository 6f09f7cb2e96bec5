"""Symmetric memory of a process group: the P2P probe, the flags that order its use, and the cached buffers.

A buffer has three areas: | flags | rows of K/V | gradients of rows |
"""

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
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from cp_dtensor._torch import SymmetricBuffer, cuda_driver, prepared, symmetric_buffer, uses_nccl
from cp_dtensor._torch.cache import GroupCache, LRUCache
from cp_dtensor._torch.cuda_driver import FlagOperations, await_flags, raise_flags
from cp_dtensor._torch.tensors import TRITON_AVAILABLE, current_stream

if TRITON_AVAILABLE:
    from cp_dtensor._torch.triton_launch import BoundLaunch
    from cp_dtensor.comm.triton_kernels import flag_launch, padded_count


GRANULE = 2 << 20
"""Bytes that CUDA maps at a time."""

# P2P probe


def probe_p2p(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why the ranks cannot read each other's memory, None if they can; equal on every rank. A collective."""
    if device.type != "cuda":
        return f"it needs CUDA devices, the tensors are on {device.type}"
    if not uses_nccl(group, device):
        return "it needs a process group with an NCCL backend"
    local = None if cuda_driver.is_available() else "the CUDA driver has no stream memory operations"
    facts = (_host(), str(torch.cuda.get_device_properties(device).uuid), local or _unreachable_peer(device))
    of_ranks: list[tuple[str, str, str | None]] = [facts] * group.size()
    dist.all_gather_object(of_ranks, facts, group=group)
    hosts, devices, reasons = zip(*of_ranks, strict=True)
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} hosts"
    if len(set(devices)) < group.size():
        return "some ranks share a device"
    return next((reason for reason in reasons if reason is not None), None) or _failed_trial(group, device)


def _host() -> str:
    """Returns a name of the host, different for different hosts that have the same hostname."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _failed_trial(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Maps a little memory, since only that shows if processes (in containers, say) may share it. A collective."""
    reason = None
    try:
        symmetric_buffer(GRANULE, device, group)
    except RuntimeError as error:
        reason = f"mapping memory failed: {error}"
    of_ranks: list[str | None] = [reason] * group.size()
    dist.all_gather_object(of_ranks, reason, group=group)
    return next((each for each in of_ranks if each is not None), None)


def _unreachable_peer(device: torch.device) -> str | None:
    index = torch.cuda.current_device() if device.index is None else device.index
    peers = [peer for peer in range(torch.cuda.device_count()) if peer != index]
    unreachable = [peer for peer in peers if not torch.cuda.can_device_access_peer(index, peer)]
    return f"device {index} cannot access device {unreachable[0]}" if unreachable else None


# Flags


class Flag(IntEnum):
    """Flags that a rank sets for another rank, by what the setter has done.

    A flag is a 32-bit word, 0 or 1, in the memory of the rank that waits for it; each rank that may set it has a word
    of its own. The waiting rank resets it, so there is no counter, and a captured CUDA graph can be replayed.
    """

    KV_READY = 0
    """Its rows of K/V are written."""
    KV_TAKEN = 1
    """It has read this rank's rows of K/V, so they may be overwritten."""
    GRAD_READY = 2
    """Its gradients are written."""
    GRAD_TAKEN = 3
    """It has read this rank's gradients."""


@dataclass(frozen=True, eq=False)
class Flags:
    """The flags of a group."""

    rank: int
    addresses: tuple[int, ...]
    """Address of the first flag in each rank's memory, as mapped on this device."""
    device: torch.device

    def submit(
        self, stream: torch.cuda.Stream, *, signal: Flag | None = None, wait: Flag | None = None, overlaps: bool = False
    ) -> None:
        """Sets a flag on all ranks; then waits until all ranks have set one here, and resets it.

        Args:
            stream: the current stream, or any stream with `overlaps`.
            signal: the flag to set.
            wait: the flag to wait for.
            overlaps: True if attention runs at the same time on another stream. Attention leaves a kernel no
                multiprocessor, so the front end of the GPU handles the flags. Otherwise a Triton kernel does, if there
                is Triton: with many ranks it is several times as fast.
        """
        if TRITON_AVAILABLE and not overlaps:
            self._launches[signal, wait](stream.cuda_stream)
            return
        if signal is not None:
            self._sets[signal].submit(stream.cuda_stream)
        if wait is not None:
            self._waits[wait].submit(stream.cuda_stream)

    def prepare(self) -> None:
        """Uploads the addresses of flags and loads the kernel, which a CUDA graph cannot capture."""
        if TRITON_AVAILABLE:
            self._launches[None, None](current_stream(self.device).cuda_stream)

    @cached_property
    def _sets(self) -> list[FlagOperations]:
        return [raise_flags(self._signalled(flag)) for flag in Flag]

    @cached_property
    def _waits(self) -> list[FlagOperations]:
        return [await_flags(self._awaited(flag)) for flag in Flag]

    @cached_property
    def _launches(self) -> dict[tuple[Flag | None, Flag | None], BoundLaunch]:
        """By the flag to set and the flag to wait for; None is no flag."""
        count, flags = padded_count(len(self.addresses)), [*Flag, None]

        def uploaded(of_flags: list[list[int]]) -> Iterable[torch.Tensor]:
            padded = [addresses + [0] * (count - len(addresses)) for addresses in [*of_flags, []]]
            return torch.tensor(padded, device=self.device).unbind()

        signalled = dict(zip(flags, uploaded([self._signalled(flag) for flag in Flag]), strict=True))
        awaited = dict(zip(flags, uploaded([self._awaited(flag) for flag in Flag]), strict=True))
        return {(signal, wait): flag_launch(signalled[signal], awaited[wait]) for signal in flags for wait in flags}

    def _signalled(self, flag: Flag) -> list[int]:
        """Addresses of the words that this rank sets."""
        return [self._address(holder, flag, self.rank) for holder in self._ranks]

    def _awaited(self, flag: Flag) -> list[int]:
        """Addresses of the words that this rank waits for."""
        return [self._address(self.rank, flag, setter) for setter in self._ranks]

    @property
    def _ranks(self) -> Sequence[int]:
        # With this rank among them: it writes and reads on different streams, which nothing else orders.
        return range(len(self.addresses))

    def _address(self, holder: int, flag: Flag, setter: int) -> int:
        return self.addresses[holder] + 4 * (flag * len(self.addresses) + setter)


# Workspaces

_log = logging.getLogger("cp_dtensor")
_FLAG_BYTES = 64 * 1024
_MOST_TABLES = 1024
_BEFORE_ATTENTION = -1
"""Stream priority: copies that are kernels get the first multiprocessors that attention leaves."""


@dataclass(frozen=True, eq=False)
class Workspace:
    """The symmetric buffer of a group, its flags, and the streams and events of transfers through it.

    It serves all calls of the group, in all layers, forward and backward.
    """

    rank: int
    world_size: int
    buffer: SymmetricBuffer
    addresses: tuple[int, ...]
    """Of each rank's buffer, as mapped on this device."""
    flags: Flags
    kv_bytes: int
    grad_bytes: int
    kv_stream: torch.cuda.Stream
    grad_stream: torch.cuda.Stream
    side_stream: torch.cuda.Stream
    # Each event is waited for before it is recorded again.
    memory_is_free: torch.cuda.Event
    kv_arrived: torch.cuda.Event
    grads_arrived: tuple[torch.cuda.Event, torch.cuda.Event]
    tables: LRUCache[Any] = field(default_factory=lambda: LRUCache(_MOST_TABLES))
    """Device tensors of addresses in the buffer, by what they are for."""
    _kv_views: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)
    _last_stream: list[torch.cuda.Stream] = field(default_factory=list)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Makes `stream` wait for earlier writes to the buffer on another stream.

        Peers read in the order of calls, so rows have to be written in that order.
        """
        last = self._last_stream[0] if self._last_stream else stream
        if last != stream and _is_capturing(last) == _is_capturing(stream):  # a graph cannot wait for what is not in it
            stream.wait_stream(last)
        self._last_stream[:] = [stream]

    def kv(self, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Returns this rank's area for rows of K/V, flat."""
        view = self._kv_views.get(dtype)
        if view is None:
            memory = self.buffer.bytes_of[self.rank][_FLAG_BYTES : _FLAG_BYTES + self.kv_bytes]
            with torch.inference_mode(False):  # training may follow inference, and cannot write to inference tensors
                view = self._kv_views[dtype] = memory.view(dtype)
        return view

    def grads(self) -> torch.Tensor:
        """Returns the bytes of this rank's area for gradients of all ranks' rows."""
        start = _FLAG_BYTES + self.kv_bytes
        return self.buffer.bytes_of[self.rank][start : start + self.grad_bytes]

    def kv_address(self, rank: int) -> int:
        """Returns the address of `rank`'s area for rows of K/V."""
        return self.addresses[rank] + _FLAG_BYTES

    def grads_address(self, rank: int) -> int:
        """Returns the address of `rank`'s area for gradients."""
        return self.addresses[rank] + _FLAG_BYTES + self.kv_bytes


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_obstacles = GroupCache[str | None]()
_fallbacks = GroupCache[None]()


def p2p_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why the ranks of a group cannot read each other's memory, None if they can.

    The first call for a group is a collective.

    Raises:
        RuntimeError: the first call is in the capture of a CUDA graph.
    """

    def probe() -> str | None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the ranks have to find out if they can share memory, which a CUDA graph cannot capture: run one call "
                "before capturing"
            )
        return prepared(lambda: probe_p2p(group, device))

    return _obstacles.get(group, device.type, probe)  # a group may have tensors on several types of device


def log_fallback(group: dist.ProcessGroup, obstacle: str) -> None:
    """Logs, once for a group, that calls with `rotate_method="symm_mem"` use all-gather."""
    message = "symmetric memory is not available (%s): using all-gather instead"
    _fallbacks.get(group, None, lambda: _log.warning(message, obstacle))


class _Workspaces:
    """The workspaces of the process. Mapping memory is a collective and takes a second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # not held during collectives: ranks may call for several groups in any order
        self._current: WeakKeyDictionary[dist.ProcessGroup, Workspace] = WeakKeyDictionary()
        # Workspaces of captured graphs, whose replays use these addresses, and of calls that raised, which peers may
        # still be reading.
        self._pinned: WeakKeyDictionary[dist.ProcessGroup, list[Workspace]] = WeakKeyDictionary()

    def get(self, group: dist.ProcessGroup, device: torch.device, kv_bytes: int, grad_bytes: int) -> Workspace:
        """Returns the workspace of a group, with at least so many bytes.

        Mapping a larger one is a collective; all ranks ask for the same sizes.

        Raises:
            RuntimeError: memory has to be mapped while a CUDA graph is captured.
        """
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
                # Peers may be reading the old memory until all ranks are here.
                prepared(lambda: _synchronize_ranks(group, device))
                with self._lock:
                    del self._current[group], held
            held = prepared(lambda: _map(group, device, _round_up(kv_bytes), _round_up(grad_bytes)))
            with self._lock:
                self._current[group] = held
        if capturing:
            self._pin(group, held)
        return held

    def abandon(self, group: dist.ProcessGroup) -> None:
        """Drops the group's workspace, whose flags are in an unknown state, so that the next call maps another."""
        with self._lock:
            held = self._current.pop(group, None)
        if held is not None:
            self._pin(group, held)

    def _pin(self, group: dist.ProcessGroup, workspace: Workspace) -> None:
        with self._lock:
            pinned = self._pinned.setdefault(group, [])
            if workspace not in pinned:
                pinned.append(workspace)

    def allocated_bytes(self, device: torch.device) -> int:
        """Returns the bytes of symmetric memory on a device, which torch's allocator does not count."""
        with self._lock:
            held = [*self._current.values(), *(one for several in self._pinned.values() for one in several)]
            own = {id(one): one.buffer.bytes_of[one.rank] for one in held}
            return sum(memory.numel() for memory in own.values() if memory.device == device)


_workspaces = _Workspaces()
workspace = _workspaces.get
abandon = _workspaces.abandon
allocated_bytes = _workspaces.allocated_bytes


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
    # At first all areas count as read, so that no rank waits before the first use.
    words = made.buffer.bytes_of[made.rank][:_FLAG_BYTES].view(torch.int32)
    for flag in (Flag.KV_TAKEN, Flag.GRAD_TAKEN):
        words[flag * made.world_size : (flag + 1) * made.world_size] = 1
    made.flags.prepare()
    _synchronize_ranks(group, device)
    return made


def _synchronize_ranks(group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits until all work that any rank has launched is done."""
    torch.cuda.synchronize(device)
    dist.barrier(group)
    torch.cuda.synchronize(device)


def _grown(needed: int, held: int) -> int:
    """Returns 1.5 times the held size where it is too small: masks that change every step need a bit more each time."""
    return held if needed <= held else max(needed, held + held // 2)


def _round_up(count: int) -> int:
    return -(-count // GRANULE) * GRANULE
