"""torch's context parallel of FlexAttention, as its users must put it together of private parts; for benchmarks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import (
    _HeadTailLoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.distributed.tensor.experimental._context_parallel._attention import _create_cp_block_mask
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask

__all__ = ["FlexBalancer", "flex_cp_allgather"]

_TAKES_BLOCK_SIZE = "BLOCK_SIZE" in inspect.signature(_create_cp_block_mask).parameters  # from 2.15 on

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FlexBalancer:
    """How torch rearranges a sequence before it is cut into contiguous shards.

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
        """The same in each document; lengths are multiples of 2 n."""
        return cls(_PerDocumentHeadTailLoadBalancer([list(lengths)], world_size, device))

    @classmethod
    def by_processing_time(cls, blocks: BlockMask, world_size: int) -> FlexBalancer:
        """Blocks of queries, dealt by the number of key blocks that they see."""
        return cls(_PTRRLoadBalancer(blocks, world_size))

    def positions(self) -> torch.Tensor:
        """(S,): the token at each place of the rearranged sequence."""
        return self._balancer._generate_indices(restore=False)[0]

    def block_mask(self, mask_mod: MaskMod, seq_len: int, mesh: DeviceMesh) -> BlockMask:
        """This rank's queries against all keys, rearranged."""
        blocks = {"BLOCK_SIZE": (128, 128)} if _TAKES_BLOCK_SIZE else {}
        return _create_cp_block_mask(
            mask_mod, 1, 1, seq_len, seq_len, device_mesh=mesh, load_balancer=self._balancer, **blocks
        )
