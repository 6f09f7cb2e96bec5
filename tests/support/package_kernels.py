"""Checks of the backends on optional packages against float64, on one GPU; and packages that tests pretend to have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from cp_dtensor.attention.backends import cudnn_flex
from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiles import ShapedMask, Tile, TileMask
from cp_dtensor.plan.tiling import Masking, tiling_of
from cp_dtensor.spec.layouts import Layout
from cp_dtensor.spec.masks import Mask

TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3}
"""Largest relative error, in norm: twice what rounding of inputs and results explains."""


class Unwanted(AttentionBackend):
    """A backend in place of the one that an optional kernel steps back to, in tests in which it must not."""

    name = "UNWANTED"

    def refusal(self, spec: CallSpec) -> str | None:
        return None

    def forward(self, *arguments: object) -> tuple[Tensor, Tensor]:
        raise AssertionError("the optional kernel has stepped back in forward")

    def backward(self, *arguments: object) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("the optional kernel has stepped back in backward")


def drawn(batch: int, heads: int, rows: int, dim: int, dtype: torch.dtype, seed: int, memory: str = "BSHD") -> Tensor:
    """Returns random numbers (B, H, S, D) on the GPU.

    Args:
        memory: "BHSD" or "BSHD"; "slice" for a part of a longer sequence, "packed" for a part of a wider last dim,
            "odd" for a start that is not aligned.
    """
    generator = torch.Generator().manual_seed(seed)
    more = {"slice": (3, 0), "packed": (0, dim), "odd": (0, 1)}.get(memory, (0, 0))
    values = torch.randn(batch, rows + more[0], heads, dim + more[1], generator=generator).to("cuda", dtype)
    values = values[:, more[0] :, :, more[1] :].transpose(1, 2)
    return values.contiguous() if memory == "BHSD" else values


def check(
    backend: AttentionBackend, mask: TileMask, shape: tuple[int, int, int, int, int], dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16, memory: str = "BSHD", seed: int = 0,
) -> list[float]:  # fmt: skip
    """Checks a tile beside 11 more keys, which all rows see: its partial result, and its share of the gradients.

    Args:
        shape: batch rows, query heads, kv heads, rows, columns.

    Returns:
        The relative errors, in norm, of out, dq, dk and dv.
    """
    batch, heads, kv_heads, rows, columns = shape
    q = drawn(batch, heads, rows, dims[0], dtype, seed, memory)
    k = drawn(batch, kv_heads, columns, dims[0], dtype, seed + 1, memory)
    v = drawn(batch, kv_heads, columns, dims[1], dtype, seed + 2, memory)
    grad_out = drawn(batch, heads, rows, dims[1], dtype, seed + 3)
    scale = dims[0] ** -0.5
    reference = MathAttention() if isinstance(mask, ShapedMask) else IntervalAttention()
    wide = [x.double() for x in (q, k, v)]
    out, lse = backend.forward(q, k, v, mask, scale)
    want_out, want_lse = reference.forward(*wide, mask, scale)
    assert out.dtype == dtype or (isinstance(backend, IntervalAttention) and out.dtype == torch.float32)
    assert lse.dtype == torch.float32
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), "rows that see nothing have lse -inf"
    assert bool((out[~seen] == 0).all()), "rows that see nothing have out 0"
    assert bool(((lse.double() - want_lse)[seen].abs() < 2e-2).all())
    # The rest of the keys, so that the final out and lse are not those of the tile.
    rest_k, rest_v = (drawn(batch, kv_heads, 11, dim, dtype, seed + 4).double() for dim in dims)
    rest_out, rest_lse = MathAttention().forward(wide[0], rest_k, rest_v, ShapedMask(is_causal=False), scale)
    whole_lse = torch.logaddexp(want_lse, rest_lse)
    weights = [(part - whole_lse).exp().unsqueeze(-1) for part in (want_lse, rest_lse)]
    whole_out = want_out * weights[0] + rest_out * weights[1]
    final = torch.empty_like(grad_out).copy_(whole_out)
    grads = backend.backward(grad_out, q, k, v, final, whole_lse.float(), mask, scale)
    wanted = reference.backward(grad_out.double(), *wide, whole_out, whole_lse, mask, scale)
    errors = [relative(got, want) for got, want in zip((out, *grads), (want_out, *wanted), strict=True)]
    assert all(error < TOLERANCE[dtype] for error in errors), errors
    return errors


def relative(got: Tensor, want: Tensor) -> float:
    """Returns the norm of the error over the norm of what is wanted; 0 if both are equal, inf for an error of zeros."""
    assert got.shape == want.shape
    error, norm = float((got.double() - want).norm()), float(want.norm())
    return (error / norm if norm else math.inf) if error else 0.0


def flash4(deterministic: bool = False) -> Flash4Attention:
    """Returns FlashAttention-4 that may not step back."""
    return Flash4Attention(Unwanted(), deterministic)


@contextmanager
def only_cudnn_flex() -> Iterator[None]:
    """While open, cuDNN's FlexAttention computes tiles of any size and may not step back."""
    with mock.patch.object(cudnn_flex, "SHORTEST", 1), mock.patch.object(cudnn_flex, "_INTERVALS", Unwanted()):
        yield


def tiles_of(
    mask: Mask, length: int, batch: int, layout: Layout, rank: int, size: int = 2,
    masking: Masking = Masking.INTERVALS,
) -> list[Tile]:  # fmt: skip
    """Returns all tiles of a rank under a mask."""
    partition = LayoutPartition(layout, length, length, batch, size)
    tiling = tiling_of(partition.groups(), mask, masking, partition.lengths)
    return [tile for source in range(size) for tile in tiling.tiles_against(rank, source)]


def check_interval_tiles(
    tiles: list[Tile], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False, memory: str = "BSHD",
) -> list[float]:  # fmt: skip
    """Checks tiles by cuDNN's FlexAttention, twice; returns the largest relative error of each."""
    assert tiles
    errors = []
    with only_cudnn_flex():
        for seed, tile in enumerate(tiles):
            (first, last), (start, stop), batch = tile.q, tile.kv, tile.batch[1] - tile.batch[0]
            shape = batch, *heads, last - first, stop - start
            backend = CudnnFlexAttention(has_gradients=not deterministic)
            errors.append(max(check(backend, tile.mask, shape, dims, dtype, memory, seed)))
            with mock.patch.object(cudnn_flex, "_recording", None):  # the launches of the first call are repeated
                errors.append(max(check(backend, tile.mask, shape, dims, dtype, memory, seed + 1000)))
    return errors
