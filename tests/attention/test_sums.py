"""Sums of partial gradients: the Triton kernel and its reference implementation."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from support.devices import each_implementation

from cp_dtensor.attention.merge import SumPart, add_parts, add_parts_reference
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.spec.layouts import Span

launch_sum = pytest.importorskip("cp_dtensor.attention.triton.merge").launch_sum

Sum = Callable[[torch.Tensor, torch.Tensor, Sequence[SumPart]], None]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def torch_sum(out: torch.Tensor, base: torch.Tensor, parts: Sequence[SumPart]) -> None:
    add_parts_reference(out, base, parts, torch.float32)


each_sum = each_implementation("add", torch_sum, launch_sum)
each_place = pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])


def problem(
    rows: int, head_dim: int, parts: Sequence[tuple[int, Span]], device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, list[SumPart]]:
    """A base (2, 3, rows, head_dim) and a stack for each `(count, rows)` of `parts`."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)

    base = normal(2, 3, rows, head_dim)
    return base, [(span, normal(count, 2, 3, span[1] - span[0], head_dim)) for count, span in parts]


def exact(base: torch.Tensor, parts: Sequence[SumPart]) -> torch.Tensor:
    total = base.cpu().double()
    for (start, stop), stack in parts:
        total[:, :, start:stop] += stack.cpu().double().sum(0)
    return total


def summed(
    add: Sum, base: torch.Tensor, parts: Sequence[SumPart], in_place: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The sum, in `dtype` (None: that of the base); leaves what it is given as it is."""
    base = base.clone()
    out = base if in_place else torch.empty_like(base, dtype=dtype or base.dtype)
    given = [*(stack for _, stack in parts), *([] if in_place else [base])]
    before = [tensor.clone() for tensor in given]
    add(out, base, parts)
    assert all(map(torch.equal, given, before)), "the sum has written to what it was given"
    return out


def assert_rounded_once(add: Sum, got: torch.Tensor, base: torch.Tensor, parts: Sequence[SumPart]) -> None:
    """Up to float32's errors in the sum. Triton's interpreter cuts bfloat16 off, which is up to a whole unit."""
    cut_off = add is launch_sum and got.device.type == "cpu" and got.dtype == torch.bfloat16
    rtol = torch.finfo(got.dtype).eps * (1.0 if cut_off else 0.5)
    torch.testing.assert_close(got.cpu().double(), exact(base, parts), rtol=rtol + 1e-6, atol=1e-5)


@each_sum
@each_place
@pytest.mark.parametrize(
    ("rows", "head_dim", "counts"),
    [*((37, 80, counts) for counts in ((), (1,), (7,), (1, 1), (3, 5))), (1, 1, (3, 5)), (130, 128, (3, 5))],
    ids=str,
)
def test_stacks_are_added(
    add: Sum, device: str, rows: int, head_dim: int, counts: tuple[int, ...], in_place: bool
) -> None:
    assert len(counts) <= MAX_PARTS
    base, parts = problem(rows, head_dim, [(count, (0, rows)) for count in counts], device)
    assert_rounded_once(add, summed(add, base, parts, in_place), base, parts)


@each_sum
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
def test_sums_of_any_dtype_are_in_float32_and_rounded_once(
    add: Sum, device: str, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    base, parts = problem(19, 32, [(5, (0, 19)), (4, (4, 11))], device, dtype)
    result = summed(add, base, parts, dtype=out_dtype)
    assert result.dtype == out_dtype
    assert_rounded_once(add, result, base, parts)


@each_sum
@each_place
def test_strides_are_free_but_for_the_last_dim(add: Sum, device: str, in_place: bool) -> None:
    """The result as (B, S, H, D); the stacks as parts of rows, in which gradients travel: (N, S, [... | B, H, D])."""
    base, parts = problem(21, 32, [(4, (0, 21)), (3, (5, 20))], device)
    base = base.transpose(1, 2).contiguous().transpose(1, 2)
    strided = []
    for rows, stack in parts:
        travelling = torch.empty(len(stack), stack.size(3), 2 * 3 * 48, device=device)
        view = travelling[..., 2 * 3 * 16 :].unflatten(-1, (2, 3, 32)).movedim(1, 3)
        strided.append((rows, view.copy_(stack)))
    result = summed(add, base, strided, in_place)
    assert result.stride() == base.stride()
    assert_rounded_once(add, result, base, parts)


@each_sum
def test_small_numbers_are_not_lost_beside_large_ones(add: Sum, device: str) -> None:
    """1 + 1024 / 1024 is 2; in bfloat16 every one of the small terms would be rounded away."""
    base = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16, device=device)
    terms = torch.full((1024, 1, 1, 1, 1), 2.0**-10, dtype=torch.bfloat16, device=device)
    assert summed(add, base, [((0, 1), terms)], in_place=True).item() == 2.0


@each_place
@pytest.mark.parametrize("add", [add_parts, add_parts_reference])
def test_float64_sums_keep_float64(add: Callable[..., None], in_place: bool) -> None:
    base, parts = problem(18, 32, [(4, (0, 18)), (2, (3, 9))], "cpu", torch.float64)
    result = summed(partial(add, sum_dtype=torch.float64), base, parts, in_place)
    torch.testing.assert_close(result, exact(base, parts), rtol=1e-14, atol=1e-14)
