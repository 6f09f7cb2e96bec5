"""Accumulation of parts: exact in any order, rounded once, without overwriting the caller's tensors."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.accumulations import (
    ALL_BATCH,
    ALL_HEADS,
    BATCH,
    DIM,
    HEADS,
    ROWS,
    SHAPE,
    Add,
    Source,
    accumulated,
    assert_rounded_once,
    check,
    float64_results,
)
from support.cases import examples
from support.devices import no_gpu

from cp_dtensor.attention import accumulate
from cp_dtensor.attention.accumulate import Accumulator, Part, place_sums
from cp_dtensor.attention.triton import MAX_PARTS
from cp_dtensor.plan.plan import head_spans
from cp_dtensor.spec.layouts import Span

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
each_kind = pytest.mark.parametrize("kind", ["merge", "sum"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@st.composite
def scripts(draw: st.DrawFn, source: Source) -> list[Add]:
    """Heads come in groups, which may be cut further for their last parts."""

    def parts(heads: Span) -> list[Part]:
        if draw(st.booleans()):
            return [source.part(heads, stack=draw(st.integers(0, 2)), wide=draw(st.booleans()))]
        spans = st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)).map(lambda edges: (min(edges), max(edges)))
        batches = draw(st.sampled_from([[ALL_BATCH], [(0, 1), (1, 2)]]))
        return [
            source.part(heads, draw(spans), draw(st.sampled_from(batches)), draw(st.integers(0, 3)))
            for _ in range(draw(st.integers(0, 2 * MAX_PARTS + 1)))
        ]

    first, last = [], []
    for group in head_spans(HEADS, draw(st.integers(1, 3))):
        first += [Add(group, parts(group), is_last=False) for _ in range(draw(st.integers(0, 2)))]
        for start, stop in head_spans(group[1] - group[0], draw(st.integers(1, 3))):
            heads = group[0] + start, group[0] + stop
            last.append(Add(heads, parts(heads), is_last=True))
    return first + last


@each_kind
@settings(max_examples=examples(100))
@given(data=st.data())
def test_whatever_is_added_makes_what_float64_makes(kind: str, data: st.DataObject) -> None:
    source = Source(kind, data.draw(st.sampled_from(DTYPES)), seed=data.draw(st.integers(0, 1000)))
    check(source, data.draw(scripts(source)))


@no_gpu
@each_kind
@settings(max_examples=examples(10))
@given(data=st.data())
def test_kernels_make_it_too(kind: str, data: st.DataObject) -> None:
    """In Triton's interpreter, which cuts bfloat16 off."""
    kernels = pytest.importorskip("cp_dtensor.attention.triton.merge")
    source = Source(
        kind, data.draw(st.sampled_from([torch.float16, torch.float32])), seed=data.draw(st.integers(0, 99))
    )

    def add_parts(out: torch.Tensor, base: torch.Tensor, parts: Any, _dtype: torch.dtype) -> None:
        kernels.launch_sum(out, base, parts)

    with (
        mock.patch.object(accumulate, "merge", kernels.launch_merge),
        mock.patch.object(accumulate, "add_parts", add_parts),
    ):
        check(source, data.draw(scripts(source)))


@each_kind
@each_dtype
def test_a_single_part_of_everything_passes_through_untouched(kind: str, dtype: torch.dtype) -> None:
    source = Source(kind, dtype)
    for adds in (1, 2):  # the second brings nothing
        part = source.part()
        accumulator = source.accumulator()
        for index in range(adds):
            accumulator.add(ALL_HEADS, [part] if index == 0 else [], is_last=index == adds - 1)
        assert [tensor.data_ptr() for tensor in accumulator.result()] == [tensor.data_ptr() for tensor in part.tensors]


@each_dtype
def test_the_first_gradient_is_added_to_in_place(dtype: torch.dtype) -> None:
    """Also where everything else comes by groups of heads: no second state, no copy."""
    source = Source("sum", dtype)
    part, accumulator = source.part(), source.accumulator()
    accumulator.add(ALL_HEADS, [part], is_last=False)
    for heads in head_spans(HEADS, 2):
        accumulator.add(heads, [source.part(heads, (3, 6))], is_last=True)
    assert [tensor.data_ptr() for tensor in accumulator.result()] == [tensor.data_ptr() for tensor in part.tensors]


