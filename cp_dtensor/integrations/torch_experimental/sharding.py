"""Shards of tensors and block masks, and the order of their tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor import context_parallel_shard as shard
from cp_dtensor import context_parallel_unshard as unshard
from cp_dtensor.api.extension import Mesh, checked_buffers, checked_sequence_dim, sequence_ranks
from cp_dtensor.integrations.torch_experimental.private import (
    _cp_options,
    _HeadTailLoadBalancer,
    flatten_tree,
    torchs_shard,
    torchs_unshard,
)


def axis_group(mesh: Mesh) -> dist.ProcessGroup:
    """Return the process group of a context-parallel axis."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected mesh to be a DeviceMesh of one dim or a ProcessGroup, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"expected a mesh of one dim, the context-parallel axis; got {mesh.ndim} dims: {mesh}")
    return mesh.get_group()


class _Orders:
    """The layouts in which this process has sharded sequences, the latest last; None is an order that no layout has.

    Torch has one flag of the process, `_cp_options.enable_load_balance`, which the latest shards set for all attention.
    """

    def __init__(self) -> None:
        self._by_group: WeakKeyDictionary[dist.ProcessGroup, dict[int, tuple[Layout | None, ...]]] = WeakKeyDictionary()
        self.balance = True  # as the latest shards have left the flag
        self._lock, self._outside = threading.Lock(), True
        self._open: list[bool] = []

    def of(self, group: dist.ProcessGroup) -> dict[int, tuple[Layout | None, ...]]:
        """Return the layouts of sequences by their global length, the latest length last."""
        if _cp_options.enable_load_balance != self.balance:  # set by the program since, which has other shards now
            self._by_group.clear()
            self.balance = _cp_options.enable_load_balance
        return self._by_group.setdefault(group, {})

    def note(self, group: dist.ProcessGroup, length: int, layout: Layout | None) -> None:
        """Record the layout of a sequence of `length` tokens."""
        noted = self.of(group)
        noted[length] = (*(each for each in noted.pop(length, ()) if each != layout), layout)

    def set_balance(self, balance: bool) -> None:
        """Set torch's flag for shards that are made now, without forgetting the orders of others."""
        self.balance = _cp_options.enable_load_balance = balance

    @contextmanager
    def balanced(self, balance: bool) -> Iterator[None]:
        """Set torch's flag, which torch's own ring reads, while a context is open; ranks may be threads."""
        with self._lock:
            self._outside = self._outside if self._open else _cp_options.enable_load_balance
            self._open.append(balance)
            self.set_balance(balance)
        try:
            yield
        finally:
            with self._lock:
                del self._open[len(self._open) - 1 - self._open[::-1].index(balance)]
                self.set_balance(self._open[-1] if self._open else self._outside)

    def variant(self) -> str:
        """Encode the orders for Dynamo, which reuses compiled code only where this string is equal."""
        groups = [list(group.items()) for group in list(self._by_group.values())]  # other threads may note meanwhile
        noted = {(length, layouts[-1]) for group in groups for length, layouts in group}
        latest = {layout for _, layout in noted}
        return repr(sorted(map(repr, noted if len(latest) > 1 else latest)))


orders = _Orders()


def default_layout(length: int, world_size: int) -> Layout:
    """Return the layout of a context, which is torch's, so that its shards fit those of other helpers."""
    balanced = _cp_options.enable_load_balance and length % (2 * world_size) == 0
    return HeadTail() if balanced else Contiguous()


