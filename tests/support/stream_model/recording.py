"""CUDA streams that record what the ranks of a group submit to them.

The library itself runs, with stand-ins for torch's streams and events and for the CUDA driver. `interleavings` runs the
records.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from cp_dtensor._torch import SymmetricBuffer, cuda_driver
from cp_dtensor.comm import flags, head_exchange_symm_mem, symm_mem
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.comm.flags import Flag
from cp_dtensor.comm.symm_mem_workspace import Workspace

Op = tuple[Any, ...]
"""An operation and its arguments, which `interleavings` executes."""
_WAIT = cuda_driver._WAIT_VALUE_32
_ROOM = 1 << 16


class Event:
    """Stand-in for `torch.cuda.Event`. A wait is for the last record before the wait."""

    def __init__(self) -> None:
        self.mark: int | None = None
        self.clock: dict[int, int] = {}
        self.is_captured = False

    def record(self, stream: Stream) -> None:
        self.mark, self.is_captured = stream.rank.group.new_id(), stream.is_capturing
        stream.submit("mark", self.mark)
        self.clock = dict(stream.clock)


class Stream:
    """Stand-in for `torch.cuda.Stream`. Captured work has a lane of its own, which only events order."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.cuda_stream = rank, rank.group.new_id()
        rank.group.streams[self.cuda_stream] = self
        self.enter_lane(is_capturing=False)

    def enter_lane(self, is_capturing: bool) -> None:
        self.is_capturing, self.lane = is_capturing, self.rank.group.new_id()
        self.rank.lanes.append(self.lane)
        self.clock: dict[int, int] = {}

    def submit(self, *op: Any) -> None:
        group = self.rank.group
        group.lanes[self.lane].append(op)
        self.rank.submitted.append(op)
        self.clock[self.lane] = len(group.lanes[self.lane])

    def wait_event(self, event: Event) -> None:
        if event.mark is None:
            return
        if event.is_captured and not self.is_capturing:
            self.eager = self.lane, self.clock
            self.enter_lane(True)  # the stream joins the graph
            self.rank.captured.append(self)
        assert event.is_captured == self.is_capturing, "a graph waits for what is not in it"
        self.submit("after", event.mark)
        for lane, length in event.clock.items():
            self.clock[lane] = max(self.clock.get(lane, 0), length)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [each for part in value for each in _tensors_in(part)] if isinstance(value, Iterable) else []


