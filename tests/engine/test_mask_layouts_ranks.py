"""Sharding under layouts that are made for a mask, and refusals of other lengths (`test_masked_calls`: attention)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cp_dtensor import (
    Balanced,
    BalancedBlocks,
    Causal,
    ContextParallel,
    Documents,
    Layout,
    PerDocument,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
    ring_attention,
)

LENGTH = 37
CU_SEQLENS = [2, 5, 5, 20, 21, 35]
LAYOUTS = [
    PerDocument(CU_SEQLENS, seq_len=LENGTH),
    Balanced(Documents(CU_SEQLENS, within=Causal()), LENGTH),
    BalancedBlocks(tuple(i % 7 for i in range(LENGTH)), 1, LENGTH),
]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: repr(layout)[:48])


@each_layout
@pytest.mark.parametrize(("q_len", "kv_len"), [(19, 11), (11, 19), (18, 18)])
def test_shards_of_other_lengths_are_refused_on_every_rank(layout: Layout, q_len: int, kv_len: int) -> None:
    """Only those of the first rank are wrong; the other has 18 of 37 tokens."""
    wrong, both = min(q_len, kv_len), (q_len, kv_len)
    says = rf"rank 1 says \({LENGTH}, {LENGTH}\), the others 'refused: {q_len} and {kv_len}"
    same = r"key length: got 11 tokens, but this \w+ divides .* 37 tokens only"
    cases: list[tuple[str, str, tuple[int, int], Any]] = [
        (rf"got {wrong} local tokens on rank 0 of 2, expected 19 of 37 tokens in this .* only", says, both, None),
        (rf"length does not fit: got {wrong} local tokens .* expected 19", says, both, LENGTH),
        (same, same, (19, 6), (LENGTH, 11)),
    ]

    def body(rank: int) -> None:
        for message, of_others, lengths, seq_len in cases:
            q, k = (torch.zeros(1, 1, length, 4) for length in (lengths if rank == 0 else (18, 18)))
            with pytest.raises(ValueError, match=of_others if rank else message):
                ring_attention(q, k, k, mesh=dist.group.WORLD, layout=layout, seq_len=seq_len)
        if rank == 0:
            with pytest.raises(ValueError, match=r"got 18 local tokens on rank 0 of 2, expected 19"):
                context_parallel_unshard(dist.group.WORLD, [torch.zeros(18)], [0], layout)

    run_ranks(2, body)


@each_layout
def test_whole_tensors_of_other_lengths_are_refused(layout: Layout) -> None:
    whole = [torch.zeros(2, LENGTH), torch.zeros(2, LENGTH + 1)]
    buffer = r"buffer 1: got 38 tokens, but this \w+ divides sequences of 37 tokens only"
    calls: list[tuple[str, Any]] = [
        (buffer, lambda world: context_parallel_shard(world, whole, [1, 1], layout)),
        (buffer, lambda world: context_parallel(world, buffers=whole, buffer_seq_dims=[1, 1], layout=layout)),
        ("seq_len: got 38 tokens", lambda world: context_parallel(world, seq_len=38, layout=layout)),
        (
            "seq_len: got 38 tokens",
            lambda world: ContextParallel(seq_len=38, layout=layout)._apply(torch.nn.Identity(), world),
        ),
        ("sequences of 37 tokens only, got 38 tokens", lambda world: local_positions(world, 38, layout)),
    ]

    def body(rank: int) -> None:
        for message, call in calls:
            with pytest.raises(ValueError, match=message):
                call(dist.group.WORLD)

    run_ranks(1, body)
