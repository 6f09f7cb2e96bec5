"""Backends on optional packages on one GPU, against float64: shapes, dtypes, memory, determinism, masks, capture."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.cases import examples
from support.package_kernels import check, check_interval_tiles, drawn, flash4, only_cudnn_flex, relative, tiles_of

from cp_dtensor import Batched, Causal, Contiguous, Documents, HeadTail, Layout, Mask, PrefixLM, SlidingWindow, Striped
from cp_dtensor.attention.backends import cudnn_flex, interval
from cp_dtensor.attention.backends import flash4 as flash4_backend
from cp_dtensor.attention.backends.aten import CudnnAttention, EfficientAttention, FlashAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention, Geometry, planned_tile
from cp_dtensor.attention.backends.flash4 import PACKAGE as FLASH4
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.interval import IntervalAttention, tile_rows
from cp_dtensor.attention.backends.packages import Package, has_package_kernels
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, TileMask
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec.model_masks import Keys
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
    mask: TileMask, rows: int, columns: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    check(flash4(), mask, (2, *heads, rows, columns), dims, dtype, seed=0)
    monkeypatch.delattr(flash4_backend, "_recorded")
    check(flash4(), mask, (2, *heads, rows, columns), dims, dtype, seed=1)  # repeats the launches of the first call


@needs_flash4
@pytest.mark.parametrize("memory", ["BHSD", "slice", "packed", "odd"])
def test_flash4_in_any_memory(memory: str) -> None:
    check(flash4(), CAUSAL_TILE, (2, 8, 2, 300, 300), (128, 128), memory=memory)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", [FlashAttention(), CudnnAttention(), EfficientAttention()], ids=lambda x: x.name)
def test_torch_kernels_in_memory_that_is_not_aligned(backend: AttentionBackend) -> None:
    check(backend, CAUSAL_TILE, (2, 8, 2, 300, 300), (128, 128), memory="odd")


@needs_flash4
@pytest.mark.parametrize("shape", [(1, 4, 2, 1, 300), (1, 4, 2, 300, 1), (1, 4, 2, 1, 1), (1, 4, 2, 255, 255)])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128)])
def test_short_tiles(shape: tuple[int, int, int, int, int], dims: tuple[int, int]) -> None:
    check(Flash4Attention(CudnnAttention()), FULL_TILE, shape, dims)


@needs_flash4
@pytest.mark.parametrize(("mask", "rows", "columns"), [(CAUSAL_TILE, 523, 523), (FULL_TILE, 300, 500)])
def test_groups_with_two_head_dims(mask: TileMask, rows: int, columns: int) -> None:
    check(replace(flash4(), copies_kv=True), mask, (1, 8, 2, rows, columns), (192, 128))


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
    first, *others = gradients(CudnnFlexAttention(has_gradients=False), tile.mask, 1100)
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


def any_mask(draw: random.Random, length: int) -> Mask:
    """Returns a union of 1 to 4 masks of intervals; in some of them rows see nothing."""

    def documents() -> Mask:
        edges = sorted(draw.randint(0, length) for _ in range(draw.randint(2, 9)))
        return Documents([0, *edges], within=window())  # rows behind the last one see nothing

    def window() -> Mask:
        return SlidingWindow(draw.randint(0, 200), draw.choice([0, draw.randint(0, 100)]))

    def one() -> Mask:
        return draw.choice(
            [documents, window, lambda: PrefixLM(draw.randint(1, length)), lambda: documents() & window()]
        )()

    mask = one()
    for _ in range(draw.randrange(4)):
        mask = mask | one()
    return mask


@pytest.mark.timeout(1200)  # for many cases
@pytest.mark.parametrize("kernel", [pytest.param("cudnn", marks=needs_flex), "triton"])
def test_random_masks(kernel: str) -> None:
    seed = random.randrange(1 << 30)
    for case in range(seed, seed + examples(4)):
        draw = random.Random(case)
        length, batch = draw.randint(150, 700), draw.randint(1, 2)
        masks = [any_mask(draw, length) for _ in range(batch)]
        layout = draw.choice([HeadTail(), Contiguous(), Striped(8)])
        heads, dims = draw.choice([((4, 2), (64, 64)), ((2, 2), (128, 128))])  # each pair is compiled once
        mask = masks[0] if batch == 1 else Batched(masks)
        masking = draw.choice([Masking.INTERVALS, Masking.INTERVALS_TOGETHER])
        tiles = tiles_of(mask, length, batch, layout, draw.randrange(2), masking=masking)
        print(case, length, masks, layout, heads, dims, masking)  # shown if it fails
        if kernel == "cudnn" and tiles:
            check_interval_tiles(tiles, heads, dims)
        for tile in tiles if kernel == "triton" else ():
            (first, last), (start, stop) = tile.q, tile.kv
            shape = tile.batch[1] - tile.batch[0], *heads, last - first, stop - start
            check(IntervalAttention(), tile.mask, shape, dims, seed=case)


@needs_flex
@pytest.mark.parametrize(("heads", "dims"), [((4, 4), (192, 128)), ((4, 1), (256, 256)), ((8, 2), (64, 64))])
def test_flex_of_other_head_dims(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    check_interval_tiles(tiles_of(DOCUMENTS, LENGTH, 1, HeadTail(), 0), heads, dims)


@needs_flex
@pytest.mark.parametrize(("dtype", "memory"), [(torch.float16, "odd"), (torch.bfloat16, "packed")])
def test_flex_of_other_dtypes_in_any_memory(dtype: torch.dtype, memory: str) -> None:
    check_interval_tiles(tiles_of(DOCUMENTS, LENGTH, 1, HeadTail(), 0), (8, 2), (128, 128), dtype, memory=memory)


KERNELS = {"cudnn": CudnnFlexAttention(), "triton": IntervalAttention(), "flash4": flash4()}


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        *(pytest.param("cudnn", kind, marks=needs_flex) for kind in ("window", "documents")),
        ("triton", "window"), ("triton", "documents"), pytest.param("flash4", "causal", marks=needs_flash4),
    ],
)  # fmt: skip
def test_some_rows_and_columns_of_a_million_tokens(kernel: str, kind: str) -> None:
    length, width = 1 << 20, 64
    of_kind = {
        "window": SlidingWindow(4096, 0),
        "documents": lognormal_documents(length, 2048, 1.0),
        "causal": Causal(),
    }
    (tile,) = tiles_of(of_kind[kind], length, 1, Contiguous(), 0, 1)
    q, k, v, grad_out = (drawn(1, heads, length, 128, torch.bfloat16, seed) for seed, heads in enumerate((2, 1, 1, 2)))
    backend = KERNELS[kernel]
    mask = CAUSAL_TILE if kernel == "flash4" else tile.mask
    if kernel == "cudnn":
        planned = planned_tile(tile.mask, Geometry.of(q, k, v))
        assert planned is not None
        assert sum(x.nbytes for x in planned.tensors) < 100 << 20
    with only_cudnn_flex():
        out, lse = backend.forward(q, k, v, mask, 0.1)
        dq, dk, dv = backend.backward(grad_out, q, k, v, out, lse, mask, 0.1)
    intervals = tile_rows(tile.mask, q.device).masks[0].intervals
    assert intervals is not None
    lo, hi = (x.flatten().long() for x in intervals)

    def weights(rows: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Softmax weights and their gradients, (2, rows, columns), in float64, from the lse of the kernel."""
        column = torch.arange(length, device="cuda")[columns]
        seen = (column >= lo[rows, None]) & (column < hi[rows, None])
        queries, keys, values = q[0, :, rows].double(), k[0, :, columns].double(), v[0, :, columns].double()
        found = (queries @ keys.mT * 0.1 - lse[0, :, rows, None].double()).exp() * seen
        delta = (grad_out[0, :, rows].double() * out[0, :, rows].double()).sum(-1, keepdim=True)
        return found, found * (grad_out[0, :, rows].double() @ values.mT - delta) * 0.1

    for first in (0, length // 2 + 77, length - width):
        rows = slice(first, first + width)
        columns = slice(int(lo[rows].min()), int(hi[rows].max()))
        found, slopes = weights(rows, columns)
        assert float((found.sum(-1) - 1).abs().max()) < 1e-2, "the lse is that of these columns"
        assert relative(out[0, :, rows], found @ v[0, :, columns].double()) < 6e-3
        assert relative(dq[0, :, rows], slopes @ k[0, :, columns].double()) < 6e-3
        columns, seeing = rows, ((lo < rows.stop) & (hi > rows.start)).nonzero()
        rows = slice(int(seeing.min()), int(seeing.max()) + 1)
        found, slopes = weights(rows, columns)
        assert relative(dv[0, 0, columns], (found.mT @ grad_out[0, :, rows].double()).sum(0)) < 6e-3
        assert relative(dk[0, 0, columns], (slopes.mT @ q[0, :, rows].double()).sum(0)) < 6e-3


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


@needs_flex
@pytest.mark.parametrize("has_plan", [True, False])
def test_graphs_of_several_intervals(has_plan: bool) -> None:
    """Without a plan, which may have been dropped, our kernels compute the tile from tables of before the capture."""
    mask = Causal() & (SlidingWindow(300, 0) | Keys(((0, 40), (100, 164))))
    (tile,) = tiles_of(mask, LENGTH, 1, Contiguous(), 0, 1, Masking.INTERVALS_TOGETHER)
    q, grad_out = (drawn(1, 8, LENGTH, 128, torch.bfloat16, seed) for seed in (0, 1))
    k, v = (drawn(1, 2, LENGTH, 128, torch.bfloat16, seed) for seed in (2, 3))

    def both(backend: AttentionBackend) -> tuple[torch.Tensor, ...]:
        out, lse = backend.forward(q, k, v, tile.mask, 0.1)
        return out, *backend.backward(grad_out, q, k, v, out.to(q.dtype), lse, tile.mask, 0.1)

    both(CudnnFlexAttention())
    both(IntervalAttention())
    if not has_plan:
        cudnn_flex._planned.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both(CudnnFlexAttention())
    q.copy_(drawn(1, 8, LENGTH, 128, torch.bfloat16, 4))
    graph.replay()
    for got, want in zip(captured, both(IntervalAttention()), strict=True):
        assert relative(got, want.double()) < 1e-2


def test_cudnn_through_torch_of_wide_and_unequal_head_dims() -> None:
    for heads, dims in (((4, 1), (256, 256)), ((4, 4), (192, 128)), ((4, 2), (136, 136))):
        check(CudnnAttention(), CAUSAL_TILE, (1, *heads, 300, 300), dims)
