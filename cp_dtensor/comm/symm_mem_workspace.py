"""Symmetric memory of a process group: the P2P probe, and the cached buffers.

A buffer has three areas: | flags | rows of K/V | gradients of rows |
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from cp_dtensor._torch import SymmetricBuffer, cuda_driver, group_timeout, prepared, symmetric_buffer, uses_nccl
from cp_dtensor._torch.cache import GroupCache, capturing, refuse_capture
from cp_dtensor._torch.cuda_driver import fill_bytes
from cp_dtensor.comm.calls import Calls, counted_calls
from cp_dtensor.comm.faults import PeerError, described, named
from cp_dtensor.comm.flags import Flag, Flags, WaitStatus
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.watchdog import WatchedWaits, watch
from cp_dtensor.spec.cache import LRUCache

_log = logging.getLogger("cp_dtensor.comm")

GRANULE = 2 << 20
"""Bytes that CUDA maps at a time."""

# P2P probe

_obstacles = GroupCache[str | None]()


def p2p_obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the reason why the ranks of a group cannot read each other's memory, None if they can.

    The first call for a group is a collective.

    Raises:
        RuntimeError: the first call is in the capture of a CUDA graph.
    """

    def probe() -> str | None:
        refuse_capture("the ranks have to test if they can share memory", "run one call")
        return prepared(lambda: probe_p2p(group, device))

    return _obstacles.get(group, device.type, probe)  # a group may have tensors on several types of device


