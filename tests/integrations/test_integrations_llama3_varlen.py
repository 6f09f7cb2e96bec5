"""The llama3 functions for packed documents that cross the boundaries between ranks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import errors_by_rank, recorded_collectives
from support.packed_documents import PackedProblem, equal_generators, shard_packed
from support.problems import assert_close
from support.ranks import run_ranks

from cp_dtensor import Contiguous
from cp_dtensor.integrations import ring_flash_attn
from cp_dtensor.integrations.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens, llama3_flash_attn_varlen_func

PACKINGS = ("", "kvpacked_", "qkvpacked_")
PREPARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
each_packing = pytest.mark.parametrize("packing", PACKINGS)


def function(packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"llama3_flash_attn_varlen_{packing}func")


def packed(packing: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    if packing == "qkvpacked_":
        return [torch.stack([q, k, v], 1)]
    return [q, torch.stack([k, v], 1)] if packing == "kvpacked_" else [q, k, v]


def prepare(edges: tuple[int, ...], causal: bool, rank: int, ranks: int) -> dict[str, Any]:
    values = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(edges, dtype=torch.int32), causal, rank, ranks)
    return dict(zip(PREPARED, values, strict=True))


def numbers(prepared: dict[str, Any]) -> list[Any]:
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in prepared.values()]


def test_arguments_prepared_for_each_rank() -> None:
    """Results by hand: 8 parts of 2 tokens; 2 parts, not causal, with the keys after them."""
    expected = [
        [[0, 2], [0, 2], 2, 2, slice(0, 2)],
        [[0, 2], [0, 4], 2, 4, slice(0, 4)],
        [[0, 2], [0, 6], 2, 6, slice(0, 6)],
        [[0, 1, 2], [0, 7, 8], 1, 7, slice(0, 8)],
        [[0, 2], [0, 3], 2, 3, slice(7, 10)],
        [[0, 2], [0, 5], 2, 5, slice(7, 12)],
        [[0, 2], [0, 7], 2, 7, slice(7, 14)],
        [[0, 2], [0, 2], 2, 2, slice(14, 16)],
    ]
    assert [numbers(prepare((0, 7, 14, 16), True, rank, 8)) for rank in range(8)] == expected
    assert numbers(prepare((0, 7, 14, 16), False, 0, 2)) == [[0, 7, 8], [0, 7, 14], 7, 7, slice(0, 14)]
    assert numbers(prepare((0, 7, 14, 16), False, 1, 2)) == [[0, 6, 8], [0, 7, 9], 6, 7, slice(7, 16)]
    assert numbers(prepare((0, 4, 4, 8), True, 1, 2)) == [[0, 0, 4], [0, 0, 4], 4, 4, slice(4, 8)]
    assert numbers(prepare((0, 3, 5), True, 0, 2)) == [[0, 3], [0, 3], 3, 3, slice(0, 3)]  # ranks do not divide it
    told = prepare((0, 4, 8), True, 1, 2)
    assert told["cu_seqlens_q"].dtype == told["cu_seqlens_k"].dtype == torch.int32


_ends = st.one_of(st.none(), st.integers(0, 9))


@each_packing
def test_out_and_gradients_are_those_of_one_device(packing: str) -> None:
    @settings(max_examples=examples(14), deadline=None)
    @given(
        st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 5),
        st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.booleans(), st.booleans(), st.booleans(), st.tuples(_ends, _ends),
    )  # fmt: skip
    def checked(
        lengths: list[int], ranks: int, heads: tuple[int, int], causal: bool, cut: bool, debug: bool,
        window: tuple[int | None, int | None],
    ) -> None:  # fmt: skip
        edges = tuple(sum(lengths[:count]) for count in range(len(lengths) + 1))
        q_heads, kv_heads = (heads[0], heads[0]) if packing == "qkvpacked_" else heads
        problem = PackedProblem(edges, q_heads=q_heads, kv_heads=kv_heads, is_causal=causal, window=window, scale=0.4)
        check(packing, problem, ranks, prepared_causal=causal and cut, debug=debug)

    checked()


def check(packing: str, problem: PackedProblem, ranks: int, *, prepared_causal: bool, debug: bool) -> None:
    *qkv, grad_out = whole = problem.draw(0)
    out, *grads, lse = problem.reference(*whole)
    inputs, wanted_grads = packed(packing, *qkv), packed(packing, *grads)
    left, right = (-1 if end is None else end for end in problem.window)

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
            return shard_packed(tensor, Contiguous(), rank, ranks, dim)

        told = prepare(problem.cu_seqlens, prepared_causal, rank, ranks)
        leaves = [local(tensor).requires_grad_() for tensor in inputs]
        got, got_lse, nothing = function(packing)(
            *leaves, **told, heads_k_stride=1, causal=problem.is_causal, window_size=(left, right), softmax_scale=0.4,
            return_attn_probs=True, debug=debug,
        )  # fmt: skip
        assert got.is_contiguous()
        assert nothing is None
        assert_close(got, local(out), f"out of rank {rank}, {problem}")
        assert_close(got_lse, local(lse, 1), f"lse of rank {rank}, {problem}")
        for index, pair in enumerate(zip(torch.autograd.grad(got, leaves, local(grad_out)), wanted_grads, strict=True)):
            assert_close(pair[0], local(pair[1]), f"gradient {index} of rank {rank}, {problem}")

    run_ranks(ranks, body)


def test_ranks_exchange_no_integers() -> None:
    q = torch.randn(5, 2, 8)
    told = [prepare((0, 3, 10), True, rank, 2) for rank in range(2)]
    with recorded_collectives() as collectives:
        run_ranks(2, lambda rank: llama3_flash_attn_varlen_func(q, q, q, **told[rank], heads_k_stride=1, causal=True))
    assert not [each for each in collectives if each.sent[0].dtype == torch.int64]


def test_copies_and_tensors_written_to_are_refused() -> None:
    def body(rank: int) -> None:
        for name in PREPARED[:2]:
            told = prepare((0, 5, 12), True, rank, 2)
            with pytest.raises(ValueError, match=f"{name} {_NOT_PREPARED}"):
                call(rank, **{name: told[name].clone()})
            told[name].add_(0)
            with pytest.raises(ValueError, match=f"{name} {_NOT_PREPARED} and not written to since"):
                call(rank, **told)
        with pytest.raises(ValueError, match=f"cu_seqlens_k {_NOT_PREPARED}"):  # of another packed sequence
            call(rank, cu_seqlens_k=prepare((0, 4, 12), True, rank, 2)["cu_seqlens_k"])

    run_ranks(2, body)


def test_positional_arguments_are_in_that_package_s_order() -> None:
    options = [
        *PREPARED[:4], "heads_k_stride", "local_k_slice", "dropout_p", "softmax_scale", "causal", "window_size",
        "alibi_slopes", "deterministic", "return_attn_probs", "group",
    ]  # fmt: skip
    for packing, tensors in {"": ["q", "k", "v", *options], "kvpacked_": ["q", "kv"], "qkvpacked_": ["qkv"]}.items():
        parameters = inspect.signature(function(packing)).parameters.values()
        assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == tensors


PROBLEM = PackedProblem((0, 5, 12))
CHANGES: dict[str, tuple[Any, PackedProblem | None]] = {
    "dropout_p": (0.5, None),
    "softmax_scale": (0.9, replace(PROBLEM, scale=0.9)),
    "softcap": (0.5, replace(PROBLEM, softcap=0.5)),
    "causal": (True, replace(PROBLEM, is_causal=True)),
    "window_size": ((2, 1), replace(PROBLEM, window=(2, 1))),
}
_NOT_PREPARED = "to be the tensor that llama3_flash_attn_prepare_cu_seqlens returned, not a copy"
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "cu_seqlens_q": (torch.tensor([0, 3, 6]), ValueError, f"cu_seqlens_q {_NOT_PREPARED}"),
    "cu_seqlens_k": (torch.tensor([0, 4, 12]), ValueError, f"cu_seqlens_k {_NOT_PREPARED}"),
    "local_k_slice": (slice(0, 11), ValueError, "prepared for local_k_slice from . to 12, and here is .* from 0 to 11"),
    "max_seqlen_q": (4, ValueError, "max_seqlen_q to be at least ., the longest document; got 4"),
    "max_seqlen_k": (6, ValueError, "max_seqlen_k to be at least 7, the longest document; got 6"),
    "heads_k_stride": (3, ValueError, "heads_k_stride to divide the 2 key heads, got 3"),
    "alibi_slopes": (torch.ones(2), NotImplementedError, r"alibi_slopes, a tensor of shape \(2,\), expected None"),
    "softcap": (-1.0, ValueError, "softcap to be a finite number of at least 0.0"),
    "group": (3, TypeError, "got int"),
}


@each_packing
def test_no_argument_is_ignored(packing: str) -> None:
    *qkv, _ = PROBLEM.draw(0)

    def body(rank: int, changed: dict[str, Any]) -> Any:
        local = [shard_packed(tensor, Contiguous(), rank, 2) for tensor in packed(packing, *qkv)]
        told = prepare(PROBLEM.cu_seqlens, False, rank, 2)
        return function(packing)(*local, **{**told, "heads_k_stride": 1, **changed})

    with equal_generators():
        before = run_ranks(2, body, {})
        for argument, (value, changed) in CHANGES.items():
            for rank, out in enumerate(run_ranks(2, body, {argument: value})):
                assert not torch.allclose(out, before[rank]), argument
                if changed:
                    wanted = changed.reference(*changed.draw(0))[0]
                    assert_close(out, shard_packed(wanted, Contiguous(), rank, 2), argument)
    for argument, (value, error, message) in REFUSED.items():
        found = [e for e in errors_by_rank(2, partial(body, changed={argument: value})) if e is not None]
        assert found, argument
        for each in found:
            assert isinstance(each, error), argument
            assert re.search(message, str(each)), argument
    tested = {*CHANGES, *REFUSED, "deterministic", "return_attn_probs", "debug", "q", "k", "v"}
    assert set(inspect.signature(function()).parameters) <= tested


def call(rank: int, ranks: int = 2, **changed: Any) -> None:
    q = torch.randn(6, 2, 8)
    told = prepare((0, 5, 12), True, rank, ranks)
    llama3_flash_attn_varlen_func(q, q, q, **{**told, "heads_k_stride": 1, "causal": True, **changed})


def test_documents_prepared_for_causal_attention_only() -> None:
    q = torch.randn(6, 2, 8)
    for error in errors_by_rank(2, lambda rank: call(rank, causal=False)):
        assert isinstance(error, ValueError)
        assert "got causal=False with documents that were prepared for causal=True" in str(error)

    def uncut(rank: int) -> None:  # no document lies on both ranks, so nothing was left out
        told = prepare((0, 6, 12), True, rank, 2)
        llama3_flash_attn_varlen_func(q, q, q, **told, heads_k_stride=1)

    run_ranks(2, uncut)


def test_documents_of_another_rank_or_length() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=rf"prepared for rank {1 - rank} of 2, and here is rank {rank} of 2"):
            call(1 - rank)
        with pytest.raises(ValueError, match="prepared for rank 0 of 1, and here is rank"):
            call(0, ranks=1)
        q = torch.randn(7, 2, 8)
        told = prepare((0, 5, 12), True, rank, 2)
        with pytest.raises(ValueError, match="prepared for 6 tokens, and here is 7 tokens"):
            llama3_flash_attn_varlen_func(q, q, q, **told, heads_k_stride=1, causal=True)
        for bad in (3, slice(None, 5), slice(0, 6, 2)):
            with pytest.raises(TypeError, match="local_k_slice to be a slice of two integers"):
                call(rank, local_k_slice=bad)
        for bad in (torch.tensor([[0, 6]]), 3, []):
            with pytest.raises(ValueError, match=f"cu_seqlens_q {_NOT_PREPARED}"):
                call(rank, cu_seqlens_q=bad)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0, 4], True, 0, 2), TypeError, "cu_seqlens to be a tensor, got list"),
        ((torch.tensor([1, 4]), True, 0, 2), ValueError, r"cu_seqlens to begin with 0, got \[1, 4\]"),
        ((torch.tensor([0, 4, 2]), True, 0, 2), ValueError, "ascending"),
        ((torch.tensor([0, 4]), True, 2, 2), ValueError, "a rank of world_size=2, got rank=2"),
    ],
)
def test_refused_arguments_of_prepare(arguments: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llama3_flash_attn_prepare_cu_seqlens(*arguments)
