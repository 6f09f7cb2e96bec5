"""Shards of tensors and block masks, and the load balancers that order the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor import Contiguous, HeadTail, Layout, PerDocument, context_parallel_shard
from cp_dtensor import context_parallel_unshard as unshard
from cp_dtensor.api.extension import sequence_ranks, take_shard
from cp_dtensor.integrations.torch_experimental.options import (
    _cp_options,
    assumed_layout,
    axis_group,
    check_one_dim_each,
)
from cp_dtensor.integrations.torch_experimental.private import flatten_tree, simulated

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_BLOCKS = (128, 128)


def _context_parallel_shard(
    mesh: DeviceMesh, buffers: Any, seq_dims: Any, load_balancer: Any = None,
    batch_and_seq: tuple[int, int] | None = None,
) -> Any:  # fmt: skip
    """Return this rank's shards, in the structure of `buffers`.

    It changes no setting; it records the order of sequences of this length for `context_parallel_unshard` and
    `_ContextParallel`.

    Args:
        mesh: the context-parallel axis.
        buffers: tensors that every rank has whole, and `BlockMask`s, in lists, tuples and dicts.
        seq_dims: the sequence dim of each, in a structure with as many leaves; those of masks are ignored.
        load_balancer: the order of the tokens; contiguous if None.
        batch_and_seq: ignored; torch 2.14 and newer have it.

    Returns:
        new tensors, differentiable, and masks of this rank's queries and the keys of all ranks.

    Raises:
        ValueError: arguments that do not fit; for an order that no layout has, a length that is not a
            multiple of the number of ranks.
        NotImplementedError: masks that the ranks cannot divide into whole blocks, neither their own nor of 128 queries.
    """
    flat_buffers, rebuild = flatten_tree(buffers, lambda leaf: isinstance(leaf, BlockMask))
    flat_dims, _ = flatten_tree(seq_dims, lambda leaf: False)
    check_one_dim_each(flat_buffers, flat_dims)
    return rebuild(
        [
            _shard_one(mesh, index, buffer, dim, load_balancer)
            for index, (buffer, dim) in enumerate(zip(flat_buffers, flat_dims, strict=True))
        ]
    )


def _shard_one(mesh: DeviceMesh, index: int, buffer: Any, dim: int, balancer: Any) -> Any:
    if not isinstance(buffer, (torch.Tensor, BlockMask)):
        raise ValueError(
            f"Unknown buffer type: {type(buffer)}: expected buffer {index} to be a torch.Tensor or a BlockMask"
        )
    if isinstance(buffer, torch.Tensor):
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(f"buffer {index}: sequence dim {dim} is out of range for shape {tuple(buffer.shape)}")
        dim %= buffer.dim()
    length = buffer.size(dim) if isinstance(buffer, torch.Tensor) else buffer.seq_lengths[0]
    group = axis_group(mesh)
    layout = _balancer_layout(balancer, length, group.size())
    _cp_options.orders.note_shards(group, length, layout, balancer is not None)
    indices = _balancer_indices(balancer, length) if layout is None else None
    if layout is None and length % group.size() and isinstance(buffer, torch.Tensor):
        raise ValueError(
            f"buffer {index}: expected a length that {group.size()} ranks divide evenly in the order of "
            f"{type(balancer).__name__}, got {length}"
        )

    def shard(whole: torch.Tensor, rank: int) -> torch.Tensor:
        if layout is not None:
            return take_shard(whole, dim, layout, rank, group.size())
        assert indices is not None  # None has a layout
        return _permuted(whole, dim, indices.chunk(group.size(), dim=1)[rank], f"buffer {index}")

    local = simulated(mesh, buffer, shard)
    if local is not None:
        return local
    if isinstance(buffer, BlockMask):
        # In blocks of the mask's size if every rank has whole ones.
        blocks = buffer.BLOCK_SIZE if length % (group.size() * buffer.BLOCK_SIZE[0]) == 0 else _BLOCKS
        shape = (*buffer.kv_num_blocks.shape[:2], *buffer.seq_lengths)
        return _block_mask_of_rank(buffer.mask_mod, shape, blocks, mesh, _balancer_indices(balancer, length))
    if layout is not None:
        return context_parallel_shard(mesh, [buffer], [dim], layout)[0]
    return shard(buffer, group.rank())


def _permuted(tensor: torch.Tensor, dim: int, indices: torch.Tensor, what: str) -> torch.Tensor:
    """Return tokens (along `dim`) in the order of `indices`: (1, tokens), or (B, tokens) for each batch row."""
    indices = indices.to(tensor.device)
    if indices.size(0) == 1:
        return tensor.index_select(dim, indices[0])
    if dim == 0 or tensor.size(0) != indices.size(0):
        raise ValueError(
            f"Cannot rearrange buffer: {what}: expected {indices.size(0)} batch rows in dim 0, since each has its own "
            f"order; got shape {tuple(tensor.shape)} with sequence dim {dim}"
        )
    rows = [row.index_select(dim - 1, order) for row, order in zip(tensor, indices, strict=True)]
    return torch.stack(rows)


@torch.no_grad()
def context_parallel_unshard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], load_balancer: Any = None
) -> list[torch.Tensor]:
    """Return whole tensors on every rank from the ranks' shards.

    Args:
        mesh: the context-parallel axis.
        buffers: this rank's shards.
        seq_dims: the sequence dim of each.
        load_balancer: the order of the tokens. If None, the order in which `context_parallel` or
            `_context_parallel_shard` sharded sequences of this length; if neither did, as
            `_cp_options.enable_load_balance` says.

    Returns:
        new tensors in the order of the sequence, without gradients.

    Raises:
        TypeError, ValueError: arguments that do not fit; sequences of this length were sharded in several orders.
    """
    group = axis_group(mesh)
    check_one_dim_each(buffers, seq_dims)
    local = [buffer.size(dim) for buffer, dim in zip(buffers, seq_dims, strict=True)]
    by_rank = sequence_ranks(group).gather_integers(local, buffers[0].device) if local else []
    lengths = [sum(lengths) for lengths in zip(*by_rank, strict=True)]
    whole = []
    for buffer, dim, length in zip(buffers, seq_dims, lengths, strict=True):
        if load_balancer is None:
            layout: Layout | None = assumed_layout(group, length)
        else:
            layout = _balancer_layout(load_balancer, length, group.size())
        (tensor,) = unshard(mesh, [buffer], [dim], layout if layout is not None else Contiguous())
        if layout is None:
            indices = _balancer_indices(load_balancer, length, restore=True)
            assert indices is not None
            tensor = _permuted(tensor, dim % tensor.dim(), indices, "unsharding")
        whole.append(tensor)
    return whole


# Load balancers: permutations of the sequence whose equal parts give the ranks equal work


class _LoadBalancer(ABC):
    """A permutation of the sequence."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> torch.Tensor | None:
        """Return indices so that `x[indices]` is in balanced order; with `restore`, those of the inverse permutation.

        Returns:
            (1, S), or (B, S) if batch rows differ; None for no permutation.
        """


