"""Clocks and memory counters of the two kinds of devices."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

Call = Callable[[], object]
_CALLS_BEFORE_CAPTURE = 3


class Device(ABC):
    """What measurements need of a device."""

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """Where tensors live."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until everything that was launched is done."""

    @abstractmethod
    def time_ms(self, call: Call) -> float:
        """Milliseconds from the start of a call to the end of all that it launched."""

    @abstractmethod
    def launch_us(self, call: Call, calls: int) -> float | None:
        """Median microseconds that a call takes the host, in a row of calls that nobody waits for; None: no answer."""

    @abstractmethod
    def extra_bytes(self, call: Call) -> int | None:
        """Most memory that was in use during a call, over what was in use before; None if it is not counted."""

    @abstractmethod
    def captured(self, call: Call) -> Call:
        """A call that replays all that `call` launches."""

    @abstractmethod
    def free_unused(self) -> None:
        """Gives cached memory back."""


class Host(Device):
    """The CPU: a call is over when it returns."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass

    def time_ms(self, call: Call) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    def launch_us(self, call: Call, calls: int) -> float | None:
        return None

    def extra_bytes(self, call: Call) -> int | None:
        call()
        return None

    def captured(self, call: Call) -> Call:
        raise NotImplementedError("CUDA graphs need a GPU")

    def free_unused(self) -> None:
        pass


class Gpu(Device):
    """The current CUDA device."""

    def __init__(self) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def torch_device(self) -> torch.device:
        return self._device

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def time_ms(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def launch_us(self, call: Call, calls: int) -> float | None:
        seconds = []
        self.synchronize()
        for _ in range(calls):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        self.synchronize()
        return statistics.median(seconds) * 1e6

    def extra_bytes(self, call: Call) -> int | None:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        call()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self._device) - before

    def captured(self, call: Call) -> Call:
        # What is made at first calls (plans, communicators, workspaces) is made beforehand, on the capturing stream.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_CALLS_BEFORE_CAPTURE):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for events meanwhile, which must not spoil the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            call()
        return graph.replay

    def free_unused(self) -> None:
        torch.cuda.empty_cache()
