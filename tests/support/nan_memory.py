"""NaN fill of uninitialised memory, so that reads of unwritten values are visible."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._device import _device_constructors

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Makes floating and complex results of `torch.empty`, `torch.empty_like` and `Tensor.new_empty(_strided)` NaN.

    This holds in all threads of the process. `torch.utils.deterministic.fill_uninitialized_memory` would need
    deterministic algorithms, which changes or forbids the kernels under test. Tensor subclasses and memory that C++
    code allocates are not filled. A test that spawns processes enters this context in each of them.
    """
    _device_constructors()  # a cached set of functions; `with torch.device(...)` needs the unpatched ones in it
    with (
        mock.patch.object(torch, "empty", _poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", _poisoned(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty)),
        mock.patch.object(torch.Tensor, "new_empty_strided", _poisoned(torch.Tensor.new_empty_strided)),
    ):
        yield


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(allocate)
    def allocate_and_fill(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        plain = type(tensor) in PLAIN_TYPES and tensor.layout == torch.strided and tensor.device.type != "meta"
        if plain and (tensor.is_floating_point() or tensor.is_complex()) and not torch.compiler.is_compiling():
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return allocate_and_fill
