"""Shared patches of torch, and interception of `F.scaled_dot_product_attention` at torch's dispatcher.

A dispatcher kernel sees every call, however the function was imported and in whatever thread it runs, backward
included, and costs other operators nothing (docs/decisions.md#sdpa-is-intercepted-in-torchs-dispatcher).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from cp_dtensor import _torch


class SharedInstallation:
    """Context managers that the first holder enters and the last one exits, in whatever order and thread they come.

    Args:
        parts: makes the context managers, in the order in which they are entered. If one fails, those before it are
            exited and nothing is held.
    """

    def __init__(self, parts: Callable[[], Iterable[AbstractContextManager[object]]]) -> None:
        self._parts = parts
        self._lock = threading.RLock()
        self._holders = 0
        self._installed: ExitStack | None = None

    def held(self) -> ExitStack:
        """Add a holder at once; it is removed by `close()` of the result, or at the end of a `with` block of it."""
        with self._lock, ExitStack() as lease:
            # First of all: garbage collection in this very thread may release, and must not find itself the last.
            self._holders += 1
            lease.callback(self._release)
            if self._installed is None:
                with ExitStack() as stack:
                    for part in self._parts():
                        stack.enter_context(part)
                    self._installed = stack.pop_all()
            return lease.pop_all()

    def _release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0 and self._installed is not None:
                installed, self._installed = self._installed, None
                installed.close()


@dataclass(frozen=True)
class SdpaArguments:
    """The arguments of one `F.scaled_dot_product_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    first: tuple[int, int] = (0, 0)
    """Global index of the first batch row and the first query head, if the tensors are local parts of DTensors."""
    under_vmap: bool = False
    """True inside of torch.vmap, where interceptors refuse the call or leave it to torch."""

    def attend_by_torch(self) -> torch.Tensor:
        """Compute torch's own SDPA of these tensors."""
        return _torch.original_sdpa(
            self.q, self.k, self.v, self.attn_mask, self.dropout_p, self.is_causal,
            scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip


def refuse_wrapped(owner: str, *tensors: torch.Tensor) -> None:
    """Refuse nested tensors and DTensors in a context, where `owner` takes this rank's shards."""
    if any(tensor.is_nested or isinstance(tensor, DTensor) for tensor in tensors):
        raise NotImplementedError(
            f"{owner} takes plain tensors inside of context_parallel, this rank's shards; got nested tensors or "
            "DTensors"
        )


Interceptor = Callable[[SdpaArguments], torch.Tensor | None]
"""Computes a call, or returns None to leave it to the next interceptor, in the end to torch."""


_interceptors: list[Interceptor] = []
"""The interceptors of the process, the latest first; again for each time that one is entered."""


def intercepted_sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Let the first interceptor that takes the call compute SDPA, or else torch.

    DTensor calls it for SDPA in inference mode, which torch's dispatcher brings to its operator without the override.
    """
    call = SdpaArguments(*args, **kwargs)
    for interceptor in tuple(_interceptors):  # another thread may change the list meanwhile
        result = interceptor(call)
        if result is not None:
            return result
    return call.attend_by_torch()


_override = SharedInstallation(
    lambda: [_torch.sdpa_overridden(intercepted_sdpa, partial(intercepted_sdpa, under_vmap=True))]
)


@contextmanager
def intercepted(interceptor: Interceptor) -> Iterator[None]:
    """Pass calls of SDPA in all threads to `interceptor` first, then to those that were there before."""
    with _override.held():
        _interceptors.insert(0, interceptor)
        try:
            yield
        finally:
            _interceptors.remove(interceptor)


# Torch's own context parallelism

TORCHS_TOO = (
    "torch's own context parallelism (context_parallel, _ContextParallel or its dispatcher, of "
    "torch.distributed.tensor.experimental) is in use together with cp_dtensor's. Both change the same attention, and "
    "both results would be wrong: use one of them at a time. cp_dtensor.integrations.torch_experimental has torch's "
    "names, and its redirect_imports() puts them in place of torch's for programs that import those"
)


def refuse_torchs_context_parallel() -> None:
    """Refuse a context, the dispatcher, or attention in them while torch's own context parallelism is open."""
    if _torch.torchs_context_parallel_is_open():
        raise RuntimeError(TORCHS_TOO)