def _context_parallel_shard(
    mesh: DeviceMesh, buffers: Any, seq_dims: Any, load_balancer: Any = None,
    batch_and_seq: tuple[int, int] | None = None,
) -> Any:  # fmt: skip
    """Return this rank's shards of tensors and `BlockMask`s, in the structure of `buffers`, as torch's function.

    Tensors are differentiable where a layout has the order of the load balancer. Causal attention of DTensors, such as
    those of modules with `_ContextParallel`, and `context_parallel_unshard` look up that order, which is noted here.

    Raises:
        TypeError, ValueError: arguments that do not fit.
        NotImplementedError: masks that the ranks cannot divide into whole blocks of 128 queries.
    """
    flat, rebuild = flatten_tree(buffers, lambda leaf: isinstance(leaf, BlockMask))
    dims, _ = flatten_tree(seq_dims, lambda leaf: False)
    if len(flat) != len(dims):
        raise ValueError(f"expected seq_dims to have one sequence dim per buffer, got {len(dims)} for {len(flat)}")
    group, lengths = axis_group(mesh), []
    for index, buffer in enumerate(flat):
        if isinstance(buffer, torch.Tensor):
            dims[index] = checked_sequence_dim(f"buffer {index}", buffer, dims[index])
            lengths.append(buffer.size(dims[index]))
        elif isinstance(buffer, BlockMask):
            lengths.append(buffer.seq_lengths[0])
        else:
            raise ValueError(f"buffer {index}: expected a torch.Tensor or a BlockMask, got {type(buffer).__name__}")
    layouts = [_layout_of(load_balancer, length, group.size()) for length in lengths]
    options = {} if batch_and_seq is None else {"batch_and_seq": batch_and_seq}
    simulated = not isinstance(mesh.get_local_rank(), int)  # one rank for each of torch's LocalTensorMode
    before = _cp_options.enable_load_balance
    try:
        shards = [
            torchs_shard(mesh, [buffer], [dim], load_balancer, **options)[0]
            if simulated or layout is None or isinstance(buffer, BlockMask)
            else shard(mesh, [buffer], [dim], layout)[0]
            for buffer, dim, layout in zip(flat, dims, layouts, strict=True)
        ]
    except BaseException:
        _cp_options.enable_load_balance = before  # which torch's function has set
        raise
    orders.set_balance(load_balancer is not None)
    for length, layout in zip(lengths, layouts, strict=True):
        orders.note(group, length, layout)
    return rebuild(shards)


def _layout_of(balancer: Any, length: int, world_size: int) -> Layout | None:
    """Return the layout that has a balancer's order, None if no layout has it."""
    if balancer is None:
        return Contiguous()
    if getattr(balancer, "world_size", world_size) != world_size:
        raise ValueError(
            f"expected a load balancer for {world_size} ranks, got a {type(balancer).__name__} for "
            f"{balancer.world_size}"
        )
    if type(balancer) is not _HeadTailLoadBalancer:
        return None
    if balancer.seq_length != length:
        raise ValueError(
            f"expected a load balancer for {length} tokens, got a _HeadTailLoadBalancer for {balancer.seq_length}"
        )
    return HeadTail()


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], load_balancer: Any = None
) -> list[torch.Tensor]:
    """Return whole tensors on every rank from the ranks' shards, without gradients, as torch's function.

    Without a load balancer, the order is that in which `context_parallel` or `_context_parallel_shard` sharded
    sequences of this length; if neither did, as `_cp_options.enable_load_balance` says.

    Raises:
        TypeError, ValueError: arguments that do not fit; sequences of this length were sharded in several orders.
    """
    group = axis_group(mesh)
    _, dims = checked_buffers(buffers, seq_dims, Contiguous())
    if load_balancer is not None and type(load_balancer) is not _HeadTailLoadBalancer:
        whole: list[torch.Tensor] = torchs_unshard(mesh, list(buffers), dims, load_balancer)
        return whole
    local = [buffer.size(dim) for buffer, dim in zip(buffers, dims, strict=True)]
    by_rank = sequence_ranks(group).gather_integers(local, buffers[0].device) if local else []
    layouts = []
    for length in map(sum, zip(*by_rank, strict=True)):
        if load_balancer is not None:
            layouts.append(_layout_of(load_balancer, length, group.size()))
            continue
        noted = orders.of(group).get(length) or (default_layout(length, group.size()),)
        layouts.append(noted[0])
        if len(noted) > 1 or noted[0] is None:
            said = ", ".join("a load balancer's" if order is None else repr(order) for order in noted)
            raise ValueError(
                f"sequences of {length} tokens have been sharded in this order: {said}; pass the right one as "
                "load_balancer=, or as layout= of cp_dtensor.context_parallel_unshard"
            )
    return [
        unshard(mesh, [buffer], [dim], layout)[0] for buffer, dim, layout in zip(buffers, dims, layouts, strict=True)
    ]
