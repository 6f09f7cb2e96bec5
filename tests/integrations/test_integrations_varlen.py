"""Functions of packed documents of ring-flash-attention: documents divided over all ranks, or cut (llama3)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import errors_by_rank, recorded_collectives
from support.masked_problems import fits
from support.packed_documents import PackedProblem, equal_generators, shard_packed
from support.problems import assert_close
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Causal, Contiguous, Documents, PerDocument, context_parallel_shard, context_parallel_unshard
from cp_dtensor.integrations import ring_flash_attn
from cp_dtensor.integrations.ring_flash_attn import (
    ContiguousPerDocument,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
)

CHUNKS = {"ring": 1, "zigzag_ring": 2}
PACKINGS = ("", "kvpacked_", "qkvpacked_")
PREPARED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
each_kind = pytest.mark.parametrize("kind", CHUNKS)
each_of_all_kinds = pytest.mark.parametrize("kind", [*CHUNKS, "llama3"])
each_packing = pytest.mark.parametrize("packing", PACKINGS)


def function(kind: str, packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"{kind}_flash_attn_varlen_{packing}func")


def packed(packing: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    if packing == "qkvpacked_":
        return [torch.stack([q, k, v], 1)]
    return [q, torch.stack([k, v], 1)] if packing == "kvpacked_" else [q, k, v]


def prepare(edges: tuple[int, ...], causal: bool, rank: int, ranks: int) -> dict[str, Any]:
    values = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(edges, dtype=torch.int32), causal, rank, ranks)
    return dict(zip(PREPARED, values, strict=True))


def documents(kind: str, edges: tuple[int, ...], causal: bool, rank: int, ranks: int) -> dict[str, Any]:
    """Return the arguments of a rank that describe the documents."""
    if kind == "llama3":
        return {**prepare(edges, causal, rank, ranks), "heads_k_stride": 1}
    local = torch.tensor(edges, dtype=torch.int32) // ranks
    return {"cu_seqlens": local, "max_seqlen": int(local.diff().max())}


def extracted(kind: str, tensor: torch.Tensor, edges: tuple[int, ...], rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's tokens of each document, then its part of the padding."""
    if kind == "llama3":
        (segment,) = Contiguous().segments(len(tensor), rank, ranks)
        return tensor[segment.start : segment.start + segment.length]
    parts = []
    for start, stop in pairwise(edges):
        if start < stop:
            chunks = tensor[start:stop].chunk(CHUNKS[kind] * ranks)
            parts += [chunks[rank]] + [chunks[-1 - rank]] * (kind == "zigzag_ring")
    padding = tensor[edges[-1] :]
    if kind == "ring":
        return torch.cat([*parts, *padding.chunk(ranks)[rank : rank + 1]])
    segments = PerDocument(edges, seq_len=len(tensor)).segments(len(tensor), rank, ranks)
    of_rank = [position - edges[-1] for each in segments for position in each.positions() if position >= edges[-1]]
    return torch.cat([*parts, padding[of_rank]])


_ends = st.one_of(st.none(), st.integers(0, 9))


