"""Triton launches that are prepared once for tensors of given shapes, strides and dtypes, at any addresses.

A `Launch` is a kernel with its programs, numbers and constants, cached by what it depends on (`cached_launch`). Triton
compiles another form of a kernel for addresses that are not multiples of 16. A launch keeps the compiled forms and
launches them, without the search for a form by `kernel[grid](...)`, which takes three times the host's time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from cp_dtensor._torch.tensors import current_stream_handle

_MOST_LAUNCHES = 2048
"""Cached launches of each launcher; ragged documents may need other launches at every step."""
_ALIGNMENT = 16  # of addresses, for which Triton compiles a form of its own

_Made = TypeVar("_Made")


class Facts(NamedTuple):
    """The properties of a tensor that a launch depends on, besides its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def facts(x: torch.Tensor) -> Facts:
    """Return the facts of a tensor.

    >>> facts(torch.zeros(2, 3))
    Facts(shape=torch.Size([2, 3]), strides=(3, 1), dtype=torch.float32)
    """
    return tuple.__new__(Facts, (x.shape, x.stride(), x.dtype))  # in half the time of Facts(...)


def cached_launch(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """Decorate a function that makes launches from hashable values with an LRU cache."""
    return functools.lru_cache(maxsize=_MOST_LAUNCHES)(make)


class Launch:
    """A kernel with all arguments but its tensors, which are passed at each call and come first."""

    def __init__(
        self, kernel: Any, programs: int, numbers: Sequence[float], constants: Mapping[str, object],
        blocks: Sequence[tuple[int, ...] | None] = (),
    ) -> None:  # fmt: skip
        """Compile nothing yet.

        Args:
            kernel: a Triton kernel whose parameters are tensors, numbers, then constants.
            programs: number of programs, all on axis x of the grid: CUDA allows 2^31 - 1 there, 65,535 on y and z.
            numbers: integers and floats, in order.
            constants: the kernel's `tl.constexpr` parameters and Triton's options, by name.
            blocks: for each tensor the shape of the blocks that the kernel reads by a descriptor, None for a pointer.
                Tensors beyond its end are pointers.
        """
        assert programs < 2**31, f"a launch of {programs} programs"
        self._kernel, self._grid = kernel, (programs, 1, 1)
        self._numbers, self._constants, self._blocks = tuple(numbers), dict(constants), tuple(blocks)
        self._compiled: dict[tuple[int, object], Any] = {}  # by device and alignments

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the current device, which has the tensors. Their facts are as expected."""
        if 0 in self._grid:
            return
        device, addresses = tensors[0].device, [x.data_ptr() for x in tensors]
        key = (device.index, _alignments(addresses))
        compiled = self._compiled.get(key)
        # Triton asks the driver about the address of each tensor, not about integers.
        arguments: list[Any] = list(tensors if compiled is None else addresses)
        for index, block in enumerate(self._blocks):
            if block is not None:
                arguments[index] = TensorDescriptor.from_tensor(tensors[index], list(block))
        if compiled is None:  # always in Triton's interpreter, which compiles nothing
            self._compiled[key] = self._kernel[self._grid](*arguments, *self._numbers, **self._constants)
            return
        arguments += (*self._numbers, *self._constants_in_order)
        compiled[self._grid](*arguments, stream=current_stream_handle(device))

    @functools.cached_property
    def _constants_in_order(self) -> list[object]:
        """The constants without Triton's options, in the order of the kernel's parameters."""
        return [self._constants[name] for name in self._kernel.arg_names if name in self._constants]


def _alignments(addresses: Sequence[int]) -> object:
    """Return a value that is equal for addresses with the same compiled form."""
    if not functools.reduce(int.__or__, addresses) % _ALIGNMENT:
        return True
    return tuple(address % _ALIGNMENT == 0 for address in addresses)
