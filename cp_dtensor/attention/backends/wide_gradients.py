"""Backend with float32 gradients from the Triton kernels, around a backend of torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.masked import RowMask, attention_backward
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import TileMask

_FULL, _CAUSAL = RowMask(), RowMask(causal_offset=0)


@dataclass(frozen=True)
class WideGradients(AttentionBackend):
    """The forward of another backend, with gradients in float32 (float64 for float64 inputs).

    torch's kernels round gradients to the dtype of their inputs, so that a sum of several has several rounding errors.
    Float32 gradients of a rank's own tile, usually the largest term, avoid the largest of these errors.
    """

    backend: AttentionBackend

    @property
    def name(self) -> str:
        return self.backend.name

    def refusal(self, spec: CallSpec) -> str | None:
        return self.backend.refusal(spec)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.backend.forward(q, k, v, mask, scale)

    def backward(
        self, grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, mask: TileMask, scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        rows = _CAUSAL if mask.is_causal else _FULL
        grad_dtype = torch.promote_types(q.dtype, torch.float32)
        return attention_backward(grad_out, q, k, v, out, lse, rows, scale, grad_dtype=grad_dtype)