@each_packing
@each_of_all_kinds
def test_out_and_gradients_are_those_of_one_device(kind: str, packing: str) -> None:
    """Documents of any length that fits, also empty ones; with padding where documents are divided."""

    @settings(max_examples=examples(12), deadline=None)
    @given(
        st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 3),
        st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.booleans(), st.booleans(), st.tuples(_ends, _ends), st.booleans(),
    )  # fmt: skip
    def checked(
        lengths: list[int], ranks: int, padding: int, heads: tuple[int, int], causal: bool, prepared_causal: bool,
        window: tuple[int | None, int | None], debug: bool,
    ) -> None:  # fmt: skip
        multiple = CHUNKS[kind] * ranks if kind in CHUNKS else 2
        edges = tuple(multiple * sum(lengths[:count]) for count in range(len(lengths) + 1))
        if kind == "llama3":
            padding, edges = 0, tuple(max(0, edge - 1) for edge in edges)  # odd lengths, too
        for part in (1, ranks) if kind in CHUNKS else ():  # of one rank, and of all: neither may look like ids
            local = tuple(edge // ranks * part for edge in edges)
            assume(fits(Documents(local), *[local[-1] + padding * part] * 2, 1))
        q_heads, kv_heads = (heads[0], heads[0]) if packing == "qkvpacked_" else heads
        problem = PackedProblem(
            edges, q_len=edges[-1] + padding * ranks, q_heads=q_heads, kv_heads=kv_heads, is_causal=causal,
            window=window, scale=0.3 if heads[0] == 3 else None, softcap=0.5 if heads[0] == 4 else 0.0,
        )  # fmt: skip
        check(kind, packing, problem, ranks, prepared_causal=causal and prepared_causal, debug=debug)

    checked()


def check(kind: str, packing: str, problem: PackedProblem, ranks: int, *, prepared_causal: bool, debug: bool) -> None:
    *qkv, grad_out = whole = problem.draw(0)
    out, *grads, lse = problem.reference(*whole)
    inputs, wanted_grads = packed(packing, *qkv), packed(packing, *grads)
    left, right = (-1 if end is None else end for end in problem.window)
    options = {"causal": problem.is_causal, "window_size": (left, right), "softmax_scale": problem.scale}
    options |= {"softcap": problem.softcap, "debug": debug}

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return extracted(kind, tensor, problem.cu_seqlens, rank, ranks)

        leaves = [local(tensor).requires_grad_() for tensor in inputs]
        told = documents(kind, problem.cu_seqlens, prepared_causal, rank, ranks)
        got, got_lse, nothing = function(kind, packing)(*leaves, **told, **options, return_attn_probs=True)
        assert got.is_contiguous()
        assert nothing is None
        assert_close(got, local(out), f"out of rank {rank}, {problem}")
        assert_close(got_lse, local(lse.T).T, f"lse of rank {rank}, {problem}")
        for index, pair in enumerate(zip(torch.autograd.grad(got, leaves, local(grad_out)), wanted_grads, strict=True)):
            assert_close(pair[0], local(pair[1]), f"gradient {index} of rank {rank}, {problem}")

    run_ranks(ranks, body)


PROBLEM = PackedProblem((0, 8, 16))
_NOT_PREPARED = "to be the tensor that llama3_flash_attn_prepare_cu_seqlens returned, not a copy"
Refused = dict[str, tuple[Any, type[Exception], str]]
REFUSED: Refused = {
    "alibi_slopes": (torch.ones(2), NotImplementedError, r"alibi_slopes, a tensor of shape \(2,\), expected None"),
    "softcap": (-1.0, ValueError, "softcap to be a finite number of at least 0.0"),
    "group": (3, TypeError, "got int"),
    "mask": (Causal(), TypeError, "takes no mask beside cu_seqlens"),
    "sofcap": (1.0, TypeError, "unexpected keyword argument 'sofcap'"),
    "scale": (1.0, TypeError, "multiple values for keyword argument 'scale'"),
}
REFUSED_CHUNKS: Refused = {"max_seqlen": (3, ValueError, "max_seqlen to be an integer of at least 4, .*; got 3")}
REFUSED_LLAMA3: Refused = {
    "cu_seqlens_q": (torch.tensor([0, 3, 6]), ValueError, f"cu_seqlens_q {_NOT_PREPARED}"),
    "cu_seqlens_k": (torch.tensor([0, 4, 12]), ValueError, f"cu_seqlens_k {_NOT_PREPARED}"),
    "local_k_slice": (slice(0, 17), ValueError, r"prepared for .*slice\(\d, .*, and here is .*slice\(0, 17, None"),
    "max_seqlen_q": (4, ValueError, "max_seqlen_q to be an integer of at least 8, the longest document; got 4"),
    "max_seqlen_k": (6, ValueError, "max_seqlen_k to be an integer of at least 8, the longest document; got 6"),
    "heads_k_stride": (3, ValueError, "heads_k_stride to divide the 2 key heads, got 3"),
}


@each_of_all_kinds
def test_no_argument_is_ignored(kind: str) -> None:
    *qkv, _ = PROBLEM.draw(0)

    def body(rank: int, changed: dict[str, Any]) -> Any:
        local = [extracted(kind, tensor, PROBLEM.cu_seqlens, rank, 2) for tensor in qkv]
        return function(kind)(*local, **{**documents(kind, PROBLEM.cu_seqlens, False, rank, 2), **changed})

    with equal_generators():
        for out, dropped in zip(run_ranks(2, body, {}), run_ranks(2, body, {"dropout_p": 0.5}), strict=True):
            assert not torch.allclose(out, dropped)
    refused = {**REFUSED, **(REFUSED_LLAMA3 if kind == "llama3" else REFUSED_CHUNKS)}
    for argument, (value, error, message) in refused.items():
        for each in errors_by_rank(2, partial(body, changed={argument: value})):
            assert isinstance(each, error), argument
            assert re.search(message, str(each)), argument


@each_kind
def test_nested_ring_and_shards_of_whole_tensors(kind: str) -> None:
    problem = PackedProblem((0, 8, 24), is_causal=True)
    *qkv, _ = whole = problem.draw(0)
    expected = problem.reference(*whole)[0]
    layout = {"ring": ContiguousPerDocument, "zigzag_ring": PerDocument}[kind](problem.cu_seqlens)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
        local = context_parallel_shard(mesh, qkv, [0] * 3, layout)
        got = function(kind)(*local, [0, 2, 6], 4, causal=True, group=mesh)
        assert_close(got, extracted(kind, expected, problem.cu_seqlens, rank, 4), f"rank {rank}")
        assert_close(context_parallel_unshard(mesh, [got], [0], layout)[0], expected)

    run_ranks(4, body)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 5))
