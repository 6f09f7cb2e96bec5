"""LSE merge of partial results: the Triton kernel and its reference implementation."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch
from support.devices import each_implementation

from cp_dtensor.attention.lse import with_gradient_of_lse
from cp_dtensor.attention.merge import MergePart, merge, merge_reference
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.spec.layouts import Span

launch_merge = pytest.importorskip("cp_dtensor.attention.triton.merge").launch_merge

Partial = tuple[torch.Tensor, torch.Tensor]
Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[MergePart]], None]

INFINITY = float("inf")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
KEYS = 12

each_merge = each_implementation("merge", merge_reference, launch_merge)
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
@pytest.mark.parametrize(
    ("rows", "head_dim", "parts"),
    [
        *((37, 32, parts) for parts in range(MAX_PARTS + 1)),
        *((*size, MAX_PARTS) for size in ((1, 1), (130, 80), (37, 128), (19, 256))),
    ],
)
def test_parts_merge_into_the_attention_over_all_keys(
    merge: Merge, device: str, rows: int, head_dim: int, parts: int, in_place: bool
) -> None:
    logits, v = problem(rows, head_dim)
    result = merged(merge, *cut_up(logits, v, [(0, rows)] * parts, device), in_place)
    assert_close(result, attention(logits, v))
    unseen = slice(2, None, 5)
    assert (result[0][:, :, unseen] == 0).all()
    assert (result[1][:, :, unseen] == -INFINITY).all()


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
def test_nothing_is_the_identity(merge: Merge, device: str) -> None:
    partial = cut_up(*problem(rows=18, head_dim=32), [], device)[0]
    nothing = (torch.zeros_like(partial[0]), torch.full_like(partial[1], -INFINITY))
    for base, parts in ((partial, [nothing]), (nothing, [partial]), (nothing, [nothing, partial])):
        assert all(map(torch.equal, merged(merge, base, everywhere(*parts)), partial))


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


def test_float64_state_keeps_float64() -> None:
    logits, v = problem(rows=18, head_dim=32)
    first, *others = (attention(logits[..., i : i + 4], v[:, :, i : i + 4]) for i in (0, 4, 8))
    for function in (merge, merge_reference):
        for in_place in (False, True):
            result = merged(function, first, everywhere(*others), in_place)
            for got, expected in zip(result, attention(logits, v), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 1e-3), (torch.bfloat16, 6e-3), (torch.float32, 1e-6)])
def test_gradients_of_lse_of_any_size(dtype: torch.dtype, error: float) -> None:
    out, noise = torch.randn(2, 1, 3, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for size, of_lse in product((0.0, 1e-6, 1e-3), (1e-4, 1.0, 10.0, 1000.0)):
        grad_out, grad_lse = noise * size, torch.full((1, 3, 8), of_lse)
        changed, grad = with_gradient_of_lse(out, torch.zeros(1, 3, 8), grad_out, grad_lse)
        delta = (grad.double() * changed.double()).sum(3)
        wanted = (grad_out.double() * out.double()).sum(3) - grad_lse
        torch.testing.assert_close(delta, wanted, rtol=0.0, atol=error * (of_lse + 16 * size))
