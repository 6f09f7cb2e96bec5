"""torch's fused SDPA ops on a ring, and the merge of partial results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cp_dtensor import Causal, Contiguous, Full, Layout
from cp_dtensor.api.extension import (
    merge,
    refuse_unsupported_sdpa,
    ring_attention_backward,
    ring_attention_by_backend,
)


class _SDPAMerger:
    """Merges the results of attention calls over different keys.

    Args:
        convert_to_f32: no effect: sums are always in float32 (float64 for float64 results).
        seq_dim: the sequence dim of `out`; calls with `partial` are about its last rows.

    Rows that saw no key (lse -inf) do not count; they are zero if no call saw a key.
    """

    def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
        self._seq_dim = seq_dim
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._dtypes = (torch.float32, torch.float32)
        self._lse_has_last_dim = False

    def step(self, out: torch.Tensor, lse: torch.Tensor, partial: bool) -> None:
        """Adds the result of a call.

        Args:
            out: (B, H, S, D) in torch's own calls; otherwise any shape whose last dim is not the sequence.
            lse: natural log of the softmax denominator, in out's shape without its last dim or with a last dim of 1;
                longer in dim 2 if padded by the efficient backend.
            partial: True if the result is about the last rows only.

        Raises:
            ValueError: shapes that do not fit.
            RuntimeError: the first result is partial.
        """
        if partial and self._state is None:
            raise RuntimeError("expected the first result to be of all rows, got partial=True")
        self._dtypes = (out.dtype, lse.dtype)
        self._lse_has_last_dim = lse.dim() == out.dim()
        lse = _without_padding(lse.squeeze(-1) if self._lse_has_last_dim else lse, out)
        if self._state is None:
            state_dtype = torch.promote_types(lse.dtype, torch.float32)
            # Copies: the tensors that ops return stay theirs.
            total_out, total_lse = (
                x.to(state_dtype, copy=True, memory_format=torch.contiguous_format) for x in (out, lse)
            )
            self._state = total_out, total_lse
            return
        total_out, total_lse = self._state
        if partial:
            rows = out.size(self._seq_dim)
            first = total_out.size(self._seq_dim) - rows
            total_out, total_lse = (x.narrow(self._seq_dim, first, rows) for x in (total_out, total_lse))
        if total_out.shape != out.shape:
            raise ValueError(f"expected a result of shape {tuple(total_out.shape)}, got {tuple(out.shape)}")
        out, lse, total_out, total_lse = (x[(None,) * max(4 - out.dim(), 0)] for x in (out, lse, total_out, total_lse))
        merge(total_out, total_lse, total_out, total_lse, [((0, out.size(2)), out, lse.contiguous())])

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `(out, lse)` over all keys, in the form and dtypes of the last call.

        Raises:
            RuntimeError: no call was merged.
        """
        if self._state is None:
            raise RuntimeError("expected at least one result to have been merged")
        out, lse = (x.to(dtype) for x, dtype in zip(self._state, self._dtypes, strict=True))
        return out, lse.unsqueeze(-1) if self._lse_has_last_dim else lse


def _without_padding(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Returns (B, H, S) of an LSE that the efficient backend may have padded to a multiple of 32 rows.

    Raises:
        ValueError: any other shape.
    """
    if out.dim() == 4 and lse.shape[:2] == out.shape[:2] and lse.size(-1) > out.size(2):
        lse = lse[..., : out.size(2)]
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"expected an lse of shape {tuple(out.shape[:-1])}, got {tuple(lse.shape)}")
    return lse


_CPU_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_EFFICIENT = "_scaled_dot_product_efficient_attention"
_CUDNN = "_scaled_dot_product_cudnn_attention"
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "FLASH_ATTENTION",
    _CPU_FLASH: "FLASH_ATTENTION",
    _EFFICIENT: "EFFICIENT_ATTENTION",
    _CUDNN: "CUDNN_ATTENTION",
}


def as_aten_op(op: Any) -> AtenOp | None:
    """Returns the fused SDPA op of an aten op with or without overload, forward or backward; None for other ops."""
    namespace, _, name = str(op).partition(".")
    name = name.partition(".")[0].removesuffix("_backward")
    return AtenOp(name) if namespace == "aten" and name in _BACKENDS else None


@dataclass(frozen=True)
class AtenOp:
    """A fused SDPA op: the backend of a ring attention and the form of its results."""

    name: str
    """In `torch.ops.aten`, of the forward op."""

    def forward(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Returns the results of the op; differentiable. There is no random state, since there is no dropout.

        Args:
            group: the ranks of the ring.
            layout: the layout under a causal mask, None without a mask.
            query, key, value: (B, H, S, D), of equal shapes on all ranks.
            kwargs: those of the op.

        Raises:
            TypeError, ValueError: tensors that do not fit.
            NotImplementedError: masks, dropout, and problems that the backend refuses.
        """
        out, lse = ring_attention_by_backend(
            _BACKENDS[self.name], query, key, value, **_arguments(group, layout, query, key, kwargs)
        )
        if self.name == _CPU_FLASH:
            return out, lse
        state = query.new_empty(0, dtype=torch.int64)
        if self.name == _EFFICIENT:
            return out, lse, state, state
        if self.name == _CUDNN:
            lse = lse.unsqueeze(-1)
        return out, lse, None, None, query.size(2), key.size(2), state, state, query.new_empty(0)

    def backward(
        self,
        group: dist.ProcessGroup,
        layout: Layout | None,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Returns the results of the op's backward.

        Raises:
            as `forward`.
        """
        lse = _without_padding(lse.squeeze(-1) if lse.dim() == out.dim() else lse, out).contiguous()
        arguments = _arguments(group, layout, query, key, kwargs)
        grads = ring_attention_backward(_BACKENDS[self.name], grad_out, query, key, value, out, lse, **arguments)
        return (*grads, None) if self.name == _EFFICIENT else grads


def _arguments(
    group: dist.ProcessGroup, layout: Layout | None, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a ring attention from those of the op, except tensors.

    Raises:
        NotImplementedError: masks, dropout, and a request for the attention weights.
    """
    mask = next((kwargs[name] for name in ("attn_bias", "attn_mask") if kwargs.get(name) is not None), None)
    refuse_unsupported_sdpa(mask, kwargs.get("dropout_p") or 0.0)
    if kwargs.get("return_debug_mask"):
        raise NotImplementedError("no rank has the attention weights of the whole sequence: got return_debug_mask")
    return {
        "mesh": group,
        "mask": Full() if layout is None else Causal(),
        "layout": layout or Contiguous(),
        "scale": kwargs.get("scale"),
        "seq_len": (query.size(2) * group.size(), key.size(2) * group.size()),
    }
