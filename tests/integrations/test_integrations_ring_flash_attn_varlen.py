"""Varlen functions that divide each document over all ranks: out and gradients equal those of one device."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
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
from support.packed_documents import PackedProblem, equal_generators
from support.problems import assert_close
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Documents, PerDocument
from cp_dtensor.integrations import ring_flash_attn
from cp_dtensor.integrations.ring_flash_attn_varlen import ContiguousPerDocument, shard_varlen, unshard_varlen

CHUNKS = {"ring": 1, "zigzag_ring": 2}
PACKINGS = ("", "kvpacked_", "qkvpacked_")
each_kind = pytest.mark.parametrize("kind", CHUNKS)
each_packing = pytest.mark.parametrize("packing", PACKINGS)


def function(kind: str, packing: str = "") -> Callable[..., Any]:
    return getattr(ring_flash_attn, f"{kind}_flash_attn_varlen_{packing}func")


def packed(packing: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    if packing == "qkvpacked_":
        return [torch.stack([q, k, v], 1)]
    return [q, torch.stack([k, v], 1)] if packing == "kvpacked_" else [q, k, v]


def extracted(kind: str, tensor: torch.Tensor, edges: tuple[int, ...], rank: int, ranks: int) -> torch.Tensor:
    """Returns a rank's tokens of each document, then its part of the padding."""
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


def check(kind: str, packing: str, problem: PackedProblem, ranks: int, *, debug: bool) -> None:
    *qkv, grad_out = whole = problem.draw(0)
    out, *grads, lse = problem.reference(*whole)
    inputs, wanted_grads = packed(packing, *qkv), packed(packing, *grads)
    left, right = (-1 if end is None else end for end in problem.window)
    local_edges = torch.tensor(problem.cu_seqlens, dtype=torch.int32) // ranks
    options = {"causal": problem.is_causal, "window_size": (left, right), "softmax_scale": problem.scale}
    options["debug"] = debug

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return extracted(kind, tensor, problem.cu_seqlens, rank, ranks)

        leaves = [local(tensor).requires_grad_() for tensor in inputs]
        longest = int(local_edges.diff().max())
        got, got_lse, nothing = function(kind, packing)(
            *leaves, local_edges, longest, return_attn_probs=True, **options
        )
        assert got.is_contiguous()
        assert nothing is None
        assert_close(got, local(out), f"out of rank {rank}, {problem}")
        assert_close(got_lse, local(lse.T).T, f"lse of rank {rank}, {problem}")
        for index, pair in enumerate(zip(torch.autograd.grad(got, leaves, local(grad_out)), wanted_grads, strict=True)):
            assert_close(pair[0], local(pair[1]), f"gradient {index} of rank {rank}, {problem}")

    run_ranks(ranks, body)


_ends = st.one_of(st.none(), st.integers(0, 9))