def probe_p2p(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why the ranks cannot read each other's memory, None if they can; equal on every rank. A collective.

    Ranks may share a device, which NCCL refuses, with torch's environment variable for that, as tests do.
    """
    if device.type != "cuda":
        return f"it needs CUDA devices, the tensors are on {device.type}"
    may_share = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
    if not (uses_nccl(group, device) or may_share):
        return "it needs a process group with an NCCL backend"
    ranks = SequenceRanks(group)
    reason = None if cuda_driver.is_available() else "the CUDA driver has no stream memory operations"
    reason = reason or _unreachable_peer(device)
    facts = (host_of_rank(), str(torch.cuda.get_device_properties(device).uuid), reason)
    hosts, devices, reasons = zip(*ranks.gather_objects(facts, device), strict=True)
    if len(set(devices)) < group.size() and not may_share:
        return "some ranks share a device"
    if len(set(hosts)) > 1 and not any(reasons):
        reasons = _obstacles_of_hosts(ranks, device)
        if any(reasons):
            refusal = next(filter(None, reasons))
            return f"the ranks are on {len(set(hosts))} hosts that share no memory over NVLink: {refusal}"
    if not any(reasons):
        try:
            symmetric_buffer(GRANULE, device, group)  # only that shows if processes in containers may share memory
        except RuntimeError as error:
            reason = f"mapping memory failed: {error}"
        reasons = tuple(ranks.gather_objects(reason, device))
    return next(filter(None, reasons), None)


def host_of_rank() -> tuple[str, str, str | None]:
    """Return what tells the host of this rank from others.

    NCCL goes by NCCL_HOSTID, too, with which the ranks of one host stand for those of several.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")  # different for different hosts that have the same hostname
    return socket.gethostname(), boot.read_text() if boot.exists() else "", os.environ.get("NCCL_HOSTID")


def _obstacles_of_hosts(ranks: SequenceRanks, device: torch.device) -> tuple[str | None, ...]:
    """Return by rank why it cannot map the memory of ranks on other hosts, None if it can. A collective.

    A trial of the driver, which fails at once. Torch's rendezvous would wait for ranks that have failed, and on GPUs
    without NVLink to other hosts for file descriptors that never come.
    """
    with ExitStack() as allocated:
        handle, reason = b"", None
        try:
            handle = allocated.enter_context(cuda_driver.fabric_memory(_index(device), GRANULE))
        except RuntimeError as error:
            reason = str(error)
        handles, reasons = zip(*ranks.gather_objects((handle, reason), device), strict=True)
        if not any(reasons):
            try:
                for each in handles:
                    cuda_driver.import_fabric_memory(each)
            except RuntimeError as error:
                reason = str(error)
            reasons = tuple(ranks.gather_objects(reason, device))
    return reasons


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _unreachable_peer(device: torch.device) -> str | None:
    index = _index(device)
    for peer in range(torch.cuda.device_count()):
        if peer != index and not torch.cuda.can_device_access_peer(index, peer):
            return f"device {index} cannot access device {peer}"
    return None


# Workspaces

_FLAG_BYTES = 64 * 1024
_NAN_BYTE = 0xFF
"""Byte of which floating-point numbers of all dtypes are NaN."""
_BEFORE_ATTENTION = -1
"""Stream priority: copies that are kernels get the first multiprocessors that attention leaves."""


class Workspace:
    """The symmetric buffer of a group, its flags, and the streams and events of transfers through it.

    It serves all calls of the group, in all layers, forward and backward.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, kv_bytes: int, grad_bytes: int) -> None:
        """Map memory of these sizes. A collective."""
        self.rank, self.kv_bytes, self.grad_bytes = group.rank(), kv_bytes, grad_bytes
        self.buffer: SymmetricBuffer = symmetric_buffer(_FLAG_BYTES + kv_bytes + grad_bytes, device, group)
        self.addresses = tuple(memory.data_ptr() for memory in self.buffer.bytes_of)  # as mapped on this device
        self.flags = Flags(self.rank, self.addresses, device, WaitStatus(device))
        self.kv_stream, self.grad_stream = (torch.cuda.Stream(device, _BEFORE_ATTENTION) for _ in range(2))
        self.side_stream = torch.cuda.Stream(device)
        # Each event is waited for before it is recorded again.
        self.memory_is_free, self.kv_arrived = torch.cuda.Event(), torch.cuda.Event()
        self.grads_arrived = torch.cuda.Event(), torch.cuda.Event()
        self.tables: LRUCache[Any] = LRUCache(pins=capturing)
        """Device tensors of addresses in the buffer, by what they are for."""
        self.in_flight: dict[int, object] = {}
        """Tensors that copies on `kv_stream` and `grad_stream` write to, by the identity of their transfer.

        The allocator does not know of these copies. A call that raises leaves its tensors here, so that nothing else
        gets their memory before the copies are done."""
        self._areas: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._last_stream: torch.cuda.Stream | None = None
        # At first all areas count as read, so that no rank waits before the first use.
        world_size, words = group.size(), self.buffer.bytes_of[self.rank][:_FLAG_BYTES].view(torch.int32)
        for flag in (Flag.KV_TAKEN, Flag.GRAD_TAKEN):
            words[flag * world_size : (flag + 1) * world_size] = 1
        self.flags.prepare()
        self._waits = _Waits(self, group, device)
        _synchronize_ranks(group, device)
        watch(self._waits)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for earlier writes to the buffer on another stream.

        Peers read in the order of calls, so rows have to be written in that order.
        """
        last, self._last_stream = self._last_stream or stream, stream
        if last != stream and _is_capturing(last) == _is_capturing(stream):  # a graph waits only for work in it
            stream.wait_stream(last)

    def kv(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's area for rows of K/V, flat."""
        return self._area(_FLAG_BYTES, self.kv_bytes, dtype)

    def grads(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's area for gradients of all ranks' rows, flat."""
        return self._area(_FLAG_BYTES + self.kv_bytes, self.grad_bytes, dtype)

    def _area(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        area = self._areas.get((start, dtype))
        if area is None:
            with torch.inference_mode(False):  # training may follow inference, and cannot write to inference tensors
                area = self.buffer.bytes_of[self.rank][start : start + count].view(dtype)
            self._areas[start, dtype] = area
        return area

    def kv_address(self, rank: int) -> int:
        """Return the address of `rank`'s area for rows of K/V."""
        return self.addresses[rank] + _FLAG_BYTES

    def grads_address(self, rank: int) -> int:
        """Return the address of `rank`'s area for gradients."""
        return self.addresses[rank] + _FLAG_BYTES + self.kv_bytes


_LATE = {
    Flag.KV_READY: "the K/V rows of",
    Flag.KV_TAKEN: "the reads of this rank's K/V rows by",
    Flag.GRAD_READY: "the gradients of",
    Flag.GRAD_TAKEN: "the reads of this rank's gradients by",
}
_ANSWER_SECONDS = 1.0
"""Time in which the device answers what flags are missing."""


class _Waits(WatchedWaits):
    """The waits for the flags of a workspace."""

    def __init__(self, workspace: Workspace, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(workspace.flags.status, group_timeout(group, device))
        # A group is kept alive by its user, and a workspace by the group: its memory is unmapped when the last
        # reference ends, not by a garbage collection in another thread.
        self._workspace, self._group = ref(workspace), ref(group)
        self._described, self._members = described(group), dist.get_process_group_ranks(group)
        self._flags = workspace.buffer.bytes_of[workspace.rank][:_FLAG_BYTES].view(torch.int32)
        self._copy = torch.empty_like(self._flags, device="cpu", pin_memory=device.type == "cuda")
        self._stream, self._copied = torch.cuda.Stream(device), torch.cuda.Event()
        self._releases, self._waiting = workspace.flags.releases(), workspace.flags.status.waiting

    def fail(self, flags: dict[Flag, int], seconds: float) -> None:
        held, group = self._workspace(), self._group()
        if held is None or group is None:
            return
        with torch.cuda.stream(self._stream):  # also gives this thread the context of the device
            self._copy.copy_(self._flags, non_blocking=True)
            self._copied.record(self._stream)
            end = time.monotonic() + _ANSWER_SECONDS
            while not self._copied.query() and time.monotonic() < end:
                time.sleep(0.01)
            words = self._copy.tolist() if self._copied.query() else []
        waits = " and ".join(
            f"{_LATE[flag]} {named(held.flags.setters_missing(words, flag, value), self._members)}"
            for flag, value in flags.items()
        )
        memory = memory_of(group)
        calls = memory.calls
        latest = f" The latest on this rank is {calls.texts.get(calls.number, 'not known')}." if calls else ""
        failure = PeerError(
            f"rank {held.rank} of {self._described} waited {seconds:.3g} s in shared memory, longer than the timeout "
            f"of the group, for {waits}.{latest} The results of calls in flight are invalid."
        )
        memory.failure = failure
        _log.error("%s", failure)
        with torch.cuda.stream(self._stream):
            for address in held.addresses:
                fill_bytes(self._stream.cuda_stream, address + _FLAG_BYTES, _NAN_BYTE, held.kv_bytes + held.grad_bytes)

    def release(self) -> None:
        waiting = self._waiting()
        with torch.cuda.stream(self._stream):
            for flag, operations in zip(Flag, self._releases, strict=True):
                operations.submit(self._stream.cuda_stream, waiting.get(flag, 1))


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


@dataclass(eq=False)
class _Memory:
    """The workspaces of a group."""

    current: Workspace | None = None
    pinned: list[Workspace] = field(default_factory=list)
    """Those of captured graphs, whose replays use these addresses."""
    abandoned: list[Workspace] = field(default_factory=list)
    """Those of calls that raised, which peers may still be reading, and whose copies may still be in flight."""
    calls: Calls | None = None
    """The passes of the group, if they are counted."""
    failure: PeerError | None = None
    """The error of a wait that took longer than the timeout of the group."""

    def working(self) -> Workspace | None:
        """Return the current workspace.

        Raises:
            PeerError: a wait of the group has failed.
        """
        if self.failure is not None:
            raise PeerError(str(self.failure)) from self.failure
        return self.current


_lock = threading.Lock()  # not held during collectives: ranks may call for several groups in any order
_by_group: WeakKeyDictionary[dist.ProcessGroup, _Memory] = WeakKeyDictionary()


def memory_of(group: dist.ProcessGroup) -> _Memory:
    """Return the workspaces of a group, to be changed."""
    with _lock:
        memory = _by_group.get(group)
        if memory is None:
            memory = _by_group[group] = _Memory()
    return memory


def workspace(group: dist.ProcessGroup, device: torch.device, kv_bytes: int, grad_bytes: int) -> Workspace:
    """Return the cached workspace of a group, with at least so many bytes, which are equal on all ranks.

    Mapping memory, at the first call and for a larger size, is a collective that takes a second.

    Raises:
        PeerError: an earlier call of the group waited longer than the timeout of the group.
        RuntimeError: memory has to be mapped while a CUDA graph is captured.
    """
    memory = memory_of(group)
    held = memory.working()
    if held is None or held.kv_bytes < kv_bytes or held.grad_bytes < grad_bytes:
        refuse_capture("the ranks have to map shared memory", "run one forward and backward of this size")
        if held is not None:
            kv_bytes, grad_bytes = _grown(kv_bytes, held.kv_bytes), _grown(grad_bytes, held.grad_bytes)
        if held is not None or memory.abandoned:
            # Peers may be reading the old memory, and copies may be in flight, until all ranks are here.
            prepared(lambda: _synchronize_ranks(group, device))
            memory.working()  # while the ranks waited for each other, a wait may have failed
            held = memory.current = None
            memory.abandoned.clear()
        held = memory.current = prepared(lambda: Workspace(group, device, _round_up(kv_bytes), _round_up(grad_bytes)))
    memory.calls = memory.calls or counted_calls(group)
    held.flags.number = 1 if memory.calls is None else memory.calls.number
    if torch.cuda.is_current_stream_capturing() and held not in memory.pinned:
        memory.pinned.append(held)
    return held


def abandon(group: dist.ProcessGroup) -> None:
    """Drop the workspace of a group, a call of which has raised: its flags are in an unknown state.

    All ranks call it, so that the next call maps another.
    """
    memory = memory_of(group)
    if memory.failure is None and memory.current is not None:  # else ranks may be missing that mapping needs
        memory.abandoned.append(memory.current)
        memory.current = None


def release() -> None:
    """Drop all workspaces but those of groups with a failed wait; the next calls map what they need.

    All ranks call it, when all work that any of them has launched is done. Graphs that were captured before cannot be
    replayed any more.
    """
    with _lock:
        for group in [group for group, memory in _by_group.items() if memory.failure is None]:
            del _by_group[group]


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of symmetric memory on a device, which torch's allocator does not count."""
    with _lock:
        memories = list(_by_group.values())
    held = {each for memory in memories for each in (memory.current, *memory.pinned, *memory.abandoned) if each}
    own = [each.buffer.bytes_of[each.rank] for each in held]
    return sum(memory.numel() for memory in own if memory.device == device)


def _synchronize_ranks(group: dist.ProcessGroup, device: torch.device) -> None:
    """Wait until all work that any rank has launched is done."""
    torch.cuda.synchronize(device)
    dist.barrier(group)
    torch.cuda.synchronize(device)


def _grown(needed: int, held: int) -> int:
    """Return 1.5 times the held size where it is too small: masks that change every step need a bit more each time."""
    return held if needed <= held else max(needed, held + held // 2)


def _round_up(count: int) -> int:
    return -(-count // GRANULE) * GRANULE
