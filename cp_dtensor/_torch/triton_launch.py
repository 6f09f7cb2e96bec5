"""How all Triton kernels here are launched: what a launch is made of is found out once, then only addresses change.

A `Launch` is a kernel, its grid, its numbers and its constants: all that follows from the shapes, strides and dtypes of
a call's tensors. Launchers keep one for each such call (`kept`). Which of a kernel's compiled forms a launch needs
depends on no more than that and on whether addresses are multiples of 16, so it is looked up by those.
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
_MOST_KEPT = 2048
"""Launches of each launcher: of ragged documents, every step may want some of its own."""
_ALIGNMENT = 16  # what Triton compiles for


_Made = TypeVar("_Made")


class Facts(NamedTuple):
    """What a launch depends on of a tensor, besides its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def facts(x: torch.Tensor) -> Facts:
    """Of a tensor.

    >>> facts(torch.zeros(2, 3))
    Facts(shape=torch.Size([2, 3]), strides=(3, 1), dtype=torch.float32)
    """
    return Facts(x.shape, x.stride(), x.dtype)


def kept(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """For a function that makes launches from hashable values: the latest are kept, to be found by these values."""
    return functools.lru_cache(maxsize=_MOST_KEPT)(make)


class Launch:
    """A kernel with everything but its tensors, which are given at each call and come first among its arguments."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        numbers: Sequence[float],
        constants: Mapping[str, object],
        blocks: Sequence[tuple[int, ...] | None] = (),
    ) -> None:
        """Nothing is compiled yet.

        Args:
            kernel: a Triton kernel whose parameters are tensors, numbers, then constants.
            grid: programs along each axis.
            numbers: integers and floats, in order.
            constants: the kernel's `tl.constexpr` parameters and Triton's options, by name.
            blocks: for each tensor the shape of the blocks that the kernel reads by a descriptor, None for a pointer;
                of tensors that are left out here, pointers.
        """
        self._kernel, self._grid = kernel, grid
        self._numbers, self._constants, self._blocks = tuple(numbers), dict(constants), tuple(blocks)
        self._may_be_direct = isinstance(kernel, triton.runtime.JITFunction) and version_is_known()
        """Not by the interpreter, nor by a Triton of which nothing here is known."""
        self._found: dict[tuple[int, object], _Compiled | DirectLaunch | str] = {}
        """By device and alignments: the same as it is launched directly, or why it is not."""

    def __call__(self, *tensors: torch.Tensor) -> None:
        """Launches on the current stream of the current device.

        The tensors are of the shapes, strides and dtypes that this launch was made for, at any addresses.
        """
        if 0 in self._grid:
            return
        if not self._may_be_direct or not tensors[0].is_cuda or _needs_triton(self._kernel):
            self._launch_by_triton(tensors)
            return
        addresses = [x.data_ptr() for x in tensors]
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        key = (device, _alignments(addresses))
        found = self._found.get(key)
        if isinstance(found, _Compiled):  # launched once before; not direct at once, since many are made only once
            found = self._found[key] = self._direct(found.kernel, tensors)
        if isinstance(found, DirectLaunch) and found(self._grid, driver.get_current_stream(device), addresses):
            return
        # Also where the driver refuses: in a thread without a CUDA context, say, for which Triton finds one.
        compiled = self._launch_by_triton(tensors)
        if found is None:
            self._found[key] = _Compiled(compiled)

    def bound(self, *tensors: torch.Tensor) -> BoundLaunch:
        """This launch with these tensors."""
        return BoundLaunch(self, tensors)

    def fixed(self, tensors: Sequence[torch.Tensor]) -> Callable[[int], bool] | None:
        """With these tensors on the current device, as a function of the stream; None if it is not direct (yet)."""
        addresses = [x.data_ptr() for x in tensors]
        device = triton.runtime.driver.active.get_current_device()
        found = self._found.get((device, _alignments(addresses)))
        return found.fixed(self._grid, addresses) if isinstance(found, DirectLaunch) else None

    @property
    def needs_triton(self) -> bool:
        """Whether Triton has to launch, at this moment."""
        return _needs_triton(self._kernel)

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
        except (Unknown, AttributeError, KeyError, TypeError) as error:  # it is not like those that are known
            _log.debug("Triton launches %s, which takes the host longer: %r", self._kernel.__name__, error)
            return repr(error)


class BoundLaunch:
    """A launch with its tensors, for what is launched again and again: soon the host says no more than go."""

    def __init__(self, launch: Launch, tensors: Sequence[torch.Tensor]) -> None:
        self._launch, self._tensors = launch, tuple(tensors)
        self._fixed: Callable[[int], bool] | None = None

    def __call__(self, stream: int) -> None:
        """Launches on the current stream of the tensors' device, whose handle this is."""
        if self._fixed is None or self._launch.needs_triton or not self._fixed(stream):
            self._launch(*self._tensors)
            if self._fixed is None and self._tensors[0].is_cuda:
                self._fixed = self._launch.fixed(self._tensors)


class _Compiled(NamedTuple):
    """What Triton has compiled and launched."""

    kernel: Any


def _alignments(addresses: Sequence[int]) -> object:
    """Equal for addresses that have the same compiled form."""
    if not functools.reduce(int.__or__, addresses) % _ALIGNMENT:
        return True
    return tuple(address % _ALIGNMENT == 0 for address in addresses)


def _needs_triton(kernel: Any) -> bool:
    """Whether what Triton has compiled may not be launched without it: somebody else has to do with launches now.

    Those who debug want the kernel compiled in another way than the one that was found when nobody did; profilers want
    to be told of launches.
    """
    knobs = triton.knobs
    if knobs.runtime.debug or knobs.compilation.instrumentation_mode or knobs.runtime.add_stages_inspection_hook:
        return True
    for hook in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return bool(kernel.pre_run_hooks)
