"""Launches of a package's compiled functions, repeated with other tensors and without the package's wrapper.

Wrappers take 0.2 to 0.6 ms of host time, most of it to check arguments and to find compiled functions. These functions
and their arguments are recorded in the first call for some shapes and called directly after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Call = tuple[Any, tuple[Any, ...]]
"""A compiled function and its arguments."""


def noting(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    """Return a function that calls `function` and appends it to `calls`, with its arguments."""

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append((function, (*arguments, named) if named else arguments))  # a dict cannot be repeated
        return function(*arguments, **named)

    return call


class Launches(NamedTuple):
    """The compiled functions of a call with their arguments."""

    calls: tuple[tuple[Any, list[Any], list[tuple[int, int]]], ...]
    """Functions, their arguments, and which of these are tensors: place of the argument, and number of the tensor."""
    workspaces: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    """Tensors that a call needs for itself, numbered after its own: shape, dtype, True if they begin as zeros."""

    @classmethod
    def of(cls, calls: Sequence[Call], tensors: Sequence[Tensor], kept: Sequence[Tensor] = ()) -> Launches | None:
        """Return recorded calls with numbers in place of tensors; None if they cannot be repeated.

        Tensors are found by address. A call that has one tensor twice, such as q for k, cannot be repeated. Neither can
        a call with an argument of another type, such as a stream. Tensors that are neither `tensors` nor `kept` are
        workspaces. If there are several functions, the first one writes its workspaces. Workspaces that appear later,
        and those of a single function, begin as zeros.

        Args:
            calls: compiled functions with their arguments, in order.
            tensors: inputs and outputs of the call.
            kept: tensors that every call reads, such as tables of a mask.
        """
        if not calls:
            return None
        numbers = {(x.data_ptr(), x.shape): number for number, x in enumerate(tensors)}
        kept_addresses = {x.data_ptr() for x in kept}
        if len(numbers) < len(tensors):
            return None
        workspaces: list[tuple[torch.Size, torch.dtype, bool]] = []
        recorded: list[tuple[Any, list[Any], list[tuple[int, int]]]] = []
        for index, (function, values) in enumerate(calls):
            recorded.append((function, list(values), []))
            for place, value in enumerate(values):
                if _is_constant(value, kept_addresses):
                    continue
                if not isinstance(value, Tensor):
                    return None
                address = value.data_ptr(), value.shape
                if address not in numbers:
                    numbers[address] = len(tensors) + len(workspaces)
                    workspaces.append((value.shape, value.dtype, index > 0 or len(calls) == 1))
                recorded[-1][1][place] = None  # a record keeps no tensor
                recorded[-1][2].append((place, numbers[address]))
        return cls(tuple(recorded), tuple(workspaces))

    def launch(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch the call for other tensors of the same shapes, in memory that the compiled functions take."""
        device = tensors[0].device
        workspaces = [
            (torch.zeros if begins_as_zeros else torch.empty)(shape, dtype=dtype, device=device)
            for shape, dtype, begins_as_zeros in self.workspaces
        ]
        all_tensors = (*tensors, *workspaces)
        for function, constants, places in self.calls:
            arguments = constants.copy()
            for place, number in places:
                arguments[place] = all_tensors[number]
            function(*arguments)


def _is_constant(x: object, kept_addresses: set[int]) -> bool:
    """Return True for an argument that is the same in every call."""
    if isinstance(x, Tensor):
        return x.data_ptr() in kept_addresses
    return (
        x is None
        or isinstance(x, (bool, int, float))
        or (isinstance(x, tuple) and all(_is_constant(each, kept_addresses) for each in x))
    )
