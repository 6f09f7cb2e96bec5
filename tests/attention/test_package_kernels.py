"""Backends on optional packages, with modules that stand for them: refusals, first use, launches."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.package_kernels import Unwanted
from support.pretended_packages import (
    AMPERE,
    BLACKWELL,
    HOPPER,
    INTERVALS,
    MATH,
    MLA,
    FlashModule,
    FlexModule,
    both,
    check,
    install,
    interval_mask,
    tensors,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.attention.backends import cudnn_flex, first_use, flash4, packages
from cp_dtensor.attention.backends.aten import CudnnAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.backends.select import choose_backend
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE

Patch = pytest.MonkeyPatch


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


def test_flash4_has_no_groups_in_backward_with_two_head_dims(fresh: Patch) -> None:
    """Its kernels do not compile for them on Hopper, so each query head gets its own K/V."""
    module = FlashModule()
    install(fresh, module)
    spec = replace(HOPPER, head_dim=24, v_head_dim=16)
    assert flash4.has_no_groups_in_backward(spec)
    assert not flash4.has_no_groups_in_backward(replace(spec, capability=(10, 0)))
    backend = Flash4Attention(Unwanted(), copies_kv=True)
    for mask in (FULL_TILE, CAUSAL_TILE):
        check(backend, mask, tensors(dims=(24, 16)))
    assert set(module.calls) == {"forward", "backward"}
    fresh.setattr(flash4, "MOST_COPIED", 2 * 4 * 300 * 40 * 2 - 1)
    module.calls.clear()
    check(replace(backend, instead=MATH), FULL_TILE, tensors(310, dims=(24, 16)))
    assert set(module.calls) == {"forward"}, "copies would be too large"


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
        f"FlashAttention-4 is not used for {direction} causal torch.bfloat16 head dims (16, 16) group 2"
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


def test_threads_that_compile_at_a_time_leave_stdout_and_logging_as_they_were() -> None:
    stdout, disabled, inside = sys.stdout, logging.root.manager.disable, threading.Event()

    def one() -> None:
        with packages.quiet():
            inside.set()
            time.sleep(0.05)

    def other() -> None:
        inside.wait(10)
        with packages.quiet(), packages.quiet():
            time.sleep(0.1)

    threads = [threading.Thread(target=each) for each in (one, other)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (sys.stdout, logging.root.manager.disable) == (stdout, disabled)


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
        (
            CudnnFlexAttention(),
            replace(INTERVALS, head_dim=192),
            "grouped heads need equal head dims on Hopper",
        ),
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
    assert CudnnFlexAttention().refusal(replace(BLACKWELL, head_dim=192)) is None


def test_backward_of_head_dim_256_is_left_to_cudnn_on_hopper(fresh: Patch) -> None:
    install(fresh, FlashModule(), FlexModule())
    fresh.setattr(CudnnAttention, "refusal", lambda self, spec: None)
    wide = replace(HOPPER, head_dim=256, v_head_dim=256)
    left = [backend.left for backend in map(choose_backend, (wide, HOPPER)) if isinstance(backend, Flash4Attention)]
    assert left == [{("backward", True), ("backward", False)}, frozenset()]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        asked_for = choose_backend(wide)
    assert isinstance(asked_for, Flash4Attention)
    assert not asked_for.left
    module = FlashModule()
    install(fresh, module)
    flash4._functions.cache_clear()
    for mask in (CAUSAL_TILE, FULL_TILE):
        check(Flash4Attention(MATH, left=left[0]), mask, tensors())
    assert set(module.calls) == {"forward"}


@pytest.mark.parametrize(
    ("dims", "left"),
    [
        ((112, 112), {("backward", False)}), ((128, 96), {("backward", False), ("backward", True)}),
        ((96, 112), {("backward", False), ("backward", True)}), ((64, 128), set()), ((120, 120), set()),
        ((96, 192), set()), ((192, 104), set()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_do_not_compile_are_left_to_other_kernels(
    fresh: Patch, dims: tuple[int, int], left: set[tuple[str, bool]], deterministic: bool
) -> None:
    """They would warn at their first use otherwise."""
    install(fresh, FlashModule(), FlexModule())
    fresh.setattr(CudnnAttention, "refusal", lambda self, spec: None)
    spec = replace(HOPPER, q_heads=2, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], deterministic=deterministic)
    backend = choose_backend(spec)
    assert isinstance(backend, Flash4Attention)
    assert backend.left == left
    other = choose_backend(replace(spec, capability=(10, 0), head_dim=112, v_head_dim=112))
    assert isinstance(other, Flash4Attention)
    assert not other.left