@each_packing
@each_kind
def test_out_and_gradients_are_those_of_one_device(kind: str, packing: str) -> None:
    """Documents of any length that the ranks divide evenly, also empty ones, with padding after them."""

    @settings(max_examples=examples(12), deadline=None)
    @given(
        st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 5), st.integers(0, 3),
        st.sampled_from([(2, 2), (4, 2), (3, 1)]), st.booleans(), st.tuples(_ends, _ends), st.booleans(),
    )  # fmt: skip
    def checked(
        local_lengths: list[int], ranks: int, padding: int, heads: tuple[int, int], causal: bool,
        window: tuple[int | None, int | None], debug: bool,
    ) -> None:  # fmt: skip
        edges = [0]
        for length in local_lengths:
            edges.append(edges[-1] + length * CHUNKS[kind] * ranks)
        for chunk in (1, ranks):  # of one rank, and of all: neither may look like ids of documents
            local = tuple(edge // ranks * chunk for edge in edges)
            assume(fits(Documents(local), *[local[-1] + padding * chunk] * 2, 1))
        q_heads, kv_heads = (heads[0], heads[0]) if packing == "qkvpacked_" else heads
        problem = PackedProblem(
            tuple(edges), q_len=edges[-1] + padding * ranks, q_heads=q_heads, kv_heads=kv_heads, is_causal=causal,
            window=window, scale=0.3 if heads[0] == 3 else None,
        )  # fmt: skip
        check(kind, packing, problem, ranks, debug=debug)

    checked()


@each_kind
def test_nested_ring(kind: str) -> None:
    problem = PackedProblem((0, 8, 24), is_causal=True)
    *qkv, _ = whole = problem.draw(0)
    expected = problem.reference(*whole)[0]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
        local = [shard_varlen(tensor, kind, problem.cu_seqlens, mesh) for tensor in qkv]
        got = function(kind)(*local, [0, 2, 6], 4, causal=True, group=mesh)
        assert_close(got, shard_varlen(expected, kind, problem.cu_seqlens, mesh), f"rank {rank}")

    run_ranks(4, body)


def test_the_example_of_the_docstring() -> None:
    def body(rank: int) -> list[list[int]]:
        return [shard_varlen(torch.arange(12), kind, [0, 4, 12]).tolist() for kind in CHUNKS]

    first, second = run_ranks(2, body)
    assert first == [[0, 1, 4, 5, 6, 7], [0, 3, 4, 5, 10, 11]]
    assert second == [[2, 3, 8, 9, 10, 11], [1, 2, 6, 7, 8, 9]]


@each_kind
def test_shard_and_unshard(kind: str) -> None:
    edges, tokens = (0, 12, 12, 36), torch.arange(42)
    whole = torch.randn(42, 2, 3)

    def body(rank: int) -> None:
        local = shard_varlen(whole, kind, torch.tensor(edges))
        assert torch.equal(local, extracted(kind, whole, edges, rank, 3))
        assert torch.equal(unshard_varlen(local, kind, edges), whole)
        rows = shard_varlen(tokens.view(1, -1), kind, edges, dim=-1)
        assert torch.equal(unshard_varlen(rows, kind, edges, dim=-1), tokens.view(1, -1))
        leaf = local.clone().requires_grad_()
        (unshard_varlen(leaf, kind, edges, grad="partial") * whole).sum().backward()
        torch.testing.assert_close(leaf.grad, 3 * local)
        assert torch.equal(shard_varlen(tokens, "llama3", edges), tokens.chunk(3)[rank])

    run_ranks(3, body)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 5))
def test_contiguous_per_document_covers_every_position_once(lengths: list[int], padding: int, ranks: int) -> None:
    edges = tuple(sum(lengths[:count]) for count in range(1, len(lengths) + 1))
    total = edges[-1] + padding
    layout = ContiguousPerDocument(edges, total)
    by_rank = [layout.segments(total, rank, ranks) for rank in range(ranks)]
    assert len({len(segments) for segments in by_rank}) == 1
    mine = [[p for segment in segments for p in segment.positions()] for segments in by_rank]
    assert sorted(position for positions in mine for position in positions) == list(range(total))
    assert [len(positions) for positions in mine] == [layout.local_length(total, rank, ranks) for rank in range(ranks)]
    with pytest.raises(ValueError, match=f"of {total} tokens only, got {total + 1}"):
        layout.segments(total + 1, 0, ranks)


def test_positional_arguments_are_in_that_package_s_order() -> None:
    options = [
        "cu_seqlens", "max_seqlen", "dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes",
        "deterministic", "return_attn_probs", "group",
    ]  # fmt: skip
    for kind in CHUNKS:
        for packing, tensors in {
            "": ["q", "k", "v", *options],
            "kvpacked_": ["q", "kv"],
            "qkvpacked_": ["qkv"],
        }.items():
            parameters = inspect.signature(function(kind, packing)).parameters.values()
            assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == tensors


PROBLEM = PackedProblem((0, 8, 16))
CHANGES: dict[str, tuple[Any, PackedProblem | None]] = {
    "cu_seqlens": ([0, 2, 8], replace(PROBLEM, cu_seqlens=(0, 4, 16))),
    "dropout_p": (0.5, None),
    "softmax_scale": (0.9, replace(PROBLEM, scale=0.9)),
    "softcap": (0.5, replace(PROBLEM, softcap=0.5)),
    "causal": (True, replace(PROBLEM, is_causal=True)),
    "window_size": ((2, 1), replace(PROBLEM, window=(2, 1))),
}
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "max_seqlen": (3, ValueError, r"max_seqlen to be at least 4, the longest document; got 3"),
    "alibi_slopes": (torch.ones(2), NotImplementedError, r"alibi_slopes, a tensor of shape \(2,\), expected None"),
    "softcap": (-1.0, ValueError, "softcap to be a finite number of at least 0.0"),
    "group": (3, TypeError, "got int"),
}


