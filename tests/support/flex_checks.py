"""Masks, scores and references for tests of FlexAttention.

torch's FlexAttention has no gradients on CPUs, and uncompiled it does not read the tables of block masks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask

from cp_dtensor import context_parallel
from support.problems import dense, normals

Mod = Callable[..., torch.Tensor]
SCALE = 0.3


def window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Mask: causal, the last 7 keys in the first batch row, 8 in the second."""
    return (q >= kv) & (q - kv < 7 + b)


def documents(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Mask: bidirectional in documents of 13 tokens, without the first token of each document as a key."""
    return (q // 13 == kv // 13) & (kv % 13 > 0) & (q % 13 > 0)


def distance(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Score that depends on all its arguments."""
    return score * 0.5 + (q - kv) * 0.02 * (h + 1) + kv * 0.01 * b


def context(**kwargs: Any) -> context_parallel:
    """Returns a context over all ranks."""
    return context_parallel(dist.group.WORLD, **kwargs)


def block_mask(
    mod: Mod, length: int, block: int | tuple[int, int] = 8, batch: int | None = None, device: str = "cpu"
) -> BlockMask:
    """Returns a block mask of the whole sequence."""
    return create_block_mask(mod, batch, None, length, length, device=device, BLOCK_SIZE=block)


def draw(length: int, width: int = 8, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[torch.Tensor]:
    """Returns q, k, v and the gradient of out, equal on every rank; 4 heads that share 2 key heads."""
    normal = normals(length)
    return [normal(2, heads, length, width).to(device, dtype) for heads in (4, 2, 2, 4)]


def grid(
    batch: int, heads: int, q_len: int, kv_len: int, device: torch.device | None = None
) -> list[torch.Tensor]:  # fmt: skip
    """Returns b, h, q and kv of every pair."""
    shapes = [(batch, 1, 1, 1), (1, heads, 1, 1), (1, 1, q_len, 1), (1, 1, 1, kv_len)]
    return [torch.arange(max(shape), device=device).view(shape) for shape in shapes]


def listed_blocks(mask: BlockMask, batch: int, heads: int) -> list[torch.Tensor]:
    """Returns the partial and the full blocks, each (B, H, blocks of queries, blocks of keys)."""
    blocks = [-(-length // block) for length, block in zip(mask.seq_lengths, mask.BLOCK_SIZE, strict=True)]
    listed, device = [], mask.kv_indices.device
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        table = torch.zeros(batch, heads, *blocks, dtype=torch.bool, device=device)
        if counts is not None:
            for place in product(range(batch), range(heads), range(blocks[0])):
                b, h, row = place[0] % counts.size(0), place[1] % counts.size(1), place[2]
                table[place][indices[b, h, row, : counts[b, h, row]].long()] = True
        listed.append(table)
    return listed


def visible(mask: BlockMask, batch: int, heads: int, q_len: int, kv_len: int) -> torch.Tensor:
    """Returns the allowed pairs (B, H, q, kv) by a mask's tables and function, as compiled kernels read them."""
    assert mask.seq_lengths == (q_len, kv_len)
    b, h, q, kv = grid(batch, heads, q_len, kv_len, mask.kv_indices.device)
    place = b, h, q // mask.BLOCK_SIZE[0], kv // mask.BLOCK_SIZE[1]
    partial, full = (table[place] for table in listed_blocks(mask, batch, heads))
    return full | (partial & mask.mask_mod(b, h, q, kv))


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Mod | None, seen: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `(out, lse)` by the formula; rows without keys are 0 and -inf."""
    changed = None if score_mod is None else lambda logits: score_mod(logits, *grid(*logits.shape, logits.device))
    return dense(q, k, v, seen, scale, change=changed)


def dense_flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Mod | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """Stand-in for `flex_attention` that is differentiable on CPUs."""
    assert enable_gqa or query.size(1) == key.size(1)
    assert kernel_options in (None, {})
    seen = None
    if block_mask is not None:
        assert tuple(block_mask.shape[-2:]) == (query.size(2), key.size(2))
        seen = visible(block_mask, *query.shape[:2], query.size(2), key.size(2))
    out, lse = dense_attention(query, key, value, score_mod, seen, query.size(3) ** -0.5 if scale is None else scale)
    if return_aux is not None:
        return out, AuxOutput(lse=lse)
    return (out, lse) if return_lse else out


def traceable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, block_mask: BlockMask | None,
    scale: float, enable_gqa: bool, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Stand-in for `flex_attention` with gradients that Dynamo traces."""
    seen = None
    if block_mask is not None:
        seen = block_mask.mask_mod(*grid(*query.shape[:3], key.size(2)))
    return dense_attention(query, key, value, score_mod, seen, scale)[0]


@torch.enable_grad()
def one_device(
    whole: list[torch.Tensor], mask_mod: Mod | None, score_mod: Mod | None, scale: float = SCALE
) -> list[torch.Tensor]:
    """Returns out, dq, dk, dv and lse of the whole sequence, also under `torch.no_grad`."""
    q, k, v = (tensor.detach().clone().requires_grad_() for tensor in whole[:3])
    seen = None
    if mask_mod is not None:
        shape = (*q.shape[:2], q.size(2), k.size(2))
        seen = mask_mod(*grid(*shape, q.device)).expand(shape)
    out, lse = dense_attention(q, k, v, score_mod, seen, scale)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3]), lse.detach()]
