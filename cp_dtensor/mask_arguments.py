"""Checks of masks, dropout and sinks that a caller passes, before anything is launched."""

from __future__ import annotations

import torch

from cp_dtensor.layouts import Layout
from cp_dtensor.masks import Causal, Full, Mask, shown_by_both

_TO_SHARD = "context_parallel_shard(mesh, [attn_mask], [-2]) makes it of a whole one"


def refuse_unsupported_sdpa(attn_mask: torch.Tensor | None, dropout_p: float) -> None:
    """Refuses what fused operators cannot have on sequence shards, where SDPA itself can, rather than ignoring it."""
    if attn_mask is not None:
        raise NotImplementedError(
            f"attn_mask is not supported by this operator on sequence shards: got a mask of shape "
            f"{tuple(attn_mask.shape)}, expected None; F.scaled_dot_product_attention takes it"
        )
    if dropout_p:
        raise NotImplementedError(
            f"dropout is not supported by this operator on sequence shards: got dropout_p={dropout_p}, expected 0.0; "
            "F.scaled_dot_product_attention takes it"
        )


def checked_mask(mask: object, is_causal: bool) -> Mask:
    """What a call's mask and `is_causal` show together.

    Raises:
        TypeError: not a mask value (a tensor goes to attn_mask).
    """
    if mask is not None and not isinstance(mask, Mask):
        got = f"the class {mask.__name__}" if isinstance(mask, type) else type(mask).__name__
        hint = "; pass tensors as attn_mask" if isinstance(mask, torch.Tensor) else ""
        raise TypeError(f"expected mask to be a Mask such as SlidingWindow(1024, 0), got {got}{hint}")
    return shown_by_both(Full() if mask is None else mask, Causal() if is_causal else Full())


def checked_dropout_p(dropout_p: float) -> float:
    """A probability.

    Raises:
        TypeError: no number.
        ValueError: a number that is none.
    """
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"expected dropout_p to be a number between 0 and 1, got {dropout_p!r}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"expected dropout_p between 0 and 1, got {dropout_p}")
    return float(dropout_p)


def checked_sinks(sinks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """A logit of each query head of q (B, H, S, D).

    Raises:
        TypeError: not a tensor.
        ValueError: not floating, of other heads, or on another device.
    """
    if not isinstance(sinks, torch.Tensor):
        raise TypeError(f"expected sinks to be a torch.Tensor, got {type(sinks).__name__}")
    received = f"got {sinks.dtype} {tuple(sinks.shape)} on {sinks.device} for q {tuple(q.shape)}"
    if not sinks.is_floating_point():
        raise ValueError(f"expected sinks of a floating dtype; {received}")
    if tuple(sinks.shape) != (q.size(1),):
        raise ValueError(f"expected one sink for each of this rank's query heads, ({q.size(1)},); {received}")
    if sinks.device != q.device:
        raise ValueError(f"expected sinks on the device of q, {q.device}; {received}")
    return sinks


def four_dims_of_mask(attn_mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """An `attn_mask` as (B or 1, H or 1, S or 1, key positions or 1), not expanded.

    Raises:
        TypeError: not a tensor.
        ValueError: neither boolean nor floating, on another device, or of dims that do not broadcast to those of q.
    """
    if not isinstance(attn_mask, torch.Tensor):
        raise TypeError(f"expected attn_mask to be a torch.Tensor, got {type(attn_mask).__name__}")
    received = f"got {attn_mask.dtype} {tuple(attn_mask.shape)} on {attn_mask.device} for q {tuple(q.shape)}"
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"expected a boolean or floating attn_mask; {received}")
    if attn_mask.device != q.device:
        raise ValueError(f"expected attn_mask on the device of q, {q.device}; {received}")
    fits = attn_mask.dim() <= 4 and all(
        size in (1, full) for size, full in zip(attn_mask.shape[-2::-1], q.shape[2::-1], strict=False)
    )
    if not fits or attn_mask.dim() < 1:
        of_other_rows = attn_mask.dim() > 1 and attn_mask.size(-2) not in (1, q.size(2))
        hint = f". {_TO_SHARD}" if of_other_rows else ""
        raise ValueError(
            "expected attn_mask to broadcast to (batch, heads, this rank's queries, keys of the whole sequence); "
            f"{received}{hint}"
        )
    return attn_mask[(None,) * (4 - attn_mask.dim())]


def check_bias(
    q: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: tuple[int, int],
    layout: Layout | None = None,
    world_size: int = 1,
) -> None:
    """Refuses an attn_mask that does not have the keys of the whole sequence, or whose rows are not those of q.

    `lengths` are those of all queries and keys; `layout` is the one that divided the rows over `world_size` ranks, if
    it is not known to be alike in every batch row.
    """
    if bias is None:
        return
    q_len, kv_len = lengths
    if bias.size(3) not in (1, kv_len):
        hint = _TO_SHARD
        if bias.size(2) == 1 < q.size(2):  # of padding, say: there are no rows to shard
            hint = "One that is the same for all queries is passed whole"
        raise ValueError(
            f"expected attn_mask to have this rank's query rows ({q.size(2)}, in layout order) and the {kv_len} keys "
            f"of the whole sequence, in the order of their positions; got {tuple(bias.shape)}. {hint}"
        )
    if layout is None or bias.size(0) > 1 or len(layout.batch_groups(q.size(0))) == 1:
        return
    # Of a single local query it cannot be seen whether the mask has rows; so where a rank has one, all refuse.
    if bias.size(2) > 1 or min(layout.local_length(q_len, rank, world_size) for rank in range(world_size)) <= 1:
        raise ValueError(
            f"{layout} gives this rank other queries in some batch rows than in others, so an attn_mask with query "
            f"rows needs all {q.size(0)} batch rows; got {tuple(bias.shape)}. Expand it before it is sharded"
        )
