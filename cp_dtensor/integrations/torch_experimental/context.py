"""`context_parallel`, the DTensor dispatcher and `_ContextParallel`, with torch's arguments."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dtensor import Contiguous, Layout, enable_context_parallel_dispatcher, ring_attention
from cp_dtensor import context_parallel as context_of_buffers
from cp_dtensor.api.extension import (
    Mesh,
    SdpaArguments,
    checked_buffers,
    checked_sequence,
    current_backward,
    intercepted,
    never_compiled,
    refuse_unsupported_sdpa,
)
from cp_dtensor.integrations.torch_experimental.options import (
    _cp_options,
    axis_group,
    check_one_dim_each,
    default_layout,
)
from cp_dtensor.integrations.torch_experimental.private import flex_cp_allgather, refuse_patched_rings


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
    ranks divides the length of the first buffer, otherwise contiguous. They are contiguous, too, if the latest call of
    `_context_parallel_shard` for this axis had no load balancer, which disables it in torch. This is torch's order, so
    that shards fit those of other helpers.

    Args:
        mesh: the context-parallel axis.
        buffers: tensors that every rank has whole, sharded in place inside of the block.
        buffer_seq_dims: the sequence dim of each.
        no_restore_buffers: those of `buffers` (the same objects) that stay sharded after exit.

    Raises:
        TypeError, ValueError: on entry, arguments that do not fit.
        NotImplementedError: on entry, if the program has replaced `_templated_ring_attention` or `_SDPAMerger`, which
            would have no effect.
    """
    refuse_patched_rings()
    tensors = checked_sequence("buffers", () if buffers is None else buffers)
    dims = checked_sequence("buffer_seq_dims", () if buffer_seq_dims is None else buffer_seq_dims)
    check_one_dim_each(tensors, dims)
    dims = checked_buffers(tensors, dims, Contiguous())
    if not isinstance(no_restore_buffers, torch.Tensor):
        for tensor in no_restore_buffers or ():
            if all(tensor is not buffer for buffer in tensors):
                raise ValueError(
                    "`no_restore_buffers` must be a subset of `buffers`, the same objects; got one of shape "
                    f"{tuple(tensor.shape)} that is not"
                )
    group = axis_group(mesh)
    layout: Layout | None = None
    if not _cp_options.enable_load_balance or _cp_options.orders.shards_are_contiguous(group):
        layout = Contiguous()
    elif dims:
        layout = default_layout(tensors[0].size(dims[0]), group.size())
    context = context_of_buffers(
        mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=no_restore_buffers, layout=layout
    )
    lengths = [tensor.size(dim) for tensor, dim in zip(tensors, dims, strict=True)]
    with context, intercepted(_reordered_dtensor_sdpa):  # before the interceptor of the context
        for length in lengths if layout is not None else ():
            _cp_options.orders.note(group, length, layout)
        yield


