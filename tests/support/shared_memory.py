"""Stand-in for symmetric memory on CPUs, for ranks that are threads; transports move every byte.

A thread executes work that it submits to a stream at once. `stream_model` has the order of real streams.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cp_dtensor._torch import SymmetricBuffer, cuda_driver
from cp_dtensor.comm import flags, head_exchange_symm_mem
from cp_dtensor.comm import symm_mem_workspace as workspaces

_PATIENCE = 60.0


class _Stream:
    """Stand-in for streams and events."""

    cuda_stream = 0

    def __init__(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait_event = wait_stream = record

    def query(self) -> bool:
        return True


class _Machine:
    """Shared memory, and stand-ins for the CUDA driver and the kernels."""

    def __init__(self) -> None:
        self._memory: dict[tuple[tuple[int, ...], int, int], torch.Tensor] = {}
        self._mapped: Counter[tuple[tuple[int, ...], int]] = Counter()
        self.copies = 0

    def symmetric_buffer(self, size: int, device: torch.device, group: Any) -> SymmetricBuffer:
        members, rank = tuple(dist.get_process_group_ranks(group)), group.rank()
        number = self._mapped[members, rank]
        self._mapped[members, rank] += 1
        self._memory[members, number, rank] = torch.zeros(size, dtype=torch.uint8)
        places = [(members, number, peer) for peer in range(group.size())]
        _await(lambda: all(place in self._memory for place in places))
        return SymmetricBuffer(tuple(self._memory[place] for place in places), None)

    def cuStreamBatchMemOp_v2(self, stream: int, count: int, operations: Sequence[Any], _: int) -> int:
        for each in operations:
            flag = ctypes.c_uint32.from_address(each.address)
            if each.operation == cuda_driver._WAIT_VALUE_32:
                _await(lambda flag=flag, value=each.value: flag.value == value)
            else:
                flag.value = each.value
        return 0

    def flag_launch(self, addresses: torch.Tensor) -> Callable[[int], None]:
        places = addresses.numel() // 2 - 1
        signalled, awaited, waits, passes = addresses.split([places, places, 1, 1])

        def words(addresses: torch.Tensor) -> list[ctypes.c_uint32]:
            return [ctypes.c_uint32.from_address(address) for address in filter(None, addresses.tolist())]

        def launch(value: int) -> None:
            for flag in words(signalled):
                flag.value = value
            for word in words(waits):
                word.value = value
            _await(lambda: all(flag.value == value for flag in words(awaited)))
            for flag in words(awaited) + words(waits):
                flag.value = 0
            for word in words(passes):
                word.value += 1

        return launch

    def cuMemcpyDtoDAsync_v2(self, target: int, source: int, count: int, stream: int) -> int:
        ctypes.memmove(target, source, count)
        self.copies += 1
        return 0

    def cuMemsetD8Async(self, target: int, value: int, count: int, stream: int) -> int:
        ctypes.memset(target, value, count)
        return 0

    def launch_copies(self, pieces: torch.Tensor, _rows: int, _bytes: int, targets: Any, _programs: int) -> None:
        for source, which, offset, rows, row_bytes, source_pitch, target_pitch in pieces.tolist():
            target = targets[which].data_ptr() + offset
            for row in range(rows):
                ctypes.memmove(target + row * target_pitch, source + row * source_pitch, row_bytes)
        self.copies += len(pieces)


@contextmanager
def shared_memory(timeout: float = 2 * _PATIENCE) -> Iterator[_Machine]:
    """Context around `run_ranks` in which ranks share memory. Skips the test without Triton.

    Args:
        timeout: deadline of a wait in seconds.
    """
    pytest.importorskip("cp_dtensor.comm.triton_kernels")
    machine, stream = _Machine(), _Stream()
    patches = [
        (cuda_driver, "_driver", lambda: machine),
        (workspaces, "symmetric_buffer", machine.symmetric_buffer),
        (workspaces, "probe_p2p", lambda *_: None),
        (flags, "flag_launch", machine.flag_launch),
        (workspaces, "group_timeout", lambda *_: timeout),
        (head_exchange_symm_mem, "launch_copies", machine.launch_copies),
        (torch.cuda, "synchronize", lambda device: None),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "stream", lambda stream: nullcontext()),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in patches:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield machine


def _await(condition: Any) -> None:
    end = time.monotonic() + _PATIENCE
    while not condition():
        assert time.monotonic() < end, "a rank waits for ever"
        time.sleep(1e-5)
