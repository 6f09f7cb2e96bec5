"""`context_parallel`, the DTensor dispatcher and `_ContextParallel`, with torch's arguments."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_dtensor import Contiguous, Layout, enable_context_parallel_dispatcher, ring_attention
from cp_dtensor import context_parallel as context_of_buffers
from cp_dtensor import set_rotate_method as set_process_default
from cp_dtensor.api.extension import (
    Mesh,
    SdpaArguments,
    checked_buffers,
    current_backward,
    intercepted,
    never_compiled,
    refuse_unsupported_sdpa,
)
from cp_dtensor.integrations.torch_experimental.private import TorchsContextParallel, _cp_options, _RotateMethod
from cp_dtensor.integrations.torch_experimental.sharding import axis_group, default_layout, orders


def set_rotate_method(rotate_method: str) -> None:
    """Set the default KV transport of this process.

    Args:
        rotate_method: "allgather" or "alltoall", as in torch; also "symm_mem" or "auto", the initial default (see
            `cp_dtensor.set_rotate_method`).

    Raises:
        NotImplementedError: anything else, as in torch.
    """
    try:
        set_process_default(rotate_method)
    except ValueError as error:
        raise NotImplementedError(str(error)) from error
    is_ring = rotate_method == "alltoall"  # for torch's own ring, which has two methods
    _cp_options.rotate_method = _RotateMethod.ALL_TO_ALL if is_ring else _RotateMethod.ALL_GATHER


@contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Any = None,
) -> Iterator[None]:
    """`cp_dtensor.context_parallel` with torch's arguments; as in torch, nothing happens before entry.

    `_cp_options` is read on entry: shards are in head-tail order if load balance is enabled and twice the number of
    ranks divides the length of the first buffer, otherwise contiguous.

    Args:
        mesh: the context-parallel axis.
        buffers: tensors that every rank has whole, sharded in place inside of the block.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: those of `buffers` (the same objects) that stay sharded after exit.

    Raises:
        TypeError, ValueError: on entry, arguments that do not fit.
    """
    given = () if buffers is None else buffers
    dims = checked_buffers(given, () if buffer_seq_dims is None else buffer_seq_dims, Contiguous())
    group, tensors = axis_group(mesh), list(given)
    lengths = [tensor.size(dim) for tensor, dim in zip(tensors, dims, strict=True)]
    layout = default_layout(lengths[0] if lengths else 0, group.size())
    context = context_of_buffers(
        mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=no_restore_buffers, layout=layout
    )
    with context, intercepted(_reordered_dtensor_sdpa):  # before the interceptor of the context
        for length in lengths:
            orders.note(group, length, layout)
        yield


class _Dispatcher:
    """torch's dispatcher switch, which is on or off and does not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed = ExitStack()
        self._is_on = False

    def enable(self) -> None:
        """Enable SDPA on DTensors that are sharded along the sequence; further calls do nothing.

        See `cp_dtensor.enable_context_parallel_dispatcher`. In addition, causal attention of DTensors made of shards of
        `_context_parallel_shard` is in the order of its load balancer.
        """
        with self._lock, ExitStack() as stack:
            if not self._is_on:
                stack.enter_context(enable_context_parallel_dispatcher())
                stack.enter_context(intercepted(_reordered_dtensor_sdpa))  # before that of the dispatcher
                self._installed, self._is_on = stack.pop_all(), True

    def disable(self) -> None:
        """Disable the dispatcher, even after several calls that enable it."""
        with self._lock:
            self._is_on = False
            self._installed.close()


_dispatcher = _Dispatcher()
_enable_context_parallel_dispatcher = _dispatcher.enable
_disable_context_parallel_dispatcher = _dispatcher.disable


