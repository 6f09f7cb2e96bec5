"""Delta of each row, the sum of out times its gradient: Triton kernel and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_dtensor._torch.triton_launch import Facts, Launch, cached_launch, facts
from cp_dtensor.attention.triton.configs import padded


@triton.jit(do_not_specialize=["rows"])
def attention_delta_kernel(
    delta_ptr, out_ptr, grad_ptr, rows,
    delta_stride_b, delta_stride_h, out_stride_b, out_stride_h, out_stride_s,
    grad_stride_b, grad_stride_h, grad_stride_s,
    V_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: delta of BLOCK_ROWS rows of one (batch, head)."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_64 = row.to(tl.int64)
    v_dim = tl.arange(0, BLOCK_V)[None, :]
    in_tile = (row < rows)[:, None] & (v_dim < V_DIM)
    out_ptrs = out_ptr + batch * out_stride_b + head * out_stride_h + row_64[:, None] * out_stride_s + v_dim
    grad_ptrs = grad_ptr + batch * grad_stride_b + head * grad_stride_h + row_64[:, None] * grad_stride_s + v_dim
    out = tl.load(out_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptrs, mask=in_tile, other=0.0).to(tl.float32)
    delta_ptrs = delta_ptr + batch * delta_stride_b + head * delta_stride_h + row_64
    tl.store(delta_ptrs, tl.sum(out * grad, 1), mask=row < rows)


def launch_attention_delta(delta: torch.Tensor, grad_out: torch.Tensor, out: torch.Tensor) -> None:
    """Writes sum(out * grad_out) over Dv to `delta`, in float32; one launch.

    Args:
        delta: (B, H, S), float32; the last dim contiguous, as in all of these.
        grad_out: (B, H, S, Dv), any floating dtype.
        out: (B, H, S, Dv), any floating dtype.
    """
    if out.numel() == 0:
        delta.zero_()
        return
    _launch(facts(delta), facts(out), facts(grad_out))(delta, out, grad_out)


@cached_launch
def _launch(delta: Facts, out: Facts, grad_out: Facts) -> Launch:
    batch, heads, rows, v_dim = out.shape
    block_v = padded(v_dim)
    block_rows = 4096 // block_v
    return Launch(
        attention_delta_kernel,
        (triton.cdiv(rows, block_rows), heads, batch),
        (rows, *delta.strides[:2], *out.strides[:3], *grad_out.strides[:3]),
        {"V_DIM": v_dim, "BLOCK_ROWS": block_rows, "BLOCK_V": block_v},
    )
