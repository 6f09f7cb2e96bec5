"""The merge of partial results: the Triton kernel, its torch twin, and the accumulator over tiles."""

from collections.abc import Callable

import pytest
import torch
from conftest import GPUS

from cp_dtensor.merge import Accumulator, merge_, merge_reference_

launch_merge = pytest.importorskip("cp_dtensor.kernels.lse_merge").launch_merge

Partial = tuple[torch.Tensor, torch.Tensor]
Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]

INFINITY = float("inf")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

# The kernel runs in Triton's interpreter where there is no GPU, and only there.
no_gpu = pytest.mark.skipif(GPUS > 0, reason="the kernel is compiled for the GPU of this machine")
each_merge = pytest.mark.parametrize(
    ("merge", "device"),
    [
        pytest.param(merge_reference_, "cpu", id="torch"),
        pytest.param(launch_merge, "cpu", marks=no_gpu, id="interpreter"),
        pytest.param(merge_reference_, "cuda", marks=pytest.mark.gpu, id="torch-cuda"),
        pytest.param(launch_merge, "cuda", marks=pytest.mark.gpu, id="triton"),
    ],
)


def attention(logits: torch.Tensor, v: torch.Tensor) -> Partial:
    """(out, lse) over all keys; (0, -inf) where every logit is -inf."""
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(lse > -INFINITY, lse, 0.0).unsqueeze(-1))
    return weights @ v, lse


