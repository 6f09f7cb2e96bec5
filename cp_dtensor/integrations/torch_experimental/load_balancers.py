"""Load balancers: permutations of the sequence whose equal parts give the ranks equal work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor import Contiguous, HeadTail, Layout


class _LoadBalancer(ABC):
    """A permutation of the sequence."""

    @abstractmethod
    def _generate_indices(self, restore: bool = False) -> torch.Tensor | None:
        """Returns indices so that `x[indices]` is in balanced order; with `restore`, those of the inverse permutation.

        Returns:
            (1, S), or (B, S) if batch rows differ; None for no permutation.
        """


class _HeadTailLoadBalancer(_LoadBalancer):
    """The order of `HeadTail()`, for any length: rank r of n has chunks r and 2n - 1 - r.

    >>> _HeadTailLoadBalancer(8, 2, "cpu")._generate_indices().tolist()
    [[0, 1, 6, 7, 2, 3, 4, 5]]
    """

    def __init__(self, seq_length: int, world_size: int, device: str | torch.device) -> None:
        self.seq_length = seq_length
        self.world_size = world_size
        self.device = device

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        order = layout_positions(HeadTail(), self.seq_length, self.world_size, self.device)
        return _restoring(order[None]) if restore else order[None]


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

    def __init__(
        self, seq_length_per_doc: Sequence[Sequence[int]], world_size: int, device: str | torch.device
    ) -> None:
        self.seq_length_per_doc = seq_length_per_doc
        self.world_size = world_size
        self.device = device

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        order = torch.stack([self._row(lengths) for lengths in self.seq_length_per_doc])
        return _restoring(order) if restore else order

    def _row(self, lengths: Sequence[int]) -> torch.Tensor:
        uneven = [length for length in lengths if length % (2 * self.world_size)]
        if uneven:
            raise ValueError(
                f"expected documents whose lengths are multiples of {2 * self.world_size}, twice the number of ranks; "
                f"got {uneven}"
            )
        by_document = []  # (ranks, tokens of a rank)
        start = 0
        for length in lengths:
            order = start + layout_positions(HeadTail(), length, self.world_size, self.device)
            by_document.append(order.view(self.world_size, -1))
            start += length
        return torch.cat(by_document, dim=1).flatten()


class _PTRRLoadBalancer(_LoadBalancer):
    """Blocks of queries, assigned to ranks by their workload: the number of key blocks that they see.

    The blocks with the largest workload come first, one for each rank; each further round has the reverse rank order.

    Args:
        block_mask: (B or 1, 1, S, S), with square blocks.
        world_size: number of ranks; it must divide the number of blocks.

    Raises:
        ValueError: on use, a mask that does not fit.
    """

    def __init__(self, block_mask: BlockMask, world_size: int) -> None:
        self.block_mask = block_mask
        self.world_size = world_size

    @staticmethod
    def ptrr_scheduling(process_time: torch.Tensor, group_size: int) -> torch.Tensor:
        """Assigns tasks to groups.

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
        return _restoring(order) if restore else order


def layout_positions(layout: Layout, length: int, world_size: int, device: Any) -> torch.Tensor:
    """Returns (S,) global positions of all ranks' tokens, rank after rank, for layouts of contiguous segments."""
    segments = [segment for rank in range(world_size) for segment in layout.segments(length, rank, world_size)]
    parts = [torch.arange(segment.start, segment.start + segment.length, device=device) for segment in segments]
    return torch.cat(parts)


def balancer_indices(balancer: Any, length: int, restore: bool = False) -> torch.Tensor | None:
    """Returns the permutation of a balancer: one of these classes, of torch's or of the program's own.

    Raises:
        TypeError: not a load balancer.
        ValueError: a permutation of another length.
    """
    if not hasattr(balancer, "_generate_indices"):
        raise TypeError(f"expected load_balancer to be a _LoadBalancer or None, got {type(balancer).__name__}")
    indices = balancer._generate_indices(restore=restore)
    if indices is not None and (indices.dim() != 2 or indices.size(1) != length):
        raise ValueError(
            f"expected {type(balancer).__name__} to give indices of shape (1 or batch, {length}) for this sequence, "
            f"got {tuple(indices.shape)}"
        )
    return indices


def balancer_layout(balancer: Any, length: int, world_size: int) -> Layout | None:
    """Returns the layout that has a balancer's order, None if no layout has it.

    Raises:
        TypeError, ValueError: as `balancer_indices`; a balancer for another number of ranks.
    """
    if balancer is None:
        return Contiguous()
    if getattr(balancer, "world_size", world_size) != world_size:
        raise ValueError(
            f"expected a load balancer for {world_size} ranks, got one for {balancer.world_size}, "
            f"{type(balancer).__name__}"
        )
    if isinstance(balancer, _HeadTailLoadBalancer) and balancer.seq_length == length:
        return HeadTail()
    indices = balancer_indices(balancer, length)
    if indices is None:
        return Contiguous()
    for layout in (HeadTail(), Contiguous()):
        if indices.size(0) == 1 and indices[0].tolist() == layout_positions(layout, length, world_size, "cpu").tolist():
            return layout
    return None


def _restoring(order: torch.Tensor) -> torch.Tensor:
    return order.argsort(dim=1)
