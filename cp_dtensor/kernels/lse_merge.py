"""The LSE merge as one Triton kernel: float32 state, in place, any strides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def lse_merge_kernel(
    out_ptr, lse_ptr, tile_out_ptr, tile_lse_ptr,
    heads, rows, head_dim,
    out_stride_b, out_stride_h, out_stride_s, out_stride_d,
    lse_stride_b, lse_stride_h, lse_stride_s,
    tile_out_stride_b, tile_out_stride_h, tile_out_stride_s, tile_out_stride_d,
    tile_lse_stride_b, tile_lse_stride_h, tile_lse_stride_s,
    BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """One program merges BLOCK_ROWS rows of one (batch, head).

    Example, one row of head dim 1: out 1, lse log 1, tile_out 5, tile_lse log 3 becomes out 4, lse log 4.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    row_64 = row.to(tl.int64)
    in_rows = row < rows
    in_tile = in_rows[:, None] & (dim < head_dim)[None, :]

    lse_ptrs = lse_ptr + batch * lse_stride_b + head * lse_stride_h + row_64 * lse_stride_s
    tile_lse_ptrs = tile_lse_ptr + batch * tile_lse_stride_b + head * tile_lse_stride_h + row_64 * tile_lse_stride_s
    out_ptrs = (
        out_ptr + batch * out_stride_b + head * out_stride_h
        + row_64[:, None] * out_stride_s + dim[None, :] * out_stride_d
    )  # fmt: skip
    tile_out_ptrs = (
        tile_out_ptr + batch * tile_out_stride_b + head * tile_out_stride_h
        + row_64[:, None] * tile_out_stride_s + dim[None, :] * tile_out_stride_d
    )  # fmt: skip

    lse = tl.load(lse_ptrs, mask=in_rows, other=float("-inf"))
    tile_lse = tl.load(tile_lse_ptrs, mask=in_rows, other=float("-inf")).to(tl.float32)
    out = tl.load(out_ptrs, mask=in_tile, other=0.0)
    tile_out = tl.load(tile_out_ptrs, mask=in_tile, other=0.0).to(tl.float32)

    largest = tl.maximum(lse, tile_lse)
    seen = largest > float("-inf")
    shift = tl.where(seen, largest, 0.0)  # -inf - -inf would be NaN
    weight = tl.exp(lse - shift)
    tile_weight = tl.exp(tile_lse - shift)
    total = weight + tile_weight
    inverse = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
    out = out * (weight * inverse)[:, None] + tile_out * (tile_weight * inverse)[:, None]
    merged_lse = tl.where(seen, shift + tl.log(tl.where(seen, total, 1.0)), float("-inf"))

    # Row values are replicated over the warps of a program, so without this barrier one warp could store the merged
    # LSE before another has loaded the old one.
    tl.debug_barrier()
    tl.store(out_ptrs, out, mask=in_tile)
    tl.store(lse_ptrs, merged_lse, mask=in_rows)


def launch_merge(out: torch.Tensor, lse: torch.Tensor, tile_out: torch.Tensor, tile_lse: torch.Tensor) -> None:
    """Merges a tile into `(out, lse)` in place, in one launch.

    Args:
        out: (B, H, S, D), float32, any strides (a slice of the rows, say).
        lse: (B, H, S), float32, any strides.
        tile_out: (B, H, S, D), float32, bfloat16 or float16, any strides.
        tile_lse: (B, H, S), float32, any strides.
    """
    batch, heads, rows, head_dim = out.shape
    block_dim = triton.next_power_of_2(head_dim)
    block_rows = max(1, min(4096 // block_dim, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(rows, block_rows), batch * heads)
    lse_merge_kernel[grid](
        out, lse, tile_out, tile_lse,
        heads, rows, head_dim,
        *out.stride(), *lse.stride(), *tile_out.stride(), *tile_lse.stride(),
        BLOCK_ROWS=block_rows, BLOCK_DIM=block_dim,
    )  # fmt: skip