def test_contiguous_per_document_covers_every_position_once(lengths: list[int], padding: int, ranks: int) -> None:
    edges = tuple(sum(lengths[:count]) for count in range(1, len(lengths) + 1))
    total = edges[-1] + padding
    layout = ContiguousPerDocument(edges, seq_len=total)
    mine = [shard_packed(torch.arange(total), layout, rank, ranks).tolist() for rank in range(ranks)]
    assert sorted(position for positions in mine for position in positions) == list(range(total))
    assert [len(positions) for positions in mine] == [layout.local_length(total, rank, ranks) for rank in range(ranks)]


@each_kind
def test_bad_documents_and_tensors(kind: str) -> None:
    q, attend = torch.randn(8, 2, 8), function(kind)
    ids = [0, 0, 0, 1, 1, 1, 2, 2]
    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((q, q, q, [0, 16], 16), ValueError, rf"{kind}_flash_attn_varlen_func expects the cu_seqlens of one rank.*16"),
        ((q, q, q, ids, 16), ValueError, rf"{kind}_flash_attn_varlen_func expects .* look like a document id of each"),
        ((q, q, q, [4, 4], 16), ValueError, r"\(4, 4\) for 8 tokens, which look like the lengths"),
        ((q, q[:6], q[:6], [0, 6], 6), ValueError, r"key length does not fit: got 6 local tokens .* expected 8 of 16"),
        ((q, q, q, [0, 6, 4], 6), ValueError, "ascending"),
        ((q, q, q, [0, 8], 8.0), ValueError, r"max_seqlen to be an integer of at least 8, .*; got 8.0"),
        ((q[None], q[None], q[None], [0, 8], 8), ValueError, r"three dims .*got q \(1, 8, 2, 8\)"),
    ]
    if kind == "zigzag_ring":
        refused.append(((q, q, q, [0, 3, 8], 8), ValueError, r"multiples of 2, got \[0, 3, 8\]"))

    def body(rank: int) -> None:
        for arguments, error, message in refused:
            with pytest.raises(error, match=message):
                attend(*arguments)
        with pytest.raises(ValueError, match=r"kv of shape \(tokens, 2, heads, head_dim\), got \(8, 2, 8\)"):
            function(kind, "kvpacked_")(q, q, [0, 8], 8)

    run_ranks(2, body)


@each_of_all_kinds
def test_ranks_exchange_metadata_only_with_debug(kind: str) -> None:
    q = torch.randn(8, 2, 8)
    told = [documents(kind, (0, 16), False, rank, 2) for rank in range(2)]
    for options, exchanges in (({}, 0), ({"debug": True}, 2)):
        with recorded_collectives() as collectives:
            run_ranks(2, lambda rank, options=options: function(kind)(q, q, q, **told[rank], **options))
        assert len([each for each in collectives if each.sent[0].dtype == torch.int64]) == exchanges


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


def call(rank: int, ranks: int = 2, tokens: int = 6, **changed: Any) -> None:
    q = torch.randn(tokens, 2, 8)
    told = prepare((0, 5, 12), True, rank, ranks)
    llama3_flash_attn_varlen_func(q, q, q, **{**told, "heads_k_stride": 1, "causal": True, **changed})


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
        for bad in (torch.tensor([[0, 6]]), 3, []):
            with pytest.raises(ValueError, match=f"cu_seqlens_q {_NOT_PREPARED}"):
                call(rank, cu_seqlens_q=bad)

    run_ranks(2, body)


def test_documents_prepared_for_causal_attention_another_rank_or_length() -> None:
    for error in errors_by_rank(2, lambda rank: call(rank, causal=False)):
        assert isinstance(error, ValueError)
        assert "got causal=False with documents that were prepared for causal=True" in str(error)

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=rf"prepared for .'rank': {1 - rank}, .* here is .'rank': {rank},"):
            call(1 - rank)
        with pytest.raises(ValueError, match=r"prepared for .*'ranks': 1,.* here is .*'ranks': 2,"):
            call(0, ranks=1)
        with pytest.raises(ValueError, match=r"prepared for .*'tokens': 6,.* here is .*'tokens': 7,"):
            call(rank, tokens=7)
        for bad in (3, slice(None, 5), slice(0, 6, 2)):
            with pytest.raises(ValueError, match=r"prepared for .*'local_k_slice': .* here is .*'local_k_slice': "):
                call(rank, local_k_slice=bad)

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
