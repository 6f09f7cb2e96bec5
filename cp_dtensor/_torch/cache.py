"""CUDA graph capture, by the user or by Inductor; values of caches: by process group, and made on their own stream.

Before Inductor captures code it runs the code once in the memory pool of its graphs, and refuses tensors that are alive
there afterwards and that the code did not return. A tensor that the first call caches for later calls is one of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from cp_dtensor._torch.tensors import current_stream, current_stream_handle, no_modes

V = TypeVar("V")


def capturing() -> bool:
    """Return True while a CUDA graph is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def refuse_capture(work: str, remedy: str) -> None:
    """Refuse work of this stream that a CUDA graph cannot capture, while one is captured."""
    if capturing():
        raise RuntimeError(f"{work}, which a CUDA graph cannot capture: {remedy} before capturing")


def is_in_cuda_graph(device: torch.device) -> bool:
    """Return whether launches and allocations on a CUDA device belong to a CUDA graph that is being made."""
    return torch.cuda.is_current_stream_capturing() or _is_in_memory_of_graphs(device)


def is_before_capture(device: torch.device) -> bool:
    """Return whether Inductor runs this code for the last time before it captures it.

    Inductor does so on a stream of its own. Work of the code on another stream is not detected.
    """
    return _is_in_memory_of_graphs(device) and not torch.cuda.is_current_stream_capturing()


def prepared(make: Callable[[], V]) -> V:
    """Return `make()`: plain tensors for a cache, made outside of modes, inference, autograd and memory of graphs."""

    def made() -> V:
        with no_modes(), torch.inference_mode(False), torch.no_grad():
            return make()

    if not torch.cuda.is_initialized():
        return made()
    device = torch.device("cuda", torch.cuda.current_device())
    if not is_before_capture(device):
        return made()

    def made_on_device() -> V:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # the other thread uses another stream, which does not wait for this one
            result = made()
            torch.cuda.synchronize()
        return result

    # The memory pool of graphs serves allocations of this thread only.
    with ThreadPoolExecutor(1) as another_thread:
        return another_thread.submit(made_on_device).result()


def _is_in_memory_of_graphs(device: torch.device) -> bool:
    """Return whether Inductor captures code, or runs it for the last time before that."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    name = "tree_manager_containers"
    if trees is None or not (hasattr(trees.local, name) or torch._C._is_key_in_tls(name)):
        return False
    container = trees.get_obj(trees.local, name).get(device.index)
    graphs = None if container is None else container.tree_manager
    return graphs is not None and bool(graphs.stream == torch.cuda.current_stream(device))


class GroupCache(Generic[V]):
    """Values of process groups, dropped with the group. A value may be made by a collective."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: WeakKeyDictionary[Any, dict[Hashable, V]] = WeakKeyDictionary()

    def has(self, group: Any, key: Hashable) -> bool:
        """Return whether there is a value of a group and a key."""
        return key in self._values.get(group, ())

    def get(self, group: Any, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a group and a key, at first `make()`."""
        with self._lock:  # not during `make`: the collectives of other groups must not wait for it
            values = self._values.setdefault(group, {})
        if key not in values:
            values[key] = make()
        return values[key]


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
