"""The identity of tensors, what is written to them, who sees what is done with them, and on which stream it is done."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

_REFUSED_FOR_WEAK_REFERENCES = re.compile(r"no weakrefs to t([12])'s Tensor object but got +(\d+)")


def swap_identities(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchanges what two tensor objects are: data, shape, autograd state. References from C++ stay with the content.

    `torch.utils.swap_tensors` does the same but refuses tensors that autograd refers to, which is the very case here.
    torch's own function refuses tensors that C++ refers to weakly. Autocast does, which remembers what it has cast, and
    is made to forget it; and profilers that record shapes, whose references may stay with the content too.
    """
    try:
        torch._C._swap_tensor_impl(first, second)
    except RuntimeError as error:
        if not _REFUSED_FOR_WEAK_REFERENCES.search(str(error)):
            raise
        torch.clear_autocast_cache()
        _swap_with_weak_references(first, second)


def _swap_with_weak_references(first: torch.Tensor, second: torch.Tensor) -> None:
    """The swap, with weak references left out of the count while it looks. Their owner must not let go of them then: a
    profiler does not, which keeps them until the profile is freed."""
    pair, swapped = (first, second), False
    uncounted: dict[int, int] = {}  # of either: how many weak references are left out meanwhile
    try:
        while not swapped:
            try:
                torch._C._swap_tensor_impl(first, second)
                swapped = True
            except RuntimeError as error:
                refused = _REFUSED_FOR_WEAK_REFERENCES.search(str(error))
                which = int(refused[1]) - 1 if refused else -1
                if refused is None or which in uncounted:
                    raise
                uncounted[which] = int(refused[2])
                for _ in range(uncounted[which]):
                    torch.UntypedStorage._free_weak_ref(pair[which]._cdata)  # of anything that counts references
    finally:
        for which, count in uncounted.items():
            for _ in range(count):  # each counts one and is never freed: whoever owns the reference will count it off
                counted = torch._C._WeakTensorRef(pair[which ^ swapped])  # type: ignore[attr-defined]
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(counted))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its data in other tensors, its attributes, as DTensors and quantized weights do."""
    return is_traceable_wrapper_subclass(tensor)


def version_of(tensor: torch.Tensor) -> int | None:
    """Counts what has been written to a tensor; None where nobody does.

    That is so of inference tensors, and of what Inductor's CUDA graphs give: a replay writes to the same tensors. Also,
    collectives do not count what they write, nor does compiled code where it uses memory again.
    """
    is_of_graph = torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]
    return None if tensor.is_inference() or is_of_graph else tensor._version


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for a batch of such tensors: under `torch.vmap`, or the older one of autograd."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


def current_stream_handle(device: torch.device) -> int:
    """CUDA's handle of `torch.cuda.current_stream(device)`, which takes several microseconds to make an object."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def below_autograd() -> AbstractContextManager[object]:
    """While open, operators run as inside of one of torch's own: autograd keeps no account of views and versions.

    For what autograd sees as one operator. Not for code of others, such as hooks of saved tensors, which may compute
    forward again. Views take the host half as long; under compiled code, of which autograd asks more, a third.
    """
    guard: AbstractContextManager[object] = torch._C._AutoDispatchBelowADInplaceOrView()
    return guard


@contextmanager
def no_modes() -> Iterator[None]:
    """While open, operators are run and seen by nobody: not traced, counted, kept for a recompute, sent to a default
    device or changed by a mode of the user's."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
