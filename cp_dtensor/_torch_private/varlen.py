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

# Autograd keys serve ordinary calls; the backend keys serve calls in inference mode, which skip autograd.
_AUTOGRAD_KEYS = ("AutogradCPU", "AutogradCUDA")
_BACKEND_KEYS = ("CPU", "CUDA")
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
        for key in _BACKEND_KEYS:
            library.impl(name, partial(_without_autograd, name, handler), key)
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
            getattr(torch.ops.torch_attn, name).default._dispatch_cache.clear()


def _with_autograd(name: str, handler: Handler, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    result = handler(_by_name(name, args, kwargs))
    return _original(name)(keyset, *args, **kwargs) if result is None else result


def _without_autograd(name: str, handler: Handler, *args: Any, **kwargs: Any) -> Any:
    result = handler(_by_name(name, args, kwargs)) if torch.is_inference_mode_enabled() else None
    return _definition(name)._init_fn(*args, **kwargs) if result is None else result


@lru_cache(maxsize=2)
def _original(name: str) -> Callable[..., Any]:
    """What torch's dispatcher calls for autograd."""
    definition = _definition(name)
    return make_autograd_impl(definition._opoverload, definition)


def _definition(name: str) -> Any:
    return getattr(sys.modules["torch.nn.attention.varlen"], name)


def _by_name(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of the operator; torch's dispatcher leaves out the last ones that have their defaults."""
    arguments = getattr(torch.ops.torch_attn, name).default._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False))
    return {argument.name: argument.default_value for argument in arguments} | given | kwargs
