"""Tensors: views and memory order of (B, H, S, D), devices and streams, identity, modes, and profiler labels."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

TRITON_AVAILABLE = find_spec("triton") is not None

Span = tuple[int, int]


@lru_cache
def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None without it. Imports nothing of it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cut(tensor: torch.Tensor, batch: Span | None, heads: Span | None, rows: Span | None) -> torch.Tensor:
    """Return a view of some batch rows, heads and sequence rows of (B, H, S, ...); None means all."""
    shape = tensor.shape  # not in a loop over the dims, which takes longer
    if batch is not None and batch != (0, shape[0]):
        tensor = tensor.narrow(0, batch[0], batch[1] - batch[0])
    if heads is not None and heads != (0, shape[1]):
        tensor = tensor.narrow(1, heads[0], heads[1] - heads[0])
    if rows is not None and rows != (0, shape[2]):
        tensor = tensor.narrow(2, rows[0], rows[1] - rows[0])
    return tensor


def cut_all(
    tensors: Sequence[torch.Tensor], batch: Span | None, heads: Span | None, rows: Span | None
) -> Sequence[torch.Tensor]:
    """Return `cut` of several tensors of equal (B, H, S); the tensors themselves if that is all of them."""
    shape = tensors[0].shape
    for dim, span in enumerate((batch, heads, rows)):
        if span is not None and span != (0, shape[dim]):
            tensors = [x.narrow(dim, span[0], span[1] - span[0]) for x in tensors]
    return tensors


def split_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a view (rows, H, S, ...) of (1, H, rows * S, ...), the tokens of one batch row after the other."""
    if tensor.size(2) % rows:
        raise ValueError(
            f"expected this rank's tokens of {rows} batch rows, as many of each, one row after the other; got "
            f"{tensor.size(2)} tokens"
        )
    return tensor if rows == 1 else tensor.squeeze(0).unflatten(1, (rows, -1)).transpose(0, 1)


def joined_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Invert `split_rows`; return a view if the rows are in memory one after the other."""
    return tensor if rows == 1 else tensor.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def in_order_of(out: torch.Tensor, grad_out: torch.Tensor) -> torch.Tensor:
    """Return `grad_out` with the strides of `out`; cuDNN needs them, and would copy it for every tile otherwise."""
    return grad_out if grad_out.stride() == out.stride() else torch.empty_like(out).copy_(grad_out)


def empty_in_order_of(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return (B, H, S, dim) in the memory order of x, so that merges with x and gradients of leaves copy nothing.

    `dtype` None is that of x.
    """
    batch, heads, rows = x.shape[:3]
    if x.stride(1) < x.stride(2):  # (B, S, H, D) memory, as in most models
        return x.new_empty(batch, rows, heads, dim, dtype=dtype).transpose(1, 2)
    return x.new_empty(batch, heads, rows, dim, dtype=dtype)


