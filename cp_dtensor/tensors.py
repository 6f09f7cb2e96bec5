"""Views, memory order and devices of (B, H, S, D) tensors, and positions as tensors."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from cp_dtensor.layouts import Segment, Span


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


def positions_of(segments: Iterable[Segment], device: torch.device | str | None = None) -> torch.Tensor:
    """The global positions of some segments' tokens, in local order: (tokens,) int64.

    >>> positions_of([Segment(start=2, length=5, block=2, period=8)]).tolist()
    [2, 3, 10, 11, 18]
    """
    parts: list[Any] = []
    for segment in segments:
        tokens: Any = torch.arange(segment.length, device=device)
        parts.append(segment.position(tokens))
    return torch.cat(parts)


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
