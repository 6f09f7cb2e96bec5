"""Attention backends: one contract that all pass, and the choice among them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.attention.backends.aten import (
    CpuFlashAttention,
    CudnnAttention,
    EfficientAttention,
    FlashAttention,
    MathAttention,
)
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.select import choose_backend
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, ShapedMask
from cp_dtensor.spec.layouts import Contiguous
from cp_dtensor.spec.masks import Full

BATCH = 2
# Relative to the largest element; as much as rounding of inputs and results of that dtype explains.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}

gpu = pytest.mark.gpu
BACKENDS = [
    pytest.param(CpuFlashAttention(), "cpu", id="flash-cpu"),
    pytest.param(MathAttention(), "cpu", id="math-cpu"),
    pytest.param(MathAttention(), "cuda", marks=gpu, id="math-cuda"),
    pytest.param(FlashAttention(), "cuda", marks=gpu, id="flash-cuda"),
    pytest.param(EfficientAttention(), "cuda", marks=gpu, id="efficient-cuda"),
    pytest.param(CudnnAttention(), "cuda", marks=gpu, id="cudnn-cuda"),
]
MASKS = [
    # (mask, rows, columns): causal is square
    pytest.param(FULL_TILE, 37, 50, id="full"),
    pytest.param(FULL_TILE, 1, 1, id="one-pair"),
    pytest.param(CAUSAL_TILE, 37, 37, id="causal"),
]


class Case(NamedTuple):
    """A tile and the rest of the keys; what backends get, and what is expected of them, in float64."""

    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    grad_out: torch.Tensor
    tile_result: tuple[torch.Tensor, torch.Tensor]
    whole_result: tuple[torch.Tensor, torch.Tensor]
    tile_grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_case(
    mask: ShapedMask,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: str,
    scale: float,
    q_heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
) -> Case:
    """The tile has `columns` keys; 11 more keys, which all rows see, are elsewhere.

    The share of the tile in dq is the gradient of a copy of q that only the tile's logits use.
    """
    generator = torch.Generator().manual_seed(rows + columns)

    def normal(heads: int, length: int) -> torch.Tensor:
        drawn = torch.randn(BATCH, heads, length, head_dim, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).double().requires_grad_()

    q, other_q = (tensor.detach().requires_grad_() for tensor in [normal(q_heads, rows)] * 2)
    k, v, other_k, other_v = (normal(kv_heads, length) for length in (columns, columns, 11, 11))
    grad_out = normal(q_heads, rows).detach()
    group = q_heads // kv_heads
    logits = scale * q @ k.repeat_interleave(group, 1).mT
    if not mask.is_full:
        row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
        logits = logits.masked_fill(column > row, float("-inf"))
    all_logits = torch.cat([logits, scale * other_q @ other_k.repeat_interleave(group, 1).mT], dim=-1)
    values = torch.cat([v, other_v], dim=2).repeat_interleave(group, 1)
    whole_out = all_logits.softmax(-1) @ values
    grads = torch.autograd.grad(whole_out, (q, k, v), grad_out)
    tile_out = logits.softmax(-1) @ v.repeat_interleave(group, 1)
    return Case(
        inputs=tuple(tensor.detach().to(device, dtype) for tensor in (q, k, v)),  # type: ignore[arg-type]
        grad_out=grad_out.to(device, dtype),
        tile_result=(tile_out.detach(), logits.logsumexp(-1).detach()),
        whole_result=(whole_out.detach(), all_logits.logsumexp(-1).detach()),
        tile_grads=grads,
    )


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape
    error = (got.detach().cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1)
    assert error <= TOLERANCE[dtype], f"error {error:.2e}"


def check_contract(
    backend: AttentionBackend, case: Case, mask: ShapedMask, scale: float, transposed: bool = False
) -> None:
    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        """Equal values, in (B, S, H, D) memory if `transposed`."""
        return tensor.transpose(1, 2).contiguous().transpose(1, 2) if transposed and tensor.dim() == 4 else tensor

    q, k, v = map(laid_out, case.inputs)
    dtype = q.dtype
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = backend.forward(q, k, v, mask, scale)
    assert torch.promote_types(out.dtype, dtype) == out.dtype
    assert lse.dtype == state_dtype
    assert_close(out, case.tile_result[0], dtype)
    assert_close(lse, case.tile_result[1], dtype)
    whole_out, whole_lse = case.whole_result
    grads = backend.backward(
        laid_out(case.grad_out), q, k, v, laid_out(whole_out.to(q)), whole_lse.to(q.device, state_dtype), mask, scale
    )
    for grad, expected in zip(grads, case.tile_grads, strict=True):
        assert_close(grad, expected, dtype)


def spec_of(
    device: str, capability: tuple[int, int] | None, dtype: str, dim: int, v_dim: int, q_heads: int, kv_heads: int
) -> CallSpec:
    partition = LayoutPartition(Contiguous(), 8, 8, 1, 1)
    return CallSpec(partition, Full(), 1, q_heads, kv_heads, dim, v_dim, dtype, device=device, capability=capability)


def problem_of(case: Case) -> CallSpec:
    q, k, v = case.inputs
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    dtype = str(q.dtype).removeprefix("torch.")
    return spec_of(q.device.type, capability, dtype, q.size(3), v.size(3), q.size(1), k.size(1))


def skip_if_refused(backend: AttentionBackend, case: Case) -> None:
    """Only on GPUs: on CPUs both backends take every case here."""
    reason = backend.refusal(problem_of(case))
    if reason is not None:
        assert case.inputs[0].is_cuda, reason
        pytest.skip(f"{backend.name} refuses: {reason}")


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("mask", "rows", "columns"), MASKS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_tiles_and_dtypes(
    backend: AttentionBackend, device: str, mask: ShapedMask, rows: int, columns: int, dtype: torch.dtype
) -> None:
    case = make_case(mask, rows, columns, dtype, device, scale=0.25)
    skip_if_refused(backend, case)
    check_contract(backend, case, mask, scale=0.25)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize(("mask", "rows", "columns"), MASKS)
@pytest.mark.parametrize(("kv_heads", "transposed"), [(1, False), (2, False), (4, True)])
def test_groups_and_memory_orders(
    backend: AttentionBackend, device: str, mask: ShapedMask, rows: int, columns: int, kv_heads: int, transposed: bool
) -> None:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    case = make_case(mask, rows, columns, dtype, device, scale=0.25, kv_heads=kv_heads)
    skip_if_refused(backend, case)
    check_contract(backend, case, mask, scale=0.25, transposed=transposed)


@pytest.mark.parametrize("head_dim", [1, 3, 17])
@pytest.mark.parametrize("backend", [CpuFlashAttention(), MathAttention()], ids=["flash", "math"])
def test_odd_head_dims_on_cpus(backend: AttentionBackend, head_dim: int) -> None:
    case = make_case(CAUSAL_TILE, 9, 9, torch.float64, "cpu", 0.3, head_dim=head_dim)
    check_contract(backend, case, CAUSAL_TILE, 0.3)


CPU = spec_of("cpu", None, "float32", 64, 64, 4, 4)
HOPPER = spec_of("cuda", (9, 0), "bfloat16", 64, 64, 4, 4)
AMPERE = replace(HOPPER, capability=(8, 0))


@pytest.mark.parametrize(
    ("backend", "problem", "reason"),
    [
        (CpuFlashAttention(), HOPPER, "the tensors are on cuda, not cpu"),
        (CpuFlashAttention(), replace(CPU, v_head_dim=32), r"head dims of q and v differ \(64 and 32\)"),
        (FlashAttention(), CPU, "the tensors are on cpu, not cuda"),
        (FlashAttention(), replace(HOPPER, dtype="float32"), "needs bfloat16 or float16, got float32"),
        (FlashAttention(), replace(HOPPER, head_dim=264, v_head_dim=264), "multiple of 8 up to 256, got 264"),
        (FlashAttention(), replace(HOPPER, capability=(7, 5)), r"needs compute capability 8.0 .* has \(7, 5\)"),
        (CudnnAttention(), CPU, "the tensors are on cpu, not cuda"),
        (CudnnAttention(), replace(HOPPER, head_dim=136, v_head_dim=136), "head dims 136 and 136: a small tile failed"),
        (CudnnAttention(), replace(HOPPER, v_head_dim=32), "head dims 64 and 32: a small tile failed"),
        (CudnnAttention(), replace(HOPPER, head_dim=264, v_head_dim=264), "multiple of 8 up to 256, got 264"),
        (CudnnAttention(), replace(HOPPER, head_dim=192, v_head_dim=12), "head dims of q and v differ"),
        (CudnnAttention(), replace(HOPPER, capability=(7, 5)), r"needs compute capability 8.0 .* has \(7, 5\)"),
        (EfficientAttention(), CPU, "the tensors are on cpu, not cuda"),
        (EfficientAttention(), replace(HOPPER, dtype="float64"), "does not compute in float64"),
        (EfficientAttention(), replace(HOPPER, head_dim=12), "multiples of 8, got .*12"),
        (EfficientAttention(), replace(HOPPER, v_head_dim=12), "multiples of 8, got .*12"),
    ],
)
def test_refusals_say_why(backend: AttentionBackend, problem: CallSpec, reason: str) -> None:
    refusal = backend.refusal(problem)
    assert isinstance(refusal, str)
    assert re.search(reason, refusal)


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (CPU, CpuFlashAttention),
        (replace(CPU, v_head_dim=32), MathAttention),
        (HOPPER, CudnnAttention),
        (replace(HOPPER, head_dim=256, v_head_dim=256), FlashAttention),
        (replace(HOPPER, dtype="float32"), EfficientAttention),
        (replace(HOPPER, dtype="float64"), MathAttention),
        (AMPERE, FlashAttention),
        (replace(AMPERE, capability=(7, 5)), EfficientAttention),
    ],
)
def test_the_fastest_backend_that_can_is_chosen(problem: CallSpec, expected: type[AttentionBackend]) -> None:
    assert type(choose_backend(problem)) is expected


@pytest.mark.parametrize(
    ("allowed", "problem", "expected"),
    [
        (SDPBackend.MATH, CPU, MathAttention),
        (SDPBackend.FLASH_ATTENTION, CPU, CpuFlashAttention),
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], CPU, CpuFlashAttention),
        (SDPBackend.FLASH_ATTENTION, HOPPER, FlashAttention),
        (SDPBackend.CUDNN_ATTENTION, AMPERE, CudnnAttention),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], HOPPER, EfficientAttention),
    ],
)
def test_sdpa_kernel_says_what_is_allowed(
    allowed: SDPBackend | list[SDPBackend], problem: CallSpec, expected: type[AttentionBackend]
) -> None:
    with sdpa_kernel(allowed):
        assert type(choose_backend(problem)) is expected


@pytest.mark.parametrize(
    ("order", "problem", "expected"),
    [
        ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], CPU, MathAttention),
        ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], CPU, CpuFlashAttention),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], HOPPER, EfficientAttention),
        ([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], CPU, MathAttention),
    ],
)
def test_sdpa_kernel_with_priority_says_the_order_too(
    order: list[SDPBackend], problem: CallSpec, expected: type[AttentionBackend]
) -> None:
    before = type(choose_backend(problem))
    with sdpa_kernel(order, set_priority=True):
        assert type(choose_backend(problem)) is expected
    assert type(choose_backend(problem)) is before


def test_when_nothing_can_do_it_every_backend_says_why() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(NotImplementedError) as caught:
        choose_backend(replace(CPU, v_head_dim=32))
    message = str(caught.value)
    assert "4:4 heads of 64/32" in message
    assert "FLASH_ATTENTION: head dims of q and v differ (64 and 32)" in message
    for name in ("MATH", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"):
        assert f"{name} is disabled by sdpa_kernel" in message
    assert len(message.splitlines()) == 1 + 4, "one line for each name, and flash has two implementations"
