"""Attention of packed documents: out, lse and all gradients equal those of each document alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import errors_by_rank
from support.packed_documents import PackedProblem, equal_generators, shard_packed
from support.problems import assert_close
from support.ranks import run_ranks

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    PrefixLM,
    SlidingWindow,
    context_parallel_attention,
    varlen_attention,
)


def attended(problem: PackedProblem, ranks: int = 2, **changed: Any) -> list[torch.Tensor]:
    """What each rank gets, with some arguments changed."""
    *qkv, _ = problem.draw(0)

    def body(rank: int) -> torch.Tensor:
        layout = changed.get("layout") or HeadTail()
        local = [shard_packed(tensor, layout, rank, ranks) for tensor in qkv]
        options = {"cu_seqlens": problem.cu_seqlens, "mesh": dist.group.WORLD, **changed}
        return varlen_attention(*local, **options)

    with equal_generators():
        return run_ranks(ranks, body)


PROBLEM = PackedProblem((0, 5, 11), q_len=12)


def test_masks_within_documents_add_up() -> None:
    """A prefix of every document; causal masks and windows hide more of it."""
    *qkv, _ = PROBLEM.draw(0)
    within = {"prefix": PrefixLM(3), "all": PrefixLM(3) & Causal("bottom_right") & SlidingWindow(2, 0, "bottom_right")}

    def body(rank: int) -> None:
        local = [shard_packed(tensor, HeadTail(), rank, 3) for tensor in qkv]
        views = [tensor.transpose(0, 1).unsqueeze(0) for tensor in local]
        for name, options in (("prefix", {}), ("all", {"is_causal": True, "window_size": (2, None)})):
            got = varlen_attention(*local, mesh=dist.group.WORLD, cu_seqlens=[0, 5, 11], within=PrefixLM(3), **options)
            mask = Documents([0, 5, 11], within=within[name])
            wanted = context_parallel_attention(*views, mesh=dist.group.WORLD, mask=mask)
            assert_close(got, wanted[0].transpose(0, 1), name)

    run_ranks(3, body)


def test_the_example_of_the_docstring() -> None:
    v = torch.tensor([1.0, 3.0, 2.0, 4.0, 6.0]).view(5, 1, 1).split([3, 2])

    def body(rank: int) -> list[float]:
        q = torch.zeros_like(v[rank])
        options = {"cu_seqlens": [0, 2, 5], "is_causal": True, "layout": Contiguous(), "seq_len": 5}
        return varlen_attention(q, q, v[rank], mesh=dist.group.WORLD, **options).flatten().tolist()

    assert run_ranks(2, body) == [[1.0, 2.0, 2.0], [3.0, 4.0]]


def test_tensors_and_lists_of_positions_are_alike() -> None:
    wanted = attended(PROBLEM, is_causal=True)
    for dtype in (torch.int32, torch.int64):
        got = attended(PROBLEM, is_causal=True, cu_seqlens=torch.tensor(PROBLEM.cu_seqlens, dtype=dtype))
        assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cu_seqlens": [0, 5, 3]}, ValueError, r"cu_seqlens to be >= 0 and ascending, got \[0, 5, 3\]"),
        ({"cu_seqlens": [0, 2.5]}, ValueError, "cu_seqlens to be one list of integers"),
        ({"cu_seqlens": [0, 13]}, ValueError, r"documents of a mask end at 13 .*, 12 and 12"),
        ({"cu_seqlens_k": [0, 12]}, ValueError, "as many documents of keys as of queries, got 1 and 2"),
        ({"window_size": 3}, ValueError, r"window_size to be a pair .*got 3"),
        ({"window_size": (-2, -1)}, ValueError, "numbers of keys >= 0, or None"),
        ({"within": "causal"}, ValueError, "within to be one mask such as .*got 'causal'"),
        ({"seq_len": (6, 8)}, ValueError, "query length does not fit: got 6 local tokens on rank . of 2, expected 3"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    *qkv, _ = PROBLEM.draw(0)

    def body(rank: int) -> None:
        local = [shard_packed(tensor, HeadTail(), rank, 2) for tensor in qkv]
        varlen_attention(*local, **{"mesh": dist.group.WORLD, "cu_seqlens": PROBLEM.cu_seqlens, **options})

    for found in errors_by_rank(2, body):
        assert isinstance(found, error)
        assert re.search(message, str(found))


def test_ranks_that_disagree_about_documents() -> None:
    """Compared wherever ranks exchange lengths."""
    q = torch.randn(4, 2, 8)

    def body(rank: int) -> None:
        varlen_attention(q, q, q, mesh=dist.group.WORLD, cu_seqlens=[0, 3 + rank, 8])

    for error in errors_by_rank(2, body):
        assert isinstance(error, ValueError)
        assert "disagree about mask" in str(error)
