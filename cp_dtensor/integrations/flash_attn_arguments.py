"""Argument conventions of flash-attn functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
import torch.distributed as dist

from cp_dtensor.api.varlen import Window, bottom_right_mask, heads_before_rows
from cp_dtensor.engine.validation import Mesh
from cp_dtensor.spec.masks import Mask, is_integer

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]
"""out, or (out, lse, None) where `return_attn_probs` was given."""


@dataclass(frozen=True)
class FlashAttnOptions:
    """Options of flash-attn's functions that have a value here which must not be ignored."""

    window_size: Sequence[int]
    softcap: float
    alibi_slopes: torch.Tensor | None

    def check(self) -> None:
        """Refuses what attention over sequence shards cannot do.

        Raises:
            NotImplementedError: what was received, and what is expected.
        """
        if self.softcap:
            raise NotImplementedError(
                f"capped logits are not supported on sequence shards yet: got softcap={self.softcap}, expected 0.0"
            )
        if self.alibi_slopes is not None:
            received = f"a tensor of shape {tuple(self.alibi_slopes.shape)}"
            raise NotImplementedError(
                f"ALiBi is not supported on sequence shards yet: got alibi_slopes, {received}, expected None"
            )

    @property
    def window(self) -> Window:
        """`window_size`, with None for -1.

        Raises:
            ValueError: no pair of numbers of keys.
        """
        ends = tuple(self.window_size) if isinstance(self.window_size, (tuple, list)) else ()
        if len(ends) != 2 or not all(is_integer(end) and end >= -1 for end in ends):
            raise ValueError(
                "expected window_size to be a pair (left, right) of numbers of keys, -1 for no limit; got "
                f"{self.window_size!r}"
            )
        left, right = (None if end == -1 else end for end in ends)
        return left, right

    def mask(self, causal: bool) -> Mask:
        """What flash-attn lets queries see: where lengths differ, the last query stands at the last key."""
        return bottom_right_mask(causal, self.window)


def heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views (B, H, S, D) of q, k and v (B, S, H, D), where H may be a multiple of k's heads.

    Raises:
        TypeError: not tensors.
        ValueError: shapes that do not fit; the message has all three.
    """
    return heads_before_rows(q, k, v, 1, "q, k and v of four dims (batch, sequence, heads, head_dim)")


def unpacked(name: str, packed: torch.Tensor, count: int, leading: str = "batch, sequence") -> tuple[torch.Tensor, ...]:
    """The `count` tensors (B, S, H, D) of a packed (B, S, count, H, D), as views; with other dims if others lead.

    Raises:
        TypeError: not a tensor.
        ValueError: another shape.
    """
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"expected {name} to be a torch.Tensor, got {type(packed).__name__}")
    dim = len(leading.split(","))
    if packed.dim() != dim + 3 or packed.size(dim) != count:
        raise ValueError(f"expected {name} of shape ({leading}, {count}, heads, head_dim), got {tuple(packed.shape)}")
    return packed.unbind(dim)


def check_longest(function: str, name: str, max_seqlen: int, longest: int) -> None:
    """Refuses a `max_seqlen` that is less than the longest document, which flash-attn would cut off.

    Raises:
        TypeError: no number.
        ValueError: too small a number.
    """
    if not hasattr(max_seqlen, "__index__"):
        raise TypeError(f"{function} expects {name} to be an integer, got {type(max_seqlen).__name__}")
    if index(max_seqlen) < longest:
        raise ValueError(f"{function} expects {name} to be at least {longest}, the longest document; got {max_seqlen}")


def group_or_default(group: Mesh | None) -> Mesh:
    """`group`, or the default process group.

    Raises:
        ValueError: there is no default process group.
    """
    if group is not None:
        return group
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        raise ValueError("expected a group, or torch.distributed.init_process_group() before; got group=None")
    return world


def flash_attn_result(out: torch.Tensor, lse: torch.Tensor, return_attn_probs: bool) -> AttentionResult:
    """What flash-attn's functions return, from (B, H, S, D) and (B, H, S): contiguous, for callers that view it."""
    out = out.transpose(1, 2).contiguous()
    return (out, lse, None) if return_attn_probs else out