class _Dispatcher:
    """torch's dispatcher switch, which is on or off and does not count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._installed: ExitStack | None = None

    def enable(self) -> None:
        """Enable SDPA on DTensors that are sharded along the sequence; further calls do nothing.

        See `cp_dtensor.enable_context_parallel_dispatcher`. In addition, causal attention of DTensors made of shards of
        `_context_parallel_shard` is in the order of its load balancer.
        """
        with self._lock:
            if self._installed is None:
                with ExitStack() as stack:
                    stack.enter_context(enable_context_parallel_dispatcher())
                    stack.enter_context(intercepted(_reordered_dtensor_sdpa))  # before that of the dispatcher
                    self._installed = stack.pop_all()

    def disable(self) -> None:
        """Disable the dispatcher, even after several calls that enable it."""
        with self._lock:
            installed, self._installed = self._installed, None
        if installed is not None:
            installed.close()


_dispatcher = _Dispatcher()
_enable_context_parallel_dispatcher = _dispatcher.enable
_disable_context_parallel_dispatcher = _dispatcher.disable

_SEQUENCE = Shard(2)


def _reordered_dtensor_sdpa(call: SdpaArguments) -> torch.Tensor | None:
    """Compute causal attention of DTensors whose shards are reordered; returns None for other calls.

    A DTensor does not record a load balancer: `_context_parallel_shard` records that sequences of this length are
    reordered.
    """
    tensors = [tensor for tensor in (call.q, call.k, call.v) if isinstance(tensor, DTensor)]
    if not call.is_causal or not tensors or any(tensor.dim() != 4 for tensor in (call.q, call.k, call.v)):
        return None
    reordered = []
    for tensor in tensors:
        for axis, placement in enumerate(tensor.placements):
            if placement == _SEQUENCE and tensor.device_mesh.size(axis) > 1:
                orders = _cp_options.orders.of_length(tensor.device_mesh.get_group(axis), tensor.size(2))
                reordered += [(axis, orders[-1])] if orders and orders[-1] != Contiguous() else []
    if not reordered:
        return None
    q, k, v = call.q, call.k, call.v
    first = tensors[0]
    axis, layout = reordered[0]
    if layout is None:
        raise NotImplementedError(
            "causal attention in this load balancer's order is not supported yet: shard with a _HeadTailLoadBalancer "
            "or with none"
        )
    if not (
        len(tensors) == 3
        and all(x.device_mesh == first.device_mesh and x.placements == first.placements for x in tensors)
        and q.size(2) == k.size(2)
        and all(
            isinstance(p, (Replicate, Shard)) and (p != _SEQUENCE or place == axis)
            for place, p in enumerate(first.placements)
        )
    ):
        raise NotImplementedError(
            f"causal attention of shards in {layout} order expects q, k and v of one length, placed alike on one mesh, "
            f"sharded over the sequence on one axis; got "
            + ", ".join(
                f"{name} {tuple(x.shape)} {x.placements if isinstance(x, DTensor) else 'torch.Tensor'}"
                for name, x in zip("qkv", (q, k, v), strict=True)
            )
        )
    refuse_unsupported_sdpa(call.attn_mask, call.dropout_p)
    local_q, local_k, local_v = (tensor.to_local() for tensor in tensors)
    out = ring_attention(
        local_q, local_k, local_v, mesh=first.device_mesh.get_group(axis), is_causal=True, scale=call.scale,
        enable_gqa=call.enable_gqa, layout=layout, seq_len=first.size(2),
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return DTensor.from_local(out, first.device_mesh, first.placements, run_check=False)


class _ContextParallel(ParallelStyle):
    """Parallel style of an attention module whose inputs are this rank's shards.

        parallelize_module(attention, mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))

    With SDPA, `F.scaled_dot_product_attention` inside of the module is ring attention over shards in the order in which
    `_context_parallel_shard` last sharded for this axis (if it never did, as `_cp_options.enable_load_balance` says).
    With FLEX, the module gets the keys and values of all ranks, rank after rank, for `flex_attention` with masks from
    `_context_parallel_shard` or torch's `_create_cp_block_mask`.

    Args:
        seq_dim: the sequence dim of the module's inputs: tensors, or DTensors that are `Shard(seq_dim)` on the axis, of
            which the module gets the local tensors. Outputs are local.
        attention_type: SDPA or FLEX.

    Raises:
        ValueError: an unknown attention type; on a call, DTensors with another placement on the axis; a recompute in a
            backward after the order has changed.
    """

    class AttentionType(Enum):
        """The attention function that the module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        super().__init__()
        self.seq_dim = seq_dim
        value = getattr(attention_type, "value", attention_type)  # so that torch's own enum is accepted too
        if value not in {each.value for each in self.AttentionType}:
            raise ValueError(f"Unknown attention type: {attention_type}: expected SDPA or FLEX")
        self.attention_type = self.AttentionType(value)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.attention_type is self.AttentionType.FLEX:
            gather = functools.partial(_with_all_keys, self.seq_dim, axis_group(device_mesh).group_name)
            module.register_forward_pre_hook(gather, with_kwargs=True)
        else:
            forward = functools.partial(_forward_of_shards, module.forward, device_mesh, self.seq_dim)
            module.forward = functools.update_wrapper(forward, module.forward, updated=())
        return module


def _with_all_keys(
    seq_dim: int, group_name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments (query, key, value, ...) of flex_attention with the keys and values of all ranks."""
    names = ("query", "key", "value")
    given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    missing = [name for name in names if not isinstance(given.get(name), torch.Tensor)]
    if missing:
        raise TypeError(f"expected {type(module).__name__} to be called with tensors {names}, {missing} are not")
    key, value = flex_cp_allgather(given["key"].contiguous(), given["value"].contiguous(), seq_dim, group_name)
    given.update(key=key, value=value)
    new_args = (*(given[name] for name in names[: len(args)]), *args[3:])
    return new_args, {**kwargs, **{name: given[name] for name in names[len(args) :]}}


@never_compiled
def _forward_of_shards(forward: Callable[..., Any], mesh: Mesh, seq_dim: int, *args: Any, **kwargs: Any) -> Any:
    refuse_patched_rings()
    layout, lengths = _order_now(mesh)
    args = tuple(_local_shard(arg, mesh, seq_dim) for arg in args)
    kwargs = {name: _local_shard(arg, mesh, seq_dim) for name, arg in kwargs.items()}
    with context_of_buffers(mesh, layout=layout, seq_len=tuple(lengths)):
        return forward(*args, **kwargs)


def _order_now(mesh: Mesh) -> tuple[Layout, list[int]]:
    """Return the layout of the shards, and the global lengths recorded in it."""
    group = axis_group(mesh)
    noted = _cp_options.orders.of_group(group)
    layouts = {layout for _, layout in noted}
    if len(layouts) > 1 and current_backward() is not None:
        raise ValueError(
            "attention is recomputed in a backward, and sequences have been sharded in several orders for this axis: "
            "the order of the first computation is unknown; use cp_dtensor.ContextParallel(layout=...)"
        )
    if not noted:
        return default_layout(0, group.size()), []
    layout = noted[-1][1]
    if layout is None:
        raise NotImplementedError(
            "SDPA in this load balancer's order is not supported yet: shard with a _HeadTailLoadBalancer or with none"
        )
    return layout, [length for length, order in noted if order == layout]


def _local_shard(value: Any, mesh: Mesh, seq_dim: int) -> Any:
    """Return the local tensor of a DTensor over the axis, other values unchanged."""
    if not isinstance(value, DTensor) or value.device_mesh.ndim != 1:
        return value
    if value.device_mesh.get_group() is not axis_group(mesh):
        return value
    if value.placements != (Shard(seq_dim % value.dim()),):
        raise ValueError(f"expected a DTensor that is Shard({seq_dim}), got {value.placements}")
    return value.to_local()
