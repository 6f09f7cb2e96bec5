"""Keeping torch.compile away from code that it cannot capture yet."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from cp_dtensor._torch_private.patches import patched

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def compiled_functions_eager(when: Callable[[], bool]) -> Iterator[None]:
    """While open, `torch.compile`d functions are asked `when()` at each call, and run uncompiled if it is true."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:  # nothing has been compiled yet
        yield
        return

    def eager_when(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def callback_from_stance(callback: Any) -> Any:
            # None stands for eager; a callback of None has asked for it already.
            return None if callback is None or when() else original(callback)

        return callback_from_stance

    with patched(eval_frame, "_callback_from_stance", eager_when):
        yield


def never_compiled(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, run as plain Python, with all that it calls, also when called from a `torch.compile`d function."""
    disabled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:  # importing it takes seconds, and nothing has been compiled yet
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for one in a program that is being compiled or exported."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor))