@dataclass(eq=False)
class _HeadTailLoadBalancer(_LoadBalancer):
    """The order of `HeadTail()`, for any length: rank r of n has chunks r and 2n - 1 - r.

    >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices().tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """

    seq_length: int
    world_size: int
    device: str | torch.device

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        order = _layout_positions(HeadTail(), self.seq_length, self.world_size, self.device)
        return order.argsort()[None] if restore else order[None]


@dataclass(eq=False)
class _PerDocumentHeadTailLoadBalancer(_LoadBalancer):
    """Head-tail order within each of several packed documents.

    Args:
        seq_length_per_doc: lengths of the documents, one list for all batch rows or one for each row.
        world_size: number of ranks.
        device: of the indices.

    Raises:
        ValueError: on use, documents whose length is not a multiple of twice the number of ranks.

    >>> _PerDocumentHeadTailLoadBalancer([[4, 8]], 2, "cpu")._generate_indices().tolist()
    [[0, 3, 4, 5, 10, 11, 1, 2, 6, 7, 8, 9]]
    """

    seq_length_per_doc: Sequence[Sequence[int]]
    world_size: int
    device: str | torch.device

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        order = torch.stack([self._row(lengths) for lengths in self.seq_length_per_doc])
        return order.argsort(dim=1) if restore else order

    def _row(self, lengths: Sequence[int]) -> torch.Tensor:
        uneven = [length for length in lengths if length % (2 * self.world_size)]
        if uneven:
            raise ValueError(
                f"expected documents whose lengths are multiples of {2 * self.world_size}, twice the number of ranks; "
                f"got {uneven}"
            )
        layout = PerDocument([0, *accumulate(lengths)])
        return _layout_positions(layout, layout.seq_len, self.world_size, self.device)


