"""Functions of packed documents of ring-flash-attention: their layout, what they prepare and refuse.

Results are in tests/matrix, forms and options in test_integrations_ring_flash_attn.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.packed_documents import shard_packed
from support.ranks import run_ranks

from cp_dtensor.integrations import ring_flash_attn
from cp_dtensor.integrations.ring_flash_attn import (
    ContiguousPerDocument,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
)

PREPARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")


def prepare(edges: tuple[int, ...], causal: bool, rank: int, ranks: int) -> dict[str, Any]:
    values = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(edges, dtype=torch.int32), causal, rank, ranks)
    return dict(zip(PREPARED, values, strict=True))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 5))
def test_contiguous_per_document_covers_every_position_once(lengths: list[int], padding: int, ranks: int) -> None:
    edges = tuple(sum(lengths[:count]) for count in range(1, len(lengths) + 1))
    total = edges[-1] + padding
    layout = ContiguousPerDocument(edges, seq_len=total)
    mine = [shard_packed(torch.arange(total), layout, rank, ranks).tolist() for rank in range(ranks)]
    assert sorted(position for positions in mine for position in positions) == list(range(total))
    assert [len(positions) for positions in mine] == [layout.local_length(total, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("kind", ["ring", "zigzag_ring"])
def test_bad_documents_and_tensors(kind: str) -> None:
    q, attend = torch.randn(8, 2, 8), getattr(ring_flash_attn, f"{kind}_flash_attn_varlen_func")
    ids = [0, 0, 0, 1, 1, 1, 2, 2]
    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((q, q, q, [0, 16], 16), ValueError, rf"{kind}_flash_attn_varlen_func expects the cu_seqlens of one rank.*16"),
        ((q, q, q, ids, 16), ValueError, rf"{kind}_flash_attn_varlen_func expects .* look like a document id of each"),
        ((q, q, q, [4, 4], 16), ValueError, r"\(4, 4\) for 8 tokens, which look like the lengths"),
        ((q, q[:6], q[:6], [0, 6], 6), ValueError, r"key length does not fit: got 6 local tokens .* expected 8 of 16"),
        ((q, q, q, [0, 6, 4], 6), ValueError, "ascending"),
        ((q, q, q, [0, 8], 3), ValueError, "max_seqlen to be an integer of at least 8, .*; got 3"),
        ((q, q, q, [0, 8], 8.0), ValueError, r"max_seqlen to be an integer of at least 8, .*; got 8.0"),
        ((q[None], q[None], q[None], [0, 8], 8), ValueError, r"three dims .*got q \(1, 8, 2, 8\)"),
    ]
    if kind == "zigzag_ring":
        refused.append(((q, q, q, [0, 3, 8], 8), ValueError, r"multiples of 2, got \[0, 3, 8\]"))

    def body(rank: int) -> None:
        for arguments, error, message in refused:
            with pytest.raises(error, match=message):
                attend(*arguments)

    run_ranks(2, body)


# llama3


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


NOT_PREPARED = "to be the tensor that llama3_flash_attn_prepare_cu_seqlens returned, not a copy"


def test_arguments_that_were_not_prepared_for_this_call_are_refused() -> None:
    def body(rank: int) -> None:
        def told(edges: tuple[int, ...] = (0, 5, 12), of: int = rank, ranks: int = 2) -> dict[str, Any]:
            return prepare(edges, True, of, ranks)

        written = told()
        written["cu_seqlens_k"].add_(0)
        others: list[tuple[dict[str, Any], str]] = [
            *[({name: told()[name].clone()}, f"{name} {NOT_PREPARED}") for name in PREPARED[:2]],
            *[({"cu_seqlens_q": bad}, f"cu_seqlens_q {NOT_PREPARED}") for bad in (torch.tensor([[0, 6]]), 3, [])],
            (written, f"cu_seqlens_k {NOT_PREPARED} and not written to since"),
            ({"cu_seqlens_k": told((0, 4, 12))["cu_seqlens_k"]}, f"cu_seqlens_k {NOT_PREPARED}"),
            (told(of=1 - rank), rf"prepared for .'rank': {1 - rank}, .* here is .'rank': {rank},"),
            (told(of=0, ranks=1), r"prepared for .*'ranks': 1,.* here is .*'ranks': 2,"),
            ({"tokens": 7}, r"prepared for .*'tokens': 6,.* here is .*'tokens': 7,"),
            *[
                ({"local_k_slice": bad}, r"prepared for .*'local_k_slice': .* here is .*'local_k_slice': ")
                for bad in (3, slice(None, 5), slice(0, 6, 2))
            ],
            ({"max_seqlen_q": 0}, "max_seqlen_q to be an integer of at least ., the longest document; got 0"),
            ({"max_seqlen_k": 4}, "max_seqlen_k to be an integer of at least ., the longest document; got 4"),
            ({"heads_k_stride": 3}, "heads_k_stride to divide the 2 key heads, got 3"),
            ({"causal": False}, "got causal=False with documents that were prepared for causal=True"),
        ]
        for changed, message in others:
            given = {"tokens": 6, **told(), "heads_k_stride": 1, "causal": True, **changed}
            q = torch.randn(given.pop("tokens"), 2, 8)
            with pytest.raises(ValueError, match=message):
                llama3_flash_attn_varlen_func(q, q, q, **given)

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
