"""`context_parallel` and the dispatcher, called as torch's are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from cp_dtensor.api.context import context_parallel as context_of_buffers
from cp_dtensor.api.dtensor.dispatcher import enable_context_parallel_dispatcher
from cp_dtensor.api.interception import intercepted
from cp_dtensor.api.sharding import checked_buffers, checked_sequence
from cp_dtensor.integrations.torch_experimental.options import Mesh, _cp_options, axis_group, default_layout
from cp_dtensor.integrations.torch_experimental.rings import refuse_patched_rings, reordered_dtensor_sdpa
from cp_dtensor.spec.layouts import Contiguous


@contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Any = None,
) -> Iterator[None]:
    """`cp_dtensor.context_parallel` with torch's arguments, and as there all happens on entry.

    Settings are read from `_cp_options` on entry: shards are in head-tail order if load balance is enabled and twice
    the number of ranks divides the length of the first buffer, otherwise contiguous. That is torch's order, so that
    these shards fit those of other helpers.

    Args:
        mesh: the context-parallel axis.
        buffers: tensors that every rank has whole, sharded in place meanwhile.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: those of `buffers` (the same objects) that stay sharded after exit.

    Raises:
        TypeError, ValueError: on entry, arguments that do not fit.
        NotImplementedError: on entry, `_templated_ring_attention` or `_SDPAMerger` have been replaced, which would have
            no effect.
    """
    refuse_patched_rings()
    tensors = checked_sequence("buffers", () if buffers is None else buffers)
    dims = checked_sequence("buffer_seq_dims", () if buffer_seq_dims is None else buffer_seq_dims)
    group = axis_group(mesh)
    layout = None
    if tensors and len(tensors) == len(dims):
        checked_buffers(tensors[:1], dims[:1], Contiguous())
        layout = default_layout(tensors[0].size(dims[0]), group.size())
    elif not _cp_options.enable_load_balance:
        layout = Contiguous()
    context = context_of_buffers(
        mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=no_restore_buffers, layout=layout
    )
    if layout is not None:
        for tensor, dim in zip(tensors, dims, strict=True):
            _cp_options.orders.note(group, tensor.size(dim), layout)
    with context, intercepted(reordered_dtensor_sdpa):  # which is asked before what the region installs
        yield


class _Dispatcher:
    """torch's switch: on or off, however often it is set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed: ExitStack | None = None

    def enable(self) -> None:
        with self._lock:
            if self._installed is None:
                with ExitStack() as stack:
                    stack.enter_context(enable_context_parallel_dispatcher())
                    stack.enter_context(intercepted(reordered_dtensor_sdpa))  # asked before what is beneath
                    self._installed = stack.pop_all()

    def disable(self) -> None:
        with self._lock:
            installed, self._installed = self._installed, None
        if installed is not None:
            installed.close()


_dispatcher = _Dispatcher()


def _enable_context_parallel_dispatcher() -> None:
    """From now on, SDPA on DTensors that are sharded along the sequence sees all of it; again does nothing.

    See `cp_dtensor.enable_context_parallel_dispatcher`. Beyond it, causal attention of DTensors that hold shards of
    `_context_parallel_shard` is in the order of its load balancer.
    """
    _dispatcher.enable()


def _disable_context_parallel_dispatcher() -> None:
    """Takes `_enable_context_parallel_dispatcher` back, however often it was called."""
    _dispatcher.disable()