@dataclass(eq=False)
class _PTRRLoadBalancer(_LoadBalancer):
    """Blocks of queries, assigned to ranks by their workload: the number of key blocks that they see.

    The blocks with the largest workload come first, one for each rank; each further round has the reverse rank order.

    Args:
        block_mask: (B or 1, 1, S, S), with square blocks.
        world_size: number of ranks; it must divide the number of blocks.

    Raises:
        ValueError: on use, a mask that does not fit.
    """

    block_mask: BlockMask
    world_size: int

    @staticmethod
    def ptrr_scheduling(process_time: torch.Tensor, group_size: int) -> torch.Tensor:
        """Assign tasks to groups.

        Args:
            process_time: (tasks,), the cost of each task.
            group_size: number of groups; it must divide the number of tasks.

        Returns:
            (groups, tasks / groups), the indices of each group's tasks, ascending.

        Raises:
            ValueError: shapes that do not fit.

        >>> _PTRRLoadBalancer.ptrr_scheduling(torch.tensor([1, 2, 3, 4]), 2).tolist()
        [[0, 3], [1, 2]]
        """
        if process_time.dim() != 1 or process_time.numel() % group_size:
            raise ValueError(
                f"expected one cost per task and a number of tasks that {group_size} groups divide evenly, got shape "
                f"{tuple(process_time.shape)}"
            )
        rounds = process_time.argsort(descending=True, stable=True).view(-1, group_size)
        rounds[1::2] = rounds[1::2].flip(1)
        return rounds.t().sort(dim=1).values

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        counts = self.block_mask.kv_num_blocks
        if self.block_mask.full_kv_num_blocks is not None:
            counts = counts + self.block_mask.full_kv_num_blocks
        rows, columns = self.block_mask.BLOCK_SIZE
        if counts.size(1) != 1 or rows != columns:
            raise ValueError(
                f"expected a mask of one head for all heads, with square blocks; got {counts.size(1)} heads and blocks "
                f"of {rows} x {columns}"
            )
        blocks = torch.stack([self.ptrr_scheduling(row[0], self.world_size).flatten() for row in counts])
        order = (blocks[..., None] * rows + torch.arange(rows, device=blocks.device)).flatten(1)
        return order.argsort(dim=1) if restore else order


def _layout_positions(layout: Layout, length: int, world_size: int, device: Any) -> torch.Tensor:
    """Return (S,) global positions of all ranks' tokens, rank after rank, for layouts of contiguous segments."""
    segments = [segment for rank in range(world_size) for segment in layout.segments(length, rank, world_size)]
    parts = [torch.arange(segment.start, segment.start + segment.length, device=device) for segment in segments]
    return torch.cat(parts)


def _balancer_indices(balancer: Any, length: int, restore: bool = False) -> torch.Tensor | None:
    """Return the permutation of a balancer of these classes, of torch's or of the program's; None for None."""
    if balancer is None:
        return None
    if not hasattr(balancer, "_generate_indices"):
        raise TypeError(f"expected load_balancer to be a _LoadBalancer or None, got {type(balancer).__name__}")
    indices = balancer._generate_indices(restore=restore)
    if indices is not None and (indices.dim() != 2 or indices.size(1) != length):
        raise ValueError(
            f"expected {type(balancer).__name__} to give indices of shape (1 or batch, {length}) for this sequence, "
            f"got {tuple(indices.shape)}"
        )
    return indices


def _balancer_layout(balancer: Any, length: int, world_size: int) -> Layout | None:
    """Return the layout that has a balancer's order, None if no layout has it."""
    if getattr(balancer, "world_size", world_size) != world_size:
        raise ValueError(
            f"expected a load balancer for {world_size} ranks, got one for {balancer.world_size}, "
            f"{type(balancer).__name__}"
        )
    if isinstance(balancer, _HeadTailLoadBalancer) and balancer.seq_length == length:
        return HeadTail()
    indices = _balancer_indices(balancer, length)
    if indices is None:
        return Contiguous()
    for layout in (HeadTail(), Contiguous()):
        if indices.tolist() == [_layout_positions(layout, length, world_size, "cpu").tolist()]:
            return layout
    return None


# Block masks


def _block_mask_of_rank(
    mask_mod: MaskMod, shape: tuple[int, int, int, int], blocks: tuple[int, int], mesh: DeviceMesh,
    order: torch.Tensor | None,
) -> BlockMask:  # fmt: skip
    """Return this rank's rows of a mask of `shape` (batch rows, heads, queries, keys).

    `order` is (1 or B, S), the global position of each token, rank after rank; None for contiguous shards.
    """
    batch, heads, q_len, kv_len = shape
    group = axis_group(mesh)
    world_size = group.size()
    if q_len % (world_size * blocks[0]):
        raise NotImplementedError(
            f"Q_LEN {q_len} is not divisible by CP mesh world size {world_size} * BLOCK_SIZE {blocks[0]}: block masks "
            "of shards are supported where every rank has whole blocks of queries"
        )
    if order is not None and kv_len != q_len:
        raise ValueError(f"expected as many keys as queries in a reordered sequence, got {q_len} and {kv_len}")
    device = mesh.device_type
    order = None if order is None else order.to(device)
    first = group.rank() * (q_len // world_size)

    def of_shard(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        if order is None:
            return mask_mod(b, h, q_idx + first, kv_idx)
        row = b if order.size(0) > 1 else b * 0
        return mask_mod(b, h, order[row, q_idx + first], order[row, kv_idx])

    create = _compiled() if device == "cuda" else create_block_mask
    return create(of_shard, batch, heads, q_len // world_size, kv_len, device=device, BLOCK_SIZE=blocks)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., BlockMask]:
    # Without compilation every element of the mask takes a byte.
    return torch.compile(create_block_mask, dynamic=False, fullgraph=True)
