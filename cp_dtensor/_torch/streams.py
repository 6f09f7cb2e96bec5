"""Tensors made on a stream of their own, so that the host does not wait for the work of the current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from cp_dtensor._torch.cache import capturing, prepared
from cp_dtensor._torch.tensors import current_stream, current_stream_handle

V = TypeVar("V")


class Shared(Generic[V]):
    """A value with tensors that calls on any stream may read, such as one of a cache.

    It is made on a stream of its own, for which alone the host waits: copies from the host to the current stream would
    wait until all that was launched before, such as the layers in front of the first attention, is done. Not so on CPUs
    and under CUDA graph capture, which has to see every launch.

    Args:
        make: makes the value.
        tensors: the tensors of the value. Once dropped, their memory waits for the streams that have read them.
    """

    def __init__(
        self, device: torch.device, make: Callable[[], V], tensors: Callable[[V], Iterable[torch.Tensor]]
    ) -> None:
        self._device, self._readers = device, set[int]()
        self._value = prepared(lambda: _made_beside(device, make))
        self._tensors = tuple(tensors(self._value))

    def read(self) -> V:
        """Return the value, before launches on the current stream read it."""
        if self._device.type == "cuda":
            handle = current_stream_handle(self._device)
            if handle not in self._readers and not capturing():  # caches keep what captured graphs read
                self._readers.add(handle)
                for tensor in self._tensors:
                    tensor.record_stream(current_stream(self._device))
        return self._value


def _made_beside(device: torch.device, make: Callable[[], V]) -> V:
    if device.type != "cuda" or capturing():
        return make()
    stream = _stream_beside(device)
    with torch.cuda.stream(stream):
        made = make()
        stream.synchronize()
    return made


@lru_cache(maxsize=64)
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # beside attention that fills the device
