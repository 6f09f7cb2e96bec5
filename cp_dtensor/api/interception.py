"""Intercepts `F.scaled_dot_product_attention`, at torch's dispatcher.

A kernel in the dispatcher sees every call, however the function was imported and in whatever thread it runs, backward
included, and costs other operators nothing; `docs/log.md` has the measurement against a function mode. It is installed
while somebody holds a lease, and not a moment longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cp_dtensor import _torch

# Changes to torch that last as long as anybody needs them.


class SharedInstallation:
    """Context managers that the first holder enters and the last one exits, in whatever order and thread they come.

    Args:
        parts: makes the context managers, in the order in which they are entered. If one fails, those before it are
            exited and nobody holds anything.
    """

    def __init__(self, parts: Callable[[], Iterable[AbstractContextManager[object]]]) -> None:
        self._parts = parts
        self._lock = threading.RLock()
        self._holders = 0
        self._is_installed = False
        self._installed = ExitStack()

    def acquire(self) -> None:
        """Becomes a holder."""
        with self._lock:
            # First of all: garbage collection in this very thread may release, and must not find itself the last.
            self._holders += 1
            if self._is_installed:
                return
            try:
                with ExitStack() as stack:
                    for part in self._parts():
                        stack.enter_context(part)
                    self._installed = stack.pop_all()
                self._is_installed = True
            except BaseException:
                self._holders -= 1
                raise

    def release(self) -> None:
        """Ends one holding."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._is_installed = False
                self._installed.close()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds while open."""
        self.acquire()
        try:
            yield
        finally:
            self.release()


@dataclass(frozen=True)
class SdpaArguments:
    """The arguments of one `F.scaled_dot_product_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    first: tuple[int, int] = (0, 0)
    """Where the batch rows and query heads stand, if these are local tensors of DTensors."""
    under_vmap: bool = False
    """Whether torch.vmap is around the call, which nobody but torch computes: interceptors refuse it or leave it."""


Interceptor = Callable[[SdpaArguments], torch.Tensor | None]
"""Computes a call, or returns None to leave it to others, in the end to torch."""


class _Interception:
    """The interceptors of the process, each with the number of leases on it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._leases: dict[Interceptor, int] = {}
        self._uninstall: Callable[[], None] | None = None

    def acquire(self, interceptor: Interceptor) -> None:
        with self._lock:
            if self._uninstall is None:
                self._uninstall = _torch.override_sdpa(self._kernel, self._kernel_under_vmap)
            # A new dict, since kernels in other threads may be reading the old one. The latest comes first.
            count = self._leases.get(interceptor, 0) + 1
            self._leases = {interceptor: count, **{i: n for i, n in self._leases.items() if i is not interceptor}}

    def release(self, interceptor: Interceptor) -> None:
        with self._lock:
            leases = dict(self._leases)
            leases[interceptor] -= 1
            self._leases = {i: n for i, n in leases.items() if n}
            if not self._leases and self._uninstall is not None:
                self._uninstall()
                self._uninstall = None

    def _kernel(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        under_vmap: bool = False,
    ) -> torch.Tensor:
        arguments = SdpaArguments(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, under_vmap=under_vmap
        )
        for interceptor in self._leases:
            result = interceptor(arguments)
            if result is not None:
                return result
        return _torch.original_sdpa(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    def _kernel_under_vmap(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._kernel(*args, **kwargs, under_vmap=True)


_interception = _Interception()


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """While open, `interceptor` is asked before torch computes a call, in all threads."""
    _interception.acquire(interceptor)
    try:
        yield
    finally:
        _interception.release(interceptor)
