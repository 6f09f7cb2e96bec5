"""Triton launches that are prepared once for tensors of given shapes, strides and dtypes, at any addresses.

A `Launch` is a kernel with its grid, numbers and constants, cached by what it depends on (`cached_launch`). The form
of the compiled kernel depends on these and on which addresses are multiples of 16, by which a launch caches it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from cp_dtensor._torch.direct_launch import Described, DirectLaunch, Unknown, version_is_known

_log = logging.getLogger("cp_dtensor")
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
    """Returns the facts of a tensor.

    >>> facts(torch.zeros(2, 3))
    Facts(shape=torch.Size([2, 3]), strides=(3, 1), dtype=torch.float32)
    """
    return Facts(x.shape, x.stride(), x.dtype)


def cached_launch(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """Decorates a function that makes launches from hashable values with an LRU cache."""
    return functools.lru_cache(maxsize=_MOST_LAUNCHES)(make)


class Launch:
    """A kernel with all arguments but its tensors, which are passed at each call and come first."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], numbers: Sequence[float], constants: Mapping[str, object],
        blocks: Sequence[tuple[int, ...] | None] = (),
    ) -> None:  # fmt: skip
        """Compiles nothing yet.

        Args:
            kernel: a Triton kernel whose parameters are tensors, numbers, then constants.
            grid: programs along each axis.
            numbers: integers and floats, in order.
            constants: the kernel's `tl.constexpr` parameters and Triton's options, by name.
            blocks: for each tensor the shape of the blocks that the kernel reads by a descriptor, None for a pointer.
                Tensors beyond its end are pointers.
        """
        self._kernel, self._grid = kernel, grid
        self._numbers, self._constants, self._blocks = tuple(numbers), dict(constants), tuple(blocks)
        # False in the interpreter, and for an unknown Triton.
        self._may_be_direct = isinstance(kernel, triton.runtime.JITFunction) and version_is_known()
        # By device and alignments: the compiled kernel, a direct launch of it, or the reason why there is none.
        self._found: dict[tuple[int, object], _Compiled | DirectLaunch | str] = {}

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launches on the current stream of the current device, with tensors of the expected facts."""
        if 0 in self._grid:
            return
        if not self._may_be_direct or not tensors[0].is_cuda or self.needs_triton():
            self._launch_by_triton(tensors)
            return
        addresses = [x.data_ptr() for x in tensors]
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (device, _alignments(addresses))
        found = self._found.get(key)
        if isinstance(found, _Compiled):  # at the second launch, since many kernels are launched only once
            found = self._found[key] = self._direct(found.kernel, tensors)
        if isinstance(found, DirectLaunch) and found(self._grid, driver.get_current_stream(device), addresses):
            return
        # Also if the driver refuses, as in a thread without a CUDA context, for which Triton sets one.
        compiled = self._launch_by_triton(tensors)
        if found is None:
            self._found[key] = _Compiled(compiled)

    def fixed(self, tensors: Sequence[torch.Tensor]) -> Callable[[int], bool] | None:
        """Returns a direct launch with these tensors, as a function of the stream; None if there is none (yet)."""
        addresses = [x.data_ptr() for x in tensors]
        device = triton.runtime.driver.active.get_current_device()
        found = self._found.get((device, _alignments(addresses)))
        return found.fixed(self._grid, addresses) if isinstance(found, DirectLaunch) else None

    def needs_triton(self) -> bool:
        """Returns True if Triton has to launch now, for a debugger or a profiler.

        Debugging compiles the kernel in another form than the cached one; profilers get a call at each launch.
        """
        knobs = triton.knobs
        if knobs.runtime.debug or knobs.compilation.instrumentation_mode or knobs.runtime.add_stages_inspection_hook:
            return True
        for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
            if hook is not None and getattr(hook, "calls", True):
                return True
        return bool(self._kernel.pre_run_hooks)

    def _launch_by_triton(self, tensors: Sequence[torch.Tensor]) -> Any:
        arguments: list[Any] = list(tensors)
        for index, block in enumerate(self._blocks):
            if block is not None:
                arguments[index] = TensorDescriptor.from_tensor(tensors[index], list(block))
        return self._kernel[self._grid](*arguments, *self._numbers, **self._constants)

    def _direct(self, compiled: Any, tensors: Sequence[torch.Tensor]) -> DirectLaunch | str:
        arguments: list[object] = [None] * len(tensors)
        for index, block in enumerate(self._blocks):
            if block is not None:
                arguments[index] = Described(tuple(tensors[index].shape), tensors[index].stride())
        try:
            return DirectLaunch(compiled, [*arguments, *self._numbers])
        except (Unknown, AttributeError, KeyError, TypeError) as error:  # not as in the known versions
            _log.debug("Triton launches %s, which takes more host time: %r", self._kernel.__name__, error)
            return repr(error)


class BoundLaunch:
    """A launch with its tensors. After a few launches it takes one driver call."""

    def __init__(self, launch: Launch, tensors: Sequence[torch.Tensor]) -> None:
        self._launch, self._tensors = launch, tuple(tensors)
        self._fixed: Callable[[int], bool] | None = None

    def __call__(self, stream: int) -> None:
        """Launches on the current stream of the tensors' device, which has this handle."""
        if self._fixed is None or self._launch.needs_triton() or not self._fixed(stream):
            self._launch(*self._tensors)
            if self._fixed is None and self._tensors[0].is_cuda:
                self._fixed = self._launch.fixed(self._tensors)


class _Compiled(NamedTuple):
    """A kernel that Triton has compiled and launched."""

    kernel: Any


def _alignments(addresses: Sequence[int]) -> object:
    """Returns a value that is equal for addresses with the same compiled form."""
    if not functools.reduce(int.__or__, addresses) % _ALIGNMENT:
        return True
    return tuple(address % _ALIGNMENT == 0 for address in addresses)
