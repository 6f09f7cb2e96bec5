"""Switches sequence-sharded SDPA of DTensors on and off, for the whole process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

import torch

from cp_dtensor import _torch_private
from cp_dtensor.dtensor.attention import dtensor_sdpa
from cp_dtensor.dtensor.handlers import fused_backward_handler, fused_forward_handler, sdpa_handler
from cp_dtensor.dtensor.strategies import BACKWARD_OPS, FORWARD_OPS, with_sequence_sharding
from cp_dtensor.interception import intercepted

_HANDLERS: dict[object, _torch_private.OpHandler] = {
    torch.ops.aten.scaled_dot_product_attention.default: sdpa_handler,
    **dict.fromkeys(FORWARD_OPS, fused_forward_handler),
    **dict.fromkeys(BACKWARD_OPS, fused_backward_handler),
}


class _Dispatcher:
    """Installed while it is held; how often `enable` holds it is counted apart from contexts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holds = 0
        self._installed = ExitStack()
        self.enabled_by_user = 0

    def acquire(self) -> None:
        with self._lock:
            if self._holds == 0:
                with ExitStack() as stack:  # takes everything back if a part fails
                    stack.enter_context(intercepted(dtensor_sdpa))
                    strategies = {op: with_sequence_sharding(op) for op in (*FORWARD_OPS, *BACKWARD_OPS)}
                    stack.enter_context(_torch_private.dtensor_tables(_HANDLERS, strategies))
                    self._installed = stack.pop_all()
            self._holds += 1

    def release(self) -> None:
        with self._lock:
            self._holds -= 1
            if self._holds == 0:
                self._installed.close()

    def count_enabled(self, change: int) -> bool:
        """Counts calls of enable (+1) and disable (-1); False if there is nothing to disable."""
        with self._lock:
            if self.enabled_by_user + change < 0:
                return False
            self.enabled_by_user += change
            return True


_dispatcher = _Dispatcher()


@contextmanager
def dispatcher_installed() -> Iterator[None]:
    """Holds the dispatcher while open."""
    _dispatcher.acquire()
    try:
        yield
    finally:
        _dispatcher.release()


class DispatcherLease:
    """What `enable_context_parallel_dispatcher` returns: a context manager that disables again on exit."""

    def __enter__(self) -> DispatcherLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disable_context_parallel_dispatcher()


def enable_context_parallel_dispatcher() -> DispatcherLease:
    """From now on, SDPA on DTensors that are sharded along the sequence is ring attention.

    Results are those of `F.scaled_dot_product_attention` on the full tensors, whatever the mesh: the ring runs around
    the axis with `Shard(2)`, while `Shard(0)` (data parallel) and `Shard(1)` (tensor parallel over heads) on other axes
    stay local. DTensors that are not sharded along the sequence are left to torch, except that on the CPU, where torch
    has no rule for its fused op, batch and head shards are computed locally. Torch's fused SDPA ops (flash,
    efficient, cuDNN, CPU flash; forward and backward) get sharding strategies for the sequence dim as well.

    May be called several times; each call wants its own `disable_context_parallel_dispatcher`. Or use it as
    `with enable_context_parallel_dispatcher(): ...`. Inside of `context_parallel` it is enabled anyway.

    DTensor's sequence shards are contiguous (`torch.chunk`), so a causal mask loads the ranks unevenly; for training
    prefer `context_parallel` or `ContextParallel`, which balance the load.
    """
    _dispatcher.acquire()
    _dispatcher.count_enabled(+1)
    return DispatcherLease()


def disable_context_parallel_dispatcher() -> None:
    """Takes back one `enable_context_parallel_dispatcher`; without one, does nothing.

    After the last one, DTensor's tables and torch's dispatcher are as before.
    """
    if _dispatcher.count_enabled(-1):
        _dispatcher.release()
