"""Sharding a tensor in place, for the time of a context."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cp_dtensor import _torch
from cp_dtensor.api.sharding import put_shard, take_shard
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.engine.lengths import odd_ones
from cp_dtensor.spec.layouts import Layout

_SHARD = "cp_dtensor_shard"  # attribute of tensors that were left sharded: over which ranks, and how long


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor that a context shards, and how."""

    tensor: torch.Tensor
    dim: int
    layout: Layout
    ranks: SequenceRanks
    restore: bool

    @property
    def length(self) -> int:
        """Global number of tokens, as long as the tensor is whole."""
        return self.tensor.size(self.dim)


class _Standing:
    """For each tensor, the shards that stand in for it, the innermost last, and gradients that wait for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._stacks: dict[int, list[LocalContents]] = {}
        self._waiting: dict[int, list[tuple[LocalContents, torch.Tensor]]] = {}

    def stack(self, tensor: torch.Tensor) -> tuple[LocalContents, ...]:
        """Who stands in for the tensor now."""
        return tuple(self._stacks.get(id(tensor), ()))

    def push(self, tensor: torch.Tensor, contents: LocalContents) -> None:
        """`contents` stands in for the tensor."""
        self._stacks.setdefault(id(tensor), []).append(contents)

    def ranks(self, tensor: torch.Tensor) -> list[set[int]]:
        """Over which ranks the tensor is sharded now."""
        return [contents.ranks for contents in self.stack(tensor)]

    def pop(self, tensor: torch.Tensor) -> None:
        """The innermost one no longer does."""
        self._stacks[id(tensor)].pop()
        if not self._stacks[id(tensor)]:
            del self._stacks[id(tensor)]

    def wait(self, tensor: torch.Tensor, contents: LocalContents, stand_in: torch.Tensor) -> None:
        """Keeps a gradient until the tensor is as it was when `contents` was made."""
        self._waiting.setdefault(id(tensor), []).append((contents, stand_in))

    def no_longer_wait(self, tensor: torch.Tensor) -> list[tuple[LocalContents, torch.Tensor]]:
        """What has been waiting."""
        return self._waiting.pop(id(tensor), [])


_standing = _Standing()


def is_shard_now(tensor: torch.Tensor) -> bool:
    """Whether the shard of an open context stands in for this tensor."""
    return bool(_standing.stack(tensor))


class LocalContents:
    """A buffer's shard, which can stand in for the whole tensor.

    Two tensor objects swap identities: code that holds the buffer sees a shard while it is `standing_in`, and whatever
    autograd has saved meanwhile stays what it was, so backward may run after the buffer has been restored. Restoring
    copies nothing.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._around = _standing.stack(buffer.tensor)
        self._whole_shape = buffer.tensor.shape
        self._sharded_for_good = False
        self._swapped_out: list[torch.Tensor | None] = []  # per entry, what has the identity of the tensor around it
        with torch.no_grad():
            self._shard = take_shard(buffer.tensor, buffer.dim, buffer.layout, buffer.ranks.rank, buffer.ranks.size)

    @property
    def ranks(self) -> set[int]:
        """Those that share the buffer."""
        return self._buffer.ranks.global_ranks()

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """The buffer is this shard while open (for good, if it is not to be restored). May be entered repeatedly.

        Raises:
            RuntimeError: on exit, if a shard that came in later is still in.
        """
        tensor = self._buffer.tensor
        with _standing.lock:
            stack = _standing.stack(tensor)
            already_in = (stack and stack[-1] is self) or self._sharded_for_good
            self._swapped_out.append(None if already_in else self._swap_in())
            _standing.push(tensor, self)
        try:
            yield
        finally:
            with _standing.lock:
                if _standing.stack(tensor)[-1] is not self:
                    raise RuntimeError(
                        "contexts that shard the same buffer must be left in the reverse order of entering them, got a "
                        f"buffer of shape {tuple(self._whole_shape)} whose later context is still open"
                    )
                _standing.pop(tensor)
                stand_in = self._swapped_out.pop()
                if stand_in is not None:
                    _torch.swap_identities(tensor, stand_in)
                    _standing.wait(tensor, self, stand_in)
                for contents, waiting in _standing.no_longer_wait(tensor):
                    contents.deliver_gradient(waiting)

    def release_whole(self) -> None:
        """Frees the whole contents of a buffer that is not to be restored."""
        if not self._buffer.restore and not self._sharded_for_good:
            self._sharded_for_good = True
            self._swapped_out[-1] = None
            buffer = self._buffer
            setattr(buffer.tensor, _SHARD, (buffer.ranks.global_ranks(), self._shard.size(buffer.dim)))

    def _swap_in(self) -> torch.Tensor:
        # A new object each time: autograd may have saved the last one, and must not see it change identity.
        stand_in = self._shard.detach().requires_grad_(self._buffer.tensor.requires_grad)
        if stand_in.requires_grad:
            stand_in.register_post_accumulate_grad_hook(self.deliver_gradient)
        _torch.swap_identities(self._buffer.tensor, stand_in)
        return stand_in

    def deliver_gradient(self, stand_in: torch.Tensor) -> None:
        """Outside, a gradient of the shard belongs to the whole tensor: in its place, zeros elsewhere."""
        buffer = self._buffer
        with _standing.lock:
            if self._sharded_for_good or stand_in is buffer.tensor or stand_in.grad is None:
                return
            if _standing.stack(buffer.tensor) != self._around:  # the whole tensor is out, in another context
                _standing.wait(buffer.tensor, self, stand_in)
                return
            grad = stand_in.grad.new_zeros(self._whole_shape)
            put_shard(grad, stand_in.grad, buffer.dim, buffer.layout, buffer.ranks.rank, buffer.ranks.size)
            stand_in.grad = None
            buffer.tensor.grad = grad if buffer.tensor.grad is None else buffer.tensor.grad + grad