def problem(rows: int, head_dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 logits (2, 3, rows, 10) and values (2, 3, 10, head_dim). A row in five sees none of the first six keys,
    another none of the last four, another none at all."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 3, rows, 10, generator=generator, dtype=torch.float64)
    logits[:, :, 0::5, :6] = -INFINITY
    logits[:, :, 1::5, 6:] = -INFINITY
    logits[:, :, 2::5] = -INFINITY
    return logits, torch.randn(2, 3, 10, head_dim, generator=generator, dtype=torch.float64)


def to(partial: Partial, device: str, out_dtype: torch.dtype = torch.float32) -> Partial:
    return partial[0].to(device, out_dtype, copy=True), partial[1].to(device, torch.float32, copy=True)


def merged(merge: Merge, first: Partial, second: Partial) -> Partial:
    out, lse = first[0].clone(), first[1].clone()
    merge(out, lse, *second)
    return out, lse


def assert_close(got: Partial, expected: Partial) -> None:
    for what, expected_part in zip(got, expected, strict=True):
        torch.testing.assert_close(what.cpu().double(), expected_part.cpu().double(), **TOLERANCE)


@each_merge
@pytest.mark.parametrize("head_dim", [1, 32, 80, 128, 256])
@pytest.mark.parametrize("rows", [1, 37, 130])
def test_parts_merge_into_the_attention_over_all_keys(merge: Merge, device: str, head_dim: int, rows: int) -> None:
    logits, v = problem(rows, head_dim)
    first = to(attention(logits[..., :6], v[:, :, :6]), device)
    second = to(attention(logits[..., 6:], v[:, :, 6:]), device)
    result = merged(merge, first, second)
    assert_close(result, attention(logits, v))
    assert not any(part.isnan().any() for part in result)
    unseen = slice(2, None, 5)
    assert (result[0][:, :, unseen] == 0).all()
    assert (result[1][:, :, unseen] == -INFINITY).all()


@each_merge
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tiles_of_any_dtype_are_merged_in_float32(merge: Merge, device: str, dtype: torch.dtype) -> None:
    logits, v = problem(rows=19, head_dim=32)
    first = to(attention(logits[..., :6], v[:, :, :6]), device)
    second = to(attention(logits[..., 6:], v[:, :, 6:]), device, dtype)
    expected = merged(merge_reference_, *((out.double().cpu(), lse.double().cpu()) for out, lse in (first, second)))
    result = merged(merge, first, second)
    assert result[0].dtype == result[1].dtype == torch.float32
    assert_close(result, expected)


@each_merge
def test_a_slice_of_the_rows_is_merged_in_place_and_the_others_stay(merge: Merge, device: str) -> None:
    logits, v = problem(rows=23, head_dim=80)
    first = to(attention(logits[..., :6], v[:, :, :6]), device)
    second = to(attention(logits[..., 6:], v[:, :, 6:]), device)
    expected = merged(merge, *(tuple(part[1:, :, 4:17].clone() for part in partial) for partial in (first, second)))
    out, lse = first[0].clone(), first[1].clone()
    merge(out[1:, :, 4:17], lse[1:, :, 4:17], second[0][1:, :, 4:17], second[1][1:, :, 4:17])
    assert_close((out[1:, :, 4:17], lse[1:, :, 4:17]), expected)
    for part, before in ((out, first[0]), (lse, first[1])):
        assert torch.equal(part[0], before[0])
        assert torch.equal(part[:, :, :4], before[:, :, :4])
        assert torch.equal(part[:, :, 17:], before[:, :, 17:])


@each_merge
def test_strides_are_free(merge: Merge, device: str) -> None:
    """State as (B, S, H, D), the tile as (S, D, B, H), LSE with the heads innermost."""
    logits, v = problem(rows=21, head_dim=32)
    first = to(attention(logits[..., :6], v[:, :, :6]), device)
    second = to(attention(logits[..., 6:], v[:, :, 6:]), device)
    out = first[0].transpose(1, 2).contiguous().transpose(1, 2)
    lse = first[1].transpose(1, 2).contiguous().transpose(1, 2)
    tile_out = second[0].permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    tile_lse = second[1].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    strides = [tensor.stride() for tensor in (out, lse)]
    merge(out, lse, tile_out, tile_lse)
    assert [tensor.stride() for tensor in (out, lse)] == strides
    assert_close((out, lse), attention(logits, v))


@each_merge
def test_merging_is_commutative_and_associative(merge: Merge, device: str) -> None:
    logits, v = problem(rows=18, head_dim=32)
    a, b, c = (
        to(attention(logits[..., start:stop], v[:, :, start:stop]), device) for start, stop in ((0, 3), (3, 6), (6, 10))
    )
    assert_close(merged(merge, a, b), merged(merge, b, a))
    assert_close(merged(merge, merged(merge, a, b), c), merged(merge, a, merged(merge, b, c)))


@each_merge
def test_nothing_is_the_identity(merge: Merge, device: str) -> None:
    partial = to(attention(*problem(rows=18, head_dim=32)), device)
    nothing = (torch.zeros_like(partial[0]), torch.full_like(partial[1], -INFINITY))
    for result in (merged(merge, partial, nothing), merged(merge, nothing, partial)):
        assert torch.equal(result[0], partial[0])
        assert torch.equal(result[1], partial[1])


@each_merge
def test_extreme_logits_do_not_overflow(merge: Merge, device: str) -> None:
    def row(out: float, lse: float) -> Partial:
        return torch.full((1, 1, 1, 1), out, device=device), torch.full((1, 1, 1), lse, device=device)

    for high in (3e4, -3e4):
        out, lse = merged(merge, row(1.0, high), row(5.0, high))
        torch.testing.assert_close((out.item(), lse.item()), (3.0, high + 0.6931), rtol=1e-6, atol=0)
    out, lse = merged(merge, row(1.0, -3e4), row(5.0, 3e4))
    assert (out.item(), lse.item()) == (5.0, 3e4)


@each_merge
def test_the_numbers_of_the_docstring(merge: Merge, device: str) -> None:
    """out 1 with lse log 1 and out 5 with lse log 3 merge to out (1 + 3 * 5) / 4 = 4 with lse log 4."""
    one, three = (torch.tensor([[[value]]], device=device).log() for value in (1.0, 3.0))
    out, lse = merged(
        merge,
        (torch.full((1, 1, 1, 1), 1.0, device=device), one),
        (torch.full((1, 1, 1, 1), 5.0, device=device), three),
    )
    torch.testing.assert_close((out.item(), lse.exp().item()), (4.0, 4.0))


@each_merge
def test_no_rows_are_no_work(merge: Merge, device: str) -> None:
    out, lse = torch.zeros(2, 3, 0, 8, device=device), torch.zeros(2, 3, 0, device=device)
    assert merge(out, lse, out, lse) is None


def test_float64_state_keeps_float64() -> None:
    logits, v = problem(rows=18, head_dim=32)
    first, second = attention(logits[..., :6], v[:, :, :6]), attention(logits[..., 6:], v[:, :, 6:])
    for merge in (merge_, merge_reference_):
        result = merged(merge, first, second)
        for got, expected in zip(result, attention(logits, v), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


def accumulator(dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> Accumulator:
    return Accumulator(torch.empty(2, 3, 8, 4, dtype=dtype), v_head_dim=5, state_dtype=state_dtype)


def tile(batch: int, rows: int, dtype: torch.dtype, seed: int) -> Partial:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(batch, 3, rows, 5, generator=generator, dtype=torch.float64).to(dtype)
    return out, torch.randn(batch, 3, rows, generator=generator, dtype=torch.float64).float()


def test_a_single_tile_of_all_rows_passes_through_untouched() -> None:
    result = accumulator(torch.bfloat16)
    out, lse = tile(2, 8, torch.bfloat16, seed=0)
    result.add((0, 2), (0, 8), out, lse)
    got_out, got_lse = result.result(torch.bfloat16)
    assert got_out.data_ptr() == out.data_ptr()
    assert got_lse.data_ptr() == lse.data_ptr()


def test_later_tiles_do_not_write_into_the_first() -> None:
    result = accumulator(torch.float32)
    first, second = tile(2, 8, torch.float32, seed=0), tile(2, 8, torch.float32, seed=1)
    before = (first[0].clone(), first[1].clone())
    result.add((0, 2), (0, 8), *first)
    result.add((0, 2), (0, 8), *second)
    assert_close(result.result(torch.float32), merged(merge_reference_, first, second))
    assert torch.equal(first[0], before[0])
    assert torch.equal(first[1], before[1])


def test_partial_tiles_touch_their_rows_alone() -> None:
    result = accumulator(torch.float32)
    some, more = tile(2, 3, torch.float32, seed=0), tile(1, 2, torch.float32, seed=1)
    result.add((0, 2), (1, 4), *some)
    result.add((1, 2), (3, 5), *more)
    out, lse = result.result(torch.float32)
    assert torch.equal(out[0, :, 1:4], some[0][0])
    assert torch.equal(lse[1, :, 1:3], some[1][1, :, :2])
    both = [
        (partial[0][..., row, :][None, ..., None, :], partial[1][..., row][None, ..., None])
        for partial, row in (((some[0][1], some[1][1]), 2), ((more[0][0], more[1][0]), 0))
    ]
    assert_close((out[1:, :, 3:4], lse[1:, :, 3:4]), merged(merge_reference_, *both))
    for untouched in ((slice(None), 0), (slice(None), 5), (0, 4)):
        batch, row = untouched
        assert (out[batch, ..., row, :] == 0).all()
        assert (lse[batch, ..., row] == -INFINITY).all()


def test_rows_that_nobody_touched_saw_nothing() -> None:
    out, lse = accumulator(torch.bfloat16).result(torch.bfloat16)
    assert torch.equal(out, torch.zeros(2, 3, 8, 5, dtype=torch.bfloat16))
    assert torch.equal(lse, torch.full((2, 3, 8), -INFINITY))


def test_float64_inputs_have_float64_state() -> None:
    result = accumulator(torch.float64, torch.float64)
    first, second = ((out, lse.double()) for out, lse in (tile(2, 8, torch.float64, seed) for seed in (0, 1)))
    result.add((0, 2), (0, 8), *first)
    result.add((0, 2), (0, 8), *second)
    for got, expected in zip(result.result(torch.float64), merged(merge_reference_, first, second), strict=True):
        assert got.dtype == torch.float64
        assert torch.equal(got, expected)


def test_many_tiles_of_bfloat16_are_summed_in_float32() -> None:
    """Equal partials merge to the same out again, without the drift that bfloat16 sums would have."""
    result = accumulator(torch.bfloat16)
    out, lse = tile(2, 8, torch.bfloat16, seed=0)
    for _ in range(64):
        result.add((0, 2), (0, 8), out, lse)
    got_out, got_lse = result.result(torch.bfloat16)
    assert torch.equal(got_out, out)
    torch.testing.assert_close(got_lse, lse + 4.158883, rtol=1e-5, atol=1e-5)  # log 64
