"""Backends on optional packages, with modules that stand for them: refusals, first use, and plans."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.package_kernels import Unwanted, relative
from support.pretended_packages import AMPERE, BLACKWELL, HOPPER, INTERVALS, MLA, FlashModule, FlexModule, install

from cp_dtensor.attention.backends import cudnn_flex, first_use, flash4, interval, packages
from cp_dtensor.attention.backends.aten import CudnnAttention, MathAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention, Geometry, end_points, plan_bytes
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.backends.select import choose_backend
from cp_dtensor.attention.triton.row_mask import RowMask
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, IntervalMask, KeyRun, TileMask
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.intervals import IntervalBand
from cp_dtensor.spec.layouts import Segment

MATH = MathAttention()
Patch = pytest.MonkeyPatch


def tensors(
    rows: int = 300, columns: int = 300, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16)
) -> Any:
    shapes = (heads[0], rows, dims[0]), (heads[1], columns, dims[0]), (heads[1], columns, dims[1])
    return [torch.randn(2, *shape).bfloat16() for shape in (*shapes, (heads[0], rows, dims[1]))]


def both(backend: AttentionBackend, mask: TileMask, values: Any, scale: float = 0.25) -> list[torch.Tensor]:
    """Returns the result of a tile and its gradients."""
    q, k, v, grad_out = values
    out, lse = backend.forward(q, k, v, mask, scale)
    return [out, lse, *backend.backward(grad_out, q, k, v, out, lse, mask, scale)]


def check(backend: AttentionBackend, mask: TileMask, values: Any, reference: AttentionBackend = MATH) -> None:
    got, want = both(backend, mask, values), both(reference, mask, [x.double() for x in values])
    for one, other in zip(got, want, strict=True):
        finite = other.isfinite()
        assert torch.equal(finite, one.isfinite())
        assert float((one[finite].double() - other[finite]).norm() / other[finite].norm().clamp(min=1)) < 1e-2


# FlashAttention-4


def test_flash4_records_the_launches_of_the_first_call_and_repeats_them(fresh: Patch) -> None:
    module = FlashModule()
    install(fresh, module)
    backend = Flash4Attention(Unwanted())
    for mask in (CAUSAL_TILE, FULL_TILE):
        module.calls.clear()
        for _ in range(3):
            check(backend, mask, tensors())
        assert sorted(module.calls) == ["backward"] * 2 + ["forward"] * 2, "of a small tile, then of these shapes"
        check(backend, mask, tensors(rows=400, columns=400))
        assert len(module.calls) == 6, "other shapes have other launches"
    for rows in (257, 300):
        check(backend, FULL_TILE, [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(rows, 280)])


def test_flash4_records_no_launch_in_which_tensors_cannot_be_told_apart(fresh: Patch) -> None:
    install(fresh, FlashModule())
    backend = Flash4Attention(Unwanted())
    q, k, v, _ = tensors(heads=(2, 2))
    backend.forward(q, q, q, FULL_TILE, 0.25)
    out, _ = backend.forward(q, k, v, FULL_TILE, 0.25)
    assert relative(out, MATH.forward(q.double(), k.double(), v.double(), FULL_TILE, 0.25)[0]) < 1e-2


def test_flash4_records_no_launch_with_objects_of_one_call(fresh: Patch) -> None:
    """Some versions pass the stream on which to launch: a record would launch on the first call's for ever."""
    module, launched = FlashModule(), []
    wrapper = module._flash_attn_fwd

    def with_stream(q: Any, k: Any, v: Any, softmax_scale: float, causal: bool, out: Any, lse: Any) -> None:
        stream = object()

        def on_stream(given: object) -> None:
            launched.append(given is stream)
            wrapper(q, k, v, softmax_scale, causal, out, lse)

        with_stream.compile_cache[0] = on_stream  # type: ignore[attr-defined]
        with_stream.compile_cache[0](stream)  # type: ignore[attr-defined]

    with_stream.compile_cache = {}  # type: ignore[attr-defined]
    fresh.setattr(module, "_flash_attn_fwd", with_stream)
    install(fresh, module)
    q, k, v, _ = tensors()
    for _ in range(3):
        Flash4Attention(Unwanted()).forward(q, k, v, FULL_TILE, 0.25)
    assert launched == [True] * 5, "twice for a small tile, then for each call"

    gc.disable()
    try:
        out, _ = Flash4Attention(Unwanted()).forward(q, k, v, FULL_TILE, 0.25)
        memory = weakref.ref(out)
        with_stream.compile_cache.clear()  # the function in it has a reference
        del out
        assert memory() is None, "no cycle of the recorder's keeps tensors until the next garbage collection"
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("rows", "columns", "heads", "dims"),
    [(1, 300, (4, 2), (16, 16)), (300, 1, (4, 2), (16, 16)), (255, 300, (2, 2), (16, 16)), (1, 1, (2, 1), (16, 24))],
)
def test_flash4_leaves_short_tiles_to_the_other_backend(
    fresh: Patch, rows: int, columns: int, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    module = FlashModule()
    install(fresh, module)
    check(Flash4Attention(MATH), FULL_TILE, tensors(rows, columns, heads, dims))
    assert not module.calls


def test_flash4_leaves_gradients_of_groups_with_two_head_dims_to_the_other_backend(fresh: Patch) -> None:
    module = FlashModule()
    install(fresh, module)
    check(Flash4Attention(MATH), FULL_TILE, tensors(dims=(24, 16)))
    assert set(module.calls) == {"forward"}


def test_flash4_copies_tensors_that_are_not_aligned(fresh: Patch) -> None:
    install(fresh, FlashModule())
    values = [torch.randn(2, *x.shape[1:3], 17).bfloat16()[..., 1:] for x in tensors()]
    seen: list[torch.Tensor] = []
    launch = flash4._launch
    fresh.setattr(flash4, "_launch", lambda kind, own, wrapper: (seen.extend(own), launch(kind, own, wrapper)))
    check(Flash4Attention(Unwanted()), FULL_TILE, values)
    assert all(x.data_ptr() % 16 == 0 for x in seen)
    assert all(step * x.itemsize % 16 == 0 for x in seen if x.dim() == 4 for step in x.stride()[:-1])


@pytest.mark.parametrize("module", [FlashModule(factor=1.5), FlashModule(factor=float("nan"))], ids=["wrong", "nan"])
def test_a_kernel_that_is_wrong_at_first_is_not_used_again(fresh: Patch, module: FlashModule) -> None:
    install(fresh, module)
    values = tensors()
    with pytest.warns(RuntimeWarning) as caught:
        check(Flash4Attention(MATH), CAUSAL_TILE, values)
    assert [str(each.message).split(":")[0] for each in caught] == [
        f"FlashAttention-4 is not used for {direction}  causal torch.bfloat16 head dims (16, 16) group 2"
        for direction in ("forward", "backward")
    ]
    assert all("flash-attn-4 4.0.0b36, torch " in str(each.message) for each in caught)
    calls = list(module.calls)
    check(Flash4Attention(MATH), CAUSAL_TILE, values)  # warnings are errors: there is none any more
    assert module.calls == calls


def test_nothing_is_compiled_or_checked_under_capture(fresh: Patch) -> None:
    module = FlashModule()
    install(fresh, module, FlexModule())
    with fresh.context() as capture:
        for each in (first_use, cudnn_flex):
            capture.setattr(each, "capturing", lambda: True)
        check(Flash4Attention(MATH), CAUSAL_TILE, tensors())
        capture.setattr(cudnn_flex, "FEWEST_FLOPS", 0)
        check(CudnnFlexAttention(), interval_mask(), tensors(), IntervalAttention())
        assert "was not tried before CUDA graph capture" in str(CudnnAttention().refusal(MLA))
    assert not module.calls
    check(Flash4Attention(Unwanted()), CAUSAL_TILE, tensors())
    assert module.calls, "after the capture they are"


def test_lack_of_memory_at_the_first_use_is_no_verdict(fresh: Patch) -> None:
    """It is raised as any lack of memory is, and the next call tries again."""
    module = FlashModule()
    install(fresh, module)
    with fresh.context() as lacking:

        def out_of_memory(*arguments: Any, **options: Any) -> None:
            raise torch.OutOfMemoryError

        lacking.setattr(first_use.SmallTile, "drawn", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            both(Flash4Attention(MATH), CAUSAL_TILE, tensors())
    check(Flash4Attention(Unwanted()), CAUSAL_TILE, tensors())


def test_a_plan_for_which_memory_is_lacking_at_the_first_use_is_no_verdict(fresh: Patch) -> None:
    module = FlexModule()
    install(fresh, flex=module)
    fresh.setattr(cudnn_flex, "FEWEST_FLOPS", 0)
    create = module.create_mask_plan

    fresh.setattr(module, "create_mask_plan", _no_memory_for_a_plan)
    with pytest.raises(torch.OutOfMemoryError):
        both(CudnnFlexAttention(), interval_mask(), tensors())
    fresh.setattr(module, "create_mask_plan", create)
    cudnn_flex._functions.cache_clear()
    fresh.setattr(cudnn_flex, "_INTERVALS", Unwanted())
    check(CudnnFlexAttention(), interval_mask(), tensors(), IntervalAttention())


def _without_lse(q: Any, k: Any, v: Any, softmax_scale: Any, causal: Any, out: Any) -> None: ...


@pytest.mark.parametrize("problem", ["no module", "no function", "parameters"])
def test_packages_that_do_not_fit_are_refused_by_name_and_version(fresh: Patch, problem: str) -> None:
    flash, flex = FlashModule(), FlexModule()
    if problem == "no module":
        install(fresh)
    else:
        install(fresh, flash, flex)
        for module, name in ((flash, "_flash_attn_fwd"), (flex, "create_mask_plan")):
            if problem == "no function":
                delattr(module, name)
            else:
                fresh.setattr(module, name, _without_lse)
    for backend, spec, name in (
        (Flash4Attention(MATH), HOPPER, "flash-attn-4 4.0.0b36"),
        (CudnnFlexAttention(), INTERVALS, "nvidia-cudnn-frontend 1.32.0"),
    ):
        with pytest.warns(RuntimeWarning, match=name):
            refusal = backend.refusal(spec)
        assert name in str(refusal)
        assert backend.refusal(spec) == refusal, "without another warning"
    assert type(choose_backend(HOPPER)) is CudnnAttention
    assert type(choose_backend(INTERVALS)) is IntervalAttention


@pytest.mark.parametrize(
    ("backend", "spec", "reason"),
    [
        (Flash4Attention(MATH), replace(HOPPER, head_dim=96, v_head_dim=256), "does not compile for head dims 96"),
        (Flash4Attention(MATH), replace(HOPPER, head_dim=12), "multiples of 8 up to 256, got 12 and 128"),
        (Flash4Attention(MATH), replace(HOPPER, head_dim=512, v_head_dim=512), "multiples of 8 up to 256, got 512"),
        (Flash4Attention(MATH), replace(BLACKWELL, head_dim=192, v_head_dim=192), "does not compile for head dims 192"),
        (Flash4Attention(MATH), replace(HOPPER, dtype="float32"), "needs bfloat16 or float16, got float32"),
        (Flash4Attention(MATH), AMPERE, r"needs Hopper .* has compute capability \(8, 0\)"),
        (Flash4Attention(MATH), replace(HOPPER, capability=(12, 0)), r"needs Hopper .* \(12, 0\)"),
        (Flash4Attention(MATH), replace(HOPPER, device="cpu", capability=None), "the tensors are on cpu"),
        (CudnnFlexAttention(), replace(INTERVALS, head_dim=136), "multiples of 8 up to 128, .* got 136 and 128"),
        (CudnnFlexAttention(), replace(INTERVALS, head_dim=192, v_head_dim=192), "got 192 and 192"),
        (CudnnFlexAttention(), replace(INTERVALS, dtype="float64"), "got float64"),
    ],
)
def test_refusals_say_why(fresh: Patch, backend: AttentionBackend, spec: CallSpec, reason: str) -> None:
    install(fresh, FlashModule(), FlexModule())
    with pytest.raises(AssertionError, match=reason):
        assert not backend.refusal(spec), backend.refusal(spec)


@pytest.mark.parametrize("spec", [HOPPER, BLACKWELL, MLA, replace(MLA, capability=(10, 3))])
def test_what_they_compute_is_not_refused(fresh: Patch, spec: CallSpec) -> None:
    install(fresh, FlashModule(), FlexModule())
    assert Flash4Attention(MATH).refusal(spec) is None
    assert CudnnFlexAttention().refusal(spec) is None


def test_causal_backward_of_head_dim_256_is_left_to_cudnn_on_hopper(fresh: Patch) -> None:
    install(fresh, FlashModule(), FlexModule())
    fresh.setattr(CudnnAttention, "refusal", lambda self, spec: None)
    wide = replace(HOPPER, head_dim=256, v_head_dim=256)
    left = [backend.left for backend in map(choose_backend, (wide, HOPPER)) if isinstance(backend, Flash4Attention)]
    assert left == [{("backward", True)}, frozenset()]
    module = FlashModule()
    install(fresh, module)
    flash4._functions.cache_clear()
    check(Flash4Attention(MATH, left=left[0]), CAUSAL_TILE, tensors())
    assert set(module.calls) == {"forward"}


# cuDNN's FlexAttention


def interval_mask(rows: int = 300, columns: int = 300, batch: int = 1) -> IntervalMask:
    """Documents and a window, other ones in each batch row; some rows see nothing."""
    sets = tuple(
        (
            IntervalBand(10, 100 + row, 5, columns),
            IntervalBand(120 + row, rows - 20, 0, columns, left=50 + row, right=9),
        )
        for row in range(batch)
    )
    queries, keys = Segment.contiguous(0, rows), Segment.contiguous(0, columns)
    return IntervalMask(sets, (queries,), (0, rows), KeyRun((keys,)), (0, columns))


def _no_memory_for_a_plan(mask_func: Any, q: Any, k: Any, v: Any, *, build_backward: bool) -> None:
    raise torch.OutOfMemoryError


@pytest.fixture
def flex(fresh: Patch) -> Patch:
    """Tiles of any size."""
    fresh.setattr(cudnn_flex, "FEWEST_FLOPS", 0)
    return fresh


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "dims"), [((4, 2), (16, 16)), ((2, 2), (192, 128))])
def test_flex_computes_interval_tiles(flex: Patch, batch: int, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    module = FlexModule()
    install(flex, flex=module)
    flex.setattr(cudnn_flex, "_INTERVALS", Unwanted())
    mask = interval_mask(300, 280, batch)
    for _ in range(2):
        check(CudnnFlexAttention(), mask, tensors(300, 280, heads, dims), IntervalAttention())
    assert len(module.plans) == 1 + 1, "of the small tile, and one for forward and backward of this one"
    check(CudnnFlexAttention(), interval_mask(300, 280, batch), tensors(300, 280, heads, dims), IntervalAttention())
    assert len(module.plans) == 1 + 2, "another mask object has a plan of its own"


def test_first_uses_of_flex_compile_our_kernels_too(flex: Patch) -> None:
    """A later mask may have a tile that is too small for cuDNN; no step of a run waits for a compiler then."""
    install(flex, flex=FlexModule())
    used = []

    def recorded(name: str, compute: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            used.append((name, arguments[0].dtype, arguments[0].size(1)))
            return compute(*arguments, **options)

        return call

    for name in ("attention_forward", "attention_backward"):
        flex.setattr(interval, name, recorded(name, getattr(interval, name)))
    for _ in range(2):
        both(CudnnFlexAttention(), interval_mask(), tensors(heads=(6, 2)))
    ours = [each for each in used if each[1] == torch.bfloat16]
    assert ours == [("attention_forward", torch.bfloat16, 6), ("attention_backward", torch.bfloat16, 6)], "small tiles"


def test_flex_keeps_the_latest_plans_within_its_bytes(flex: Patch) -> None:
    module = FlexModule(plan_bytes=1000)
    install(flex, flex=module)
    one, other, third = (interval_mask() for _ in range(3))
    q, k, v, _ = tensors()
    geometry = Geometry.of(q, k, v)
    assert cudnn_flex.planned_tile(interval_mask(), geometry) is not None
    flex.setattr(cudnn_flex, "_planned", LRUCache(3 * cudnn_flex._planned.nbytes // 2, least=1))  # and the newest
    for mask in (one, other, one, third):
        assert cudnn_flex.planned_tile(mask, geometry) is not None
    assert len(module.plans) == 1 + 3
    made = [cudnn_flex._planned.get((mask, geometry)) is not None for mask in (one, other, third)]
    assert made == [True, False, True], "the least recently used went"
    check(CudnnFlexAttention(), other, tensors(), IntervalAttention())


@pytest.mark.parametrize("problem", ["estimate", "memory"])
def test_tiles_without_a_plan_are_computed_by_our_kernels(flex: Patch, problem: str) -> None:
    module = FlexModule()
    install(flex, flex=module)
    if problem == "estimate":
        flex.setattr(cudnn_flex, "MOST_BYTES", 2 * cudnn_flex._BYTES_OF_PARTIAL_BLOCK)
    else:
        flex.setattr(module, "create_mask_plan", _no_memory_for_a_plan)
    flex.setattr(packages.Package, "is_right", lambda *arguments: True)
    check(CudnnFlexAttention(), interval_mask(), tensors(), IntervalAttention())
    assert not module.plans


def test_a_plan_for_which_memory_was_lacking_is_made_later(flex: Patch) -> None:
    module, mask, values = FlexModule(), interval_mask(), tensors()
    install(flex, flex=module)
    check(CudnnFlexAttention(), interval_mask(), values, IntervalAttention())
    create, plans = module.create_mask_plan, len(module.plans)

    for made_by, most in ((_no_memory_for_a_plan, 0), (create, 1)):
        flex.setattr(module, "create_mask_plan", made_by)
        cudnn_flex._functions.cache_clear()
        check(CudnnFlexAttention(), mask, values, IntervalAttention())
        assert len(module.plans) == plans + most


@pytest.mark.parametrize("skips", ["rows", "columns"])
def test_flex_kernels_that_leave_results_of_empty_blocks_unwritten_are_not_used(flex: Patch, skips: str) -> None:
    """In a tile of documents against remote keys most blocks are empty, and fresh memory is often zeros by chance."""
    module = FlexModule(skips=skips)
    install(flex, flex=module)
    with pytest.warns(RuntimeWarning, match=r"is not used for (forward|backward)") as caught:
        check(CudnnFlexAttention(), interval_mask(), tensors(), IntervalAttention())
    assert len(caught) == {"rows": 2, "columns": 1}[skips]


def test_flex_leaves_small_tiles_and_deterministic_gradients_to_our_kernels(flex: Patch) -> None:
    module = FlexModule()
    install(flex, flex=module)
    flex.setattr(cudnn_flex, "FEWEST_FLOPS", 1e12)
    check(CudnnFlexAttention(), interval_mask(), tensors(), IntervalAttention())
    assert not module.plans
    flex.setattr(cudnn_flex, "FEWEST_FLOPS", 0)
    flex.setattr(module.FlexAttentionBwd, "execute", None)
    cudnn_flex._functions.cache_clear()
    flex.setattr(cudnn_flex, "check_parameters", lambda *names: None)
    check(CudnnFlexAttention(deterministic=True), interval_mask(), tensors(), IntervalAttention())
    assert len(module.plans) == 2


def test_end_points_and_estimate_of_random_intervals() -> None:
    draw = random.Random(0)
    for _ in range(30):
        batch, rows, columns = draw.randint(1, 2), draw.randint(1, 400), draw.randint(1, 400)
        kind = (batch, rows) if draw.random() < 0.5 else (rows,)
        lo, hi = (torch.randint(-20, columns + 20, kind, dtype=torch.int32) for _ in range(2))
        if draw.random() < 0.5:
            lo, hi = lo.sort(-1).values, (lo + 60).sort(-1).values
        geometry = Geometry(batch, rows, columns, 1, 1, 8, 8, torch.bfloat16, torch.device("cpu"))
        ends = end_points(RowMask(lo=lo, hi=hi), geometry)
        assert ends.shape == (1, 3, batch * rows)
        assert ends.is_contiguous()
        assert bool((ends[:, 1:] >= ends[:, :-1]).all())
        assert int(ends.min()) >= 0
        assert int(ends.max()) <= columns
        column = torch.arange(columns)
        seen = (column >= torch.atleast_2d(lo)[..., None]) & (column < torch.atleast_2d(hi)[..., None])
        planned = (column >= ends[0, 1, :, None]) & (column < ends[0, 2, :, None])
        assert torch.equal(planned, seen.expand(batch, -1, -1).flatten(0, 1))
        block = cudnn_flex._BLOCK
        partial = 0
        for row in range(0, rows, block):
            for start in range(0, columns, block):
                part = seen.expand(batch, -1, -1)[:, row : row + block, start : start + block].flatten(1)
                partial += int((part.any(1) & ~part.all(1)).sum())
        estimate = plan_bytes(RowMask(lo=lo, hi=hi), geometry) // cudnn_flex._BYTES_OF_PARTIAL_BLOCK
        assert partial <= estimate <= batch * -(-rows // block) * (columns // block + 2)
