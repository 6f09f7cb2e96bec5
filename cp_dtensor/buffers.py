"""Sharding a tensor in place, for the time of a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from cp_dtensor.layouts import Layout
from cp_dtensor.sharding import put_shard, take_shard


class ShardedBuffer:
    """One buffer of `context_parallel`.

    The tensor object stays the same; its data is exchanged for the shard's and back, so restoring is exact and free.
    """

    def __init__(
        self, index: int, tensor: torch.Tensor, dim: int, layout: Layout, group: dist.ProcessGroup, restore: bool
    ) -> None:
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(
                f"buffer {index}: got a non-leaf tensor that requires grad (from {tensor.grad_fn}); sharding it in "
                "place would break its graph. Use context_parallel_shard, which is differentiable, or detach it"
            )
        self._tensor = tensor
        self._dim = dim
        self._layout = layout
        self._group = group
        self._restore = restore
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)

    @property
    def full_length(self) -> int:
        """Global number of tokens, as long as the buffer is whole."""
        return self._tensor.size(self._dim)

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Holds the shard while open."""
        tensor = self._tensor
        full = tensor.data
        full_shape = full.shape
        with torch.no_grad():
            shard = take_shard(full, self._dim, self._layout, self._rank, self._world_size)
        full_grad, tensor.grad = tensor.grad, None
        tensor.data = shard
        # Held while open, so that the node that accumulates gradients made inside is this one.
        accumulator = self._whole_gradients_after_exit(full_shape) if tensor.requires_grad and self._restore else None
        if not self._restore:
            del full
        try:
            yield
        finally:
            if self._restore:
                tensor.data = full
                local_grad, tensor.grad = tensor.grad, full_grad
                if local_grad is not None:
                    whole = self._whole(local_grad, full_shape)
                    tensor.grad = whole if full_grad is None else full_grad + whole
            del accumulator

    def _whole_gradients_after_exit(self, full_shape: torch.Size) -> torch.autograd.graph.Node:
        """Has gradients of the shard that arrive after exit accumulated as gradients of the whole tensor."""
        node = torch.autograd.graph.get_gradient_edge(self._tensor).node

        def widen(grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            if self._tensor.shape != full_shape or grads[0] is None or grads[0].shape == full_shape:
                return None
            return (self._whole(grads[0], full_shape),)

        node.register_prehook(widen)
        return node

    def _whole(self, local_grad: torch.Tensor, full_shape: torch.Size) -> torch.Tensor:
        """The shard's gradient in its place, zeros elsewhere."""
        whole = local_grad.new_zeros(full_shape)
        put_shard(whole, local_grad, self._dim, self._layout, self._rank, self._world_size)
        return whole