def refuse_non_leaf(index: int, tensor: torch.Tensor) -> None:
    """Refuses tensors whose graph in-place sharding would break."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise ValueError(
            f"buffer {index}: got a non-leaf tensor that requires grad (from {tensor.grad_fn}), expected a leaf or one "
            "that does not require grad. Use context_parallel_shard, which is differentiable, or detach it"
        )


def refuse_wrapper(index: int, tensor: torch.Tensor) -> None:
    """Refuses tensors whose data is in other tensors: these stay whole where the identity is exchanged."""
    if _torch.is_wrapper(tensor):
        raise TypeError(
            f"buffer {index}: got a {type(tensor).__name__}, which keeps its data in other tensors, expected a plain "
            "torch.Tensor. Use context_parallel_shard, which makes a new one"
        )


def refuse_shards(tensors: list[torch.Tensor], dims: list[int], ranks: set[int]) -> None:
    """Refuses buffers that are shards over these ranks already: of shards, attention would see a part only.

    Raises:
        ValueError: a buffer of a context that is open, or one that a context has left sharded.
    """
    for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        left_sharded = getattr(tensor, _SHARD, None) == (ranks, tensor.size(dim))
        if len(ranks) > 1 and (left_sharded or ranks in _standing.ranks(tensor)):
            why = "was left sharded (no_restore_buffers) by" if left_sharded else "is a buffer of"
            raise ValueError(
                f"buffer {index}: expected a tensor that every rank has whole, got a shard of shape "
                f"{tuple(tensor.shape)}: it {why} another context over the same ranks"
            )


def refuse_different_buffers(buffers: list[Buffer], ranks: SequenceRanks) -> None:
    """Lets the ranks compare their buffers, which takes a pass over them.

    Raises:
        ValueError: on every rank alike, where they differ; names buffers and ranks.
    """
    device = buffers[0].tensor.device if buffers else torch.device("cpu")
    (counts, *_) = zip(*ranks.gather_integers([len(buffers)], device), strict=True)
    if len({*counts}) > 1:
        raise ValueError(f"the ranks have different numbers of buffers: {list(counts)} on ranks 0 to {len(counts) - 1}")
    said = ranks.gather_integers([_digest(buffer) for buffer in buffers], device) if buffers else []
    for index, digests in enumerate(zip(*said, strict=True)):
        odd = odd_ones(list(digests))
        if odd:
            raise ValueError(
                f"buffer {index}: expected the same whole tensor on every rank, got another one on rank {odd} (shape "
                f"{tuple(buffers[index].tensor.shape)} here): ranks that share a sequence read the same data"
            )


def _digest(buffer: Buffer) -> int:
    """Of a buffer's type and bits."""
    tensor = buffer.tensor.detach().resolve_conj().resolve_neg()  # whose bits are not those of its memory
    bits = tensor.contiguous().view(-1).view(torch.uint8).cpu().to(torch.int64)
    weights = torch.arange(len(bits), device="cpu") % 65521 + 1
    return zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)} {buffer.dim} {int((bits * weights).sum())}".encode())
