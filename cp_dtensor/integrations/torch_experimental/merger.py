"""`_SDPAMerger`: attention results over parts of the keys, merged one after the other."""

from __future__ import annotations

import torch

from cp_dtensor.merge import merge


class _SDPAMerger:
    """Merges results of attention calls over different keys.

    Args:
        convert_to_f32: sums are in float32 (float64 for float64 results) whatever it is.
        seq_dim: the sequence dim of `out`, of which calls with `partial` concern the last rows.

    Rows that saw no key (lse -inf) count nothing, and stay zero where none of the calls saw one.
    """

    def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
        self._seq_dim = seq_dim
        self._state: tuple[torch.Tensor, torch.Tensor] | None = None
        self._dtypes = (torch.float32, torch.float32)
        self._lse_has_last_dim = False

    def step(self, out: torch.Tensor, lse: torch.Tensor, partial: bool) -> None:
        """Adds the result of a call.

        Args:
            out: (B, H, S, D) in torch's own calls; any shape whose last dim is not of the sequence.
            lse: out's shape without its last dim, or with 1 instead of it; longer in dim 2 as padded by the efficient
                backend. Natural log of the softmax denominator.
            partial: the result is of the last rows only.

        Raises:
            ValueError: shapes that do not fit.
            RuntimeError: the first result is partial.
        """
        if partial and self._state is None:
            raise RuntimeError("expected the first result to be of all rows, got partial=True")
        self._dtypes = (out.dtype, lse.dtype)
        self._lse_has_last_dim = lse.dim() == out.dim()
        lse = lse.squeeze(-1) if self._lse_has_last_dim else lse
        lse = without_padding(lse, out)
        state_dtype = torch.promote_types(lse.dtype, torch.float32)
        if self._state is None:
            # Contiguous copies: what ops return is theirs.
            self._state = (
                out.to(state_dtype, copy=True, memory_format=torch.contiguous_format),
                lse.to(state_dtype, copy=True, memory_format=torch.contiguous_format),
            )
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
        """`(out, lse)` over all keys, shaped as they came and in the dtypes of the last call.

        Raises:
            RuntimeError: there has been no call.
        """
        if self._state is None:
            raise RuntimeError("expected at least one result to have been merged")
        out, lse = (x.to(dtype) for x, dtype in zip(self._state, self._dtypes, strict=True))
        return out, lse.unsqueeze(-1) if self._lse_has_last_dim else lse


def without_padding(lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """(B, H, S) of an LSE that the efficient backend has padded to a multiple of 32 rows.

    Raises:
        ValueError: any other shape.
    """
    if out.dim() == 4 and lse.shape[:2] == out.shape[:2] and lse.size(-1) > out.size(2):
        lse = lse[..., : out.size(2)]
    if lse.shape != out.shape[:-1]:
        raise ValueError(f"expected an lse of shape {tuple(out.shape[:-1])}, got {tuple(lse.shape)}")
    return lse