class Rank:
    """One device; also stands in for the process group on this rank."""

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self._rank = group, rank
        self.submitted: list[Op] = []
        self.lanes: list[int] = []
        """The lanes of its streams and graphs."""
        self.signalled: Counter[str] = Counter()
        """By "kv" and "grads": how often this rank has set the READY flag."""
        self.reads: list[tuple[int, int]] = []
        """Target and number of each copy from symmetric memory."""
        self.captured: list[Stream] = []
        self.alive: list[torch.Tensor] = []
        """Tensors that are not freed, so that no address has two meanings."""
        self.current = Stream(self)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.group.ranks)

    def write(self, kind: str) -> None:
        version = self.signalled[kind] + 1
        place = self._rank, kind
        self.group.writes[place, version] += 1
        self.current.submit("write", place, version)

    def read(self, stream: Stream, source: int, target: int) -> None:
        holder, kind, _ = self.group.place(source)
        assert kind != "flags"
        if stream is not self.current:  # its memory must outlive a call that raises
            held = _tensors_in(self.group.workspaces[self._rank].in_flight)
            assert any(each.data_ptr() <= target < each.data_ptr() + each.untyped_storage().nbytes() for each in held)
        number = self.group.new_id()
        self.reads.append((target, number))
        stream.submit("read", (holder, kind), self.signalled[kind], number)

    def use(self, *tensors: torch.Tensor) -> None:
        """Computes with tensors, to which all copies must have arrived."""
        self.alive += tensors
        for tensor in tensors:
            memory = tensor.untyped_storage()
            span = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
            self.current.submit("use", [number for target, number in self.reads if target in span])

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Captures what is submitted while open as one graph, which is launched on the current stream."""
        main = self.current
        before, after = Event(), Event()
        before.record(main)
        eager_lane, eager_clock = main.lane, main.clock
        main.enter_lane(True)
        main.submit("after", before.mark)
        yield
        after.record(main)
        for stream in self.captured:
            length = len(self.group.lanes[stream.lane])
            assert main.clock.get(stream.lane) == length, "captured work that the graph does not join"
            stream.is_capturing = False
            stream.lane, stream.clock = stream.eager
        self.captured.clear()
        main.is_capturing, main.lane, main.clock = False, eager_lane, eager_clock
        main.submit("after", after.mark)


class Group:
    """All ranks, what they have submitted, and their symmetric memory."""

    def __init__(self, world_size: int) -> None:
        self._ids = itertools.count(1)
        self.streams: dict[int, Stream] = {}
        self.lanes: defaultdict[int, list[Op]] = defaultdict(list)
        self.writes: Counter[tuple[tuple[int, str], int]] = Counter()
        self.active: Rank | None = None
        self.buffer: SymmetricBuffer | None = None
        self.ranks: list[Rank] = []
        self.ranks += [Rank(self, rank) for rank in range(world_size)]
        self.workspaces: list[Workspace] = []
        with self.recording():
            for rank in self.ranks:
                self.active = rank
                # Larger than any call needs, so that none maps another.
                self.workspaces.append(workspaces.workspace(rank, torch.device("cpu"), _ROOM, _ROOM))

    def new_id(self) -> int:
        return next(self._ids)

    def place(self, address: int) -> tuple[int, str, int]:
        """Returns the rank, the area ("flags", "kv" or "grads") and the offset of an address."""
        for rank, start in enumerate(self.workspaces[0].addresses):
            offset = address - start
            if 0 <= offset < workspaces._FLAG_BYTES:
                return rank, "flags", offset
            offset -= workspaces._FLAG_BYTES
            if 0 <= offset < self.workspaces[0].kv_bytes:
                return rank, "kv", offset
            offset -= self.workspaces[0].kv_bytes
            if 0 <= offset < self.workspaces[0].grad_bytes:
                return rank, "grads", offset
        raise AssertionError(f"{address} is in no rank's memory")

    def record(self, rank: Rank, program: Any) -> None:
        """Runs a program as one rank."""
        self.active = rank
        with self.recording():
            program(rank)
        assert not self.workspaces[rank.rank()].in_flight, "what has arrived is not held"

    @contextmanager
    def recording(self) -> Iterator[None]:
        with ExitStack() as stack:
            patches = [
                (cuda_driver, "_driver", lambda: self),
                (workspaces, "symmetric_buffer", self._symmetric_buffer),
                (workspaces.dist, "barrier", lambda group: None),
                (workspaces, "probe_p2p", lambda *_: None),
                (flags, "flag_launch", self._flag_launch),
                (workspaces, "_Waits", lambda *_: None),
                (workspaces, "watch", lambda _: None),
                (head_exchange_symm_mem, "launch_copies", self._launch_copies),
                (symm_mem.HeadBlocks, "write", lambda *_: self.active.write("kv")),
                (symm_mem._PulledGrads, "buffer", self._buffer_written(symm_mem._PulledGrads.buffer)),
                (symm_mem._PulledGrads, "receive", self._received(symm_mem._PulledGrads.receive)),
                (torch.cuda, "synchronize", lambda device: None),
                (torch.cuda, "Stream", lambda device, priority=0: Stream(self.active)),
                (torch.cuda, "Event", Event),
                (torch.cuda, "current_stream", lambda device=None: self.active.current),
                (torch.cuda, "is_current_stream_capturing", lambda: self.active.current.is_capturing),
                (torch.cuda, "stream", self._on_stream),
            ]
            for owner, name, stand_in in patches:
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            yield

    @contextmanager
    def _on_stream(self, stream: Stream | None) -> Iterator[None]:
        rank, before = self.active, self.active.current
        rank.current = before if stream is None else stream
        yield
        rank.current = before

    def _symmetric_buffer(self, size: int, device: torch.device, group: Rank) -> SymmetricBuffer:
        if self.buffer is None:
            self.buffer = SymmetricBuffer(
                tuple(torch.zeros(size, dtype=torch.uint8) for _ in range(group.size())), None
            )
        return self.buffer

    # Stand-ins for the driver and the kernels.

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: Sequence[Any], _: int) -> int:
        for each in operations:
            self.streams[stream].submit("wait" if each.operation == _WAIT else "set", each.address, each.value)
        self._count_signals([each.address for each in operations if each.operation != _WAIT and each.value])
        return 0

    def _flag_launch(self, addresses: torch.Tensor) -> Callable[[int], None]:
        places = addresses.numel() // 2 - 1
        signalled, awaited, waits, _ = addresses.split([places, places, 1, 1])
        before = [("set", signalled), ("set", waits), ("wait", awaited)]

        def launch(value: int) -> None:
            of_value = [(*op, value) for op in before]
            for op, addresses, word in (*of_value, ("set", awaited, 0), ("set", waits, 0)):
                for address in filter(None, addresses.tolist()):
                    self.active.current.submit(op, address, word)
            self._count_signals([*filter(None, signalled.tolist())])

        return launch

    def _count_signals(self, raised: list[int]) -> None:
        flags_raised = {
            self.place(address)[2] // (4 * len(self.ranks)) for address in raised if address not in self._statuses()
        }
        self.active.signalled["kv"] += Flag.KV_READY in flags_raised
        self.active.signalled["grads"] += Flag.GRAD_READY in flags_raised

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, count: int, stream: int) -> int:
        memory = [(start, start + self.buffer.bytes_of[0].numel()) for start in self.workspaces[0].addresses]
        with self._on_stream(self.streams[stream]):
            if any(start <= target < stop for start, stop in memory):
                holder, kind, _ = self.place(target)
                assert holder == self.active.rank(), "a rank writes to its own memory"
                self.active.write(kind)
            else:
                self.active.read(self.active.current, source, target)
        return 0

    def cuMemcpy2DAsync_v2(self, reference: Any, stream: int) -> int:
        copy = reference._obj
        self.active.read(self.streams[stream], copy.source_address, copy.target_address)
        return 0

    def _launch_copies(self, pieces: torch.Tensor, _rows: int, _bytes: int, targets: Any, _programs: int) -> None:
        for source, which, offset, *_ in pieces.tolist():
            self.active.read(self.active.current, source, targets[which].data_ptr() + offset)

    def _buffer_written(self, buffer: Any) -> Any:
        def get(transfers: Any) -> torch.Tensor:
            memory = buffer(transfers)
            self.active.write("grads")
            return memory

        return get

    def _received(self, receive: Any) -> Any:
        def get(transfers: Any) -> Any:
            contributions = receive(transfers)
            self.active.use(*(each.stack for each in contributions))
            return contributions

        return get

    def first_flags(self) -> dict[int, int]:
        """Returns the initial flags of the workspaces, and the words that tell who waits, by address."""
        assert self.buffer is not None
        count = len(Flag) * len(self.ranks)
        return dict.fromkeys(self._statuses(), 0) | {
            address + 4 * index: word
            for address, memory in zip(self.workspaces[0].addresses, self.buffer.bytes_of, strict=True)
            for index, word in enumerate(memory[: 4 * count].view(torch.int32).tolist())
        }

    def awaited(self, rank: int) -> list[list[int]]:
        """Returns the addresses of the flags in a rank's memory: by flag, then by the rank that sets it."""
        return self.workspaces[rank].flags._awaited

    def missing(self, rank: int, address: int, flags: dict[int, int]) -> set[int]:
        """Returns the ranks that have not set the flag of which one word is at `address`."""
        words = next(addresses for addresses in self.awaited(rank) if address in addresses)
        return {setter for setter, word in enumerate(words) if not flags[word]}

    def _statuses(self) -> set[int]:
        return {workspace.flags.status.addresses(flag)[0] for workspace in self.workspaces for flag in Flag}
