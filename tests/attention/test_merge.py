"""LSE merge of partial results: the Triton kernel and its reference implementation."""

from collections.abc import Callable, Sequence

import pytest
import torch
from conftest import GPUS

from cp_dtensor.attention.merge import MergePart, merge, merge_reference
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.spec.layouts import Span

launch_merge = pytest.importorskip("cp_dtensor.attention.triton.merge").launch_merge

Partial = tuple[torch.Tensor, torch.Tensor]
Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[MergePart]], None]

INFINITY = float("inf")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
KEYS = 12

# The kernel runs in Triton's interpreter where there is no GPU, and only there.
no_gpu = pytest.mark.skipif(GPUS > 0, reason="the kernel is compiled for the GPU of this machine")
each_merge = pytest.mark.parametrize(
    ("merge", "device"),
    [
        pytest.param(merge_reference, "cpu", id="torch"),
        pytest.param(launch_merge, "cpu", marks=no_gpu, id="interpreter"),
        pytest.param(merge_reference, "cuda", marks=pytest.mark.gpu, id="torch-cuda"),
        pytest.param(launch_merge, "cuda", marks=pytest.mark.gpu, id="triton"),
    ],
)
each_place = pytest.mark.parametrize("in_place", [False, True], ids=["out of place", "in place"])


def attention(logits: torch.Tensor, v: torch.Tensor) -> Partial:
    """(out, lse) over all keys; (0, -inf) where every logit is -inf."""
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - torch.where(lse > -INFINITY, lse, 0.0).unsqueeze(-1))
    return weights @ v, lse


def problem(rows: int, head_dim: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 logits (2, 3, rows, KEYS) and values (2, 3, KEYS, head_dim). A row in five sees none of the first six
    keys, another none of the others, another none at all."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 3, rows, KEYS, generator=generator, dtype=torch.float64)
    logits[:, :, 0::5, :6] = -INFINITY
    logits[:, :, 1::5, 6:] = -INFINITY
    logits[:, :, 2::5] = -INFINITY
    return logits, torch.randn(2, 3, KEYS, head_dim, generator=generator, dtype=torch.float64)


def cut_up(
    logits: torch.Tensor, v: torch.Tensor, spans: Sequence[Span], device: str, dtype: torch.dtype = torch.float32
) -> tuple[Partial, list[MergePart]]:
    """A base of the first keys and, for each span of rows, a part of some of the others."""
    share = KEYS // (len(spans) + 1)

    def of_keys(index: int, rows: Span) -> Partial:
        keys = slice(index * share, (index + 1) * share)
        out, lse = attention(logits[:, :, slice(*rows), keys], v[:, :, keys])
        return out.to(device, dtype), lse.to(device, torch.float32)

    base = of_keys(0, (0, logits.size(2)))
    return base, [(rows, *of_keys(1 + index, rows)) for index, rows in enumerate(spans)]


def expected_of(logits: torch.Tensor, v: torch.Tensor, spans: Sequence[Span]) -> Partial:
    """The attention that `cut_up` cuts up: rows see the keys of a part only where it has them."""
    share = KEYS // (len(spans) + 1)
    hidden = torch.ones(logits.shape[2:], dtype=torch.bool)
    hidden[:, :share] = False
    for index, rows in enumerate(spans, start=1):
        hidden[slice(*rows), index * share : (index + 1) * share] = False
    return attention(logits.masked_fill(hidden, -INFINITY), v)


def merged(
    merge: Merge, base: Partial, parts: Sequence[MergePart], in_place: bool = False, dtype: torch.dtype | None = None
) -> Partial:
    """The merge, in `dtype` (None: that of the base); leaves what it is given as it is."""
    base = base[0].clone(), base[1].clone()
    if in_place:
        out, lse = base
    else:
        out, lse = torch.empty_like(base[0], dtype=dtype or base[0].dtype), torch.empty_like(base[1])
    given = [
        tensor for part in ((None, *base), *parts) for tensor in part[1:] if tensor is not out and tensor is not lse
    ]
    before = [tensor.clone() for tensor in given]
    merge(out, lse, *base, parts)
    assert all(map(torch.equal, given, before)), "the merge has written to what it was given"
    return out, lse


def rounding_error(merge: Merge, device: str, dtype: torch.dtype) -> float:
    """The most that rounding changes a number, relatively: half a unit. Triton's interpreter cuts bfloat16 off."""
    cut_off = merge is launch_merge and device == "cpu" and dtype == torch.bfloat16
    return torch.finfo(dtype).eps * (1.0 if cut_off else 0.5)


def everywhere(*partials: Partial) -> list[MergePart]:
    return [((0, out.size(2)), out, lse) for out, lse in partials]


def assert_close(got: Partial, expected: Partial) -> None:
    for what, expected_part in zip(got, expected, strict=True):
        torch.testing.assert_close(what.cpu().double(), expected_part.cpu().double(), **TOLERANCE)


@each_merge
@each_place
@pytest.mark.parametrize("parts", range(MAX_PARTS + 1))
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 1), (37, 32), (130, 80), (37, 128), (19, 256)])
def test_parts_merge_into_the_attention_over_all_keys(
    merge: Merge, device: str, rows: int, head_dim: int, parts: int, in_place: bool
) -> None:
    logits, v = problem(rows, head_dim)
    result = merged(merge, *cut_up(logits, v, [(0, rows)] * parts, device), in_place)
    assert_close(result, attention(logits, v))
    unseen = slice(2, None, 5)
    assert (result[0][:, :, unseen] == 0).all()
    assert (result[1][:, :, unseen] == -INFINITY).all()


