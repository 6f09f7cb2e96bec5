"""Views, memory order and devices of (B, H, S, D) tensors, and positions as tensors."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

TRITON_AVAILABLE = find_spec("triton") is not None

Span = tuple[int, int]


def cut(tensor: torch.Tensor, batch: Span | None, heads: Span | None, rows: Span | None) -> torch.Tensor:
    """(B, H, S, ...) to some batch rows, heads and sequence rows, a view; None means all."""
    shape = tensor.shape
    for dim, span in ((0, batch), (1, heads), (2, rows)):
        if span is not None and (span[0] or span[1] != shape[dim]):
            tensor = tensor.narrow(dim, span[0], span[1] - span[0])
    return tensor


def split_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """(1, H, rows * S, ...), the tokens of batch rows one after the other, as a view (rows, H, S, ...).

    Raises:
        ValueError: tokens that are not of so many rows.
    """
    if tensor.size(2) % rows:
        raise ValueError(
            f"expected this rank's tokens of {rows} batch rows, as many of each, one row after the other; got "
            f"{tensor.size(2)} tokens"
        )
    return tensor if rows == 1 else tensor.squeeze(0).unflatten(1, (rows, -1)).transpose(0, 1)


def joined_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The inverse of `split_rows`; a view of what is in memory row after row."""
    return tensor if rows == 1 else tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def in_order_of(out: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """`grad_out` in the memory order of `out`, which cuDNN insists on, so that it is not copied for every tile."""
    return grad_out if grad_out.stride() == out.stride() else torch.empty_like(out).copy_(grad_out)


def laid_out_after(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` (B, H, S, Dv) in strides that are a function of those of q (B, H, S, D) alone; a copy if it has others.

    They are q's own where the shapes are equal and no elements of q share memory, else those of memory without gaps in
    q's order of dims.
    """
    if out.stride() == q.stride() and out.shape == q.shape:  # as usual
        return out
    order = sorted(range(q.dim()), key=lambda dim: (q.stride(dim), q.size(dim)))
    strides = list(q.stride())
    overlaps = any(stride == 0 < size - 1 for size, stride in zip(q.shape, strides, strict=True)) or any(
        strides[outer] < strides[inner] * q.size(inner) for inner, outer in pairwise(order) if q.size(outer) > 1
    )
    if out.shape != q.shape or overlaps:
        step = 1
        for dim in order:
            strides[dim] = step
            step *= out.size(dim)
    if all(size == 1 or ours == wanted for size, ours, wanted in zip(out.shape, out.stride(), strides, strict=True)):
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its last dim is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def in_words(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., D) and (..., Dv) as integers of one dtype, as wide as D and Dv permit: what is copied and sent as such.

    Copies are faster so, and groups know every such dtype. Views, but for memory that is divided in another way.

    >>> [tuple(x.shape) for x in in_words(torch.zeros(3, 8).bfloat16(), torch.zeros(3, 4).bfloat16())]
    [(3, 2), (3, 1)]
    """
    sizes = [x.size(-1) * x.itemsize for x in (k, v)]
    word = next(dtype for dtype in _WORDS if not any(size % dtype.itemsize for size in sizes))
    return _in_words(k, word), _in_words(v, word)


_WORDS = (torch.int64, torch.int32, torch.uint8)


def _in_words(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    steps = (tensor.storage_offset(), *tensor.stride()[:-1])
    if tensor.stride(-1) != 1 or any(step * tensor.itemsize % word.itemsize for step in steps):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(word)


def no_autocast(like: torch.Tensor) -> AbstractContextManager[None]:
    """No casting of what is computed on the tensor's device."""
    device_type = like.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes a CUDA tensor's device the current one, which streams, events and kernels are taken from."""
    return on_device(tensor.device)


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """`torch.cuda.current_stream(device)`, by the device's index: without one torch takes several times as long."""
    return torch.cuda.current_stream(device.index)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


# The identity of tensors, what is written to them, who sees what is done with them, and on which stream it is done.

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
