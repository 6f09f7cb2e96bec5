"""Process-wide switch of SDPA of DTensors that are sharded along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any

import torch

from cp_dtensor import _torch
from cp_dtensor.api.dtensor_attention import dtensor_sdpa
from cp_dtensor.api.interception import (
    SharedInstallation,
    intercepted,
    intercepted_sdpa,
    refuse_torchs_context_parallel,
)
from cp_dtensor.comm.transports import transport_by_name


def _parts() -> Iterator[AbstractContextManager[None]]:
    refuse_torchs_context_parallel()
    yield intercepted(dtensor_sdpa)
    # In inference mode, SDPA itself reaches DTensor.
    sdpa = torch.ops.aten.scaled_dot_product_attention.default
    yield _torch.dtensor_op_handled(sdpa, lambda _op, args, kwargs: intercepted_sdpa(*args, **kwargs))
    yield _torch.checkpointed_functions_bound(_bound_to_dispatcher)
    yield _torch.compiled_code_kept_apart(_variant_of_compiled_code)


def _bound_to_dispatcher(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function under `torch.utils.checkpoint` that enables the dispatcher around each of its calls.

    Backward calls it again to recompute activations, maybe after the dispatcher was disabled.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with dispatcher_installation.held():
            return function(*args, **kwargs)

    return run


def _variant_of_compiled_code() -> str:
    """Return what compiled code depends on: attention of DTensors is intercepted, with the default transport."""
    return f"cp_dtensor dispatcher, {transport_by_name(None).name}"


dispatcher_installation = SharedInstallation(_parts)


_enabled_by_user: list[ExitStack] = []
"""A lease for each call of `enable` without its `disable`."""


def enable_context_parallel_dispatcher() -> ExitStack:
    """Make SDPA on DTensors that are sharded along the sequence attend to the whole of it, from now on.

    Results are those of `F.scaled_dot_product_attention` on the full tensors, whatever the mesh: a ring runs around
    the axis with `Shard(2)`, or Ulysses over it if its name begins with "ulysses", or both over several. `Shard(0)`
    (data) and `Shard(1)` (tensor parallel over heads) on other axes stay local. DTensors that are not sharded along
    the sequence are left to torch, but on the CPU, where torch has no rule for its fused op. Fused ops that are called
    by name are torch's.

    May be called several times; each call needs its own `disable_context_parallel_dispatcher`. Or use it as
    `with enable_context_parallel_dispatcher(): ...`. Inside of `context_parallel` it is enabled anyway. Functions under
    `torch.utils.checkpoint` are recomputed under it, also after it was disabled.

    K/V travel by the process default of `set_rotate_method`, inside of `context_parallel` as well.

    DTensor's sequence shards are contiguous (`torch.chunk`), so a causal mask loads the ranks unevenly; for training
    prefer `context_parallel` or `ContextParallel`, which balance the load.

    Raises:
        RuntimeError: inside of a `torch.compile`d function, or while torch's own context parallelism is open.
    """
    _torch.refuse_in_compiled_function("enable_context_parallel_dispatcher")
    refuse_torchs_context_parallel()
    _enabled_by_user.append(dispatcher_installation.held())
    lease = ExitStack()
    lease.callback(disable_context_parallel_dispatcher)
    return lease


def disable_context_parallel_dispatcher() -> None:
    """Revert one `enable_context_parallel_dispatcher`; without one, do nothing.

    After the last one, DTensor's tables and torch's dispatcher are as before.
    """
    with suppress(IndexError):
        _enabled_by_user.pop().close()
