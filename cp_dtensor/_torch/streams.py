"""Tensors made on a stream of their own, so that the host does not wait for the work of the current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from cp_dtensor._torch.cache import capturing, prepared
from cp_dtensor._torch.tensors import current_stream, current_stream_handle

V = TypeVar("V")


def made_beside(device: torch.device, make: Callable[[], V]) -> V:
    """`make()` on a stream of its own. Its tensors are complete, and must have a `Readers`.

    The host waits for that stream alone. Copies from the host to the current stream would wait until all that was
    launched before, such as the layers in front of the first attention, is done. Under CUDA graph capture, which has to
    see every launch, and on CPUs: `make()`.
    """
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


class Readers:
    """The streams that read tensors of `made_beside`: once dropped, their memory waits for these streams."""

    def __init__(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        self._device, self._tensors = device, tuple(tensors)
        self._streams: set[int] = set()

    def add_current(self) -> None:
        """Adds the current stream, before a launch on it reads the tensors."""
        if self._device.type != "cuda":
            return
        handle = current_stream_handle(self._device)
        if handle not in self._streams and not capturing():  # caches keep what captured graphs read
            self._streams.add(handle)
            for tensor in self._tensors:
                tensor.record_stream(current_stream(self._device))


class Shared(Generic[V]):
    """A value with tensors that calls on any stream may read, such as one of a cache.

    Args:
        make: makes the value.
        tensors: the tensors of the value.
    """

    def __init__(
        self, device: torch.device, make: Callable[[], V], tensors: Callable[[V], Iterable[torch.Tensor]]
    ) -> None:
        self._value = prepared(lambda: made_beside(device, make))
        self._readers = Readers(device, tensors(self._value))

    def read(self) -> V:
        """The value, before launches on the current stream read it."""
        self._readers.add_current()
        return self._value
