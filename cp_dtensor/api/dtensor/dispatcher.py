"""Process-wide switch of SDPA of DTensors that are sharded along the sequence."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from cp_dtensor import _torch
from cp_dtensor.api.dtensor.attention import dtensor_sdpa
from cp_dtensor.api.dtensor.fused_ops import (
    BACKWARD_OPS,
    FORWARD_OPS,
    fused_backward_handler,
    fused_forward_handler,
    sdpa_handler,
    with_sequence_sharding,
)
from cp_dtensor.api.interception import SharedInstallation, intercepted
from cp_dtensor.comm.select import transport_by_name

_HANDLERS: dict[object, _torch.OpHandler] = {
    torch.ops.aten.scaled_dot_product_attention.default: sdpa_handler,
    **dict.fromkeys(FORWARD_OPS, fused_forward_handler),
    **dict.fromkeys(BACKWARD_OPS, fused_backward_handler),
}


def _parts() -> Iterator[AbstractContextManager[None]]:
    strategies = {op: with_sequence_sharding(op) for op in (*FORWARD_OPS, *BACKWARD_OPS)}
    yield intercepted(dtensor_sdpa)
    yield _torch.dtensor_tables(_HANDLERS, strategies)
    yield _torch.compiled_code_kept_apart(_variant_of_compiled_code)


def _variant_of_compiled_code() -> str:
    """Part of the cache key of compiled functions: attention of DTensors is intercepted, with the default transport."""
    return f"cp_dtensor dispatcher, {transport_by_name(None).name}"


dispatcher_installation = SharedInstallation(_parts)


class _EnabledByUser:
    """Number of calls of `enable` without their `disable`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times = 0

    def count(self, change: int) -> bool:
        """Counts a call of enable (+1) or disable (-1); False, and nothing counted, if there is nothing to disable."""
        with self._lock:
            if self._times + change < 0:
                return False
            self._times += change
            return True


_enabled_by_user = _EnabledByUser()


class DispatcherLease:
    """Result of `enable_context_parallel_dispatcher`: a context manager that disables on exit."""

    def __enter__(self) -> DispatcherLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        disable_context_parallel_dispatcher()


def enable_context_parallel_dispatcher() -> DispatcherLease:
    """From now on, SDPA on DTensors that are sharded along the sequence attends to the whole of it.

    Results are those of `F.scaled_dot_product_attention` on the full tensors, whatever the mesh: a ring runs around
    the axis with `Shard(2)`, or Ulysses over it if its name begins with "ulysses", or both over two; `Shard(0)` (data
    parallel) and `Shard(1)` (tensor parallel over heads) on other axes stay local. DTensors that are not sharded along
    the sequence are left to torch, except that on the CPU, where torch has no rule for its fused op, batch and head
    shards are computed locally. Torch's fused SDPA ops (flash, efficient, cuDNN, CPU flash; forward and backward) get
    sharding strategies for the sequence dim as well.

    May be called several times; each call needs its own `disable_context_parallel_dispatcher`. Or use it as
    `with enable_context_parallel_dispatcher(): ...`. Inside of `context_parallel` it is enabled anyway.

    K/V travel by the process default of `set_rotate_method`, inside of `context_parallel` as well.

    DTensor's sequence shards are contiguous (`torch.chunk`), so a causal mask loads the ranks unevenly; for training
    prefer `context_parallel` or `ContextParallel`, which balance the load.

    Raises:
        RuntimeError: inside of a `torch.compile`d function.
    """
    _torch.refuse_in_compiled_function("enable_context_parallel_dispatcher")
    dispatcher_installation.acquire()
    _enabled_by_user.count(+1)
    return DispatcherLease()


def disable_context_parallel_dispatcher() -> None:
    """Reverts one `enable_context_parallel_dispatcher`; without one, does nothing.

    After the last one, DTensor's tables and torch's dispatcher are as before.
    """
    if _enabled_by_user.count(-1):
        dispatcher_installation.release()
