"""Tensors (B, H, S, D) of equal values in memory of other orders than that of the dims."""

from __future__ import annotations

from collections.abc import Callable

import torch

MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "row after row": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "as projections leave it": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a larger one": lambda x: torch.nn.functional.pad(x, (1, 2, 1, 0, 1, 1))[:, 1:-1, 1:, 1:-2],
    "every other element": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "head dim first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
}
"""The one before the last has no unit stride anywhere."""
