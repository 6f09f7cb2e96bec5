"""Argument conventions of flash-attn functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor.api.extension import Mesh, is_integer

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
"""out, or (out, lse, None) with `return_attn_probs`."""


class PackedForms(ABC):
    """A flash-attn function of q, k and v together with its `kvpacked` and `qkvpacked` forms."""

    leading_dims = "batch, sequence"
    """The dims of q before (heads, head_dim)."""

    @abstractmethod
    def func(self, *args: Any, **kwargs: Any) -> AttentionResult:
        """Computes attention of separate q, k and v."""

    def kvpacked_func(self, q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> AttentionResult:
        """Calls the function without `kvpacked`; kv is k and v stacked before (heads, head_dim)."""
        return self.func(q, *unpacked("kv", kv, 2, self.leading_dims), *args, **kwargs)

    def qkvpacked_func(self, qkv: torch.Tensor, *args: Any, **kwargs: Any) -> AttentionResult:
        """Calls the function without `qkvpacked`; qkv is q, k and v stacked before (heads, head_dim)."""
        return self.func(*unpacked("qkv", qkv, 3, self.leading_dims), *args, **kwargs)


def unpacked(name: str, packed: torch.Tensor, count: int, leading_dims: str = "batch, sequence") -> tuple[Any, ...]:
    """`count` views (B, S, H, D) of `packed` (B, S, count, H, D), or of one with other leading dims."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(packed).__name__}")
    dim = len(leading_dims.split(","))
    if packed.dim() != dim + 3 or packed.size(dim) != count:
        shape = f"({leading_dims}, {count}, heads, head_dim)"
        raise ValueError(f"expected {name} of shape {shape}, got {tuple(packed.shape)}")
    return packed.unbind(dim)


def supported_window(window_size: Sequence[int], alibi_slopes: torch.Tensor | None) -> tuple[int | None, int | None]:
    """The `window_size` of flash-attn as (left, right), with None for -1; refuses unsupported options."""
    if alibi_slopes is not None:
        received = f"a tensor of shape {tuple(alibi_slopes.shape)}"
        raise NotImplementedError(
            f"ALiBi is not supported on sequence shards yet: got alibi_slopes, {received}, expected None"
        )
    ends = tuple(window_size) if isinstance(window_size, (tuple, list)) else ()
    if len(ends) != 2 or not all(is_integer(end) and end >= -1 for end in ends):
        raise ValueError(
            f"expected window_size to be a pair (left, right) of numbers of keys, -1 for no limit; got {window_size!r}"
        )
    left, right = (None if end == -1 else end for end in ends)
    return left, right


def check_longest(function: str, name: str, max_seqlen: int, longest: int) -> None:
    """Refuses a `max_seqlen` below the longest document, which flash-attn would truncate."""
    if not hasattr(max_seqlen, "__index__"):
        raise TypeError(f"{function} expects {name} to be an integer, got {type(max_seqlen).__name__}")
    if index(max_seqlen) < longest:
        raise ValueError(f"{function} expects {name} to be at least {longest}, the longest document; got {max_seqlen}")


def group_or_default(group: Mesh | None) -> Mesh:
    """`group`, or the default process group if None."""
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        raise ValueError("expected a group, or torch.distributed.init_process_group() before; got group=None")
    return group
