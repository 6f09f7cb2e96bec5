"""Sharding a tensor in place, for the time of a context."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cp_dtensor import _torch_private
from cp_dtensor.layouts import Layout
from cp_dtensor.sharding import put_shard, take_shard


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor that a context shards, and how."""

    tensor: torch.Tensor
    dim: int
    layout: Layout
    rank: int
    world_size: int
    restore: bool

    @property
    def length(self) -> int:
        """Global number of tokens, as long as the tensor is whole."""
        return self.tensor.size(self.dim)


class LocalContents:
    """A buffer's shard, which can stand in for the whole tensor.

    Two tensor objects swap identities: code that holds the buffer sees a shard while it is `standing_in`, and whatever
    autograd has saved meanwhile stays what it was, so backward may run after the buffer has been restored. Restoring
    copies nothing.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._depth = 0
        self._lock = threading.RLock()
        self._sharded_for_good = False
        self._swapped_out: torch.Tensor | None = None  # has the identity of the whole tensor while a shard stands in
        with torch.no_grad():
            self._shard = take_shard(buffer.tensor, buffer.dim, buffer.layout, buffer.rank, buffer.world_size)

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """The buffer is its shard while open (for good, if it is not to be restored). May be entered repeatedly."""
        with self._lock:
            self._depth += 1
            if self._depth == 1 and not self._sharded_for_good:
                self._swap_in()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and self._swapped_out is not None:
                    self._swap_out(self._swapped_out)

    def release_whole(self) -> None:
        """Frees the whole contents of a buffer that is not to be restored."""
        with self._lock:
            if not self._buffer.restore:
                self._swapped_out = None
                self._sharded_for_good = True

    def _swap_in(self) -> None:
        # A new object each time: autograd may have saved the last one, and must not see it change identity.
        stand_in = self._shard.detach().requires_grad_(self._buffer.tensor.requires_grad)
        if stand_in.requires_grad:
            stand_in.register_post_accumulate_grad_hook(self._deliver_gradient)
        _torch_private.swap_identities(self._buffer.tensor, stand_in)
        self._swapped_out = stand_in

    def _swap_out(self, stand_in: torch.Tensor) -> None:
        _torch_private.swap_identities(self._buffer.tensor, stand_in)
        self._swapped_out = None
        self._deliver_gradient(stand_in)

    def _deliver_gradient(self, stand_in: torch.Tensor) -> None:
        """Outside, a gradient of the shard belongs to the whole tensor: in its place, zeros elsewhere."""
        buffer, shard_grad = self._buffer, stand_in.grad
        if self._depth > 0 or self._sharded_for_good or shard_grad is None:
            return
        stand_in.grad = None
        grad = shard_grad.new_zeros(buffer.tensor.shape)
        put_shard(grad, shard_grad, buffer.dim, buffer.layout, buffer.rank, buffer.world_size)
        buffer.tensor.grad = grad if buffer.tensor.grad is None else buffer.tensor.grad + grad


def refuse_non_leaf(index: int, tensor: torch.Tensor) -> None:
    """Refuses tensors whose graph in-place sharding would break."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(
            f"buffer {index}: got a non-leaf tensor that requires grad (from {tensor.grad_fn}), expected a leaf or one "
            "that does not require grad. Use context_parallel_shard, which is differentiable, or detach it"
        )
