"""The backend on cuDNN's FlexAttention, on CPUs: a module of the tests takes the place of the package."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.package_kernels import Unwanted, relative
from support.pretended_packages import FlexModule, both, check, install, interval_mask, no_memory_for_a_plan, tensors
from support.schedules import seen_by

from cp_dtensor.attention.backends import cudnn_flex, first_use, interval, launches, packages
from cp_dtensor.attention.backends.base import AttentionBackend, expand_kv_heads
from cp_dtensor.attention.backends.cudnn_flex import CudnnFlexAttention, Geometry, end_points, plan_bytes
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.attention.triton.row_mask import RowMask
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import IntervalMask, TileMask
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.spec.intervals import IntervalBand

Patch = pytest.MonkeyPatch


@pytest.fixture
def flex(fresh: Patch) -> Patch:
    """Tiles of any size."""
    fresh.setattr(cudnn_flex, "SHORTEST", 1)
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


def test_launches_of_the_first_call_are_repeated_without_the_package(flex: Patch) -> None:
    module = FlexModule()
    install(flex, flex=module)
    flex.setattr(cudnn_flex, "_INTERVALS", Unwanted())
    backend, mask = CudnnFlexAttention(), interval_mask()
    for _ in range(3):
        check(backend, mask, tensors(), IntervalAttention())
    assert sorted(module.executed) == ["backward"] * 2 + ["forward"] * 2, "of the small tile, then of this one"
    rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()]
    scale = 0.5
    for times, (values, of_call) in enumerate(((rows_first, 0.25), (tensors(), scale)), 1):
        for _ in range(2):
            got = both(backend, mask, values, of_call)
            want = both(IntervalAttention(), mask, values, of_call)
            for one, other in zip(got, want, strict=True):
                finite = other.isfinite()
                assert relative(one[finite], other[finite].double()) < 1e-2
        assert len(module.executed) == 4 + 2 * times, "other strides, and another scale, have launches of their own"


def test_a_capture_has_what_was_made_before_it(flex: Patch) -> None:
    """Kernels of other strides are not compiled in it; another scale needs none."""
    module = FlexModule()
    install(flex, flex=module)
    backend, mask, values = CudnnFlexAttention(), interval_mask(), tensors()
    check(backend, mask, values, IntervalAttention())
    with flex.context() as capture:
        for each in (cudnn_flex, first_use):
            capture.setattr(each, "capturing", lambda: True)
        module.executed.clear()
        rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in values]
        check(backend, mask, rows_first, IntervalAttention())
        assert not module.executed, "by our kernels"
        capture.setattr(cudnn_flex, "_INTERVALS", Unwanted())
        check(backend, mask, values, IntervalAttention())
        assert not module.executed, "by what was recorded"
        both(backend, mask, values, scale=0.5)
        assert module.executed == ["forward", "backward"]


@pytest.mark.parametrize("problem", ["another name", "an object of one call"])
def test_launches_that_cannot_be_recorded_are_the_package_s(flex: Patch, problem: str) -> None:
    module = FlexModule()
    install(flex, flex=module)
    flex.setattr(cudnn_flex, "_INTERVALS", Unwanted())
    if problem == "another name":
        module.compiled_name = "renamed"
    else:
        flex.setattr(launches, "_is_constant", lambda x, kept: not isinstance(x, (torch.Tensor, float)))
    backend, mask = CudnnFlexAttention(), interval_mask()
    for _ in range(3):
        check(backend, mask, tensors(), IntervalAttention())
    assert sorted(module.executed) == ["backward"] * 5 + ["forward"] * 5, "twice for a small tile, then for each call"


def union_mask(rows: int = 300, columns: int = 300, batch: int = 1) -> IntervalMask:
    """That mask, and two more intervals of some rows: one before its own and one behind it, with gaps between."""
    whole = interval_mask(rows, columns, batch)
    between = tuple(tuple(band._replace(lo=40, hi=columns - 60) for band in bands) for bands in whole.sets[0])
    before = ((IntervalBand(0, 200, 0, 30), IntervalBand(210, rows, 3, 4)),) * batch
    behind = tuple((IntervalBand(5, 90 + 30 * row, columns - 50, columns - 20),) for row in range(batch))
    return replace(whole, sets=(between, before, behind))


class Dense(AttentionBackend):
    """Attention with a boolean mask, which is made row by row, and its gradients by autograd."""

    name = "DENSE"

    def refusal(self, spec: CallSpec) -> str | None:
        return None

    def forward(self, q: Any, k: Any, v: Any, mask: TileMask, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._logits(q, k, mask, scale)
        lse = logits.logsumexp(-1)
        return (logits - lse.unsqueeze(-1)).exp().nan_to_num(0.0) @ expand_kv_heads(v, q.size(1)), lse

    def backward(
        self, grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        dq, dk, dv = torch.autograd.grad(self.forward(*leaves, mask, scale)[0], leaves, grad_out)
        return dq, dk, dv

    def _logits(self, q: torch.Tensor, k: torch.Tensor, mask: TileMask, scale: float) -> torch.Tensor:
        seen = np.stack([seen_by(mask, q.size(2), k.size(2), row) for row in range(q.size(0))])
        logits = q @ expand_kv_heads(k, q.size(1)).mT * scale
        return logits.masked_fill(~torch.from_numpy(seen)[:, None], float("-inf"))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kernels", ["flex", "ours", "ours, small"])
def test_a_tile_of_several_intervals(flex: Patch, batch: int, kernels: str) -> None:
    module = FlexModule()
    install(flex, flex=module)
    mask, values = union_mask(300, 280, batch), tensors(300, 280)
    if kernels == "ours":
        check(IntervalAttention(), mask, values, Dense())
        return
    if kernels == "ours, small":
        flex.setattr(cudnn_flex, "SHORTEST", 301)
    else:
        flex.setattr(cudnn_flex, "_INTERVALS", Unwanted())
    assert CudnnFlexAttention().joins_intervals
    assert not CudnnFlexAttention(has_gradients=False).joins_intervals
    check(CudnnFlexAttention(), mask, values, Dense())
    assert len(module.plans) == (2 if kernels == "flex" else 0), "of a small tile with three intervals, and of this one"


def test_a_kernel_that_is_wrong_with_several_intervals_is_used_with_one(flex: Patch) -> None:
    module = FlexModule()
    install(flex, flex=module)
    create = module.create_mask_plan

    def of_first_intervals(ends: torch.Tensor, *others: Any, **options: Any) -> Any:
        return create(ends[:, :3].contiguous(), *others, **options)

    flex.setattr(module, "create_mask_plan", of_first_intervals)
    flex.setattr(cudnn_flex, "check_parameters", lambda *names: None)
    check(CudnnFlexAttention(), interval_mask(), tensors(), Dense())
    with pytest.warns(RuntimeWarning, match="is not used for (forward|backward) several intervals"):
        check(CudnnFlexAttention(), union_mask(), tensors(), Dense())
    plans = len(module.plans)
    check(CudnnFlexAttention(), interval_mask(), tensors(), Dense())
    assert len(module.plans) == plans + 1


def test_tables_of_several_intervals_are_there_when_a_graph_has_no_plan(flex: Patch) -> None:
    """A plan may have been dropped before the capture, in which tables cannot be copied from the host."""
    install(flex, flex=FlexModule())
    mask, values, made = union_mask(), tensors(), []
    check(CudnnFlexAttention(), mask, values, Dense())
    cudnn_flex._planned.clear()
    flex.setattr(cudnn_flex, "capturing", lambda: True)
    flex.setattr(interval, "TileRows", lambda *arguments: made.append(arguments))
    check(CudnnFlexAttention(), mask, values, Dense())
    assert not made


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
    ours = dict.fromkeys(each for each in used if each[1] == torch.bfloat16)
    assert [*ours] == [("attention_forward", torch.bfloat16, 6), ("attention_backward", torch.bfloat16, 6)], (
        "small tiles"
    )


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
        flex.setattr(module, "create_mask_plan", no_memory_for_a_plan)
    flex.setattr(packages.Package, "passes_check", lambda *arguments: True)
    check(CudnnFlexAttention(), interval_mask(), tensors(), IntervalAttention())
    assert not module.plans


def test_a_plan_for_which_memory_was_lacking_is_made_later(flex: Patch) -> None:
    module, mask, values = FlexModule(), interval_mask(), tensors()
    install(flex, flex=module)
    check(CudnnFlexAttention(), interval_mask(), values, IntervalAttention())
    create, plans = module.create_mask_plan, len(module.plans)

    for made_by, most in ((no_memory_for_a_plan, 0), (create, 1)):
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
    flex.setattr(cudnn_flex, "SHORTEST", 256)
    for rows, columns in ((255, 280), (280, 255), (1, 280), (280, 1)):
        check(CudnnFlexAttention(), interval_mask(rows, columns), tensors(rows, columns), IntervalAttention())
    assert not module.plans
    flex.setattr(module.FlexAttentionBwd, "execute", None)
    cudnn_flex._functions.cache_clear()
    flex.setattr(cudnn_flex, "check_parameters", lambda *names: None)
    check(CudnnFlexAttention(has_gradients=False), interval_mask(), tensors(), IntervalAttention())
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
        ends = end_points([RowMask(lo=lo, hi=hi)], geometry)
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