@each_kind
@each_dtype
def test_nothing_added_is_nothing_seen(kind: str, dtype: torch.dtype) -> None:
    source = Source(kind, dtype)
    for script in ([], [Add(ALL_HEADS, [], is_last=True)], [Add(heads, [], True) for heads in head_spans(HEADS, 3)]):
        out, *lse = accumulated(source, script)
        assert torch.equal(out, torch.zeros(SHAPE, dtype=dtype))
        assert all((tensor == -float("inf")).all() for tensor in lse)
        assert len(lse) == (kind == "merge")


@each_kind
@each_dtype
def test_results_are_in_the_memory_order_of_what_they_are_like(kind: str, dtype: torch.dtype) -> None:
    """Where they are not the first part itself."""
    source = Source(kind, dtype)
    like = torch.empty(BATCH, ROWS, HEADS, DIM, dtype=dtype).transpose(1, 2)
    for parts in ([source.part(rows=(0, 3))], [source.part(), source.part()], []):
        accumulator = source.accumulator(like)
        accumulator.add(ALL_HEADS, parts, is_last=True)
        assert accumulator.result()[0].stride() == like.stride()


def test_results_with_another_head_dim_are_in_that_order_too() -> None:
    """An output with the v dim of MLA is not copied into the order of q, nor are sums of some heads."""
    like = torch.empty(BATCH, ROWS, HEADS, 3 * DIM).transpose(1, 2)
    result = Accumulator(like, torch.float32, DIM, floats_of_lse=1)
    result.add(ALL_HEADS, [], is_last=True)
    assert result.result()[0].shape == SHAPE
    assert result.result()[0].transpose(1, 2).is_contiguous()
    some_heads, _ = result._empty(HEADS - 1, torch.float32)
    assert some_heads.shape == (BATCH, HEADS - 1, ROWS, DIM)
    assert some_heads.transpose(1, 2).is_contiguous()


def test_many_parts_of_bfloat16_are_summed_in_float32() -> None:
    """Equal partials merge to the same out again, without the drift that bfloat16 sums would have."""
    source = Source("merge", torch.bfloat16)
    part = source.part()
    out, lse = accumulated(source, [Add(ALL_HEADS, [part], is_last=index == 63) for index in range(64)])
    assert torch.equal(out, part.tensors[0])
    torch.testing.assert_close(lse, part.tensors[1] + 4.158883, rtol=1e-5, atol=1e-5)  # log 64


PLACES = {
    "apart": [((0, 2), (0, 3)), ((0, 2), (3, 5))],
    "overlapping": [((0, 2), (1, 6)), ((0, 2), (0, 3))],
    "one inside of the other": [((0, 2), (0, 6)), ((0, 2), (2, 3)), ((0, 2), (4, 5))],
    "the same rows of other batch rows": [((0, 1), (1, 4)), ((1, 2), (1, 4))],
    "overlapping in one half": [((1, 2), (1, 4)), ((0, 1), (1, 4)), ((1, 2), (3, 6))],
    "no rows": [((0, 2), (2, 2)), ((0, 2), (0, 4))],
    "none": [],
}


@each_dtype
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_gradients_are_placed_where_they_belong_and_summed_where_they_meet(
    places: list[tuple[Span, Span]], dtype: torch.dtype
) -> None:
    source = Source("sum", dtype)
    parts = [source.part(rows=rows, batch=batch, wide=index == 1) for index, (batch, rows) in enumerate(places)]
    (exact,), scale = float64_results("sum", [Add(ALL_HEADS, parts, is_last=True)])
    rows_first = torch.empty(ROWS, BATCH, HEADS, DIM + 4, dtype=dtype)  # as gradients travel; poisoned
    out = rows_first[..., :DIM].permute(1, 2, 0, 3)
    place_sums(out, parts, source.state_dtype)
    concerned = scale > 0
    assert_rounded_once(source, out[concerned], exact[concerned], scale[concerned])
    assert rows_first[..., DIM:].isnan().all()
