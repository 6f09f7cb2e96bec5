"""Private names of torch's context parallel that the benchmark needs. The only file of `tools/` that imports any."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention
from torch.distributed.tensor.experimental._attention import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["FlexBalancer", "experimental_context_parallel_settings", "flex_cp_allgather"]

_TAKES_BLOCK_SIZE = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexBalancer:
    """Permutation of a sequence before torch divides it into contiguous shards.

    Args:
        balancer: one of torch's load balancers.
    """

    def __init__(self, balancer: Any) -> None:
        self._balancer = balancer

    @classmethod
    def head_tail(cls, seq_len: int, world_size: int, device: torch.device) -> FlexBalancer:
        """Rank r has the chunks r and 2n - 1 - r."""
        return cls(_HeadTailLoadBalancer(seq_len, world_size, device))

    @classmethod
    def per_document(cls, lengths: Sequence[int], world_size: int, device: torch.device) -> FlexBalancer:
        """Head-tail order in each document; lengths are multiples of 2n."""
        return cls(_PerDocumentHeadTailLoadBalancer([list(lengths)], world_size, device))

    @classmethod
    def by_processing_time(cls, blocks: BlockMask, world_size: int) -> FlexBalancer:
        """Blocks of queries, assigned by the number of key blocks that they see."""
        return cls(_PTRRLoadBalancer(blocks, world_size))

    def positions(self) -> torch.Tensor:
        """Returns (S,), the token at each place of the permuted sequence."""
        return self._balancer._generate_indices(restore=False)[0]

    def block_mask(self, mask_mod: MaskMod, seq_len: int, mesh: DeviceMesh) -> BlockMask:
        """Returns the mask of this rank's queries and all keys, permuted."""
        blocks = {"BLOCK_SIZE": (128, 128)} if _TAKES_BLOCK_SIZE else {}
        return _create_cp_block_mask(
            mask_mod, 1, 1, seq_len, seq_len, device_mesh=mesh, load_balancer=self._balancer, **blocks
        )


@contextmanager
def experimental_context_parallel_settings(rotate_method: str, *, load_balance: bool) -> Iterator[None]:
    """Sets the KV transport and the load balance of torch's own `context_parallel` while open."""
    options = _attention._cp_options
    before = options.rotate_method, options.enable_load_balance
    _attention.set_rotate_method(rotate_method)
    options.enable_load_balance = load_balance
    try:
        yield
    finally:
        options.rotate_method, options.enable_load_balance = before
