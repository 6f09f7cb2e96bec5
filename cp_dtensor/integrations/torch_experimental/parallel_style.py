"""`_ContextParallel`: context parallelism as a property of an attention module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from cp_dtensor import _torch
from cp_dtensor._torch.experimental import flex_cp_allgather
from cp_dtensor.api.context import context_parallel
from cp_dtensor.integrations.torch_experimental.options import Mesh, _cp_options, axis_group, default_layout
from cp_dtensor.integrations.torch_experimental.rings import refuse_patched_rings
from cp_dtensor.spec.layouts import Layout


class _ContextParallel(ParallelStyle):
    """`parallelize_module(attention, mesh, _ContextParallel(2, _ContextParallel.AttentionType.SDPA))`.

    With SDPA, `F.scaled_dot_product_attention` inside of the module is ring attention over shards in the order in which
    `_context_parallel_shard` has last sharded for this axis (if it never has, as `_cp_options.enable_load_balance`
    says). With FLEX, the module gets the keys and values of all ranks, rank after rank, for `flex_attention` with masks
    from `_context_parallel_shard` or `_create_cp_block_mask`.

    Args:
        seq_dim: the sequence dim of the module's inputs.
        attention_type: SDPA or FLEX.

    Inputs of the module are this rank's shards: tensors, or DTensors that are `Shard(seq_dim)` on the axis, of which
    the module gets the local tensors. Outputs are local.

    Raises:
        ValueError: an unknown attention type; on a call, DTensors that are placed otherwise on the axis; a recompute in
            a backward after the order has changed since.
    """

    class AttentionType(Enum):
        """Which attention the module calls."""

        FLEX = "flex_attention"
        SDPA = "scaled_dot_product_attention"

    def __init__(self, seq_dim: int, attention_type: AttentionType) -> None:
        super().__init__()
        self.seq_dim = seq_dim
        # By its value, so that torch's own enum will do as well.
        self.attention_type = self.AttentionType(getattr(attention_type, "value", attention_type))

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
    """The arguments (query, key, value, ...), as flex_attention takes them, with keys and values of all ranks."""
    names = ("query", "key", "value")
    given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    missing = [name for name in names if not isinstance(given.get(name), torch.Tensor)]
    if missing:
        raise TypeError(f"expected {type(module).__name__} to be called with tensors {names}, {missing} are not")
    key, value = flex_cp_allgather(given["key"].contiguous(), given["value"].contiguous(), seq_dim, group_name)
    given.update(key=key, value=value)
    new_args = (*(given[name] for name in names[: len(args)]), *args[3:])
    return new_args, {**kwargs, **{name: given[name] for name in names[len(args) :]}}


@_torch.never_compiled
def _forward_of_shards(forward: Callable[..., Any], mesh: Mesh, seq_dim: int, *args: Any, **kwargs: Any) -> Any:
    refuse_patched_rings()
    layout, lengths = _order_now(mesh)
    args = tuple(_local_shard(arg, mesh, seq_dim) for arg in args)
    kwargs = {name: _local_shard(arg, mesh, seq_dim) for name, arg in kwargs.items()}
    with context_parallel(mesh, layout=layout, seq_len=tuple(lengths)):
        out = forward(*args, **kwargs)
    return out


def _order_now(mesh: Mesh) -> tuple[Layout, list[int]]:
    """The order of the shards, and the global lengths that are known to be in it."""
    group = axis_group(mesh)
    noted = _cp_options.orders.of_group(group)
    layouts = {layout for _, layout in noted}
    if len(layouts) > 1 and _torch.current_backward() is not None:
        raise ValueError(
            "attention is recomputed in a backward, and sequences have been sharded in several orders for this axis: "
            "it cannot be told which one it was computed in; use cp_dtensor.ContextParallel(layout=...), which says so"
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
    """The local tensor of a DTensor over the axis; anything else as it is."""
    if not isinstance(value, DTensor) or value.device_mesh.ndim != 1:
        return value
    if value.device_mesh.get_group() is not axis_group(mesh):
        return value
    if value.placements != (Shard(seq_dim % value.dim()),):
        raise ValueError(f"expected a DTensor that is Shard({seq_dim}), got {value.placements}")
    return value.to_local()
