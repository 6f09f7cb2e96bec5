"""Backends on optional packages on one GPU, against float64: shapes, dtypes, memory, determinism, masks, capture."""

from __future__ import annotations

import random

import pytest
import torch
from support.package_kernels import check, check_interval_tiles, drawn, flash4, only_cudnn_flex, relative, tiles_of

from cp_dtensor import Batched, Causal, Contiguous, Documents, HeadTail, Layout, Mask, PrefixLM, SlidingWindow, Striped
from cp_dtensor.attention.backends import cudnn_flex, interval
from cp_dtensor.attention.backends.aten import CudnnAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention, Geometry, planned_tile
from cp_dtensor.attention.backends.flash4 import PACKAGE as FLASH4
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.packages import Package, has_package_kernels
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, TileMask
from cp_dtensor.tools.parsing import lognormal_documents


def needs(package: Package) -> pytest.MarkDecorator:
    """Skips a test without a package, or without a GPU that it serves."""
    serves = torch.cuda.is_available() and has_package_kernels(torch.cuda.get_device_capability())
    reason = f"needs {package.distribution} and a Hopper or datacenter Blackwell GPU"
    return pytest.mark.skipif(not serves or package.version is None, reason=reason)


needs_flash4, needs_flex = needs(FLASH4), needs(cudnn_flex.PACKAGE)
pytestmark = pytest.mark.gpu


