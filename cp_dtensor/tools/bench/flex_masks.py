"""The benchmark's masks as FlexAttention takes them: functions of positions, and blocks of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import BlockMask

from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.masks import Causal, SlidingWindow
from cp_dtensor.tools.bench.cases import Case

BLOCK = 128
"""Queries, and keys, of a block."""
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mask_mod(case: Case, device: torch.device) -> MaskMod:
    """The mask as a function of positions.

    Raises:
        NotImplementedError: it is none that is measured with FlexAttention.
    """
    match case.mask_value:
        case Documents(cu_seqlens, _, Causal()) as documents:
            lengths = torch.tensor(documents.lengths)
            document = torch.arange(len(cu_seqlens) - 1).repeat_interleave(lengths).to(device)
            return lambda b, h, q, kv: (q >= kv) & (document[q] == document[kv])
        case SlidingWindow(left, 0) if left is not None:
            return lambda b, h, q, kv: (q >= kv) & (q - kv <= left)
        case Causal():
            return lambda b, h, q, kv: q >= kv
    raise NotImplementedError(f"no FlexAttention for {case.mask}")


@lru_cache(maxsize=1)
def whole_mask(case: Case, device: torch.device) -> BlockMask:
    """The whole mask in blocks, as `create_block_mask` makes it, which would hold all pairs in memory or be compiled.

    Args:
        case: of a length that is a multiple of `BLOCK`.
        device: of the tables.
    """
    of_pairs, position = mask_mod(case, device), torch.arange(case.seq_len, device=device)
    none = torch.zeros((), dtype=torch.int64, device=device)
    kinds = []
    for rows in position.split(BLOCK):
        seen = of_pairs(none, none, rows[:, None], position).unflatten(1, (-1, BLOCK))
        kinds.append(torch.stack([seen.any(2).any(0), seen.all(2).all(0)]))
    some, every = torch.stack(kinds, 1)
    partial, full = (_listed(blocks) for blocks in (some & ~every, every))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=of_pairs)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row has, (1, 1, rows), and their columns before the others, (1, 1, rows, columns)."""
    listed = blocks[None, None].to(torch.int32)
    return listed.sum(-1, dtype=torch.int32), listed.argsort(dim=-1, descending=True, stable=True).to(torch.int32)