SPANS = {
    "a half each": [(0, 20), (20, 41)],
    "all and a half": [(0, 41), (20, 41)],
    "two that overlap": [(3, 30), (7, 41)],
    "one inside of the other": [(3, 30), (11, 12)],
    "the middle": [(17, 23)],
    "one of no rows": [(5, 5), (0, 3)],
}


@each_merge
@each_place
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_a_part_concerns_its_rows_and_no_other(merge: Merge, device: str, spans: list[Span], in_place: bool) -> None:
    logits, v = problem(rows=41, head_dim=80)
    base, parts = cut_up(logits, v, spans, device)
    result = merged(merge, base, parts, in_place)
    assert_close(result, expected_of(logits, v, spans))
    untouched = [row for row in range(41) if not any(start <= row < stop for start, stop in spans)]
    for got, before in zip(result, base, strict=True):
        assert torch.equal(got[:, :, untouched], before[:, :, untouched])


@each_merge
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_results_of_any_dtype_are_merged_in_float32_and_rounded_once(
    merge: Merge, device: str, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    logits, v = problem(rows=19, head_dim=32)
    base, parts = cut_up(logits, v, [(0, 19), (4, 11)], device, dtype)
    doubled = [(rows, out.cpu().double(), lse.cpu().double()) for rows, out, lse in ((None, *base), *parts)]
    exact = merged(merge_reference, doubled[0][1:], doubled[1:])
    out, lse = merged(merge, base, parts, dtype=out_dtype)
    assert (out.dtype, lse.dtype) == (out_dtype, torch.float32)
    torch.testing.assert_close(lse.cpu().double(), exact[1], **TOLERANCE)
    # Beside the rounding, float32's error in the weights.
    torch.testing.assert_close(
        out.cpu().double(), exact[0], rtol=rounding_error(merge, device, out_dtype) + 2e-6, atol=1e-5
    )


@each_merge
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_place_is_as_good_as_out_of_place(merge: Merge, device: str, dtype: torch.dtype) -> None:
    logits, v = problem(rows=19, head_dim=32)
    base, parts = cut_up(logits, v, [(0, 19), (4, 11)], device, dtype)
    assert all(map(torch.equal, merged(merge, base, parts, in_place=True), merged(merge, base, parts)))


@each_merge
def test_a_slice_of_a_result_is_merged_in_place_and_the_rest_stays(merge: Merge, device: str) -> None:
    logits, v = problem(rows=23, head_dim=80)
    base, parts = cut_up(logits, v, [(0, 23)] * 2, device)
    cut = (slice(1, None), slice(1, 3), slice(4, 17))
    inner = [((2, 13), out[cut][:, :, 2:], lse[cut][:, :, 2:]) for _, out, lse in parts]
    expected = merged(merge, (base[0][cut], base[1][cut]), inner)
    out, lse = base[0].clone(), base[1].clone()
    views = out[cut], lse[cut]
    merge(*views, *views, inner)
    assert_close(views, expected)
    for whole, before, view in zip((out, lse), base, views, strict=True):
        view.copy_(before[cut])
        assert torch.equal(whole, before)


@each_merge
@each_place
def test_strides_are_free_but_for_the_last_dim(merge: Merge, device: str, in_place: bool) -> None:
    """The result as (B, S, H, D), the parts as (S, B, H, D) and spread out in memory, LSE as (H, B, S)."""
    logits, v = problem(rows=21, head_dim=32)
    base, parts = cut_up(logits, v, [(0, 21)] * 2, device)

    def heads_first(lse: torch.Tensor) -> torch.Tensor:
        return torch.empty(3, 2, 24, device=device)[..., :21].copy_(lse.transpose(0, 1)).transpose(0, 1)

    base = base[0].transpose(1, 2).contiguous().transpose(1, 2), base[1].transpose(0, 1).contiguous().transpose(0, 1)
    strided = []
    for rows, out, lse in parts:
        wide = torch.empty(21, 2, 3, 48, device=device)[..., :32]
        strided.append((rows, wide.copy_(out.permute(2, 0, 1, 3)).permute(1, 2, 0, 3), heads_first(lse)))
    before = [tensor.stride() for tensor in base]
    result = merged(merge, base, strided, in_place)
    assert [tensor.stride() for tensor in result] == before
    assert_close(result, attention(logits, v))


@each_merge
def test_the_order_of_parts_does_not_matter(merge: Merge, device: str) -> None:
    """Nor whether they come one after the other or at once: merging is commutative and associative."""
    logits, v = problem(rows=18, head_dim=32)
    base, parts = cut_up(logits, v, [(0, 18)] * 2, device)
    a, b = ((out, lse) for _, out, lse in parts)
    at_once = merged(merge, base, parts)
    assert_close(merged(merge, a, everywhere(b, base)), at_once)
    assert_close(merged(merge, merged(merge, base, everywhere(a)), everywhere(b)), at_once)
    assert_close(merged(merge, base, everywhere(merged(merge, b, everywhere(a)))), at_once)


@each_merge
def test_nothing_is_the_identity(merge: Merge, device: str) -> None:
    partial = cut_up(*problem(rows=18, head_dim=32), [], device)[0]
    nothing = (torch.zeros_like(partial[0]), torch.full_like(partial[1], -INFINITY))
    for base, parts in ((partial, [nothing]), (nothing, [partial]), (nothing, [nothing, partial])):
        assert all(map(torch.equal, merged(merge, base, everywhere(*parts)), partial))


@each_merge
def test_no_parts_leave_the_base_in_the_dtype_of_the_result(merge: Merge, device: str) -> None:
    base = cut_up(*problem(rows=18, head_dim=32), [], device, torch.bfloat16)[0]
    out, lse = merged(merge, base, [], dtype=torch.float32)
    assert torch.equal(out, base[0].float())
    assert torch.equal(lse, base[1])


def row(out: float, lse: float, device: str) -> Partial:
    return torch.full((1, 1, 1, 1), out, device=device), torch.full((1, 1, 1), lse, device=device)


@each_merge
@each_place
def test_extreme_logits_do_not_overflow(merge: Merge, device: str, in_place: bool) -> None:
    for high in (3e4, -3e4):
        one, five, six = (row(out, high, device) for out in (1.0, 5.0, 6.0))
        out, lse = merged(merge, one, everywhere(five), in_place)
        torch.testing.assert_close((out.item(), lse.item()), (3.0, high + 0.6931), rtol=1e-6, atol=0)  # log 2
        out, lse = merged(merge, one, everywhere(five, six), in_place)  # float32 resolves such LSEs to 0.002
        torch.testing.assert_close((out.item(), lse.item()), (4.0, high + 1.0986), rtol=1e-3, atol=0)  # log 3
    low, high_row = row(1.0, -3e4, device), row(5.0, 3e4, device)
    for base, part in ((low, high_row), (high_row, low)):
        out, lse = merged(merge, base, everywhere(part), in_place)
        assert (out.item(), lse.item()) == (5.0, 3e4)


@each_merge
def test_the_numbers_of_the_docstring(merge: Merge, device: str) -> None:
    """out 1 with lse log 1 and out 5 with lse log 3 merge to out (1 + 3 * 5) / 4 = 4 with lse log 4."""
    base, part = ((out, lse.log()) for out, lse in (row(1.0, 1.0, device), row(5.0, 3.0, device)))
    out, lse = merged(merge, base, everywhere(part))
    torch.testing.assert_close((out.item(), lse.exp().item()), (4.0, 4.0))


@each_merge
def test_no_rows_are_no_work(merge: Merge, device: str) -> None:
    out, lse = torch.zeros(2, 3, 0, 8, device=device), torch.zeros(2, 3, 0, device=device)
    assert merge(out, lse, out, lse, [((0, 0), out, lse)]) is None


def test_float64_state_keeps_float64() -> None:
    logits, v = problem(rows=18, head_dim=32)
    first, *others = (attention(logits[..., i : i + 4], v[:, :, i : i + 4]) for i in (0, 4, 8))
    for function in (merge, merge_reference):
        for in_place in (False, True):
            result = merged(function, first, everywhere(*others), in_place)
            for got, expected in zip(result, attention(logits, v), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)
