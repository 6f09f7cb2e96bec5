"""Attention of tiles whose rows see intervals of columns, with bias and dropout: our own kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor.extras import NO_EXTRAS, Extras
from cp_dtensor.local_attention.base import LocalAttention, Problem
from cp_dtensor.local_attention.tile_rows import TileRows, tile_rows
from cp_dtensor.masked_attention import (
    Dropout,
    attention_backward,
    attention_bias_gradient,
    attention_forward,
)
from cp_dtensor.tile_masks import IntervalMask, TileMask


@dataclass(frozen=True)
class ByRowAttention(LocalAttention):
    """Any dtype and head dim. Triton on GPUs up to head dim 256 (float32: 128), torch operations elsewhere.

    Deterministic, forward and backward.
    """

    extras: Extras = NO_EXTRAS
    """Of the tile that is computed."""
    delta: torch.Tensor | None = None
    """(B, H, S) of its rows, for backward: the same for all tiles of a row, so the ring computes it, once."""

    @property
    def name(self) -> str:
        return "BY_ROW"

    def refusal(self, problem: Problem) -> str | None:
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = _rows(mask, q)
        return attention_forward(q, k, v, rows.mask, scale, bias=self._bias(rows), dropout=self._dropout(rows))

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: TileMask,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = _rows(mask, q)
        dq, dk, dv, _ = attention_backward(
            grad_out, q, k, v, out, lse, rows.mask, scale, bias=self._bias(rows), delta=self.delta,
            dropout=self._dropout(rows),
        )  # fmt: skip
        return dq, dk, dv

    def add_bias_gradient(
        self,
        total: torch.Tensor,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        mask: TileMask,
        scale: float,
    ) -> None:
        """Adds this tile's share of the gradient of the bias to `total`, which is of the bias's shape."""
        rows = _rows(mask, q)
        bias = self._bias(rows)
        assert bias is not None
        assert self.delta is not None
        share = attention_bias_gradient(
            grad_out, q, k, v, lse, rows.mask, scale, bias=bias, delta=self.delta,
            dropout=self._dropout(rows), grad_dtype=total.dtype,
        )  # fmt: skip
        rows.add_to_bias_columns(total, share)

    def _bias(self, rows: TileRows) -> torch.Tensor | None:
        return None if self.extras.bias is None else rows.bias_columns(self.extras.bias)

    def _dropout(self, rows: TileRows) -> Dropout | None:
        extras = self.extras
        if extras.seed is None:
            return None
        return Dropout(
            extras.dropout_p, extras.seed, rows.q_positions, rows.kv_positions, extras.first_batch, extras.first_head,
            rows.in_runs,
        )  # fmt: skip


def _rows(mask: TileMask, q: torch.Tensor) -> TileRows:
    assert isinstance(mask, IntervalMask), "plans for this backend mask by row"
    return tile_rows(mask, q.device)
