"""torch's attention of packed documents, `varlen_attn`, overridden in torch's dispatcher.

Its module loads Dynamo, so it is left to the program to load it: operators may have kernels before they are defined.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch._library.autograd import make_autograd_impl

Handler = Callable[[dict[str, Any]], Any]
"""Gets all arguments by their names, and computes the call or returns None to leave it to torch."""

# Autograd keys serve ordinary calls; those in inference mode skip them, and come by the key before all backends, at
# which nobody has a kernel: those of others for backends stay.
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA")
_BEFORE_BACKENDS = "BackendSelect"
_BACKENDS = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
_NAMES = ("_varlen_attn", "_varlen_attn_out")  # the latter from torch 2.13 on


@contextmanager
def varlen_attn_overridden(attend: Handler, attend_into: Handler) -> Iterator[None]:
    """While open, `attend` is asked before torch computes a `varlen_attn`, however it was imported or captured.

    Args:
        attend: gives (out, lse, random state), as the operator does.
        attend_into: likewise for the form that writes into a tensor `out`.
    """
    library = torch.library.Library("torch_attn", "IMPL")
    for name, handler in zip(_NAMES, (attend, attend_into), strict=True):
        for key in _AUTOGRAD_KEYS:
            library.impl(name, partial(_with_autograd, name, handler), key, with_keyset=True)
        library.impl(name, partial(_without_autograd, name, handler), _BEFORE_BACKENDS, with_keyset=True)
    _forget_where_calls_go()
    try:
        yield
    finally:
        library._destroy()
        _forget_where_calls_go()


def _forget_where_calls_go() -> None:
    """Of torch's dispatcher in Python, which traces."""
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
    """What torch's dispatcher calls for autograd."""
    return make_autograd_impl(_operator(name), getattr(sys.modules["torch.nn.attention.varlen"], name))


def _operator(name: str) -> Any:
    return getattr(torch.ops.torch_attn, name).default


def _by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of the operator; torch's dispatcher leaves out the last ones that have their defaults."""
    arguments = _operator(name)._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False))
    return {argument.name: argument.default_value for argument in arguments} | given | kwargs