@each_packing
@each_kind
def test_no_argument_is_ignored(kind: str, packing: str) -> None:
    *qkv, _ = PROBLEM.draw(0)

    def body(rank: int, edges: tuple[int, ...], changed: dict[str, Any]) -> Any:
        local = [extracted(kind, tensor, edges, rank, 2) for tensor in packed(packing, *qkv)]
        return function(kind, packing)(*local, **{"cu_seqlens": [0, 4, 8], "max_seqlen": 6, **changed})

    with equal_generators():
        before = run_ranks(2, body, PROBLEM.cu_seqlens, {})
        for argument, (value, changed) in CHANGES.items():
            edges = PROBLEM.cu_seqlens if changed is None else changed.cu_seqlens
            for rank, out in enumerate(run_ranks(2, body, edges, {argument: value})):
                assert not torch.allclose(out, before[rank]), argument
                if changed:
                    wanted = extracted(kind, changed.reference(*changed.draw(0))[0], edges, rank, 2)
                    assert_close(out, wanted, argument)
    for argument, (value, error, message) in REFUSED.items():
        refused = partial(body, edges=PROBLEM.cu_seqlens, changed={argument: value})
        found = [each for each in errors_by_rank(2, refused) if each is not None]
        assert found
        for each in found:
            assert isinstance(each, error)
            assert re.search(message, str(each)), argument
    named = inspect.signature(function(kind)).parameters
    tested = {*CHANGES, *REFUSED, "deterministic", "return_attn_probs", "debug", "q", "k", "v"}
    assert set(named) <= tested


@each_kind
def test_bad_documents_and_tensors(kind: str) -> None:
    q, attend = torch.randn(8, 2, 8), function(kind)

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=rf"{kind}_flash_attn_varlen_func expects the cu_seqlens of one rank.*16"):
            attend(q, q, q, [0, 16], 16)
        with pytest.raises(
            ValueError, match=rf"{kind}_flash_attn_varlen_func expects .* look like a document id of each"
        ):
            attend(q, q, q, [0, 0, 0, 1, 1, 1, 2, 2], 16)
        with pytest.raises(ValueError, match=r"\(4, 4\) for 8 tokens, which look like the lengths"):
            attend(q, q, q, [4, 4], 16)
        with pytest.raises(ValueError, match="as many of both, got 8 queries and 6 keys"):
            attend(q, q[:6], q[:6], [0, 6], 6)
        with pytest.raises(ValueError, match="ascending"):
            attend(q, q, q, [0, 6, 4], 6)
        with pytest.raises(TypeError, match="max_seqlen to be an integer, got float"):
            attend(q, q, q, [0, 8], 8.0)
        with pytest.raises(ValueError, match=r"three dims .*got q \(1, 8, 2, 8\)"):
            attend(q[None], q[None], q[None], [0, 8], 8)
        with pytest.raises(ValueError, match=r"kv of shape \(tokens, 2, heads, head_dim\), got \(8, 2, 8\)"):
            function(kind, "kvpacked_")(q, q, [0, 8], 8)
        with pytest.raises(
            ValueError, match="expected kind to be one of 'ring', 'zigzag_ring', 'llama3'; got 'stripe'"
        ):
            shard_varlen(q, "stripe", [0, 8])
        with pytest.raises(ValueError, match=r"multiples of .*; got \[0, 3\] and 8 tokens"):
            shard_varlen(q, kind, [0, 3])
        if kind == "zigzag_ring":
            with pytest.raises(ValueError, match=r"multiples of 2, got \[0, 3, 8\]"):
                attend(q, q, q, [0, 3, 8], 8)

    run_ranks(2, body)


@each_kind
@pytest.mark.parametrize("differ", ["documents", "lengths"])
def test_ranks_that_differ_are_refused_on_every_rank(kind: str, differ: str) -> None:
    def body(rank: int) -> None:
        q = torch.randn(8 + 2 * rank * (differ == "lengths"), 2, 8)
        function(kind)(q, q, q, [0, 2 + 2 * rank * (differ == "documents"), 8], 8, debug=True)

    for error in errors_by_rank(2, body):
        assert isinstance(error, ValueError)
        assert "disagree about" in str(error)


@each_kind
def test_ranks_exchange_metadata_only_with_debug(kind: str) -> None:
    q = torch.randn(8, 2, 8)
    for options, exchanges in (({}, 0), ({"debug": True}, 2)):
        with recorded_collectives() as collectives:
            run_ranks(2, lambda rank, options=options: function(kind)(q, q, q, [0, 8], 8, **options))
        assert len([each for each in collectives if each.sent[0].dtype == torch.int64]) == exchanges