def laid_out_after(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return `out` (B, H, S, Dv) with strides that follow from those of q (B, H, S, D); a copy if it has others.

    The strides are q's own if the shapes are equal and no elements of q share memory, else those of memory without
    gaps in q's order of dims.
    """
    if out.stride() == q.stride() and out.shape == q.shape:  # as usual
        return out
    strides = list(q.stride())
    if out.shape != q.shape or has_shared_elements(q):
        step = 1
        for dim in _from_inner_to_outer(q):
            strides[dim] = step
            step *= out.size(dim)
    if all(size == 1 or old == new for size, old, new in zip(out.shape, out.stride(), strides, strict=True)):
        return out
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device=out.device).copy_(out)


def has_shared_elements(x: torch.Tensor) -> bool:
    """Return whether elements of a tensor may share memory, as in expanded dims and overlapping windows.

    True also for some dims that interleave without sharing, such as those of strides 2 and 3 and sizes 2 and 2.

    >>> has_shared_elements(torch.zeros(1, 3).expand(2, 3)), has_shared_elements(torch.zeros(2, 4)[:, :3])
    (True, False)
    """
    dims = [dim for dim in _from_inner_to_outer(x) if x.size(dim) > 1]
    is_expanded = any(x.stride(dim) == 0 for dim in dims)
    return is_expanded or any(x.stride(outer) < x.stride(inner) * x.size(inner) for inner, outer in pairwise(dims))


def _from_inner_to_outer(x: torch.Tensor) -> list[int]:
    """Return the dims of a tensor in the order of their strides."""
    return sorted(range(x.dim()), key=lambda dim: (x.stride(dim), x.size(dim)))


def unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, copied if its last dim is not contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def aligned(tensor: torch.Tensor, width: int, *, keeps_expanded: bool = False) -> torch.Tensor:
    """Return (B, H, S, D), copied unless start and steps of other dims than the last are multiples of `width` bytes.

    `width` is a power of two. Expanded dims, whose steps are 0, are copied too, unless `keeps_expanded` is True.
    """
    batch, head, row, _ = tensor.stride()
    steps = (batch | head | row) * tensor.itemsize
    if not (tensor.data_ptr() | steps) % width and (keeps_expanded or 0 not in (batch, head, row)):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def wide_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def in_words(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views (..., D) and (..., Dv) as integers of one dtype, as wide as D and Dv permit, to copy and send them.

    Copies of wide integers are faster, and process groups support these dtypes. A tensor whose memory cannot be viewed
    so is copied.

    >>> [tuple(x.shape) for x in in_words(torch.zeros(3, 8).bfloat16(), torch.zeros(3, 4).bfloat16())]
    [(3, 2), (3, 1)]
    """
    sizes = [x.size(-1) * x.itemsize for x in (k, v)]
    words = (torch.int64, torch.int32, torch.uint8)
    word = next(dtype for dtype in words if not any(size % dtype.itemsize for size in sizes))

    def viewed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.resolve_conj().resolve_neg()
        steps = (tensor.storage_offset(), *tensor.stride()[:-1])
        if tensor.stride(-1) != 1 or any(step * tensor.itemsize % word.itemsize for step in steps):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return tensor.view(word)

    return viewed(k), viewed(v)


def no_autocast(like: torch.Tensor) -> AbstractContextManager[None]:
    """Disable autocast on the tensor's device."""
    device_type = like.device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Return `torch.cuda.current_stream(device)`; several times as fast, since torch gets the device's index."""
    return torch.cuda.current_stream(device.index)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the current one, for streams, events and kernels."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


# Identity, versions and modes

_REFUSED_FOR_WEAK_REFERENCES = re.compile(r"no weakrefs to t([12])'s Tensor object but got +(\d+)")


def swap_identities(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the contents of two tensor objects: data, shape, autograd state. C++ references stay with the content.

    `torch.utils.swap_tensors` does so too, but refuses tensors that autograd refers to, as it does here. The function
    behind it refuses tensors with weak references from C++. Two owners of such references are known: autocast, whose
    cache is cleared, and profilers that record shapes, whose references may stay with the content: they are uncounted
    during the exchange. (A profiler holds them until the profile is freed, and so does not drop them then.)
    """
    pair, swapped, is_cache_cleared = (first, second), False, False
    uncounted: dict[int, int] = {}  # by tensor: weak references that are uncounted
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
                if not is_cache_cleared:
                    torch.clear_autocast_cache()
                    is_cache_cleared = True
                    continue
                uncounted[which] = int(refused[2])
                for _ in range(uncounted[which]):
                    torch.UntypedStorage._free_weak_ref(pair[which]._cdata)  # works for any counted object
    finally:
        for which, count in uncounted.items():
            for _ in range(count):  # each counts one and is never freed: the owner of the reference will
                counted = torch._C._WeakTensorRef(pair[which ^ swapped])  # type: ignore[attr-defined]
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(counted))


is_wrapper: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass
"""True if the tensor's data is in tensors that are its attributes, as in DTensors and quantized weights."""


def version_of(tensor: torch.Tensor) -> int | None:
    """Return autograd's count of writes to a tensor, None if writes are not counted.

    Writes to inference tensors and to results of Inductor's CUDA graphs are not counted; nor are writes by collectives
    and by compiled code that reuses memory, in any tensor.
    """
    is_of_graph = torch._C._is_cached_tensor(tensor)  # type: ignore[attr-defined]
    return None if tensor.is_inference() or is_of_graph else tensor._version


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a batch of tensors, under `torch.vmap` or the older vmap of autograd."""
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


def current_stream_handle(device: torch.device) -> int:
    """Return the CUDA handle of `torch.cuda.current_stream(device)` without the object, which takes microseconds."""
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


below_autograd: Callable[[], AbstractContextManager[object]] = torch._C._AutoDispatchBelowADInplaceOrView
"""While open, operators skip autograd's tracking of views and versions, as inside of one of torch's operators.

For code that autograd sees as one operator; not for code of others, such as hooks of saved tensors, which may recompute
forward. Views take half of the host time, in compiled code a third.
"""


@contextmanager
def no_modes() -> Iterator[None]:
    """Disable all modes while open: no operator is traced, counted, saved for a recompute, or changed."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def content_hash(tensor: torch.Tensor) -> int:
    """Hash of a tensor's dtype, shape and values, which waits for the device; without values on the meta device.

    Blocks of 32-bit words are multiplied by the places of the words and summed, modulo 2**64.

    >>> content_hash(torch.arange(5)) == content_hash(torch.arange(5)) != content_hash(torch.arange(5).flip(0))
    True
    """
    total = 0
    with no_modes(), torch.no_grad():
        if not tensor.is_meta and tensor.numel():
            values = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)  # as they are in memory
            words = torch.uint8 if values.numel() * values.itemsize % 4 else torch.int32
            # The stride of a single element may be any.
            if values.storage_offset() * values.itemsize % words.itemsize or values.stride(0) != 1:
                values = values.clone(memory_format=torch.contiguous_format)
            sums = [
                (block.to(torch.int64) * torch.arange(1, 2 * len(block), 2, device=block.device)).sum()
                for block in values.view(words).split(_WORDS_OF_HASH)
            ]
            for each in torch.stack(sums).tolist():
                total = (total * 0x9E3779B97F4A7C15 + each) % (1 << 64)
    return zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)} {total}".encode()) << 31 ^ total >> 2


_WORDS_OF_HASH = 1 << 20
"""Words of a block: its integers of 64 bits take 16 MiB."""
is_profiled: Callable[[], bool] = torch.autograd._profiler_enabled
"""True while a profiler runs. Warm calls ask it in place of `label`, which would be a call of a Python function:

    with label("a text") if is_profiled() else NO_LABEL:
"""
NO_LABEL: AbstractContextManager[None] = nullcontext()


def label(text: str, *values: object) -> AbstractContextManager[object]:
    """Label a block in a running `torch.profiler` as `text.format(*values)`; without a profiler it does nothing."""
    if not is_profiled():
        return NO_LABEL
    return torch.profiler.record_function(f"cp_dtensor: {text.format(*values)}")


def indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor; or its bits as integers, if torch cannot index its dtype."""
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1
    if is_float8 or tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])
    return tensor
