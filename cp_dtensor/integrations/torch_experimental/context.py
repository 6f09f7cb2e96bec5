"""`context_parallel` and the dispatcher of DTensors, with torch's arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from cp_dtensor import Contiguous, Layout, enable_context_parallel_dispatcher, ring_attention
from cp_dtensor import context_parallel as context_of_buffers
from cp_dtensor import set_rotate_method as set_process_default
from cp_dtensor.api.extension import (
    Mesh,
    SdpaArguments,
    SharedInstallation,
    checked_buffers,
    compiled_code_kept_apart,
    current_backward,
    intercepted,
)
from cp_dtensor.integrations.torch_experimental.private import _cp_options, _RotateMethod
from cp_dtensor.integrations.torch_experimental.sharding import axis_group, default_layout, orders


def set_rotate_method(rotate_method: str) -> None:
    """Set the default KV transport of this process; any name of `cp_dtensor.set_rotate_method`.

    Raises:
        NotImplementedError: another name, as in torch.
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
    ranks divides the length of the first buffer, otherwise contiguous. Arguments that do not fit are refused then.
    """
    tensors, dims = checked_buffers(buffers, buffer_seq_dims, Contiguous())
    group = axis_group(mesh)
    lengths = [tensor.size(dim) for tensor, dim in zip(tensors, dims, strict=True)]
    layout = default_layout(lengths[0] if lengths else 0, group.size())
    context = context_of_buffers(
        mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=no_restore_buffers, layout=layout
    )
    with context, _dtensors_in_order():  # before the interceptor of the context
        for length in lengths:
            orders.note(group, length, layout)
        with orders.balanced(layout != Contiguous()):
            yield


_variants = SharedInstallation(lambda: [compiled_code_kept_apart(orders.variant)])


@contextmanager
def _dtensors_in_order() -> Iterator[None]:
    """Compute attention of DTensors in the order of their shards while open, in compiled code, too."""
    with intercepted(_reordered_dtensor_sdpa), _variants.held():
        yield


_switch: list[ExitStack] = []
"""What the dispatcher has installed while it is enabled."""
_lock = threading.Lock()


def _enable_context_parallel_dispatcher() -> None:
    """Enable SDPA on DTensors that are sharded along the sequence; as in torch, further calls do nothing.

    See `cp_dtensor.enable_context_parallel_dispatcher`. In addition, causal attention of DTensors made of shards of
    `_context_parallel_shard`, such as those of modules with `_ContextParallel`, is in the order of its load balancer.
    """
    with _lock, ExitStack() as stack:
        if not _switch:
            stack.enter_context(enable_context_parallel_dispatcher())
            stack.enter_context(_dtensors_in_order())  # before the interceptor of the dispatcher
            _switch.append(stack.pop_all())


def _disable_context_parallel_dispatcher() -> None:
    """Disable the dispatcher, even after several calls that enable it."""
    with _lock:
        while _switch:
            _switch.pop().close()


def _noted(tensor: DTensor, axis: int) -> tuple[Layout | None, ...]:
    """Return the orders in which sequences of a DTensor's length have been sharded; refuse to guess one.

    Torch's own attention takes all shards for head-tail ones while its flag is set.
    """
    group, length = tensor.device_mesh.get_group(axis), tensor.size(2)
    noted = orders.of(group).get(length)
    if noted is None and default_layout(length, group.size()) != Contiguous():
        raise ValueError(
            f"causal attention of DTensors over {length} tokens, which no context and no _context_parallel_shard has "
            "sharded, while _cp_options.enable_load_balance is True: shard by one of these, or set it to False for "
            "shards in the order of the sequence"
        )
    return noted or (Contiguous(),)


def _reordered_dtensor_sdpa(call: SdpaArguments) -> torch.Tensor | None:
    """Compute causal attention of DTensors whose shards are reordered, refuse masks; return None for other calls.

    A DTensor does not say in which order its shards are: `_context_parallel_shard` and contexts note it by length.
    """
    tensors = call.q, call.k, call.v
    if (not call.is_causal and call.attn_mask is None) or any(tensor.dim() != 4 for tensor in tensors):
        return None
    reordered = [
        (axis, noted)
        for tensor in tensors
        if isinstance(tensor, DTensor)
        for axis, placement in enumerate(tensor.placements)
        if placement == Shard(2) and tensor.device_mesh.size(axis) > 1
        and (noted := _noted(tensor, axis)) != (Contiguous(),)
    ]  # fmt: skip
    if not reordered:
        return None
    axis, noted = reordered[0]
    if len(noted) > 1 and current_backward() is not None:
        raise ValueError(
            "attention is recomputed in a backward, and sequences of this length have been sharded in several orders, "
            f"{noted}: the order of the first computation is unknown; use cp_dtensor.ContextParallel(layout=...)"
        )
    layout = noted[-1]
    if layout == Contiguous():
        return None
    if layout is None:
        raise NotImplementedError(
            "causal attention in this load balancer's order is not supported yet: shard with a _HeadTailLoadBalancer "
            "or with none"
        )
    placed = [(x.device_mesh, x.placements, x.size(2)) if isinstance(x, DTensor) else None for x in tensors]
    mesh, placements, length = next(filter(None, placed))
    others = [placement for place, placement in enumerate(placements) if place != axis]
    if len({*placed}) > 1 or not all(isinstance(each, (Replicate, Shard)) and each != Shard(2) for each in others):
        got = [f"{tuple(x.shape)} {x.placements if isinstance(x, DTensor) else 'torch.Tensor'}" for x in tensors]
        raise NotImplementedError(
            f"causal attention of shards in {layout} order expects q, k and v of one length, placed alike on one mesh, "
            f"sharded over the sequence on one axis; got q {got[0]}, k {got[1]}, v {got[2]}"
        )
    if call.attn_mask is not None or call.dropout_p:
        shape = None if call.attn_mask is None else tuple(call.attn_mask.shape)
        raise NotImplementedError(
            f"attention of shards in {layout} order expects attn_mask=None and dropout_p=0.0; got attn_mask of shape "
            f"{shape} and dropout_p={call.dropout_p}"
        )
    local: Any = [cast(DTensor, tensor).to_local() for tensor in tensors]
    out: Any = ring_attention(
        *local, mesh=mesh.get_group(axis), is_causal=True, scale=call.scale, enable_gqa=call.enable_gqa, layout=layout,
        seq_len=length,
    )  # fmt: skip
    return DTensor.from_local(out, mesh, placements, run_check=False)