def _reordered_dtensor_sdpa(call: SdpaArguments) -> torch.Tensor | None:
    """Compute causal attention of DTensors whose shards are reordered; returns None for other calls.

    A DTensor does not say in which order its shards are: `_context_parallel_shard` and contexts note it by length.
    """
    tensors = call.q, call.k, call.v
    if not call.is_causal or any(tensor.dim() != 4 for tensor in tensors):
        return None
    reordered = [
        (axis, order)
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for axis, placement in enumerate(tensor.placements)
        if placement == Shard(2) and tensor.device_mesh.size(axis) > 1
        for order in orders.of(tensor.device_mesh.get_group(axis)).get(tensor.size(2), ())[-1:]
        if order != Contiguous()
    ]
    if not reordered:
        return None
    axis, layout = reordered[0]
    _refuse_unknown_order(layout)
    q, k, v = (tensor if isinstance(tensor, DTensor) else None for tensor in tensors)
    if not (
        q is not None
        and k is not None
        and v is not None
        and (q.device_mesh, q.placements) == (k.device_mesh, k.placements) == (v.device_mesh, v.placements)
        and q.size(2) == k.size(2)
        and all(
            isinstance(placement, (Replicate, Shard)) and (place == axis or placement != Shard(2))
            for place, placement in enumerate(q.placements)
        )
    ):
        got = [f"{tuple(x.shape)} {x.placements if isinstance(x, DTensor) else 'torch.Tensor'}" for x in tensors]
        raise NotImplementedError(
            f"causal attention of shards in {layout} order expects q, k and v of one length, placed alike on one mesh, "
            f"sharded over the sequence on one axis; got q {got[0]}, k {got[1]}, v {got[2]}"
        )
    refuse_unsupported_sdpa(call.attn_mask, call.dropout_p)
    out = ring_attention(
        q.to_local(), k.to_local(), v.to_local(), mesh=q.device_mesh.get_group(axis), is_causal=True, scale=call.scale,
        enable_gqa=call.enable_gqa, layout=layout, seq_len=q.size(2),
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


def _refuse_unknown_order(layout: Layout | None) -> None:
    if layout is None:
        raise NotImplementedError(
            "SDPA in this load balancer's order is not supported yet: shard with a _HeadTailLoadBalancer or with none"
        )


class _ContextParallel(TorchsContextParallel):
    """Parallel style of an attention module whose inputs are this rank's shards, with torch's arguments.

        parallelize_module(attention, mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))

    With SDPA, `F.scaled_dot_product_attention` inside of the module is ring attention over shards in the order in which
    `_context_parallel_shard` last sharded for this axis (if it never did, as `_cp_options.enable_load_balance` says).
    Inputs are tensors, or DTensors that are `Shard(seq_dim)` on the axis, of which the module gets the local tensors;
    outputs are local. With FLEX, torch's own style gathers the keys and values of all ranks.

    Raises:
        ValueError: an unknown attention type; on a call, DTensors with another placement on the axis; a recompute in a
            backward where the module was called in several orders.
    """

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if self.attention_type != self.AttentionType.SDPA:
            return super()._apply(module, mesh)
        forward = functools.partial(_forward_of_shards, module.forward, mesh, self.seq_dim, set())
        module.forward = functools.update_wrapper(forward, module.forward, updated=())
        return module


@never_compiled
def _forward_of_shards(
    forward: Callable[..., Any], mesh: Mesh, seq_dim: int, seen: set[Layout], *args: Any, **kwargs: Any
) -> Any:
    """Call `forward` in a context of the present order; `seen` has the orders of its earlier calls."""
    group = axis_group(mesh)
    noted = orders.of(group)
    layout = next(reversed(noted.values()))[-1] if noted else default_layout(0, group.size())
    if seen and current_backward() is not None:  # a recompute, of a call that may be older than the present order
        if len(seen) > 1:
            raise ValueError(
                "attention is recomputed in a backward, and sequences have been sharded in several orders for this "
                f"module: {sorted(map(repr, seen))}; use cp_dtensor.ContextParallel(layout=...)"
            )
        (layout,) = seen
    _refuse_unknown_order(layout)
    assert layout is not None
    seen.add(layout)
    lengths = tuple(length for length, layouts in noted.items() if layout in layouts)
    args = tuple(_local_shard(arg, mesh, seq_dim) for arg in args)
    kwargs = {name: _local_shard(arg, mesh, seq_dim) for name, arg in kwargs.items()}
    with context_of_buffers(mesh, layout=layout, seq_len=lengths):
        return forward(*args, **kwargs)


def _local_shard(value: Any, mesh: Mesh, seq_dim: int) -> Any:
    """Return the local tensor of a DTensor over the axis, other values unchanged."""
    if not isinstance(value, DTensor) or value.device_mesh.ndim != 1:
        return value
    if value.device_mesh.get_group() is not axis_group(mesh):
        return value
    if value.placements != (Shard(seq_dim % value.dim()),):
        raise ValueError(f"expected a DTensor that is Shard({seq_dim}), got {value.placements}")
    return value.to_local()
