"""Override of `varlen_attn`, torch's attention of packed documents, in torch's dispatcher.

The module of `varlen_attn` loads Dynamo, so it is not loaded here: a kernel may be registered before its operator.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch._library.autograd import make_autograd_impl

from cp_dtensor._torch.dtensor import bound_arguments

Handler = Callable[[dict[str, Any]], Any]
"""Gets all arguments by name. Returns the result of the call, or None, in which case torch computes it."""

# Autograd keys serve ordinary calls. Calls in inference mode skip them and pass the key before all backends, at which
# torch has no kernel, so that kernels of backends stay as they are.
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA")
_BEFORE_BACKENDS = "BackendSelect"
_BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_NAMES = ("_varlen_attn", "_varlen_attn_out")  # the latter from torch 2.13 on


@contextmanager
def varlen_attn_overridden(attend: Handler, attend_into: Handler) -> Iterator[None]:
    """While open, calls a handler before torch computes a `varlen_attn`, also in captured programs.

    Args:
        attend: returns (out, lse, random state), as the operator does.
        attend_into: handler of the operator that writes into a tensor `out`.
    """
    library = torch.library.Library("torch_attn", "IMPL")
    for name, handler in zip(_NAMES, (attend, attend_into), strict=True):
        for key in _AUTOGRAD_KEYS:
            library.impl(name, partial(_with_autograd, name, handler), key, with_keyset=True)
        library.impl(name, partial(_without_autograd, name, handler), _BEFORE_BACKENDS, with_keyset=True)
    _clear_dispatch_caches()
    try:
        yield
    finally:
        library._destroy()
        _clear_dispatch_caches()


def _clear_dispatch_caches() -> None:
    """Clears the caches of torch's dispatcher in Python, which traces."""
    for name in _NAMES:
        if hasattr(torch.ops.torch_attn, name):
            _operator(name)._dispatch_cache.clear()


def _with_autograd(name: str, handler: Handler, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    result = handler(_by_name(name, args, kwargs))
    return _original(name)(keyset, *args, **kwargs) if result is None else result


def _without_autograd(name: str, handler: Handler, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    result = handler(_by_name(name, args, kwargs))
    return _operator(name).redispatch(keyset & _BACKENDS, *args, **kwargs) if result is None else result


@lru_cache(maxsize=2)
def _original(name: str) -> Callable[..., Any]:
    """Returns torch's own autograd kernel."""
    return make_autograd_impl(_operator(name), getattr(sys.modules["torch.nn.attention.varlen"], name))


def _operator(name: str) -> Any:
    return getattr(torch.ops.torch_attn, name).default


def _by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments by name; torch's dispatcher omits trailing ones that have their defaults."""
    return bound_arguments(_operator(name), args, kwargs)