@needs_flash4
@pytest.mark.parametrize(("mask", "rows", "columns"), [(CAUSAL_TILE, 523, 523), (FULL_TILE, 301, 777)])
@pytest.mark.parametrize(("heads", "dims"), [((8, 2), (128, 128)), ((4, 4), (192, 128)), ((4, 2), (64, 64))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash4(
    mask: TileMask, rows: int, columns: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for seed in range(2):  # the second call repeats the launches of the first
        check(flash4(), mask, (2, *heads, rows, columns), dims, dtype, seed=seed)


@needs_flash4
@pytest.mark.parametrize("memory", ["BHSD", "slice", "packed", "odd"])
def test_flash4_in_any_memory(memory: str) -> None:
    check(flash4(), CAUSAL_TILE, (2, 8, 2, 300, 300), (128, 128), memory=memory)


@needs_flash4
@pytest.mark.parametrize("shape", [(1, 4, 2, 1, 300), (1, 4, 2, 300, 1), (1, 4, 2, 1, 1), (1, 4, 2, 255, 255)])
def test_short_tiles(shape: tuple[int, int, int, int, int]) -> None:
    check(Flash4Attention(CudnnAttention()), FULL_TILE, shape, (128, 128))


@needs_flash4
def test_groups_with_two_head_dims() -> None:
    check(Flash4Attention(CudnnAttention()), FULL_TILE, (1, 4, 2, 300, 500), (192, 128))


def gradients(backend: AttentionBackend, mask: TileMask, length: int) -> list[tuple[torch.Tensor, ...]]:
    """Returns the gradients of a tile, five times."""
    q, k, v, grad_out = (drawn(1, heads, length, 128, torch.bfloat16, seed) for seed, heads in enumerate((8, 2, 2, 8)))
    out, lse = backend.forward(q, k, v, mask, 0.1)
    return [backend.backward(grad_out, q, k, v, out, lse, mask, 0.1) for _ in range(5)]


@needs_flash4
def test_flash4_is_deterministic_on_demand() -> None:
    check(flash4(deterministic=True), CAUSAL_TILE, (1, 8, 2, 523, 523), (128, 128))
    first, *others = gradients(flash4(deterministic=True), CAUSAL_TILE, 1100)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@needs_flex
def test_masks_are_deterministic_on_demand() -> None:
    (tile,) = tiles_of(SlidingWindow(100, 0), 1100, 1, Contiguous(), 0, 1)
    first, *others = gradients(CudnnFlexAttention(deterministic=True), tile.mask, 1100)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


LENGTH = 1237
DOCUMENTS = lognormal_documents(LENGTH, median=100, sigma=1.0)
MASKS: dict[str, tuple[Mask, Layout, int]] = {
    "documents": (DOCUMENTS, HeadTail(), 2),
    "window": (SlidingWindow(200, 30), Contiguous(), 1),
    "prefix": (PrefixLM(300), HeadTail(), 1),
    "union": (SlidingWindow(50, 0) | (PrefixLM(64) & Causal()), Contiguous(), 1),
    "other documents in each batch row": (
        Batched([DOCUMENTS, lognormal_documents(LENGTH, median=30, sigma=1.5, seed=1)]), Contiguous(), 2,
    ),
    "rows that see nothing": (Documents([3, 3, 100, 100, 700, 1100, 1100], within=Causal()), Contiguous(), 1),
    "stripes": (DOCUMENTS, Striped(4), 1),
}  # fmt: skip


@needs_flex
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_flex_under_masks(kind: str, rank: int) -> None:
    mask, layout, batch = MASKS[kind]
    check_interval_tiles(tiles_of(mask, LENGTH, batch, layout, rank), (8, 2), (128, 128))


@needs_flex
def test_flex_under_random_masks() -> None:
    draw = random.Random()
    for rank in (0, 1, 0, 1):
        length = draw.randint(300, 1500)
        documents = lognormal_documents(length, draw.randint(10, 400), 1.0, draw.randrange(1 << 30))
        mask = documents & SlidingWindow(draw.randint(1, 300), draw.randint(0, 300))
        print(length, mask)  # shown if it fails
        check_interval_tiles(tiles_of(mask, length, 1, HeadTail(), rank), (8, 2), (128, 128))


@needs_flex
@pytest.mark.parametrize(("heads", "dims"), [((4, 4), (192, 128)), ((4, 1), (256, 256)), ((8, 2), (64, 64))])
def test_flex_of_other_head_dims(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check_interval_tiles(tiles_of(DOCUMENTS, LENGTH, 1, HeadTail(), 0), heads, dims)


@needs_flex
@pytest.mark.parametrize(("dtype", "memory"), [(torch.float16, "odd"), (torch.bfloat16, "packed")])
def test_flex_of_other_dtypes_in_any_memory(dtype: torch.dtype, memory: str) -> None:
    check_interval_tiles(tiles_of(DOCUMENTS, LENGTH, 1, HeadTail(), 0), (8, 2), (128, 128), dtype, memory=memory)


@needs_flex
def test_flex_of_a_million_tokens_against_our_kernels() -> None:
    (tile,) = tiles_of(SlidingWindow(4096, 0), 1 << 20, 1, Contiguous(), 0, 1)
    q, k, v = (drawn(1, heads, 1 << 20, 128, torch.bfloat16, seed) for seed, heads in enumerate((2, 1, 1)))
    planned = planned_tile(tile.mask, Geometry.of(q, k, v))
    assert planned is not None
    assert planned.nbytes < 100 << 20
    ours, _ = cudnn_flex._INTERVALS.forward(q, k, v, tile.mask, 0.1)
    with only_cudnn_flex():
        out, _ = CudnnFlexAttention().forward(q, k, v, tile.mask, 0.1)
    assert relative(out, ours.double()) < 6e-3


@needs_flex
def test_dropped_plans_keep_their_memory_until_tiles_are_done() -> None:
    tile, *_ = tiles_of(DOCUMENTS, LENGTH, 1, HeadTail(), 0)
    rows, columns = tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]
    q, k, v = (drawn(1, *shape, 128, torch.bfloat16, 0) for shape in ((8, rows), (2, columns), (2, columns)))
    with only_cudnn_flex():
        want, _ = CudnnFlexAttention().forward(q, k, v, tile.mask, 0.1)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # cycles: 0.1 s, in which the tile below waits
        got, _ = CudnnFlexAttention().forward(q, k, v, tile.mask, 0.1)
        interval._cached_rows.clear()
        for seed in range(10):  # each may get the memory of the one before
            cudnn_flex._planned.clear()
            other, *_ = tiles_of(lognormal_documents(LENGTH, 50, 1.0, seed), LENGTH, 1, HeadTail(), 0)
            assert planned_tile(other.mask, Geometry.of(q, k, v)) is not None
    assert torch.equal(got, want)


@needs_flex
@needs_flash4
def test_graphs_replay_what_was_used_before_them() -> None:
    tiles = tiles_of(DOCUMENTS, LENGTH, 1, HeadTail(), 0)
    masked = [(CudnnFlexAttention(), tile.mask, tile.q[1] - tile.q[0], tile.kv[1] - tile.kv[0]) for tile in tiles]
    for backend, mask, rows, columns in (*masked, (flash4(), CAUSAL_TILE, 512, 512)):
        q, grad_out = (drawn(1, 8, rows, 128, torch.bfloat16, seed) for seed in (0, 1))
        k, v = (drawn(1, 2, columns, 128, torch.bfloat16, seed) for seed in (2, 3))

        def both(backend: AttentionBackend = backend, mask: TileMask = mask) -> tuple[torch.Tensor, ...]:
            out, lse = backend.forward(q, k, v, mask, 0.1)  # noqa: B023
            return out, *backend.backward(grad_out, q, k, v, out, lse, mask, 0.1)  # noqa: B023

        with only_cudnn_flex():
            both()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = both()
            q.copy_(drawn(1, 8, rows, 128, torch.bfloat16, 4))
            graph.replay()
            for got, want in zip(captured, both(), strict=True):
                assert relative(got, want.double()) < 1e-3


def test_cudnn_through_torch_of_wide_and_unequal_head_dims() -> None:
    for heads, dims in (((4, 1), (256, 256)), ((4, 4), (192, 128)), ((4, 2), (136, 136))):
        check(CudnnAttention(), CAUSAL_TILE, (1, *heads, 300, 300), dims)
