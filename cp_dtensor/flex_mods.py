"""Functions of FlexAttention that are written for positions in the whole sequence, as functions of local rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import noop_mask

from cp_dtensor.flex_tables import FULL, PARTIAL, Tables

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ScoreMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def local_mask_mod(
    mod: MaskMod, positions: torch.Tensor, tables: Tables, kv_block: int, kv_total: torch.Tensor | None = None
) -> MaskMod:
    """`mod`, of global positions, as a function of local rows.

    Args:
        mod: as `BlockMask` has it.
        positions: those of the rows, (rows,) or (batch, rows).
        tables: of the rows.
        kv_block: how many keys a block has.
        kv_total: (1,), the number of keys where there may be more than belong to the sequence.
    """
    kinds, kinds_row = tables.kinds, tables.kinds_row
    if mod is noop_mask and kinds is None and kv_total is None:
        return mod

    def of_positions(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        seen = mod(b, h, positions[b, q] if positions.dim() > 1 else positions[q], _existing(kv, kv_total))
        if kinds is not None and kinds_row is not None:
            block = kinds_row[b, q] if kinds_row.dim() > 1 else kinds_row[q]
            mask_b, mask_h = b if kinds.size(0) > 1 else b * 0, h if kinds.size(1) > 1 else h * 0
            kind = kinds[mask_b, mask_h, block, kv // kv_block]
            seen = (kind == FULL) | ((kind == PARTIAL) & seen)
        return seen if kv_total is None else seen & (kv < kv_total[0])

    return of_positions


def local_score_mod(
    mod: ScoreMod | None, positions: torch.Tensor, kv_total: torch.Tensor | None = None
) -> ScoreMod | None:
    """`mod`, of global positions, as a function of local rows; arguments as those of `local_mask_mod`."""
    if mod is None:
        return None

    def of_positions(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        position = positions[b, q] if positions.dim() > 1 else positions[q]
        return mod(score, b, h, position, _existing(kv, kv_total))

    return of_positions


def _existing(kv: torch.Tensor, kv_total: torch.Tensor | None) -> torch.Tensor:
    """A key of the sequence, any for those behind the last, since functions look things up by it."""
    return kv if kv_total is None else torch.where(kv < kv_total[0], kv, 0)
