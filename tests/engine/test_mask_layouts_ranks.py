"""Sharding and attention under layouts that are made for a mask, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.masked_checks import WAYS, MaskedCase, check_masked
from support.masked_problems import MaskedProblem
from support.method_checks import RING_ULYSSES, ULYSSES_RING, check_all
from support.problems import Problem
from support.ranks import run_ranks

from cp_dtensor import (
    Balanced,
    BalancedBlocks,
    Batched,
    Causal,
    ContextParallel,
    Documents,
    Layout,
    Mask,
    PerDocument,
    PrefixLM,
    SlidingWindow,
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
    PerDocument([0, LENGTH]),
    Balanced(Documents(CU_SEQLENS, within=Causal()), LENGTH),
    Balanced(Causal(), LENGTH),
    Balanced(PrefixLM(9) | SlidingWindow(4, 1), LENGTH, tolerance=0.0),
    BalancedBlocks(tuple(i % 7 for i in range(LENGTH)), 1, LENGTH),
]
UNEVEN = [BalancedBlocks((1, 2, 3, 4, 5, 1, 1, 1, 9, 0), 4, LENGTH), BalancedBlocks((1, 2), 32, LENGTH)]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: repr(layout)[:48])
each_layout_and_uneven = pytest.mark.parametrize("layout", LAYOUTS + UNEVEN, ids=lambda layout: repr(layout)[:48])
CAUSAL = Problem(LENGTH, LENGTH, batch=2, q_heads=4, kv_heads=2, is_causal=True)


@pytest.mark.parametrize("grad", ["replicated", "partial"])
@each_layout_and_uneven
def test_gradients_through_shard_and_unshard(layout: Layout, grad: str) -> None:
    def loss(hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.cumsum(0) ** 2).sum()

    alone = torch.linspace(-1, 1, LENGTH, dtype=torch.float64).requires_grad_()
    loss(alone.sin()).backward()

    def body(rank: int) -> torch.Tensor:
        whole = alone.detach().clone().requires_grad_()
        (mine,) = context_parallel_shard(dist.group.WORLD, [whole], [0], layout)
        (hidden,) = context_parallel_unshard(dist.group.WORLD, [mine.sin()], [0], layout, grad=grad)
        (loss(hidden) * ([0.5, 0.2, 0.3][rank] if grad == "partial" else 1.0)).backward()
        assert whole.grad is not None
        return whole.grad

    torch.testing.assert_close(sum(run_ranks(3, body)), alone.grad, rtol=1e-10, atol=1e-10)


METHODS = [
    (("cp",), (4,), {"method": "ring", "rotate_method": "allgather"}),
    (("cp",), (3,), {"method": "ring", "rotate_method": "alltoall", "debug": True}),
    (("cp",), (4,), {"method": "ulysses"}), (ULYSSES_RING, (2, 2), {"method": "hybrid"}),
    (("cp_node", "cp_gpu"), (2, 2), {"method": "ring"}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "shape", "options"), METHODS, ids=str)
@each_layout_and_uneven
def test_attention_equals_one_device(
    layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    check_all([CAUSAL, Problem(LENGTH, LENGTH)], layout, names, shape, **options)


@each_layout
@pytest.mark.parametrize(("q_len", "kv_len"), [(19, 11), (11, 19), (18, 18)])
def test_shards_of_other_lengths_are_refused_on_every_rank(layout: Layout, q_len: int, kv_len: int) -> None:
    """Only those of the first rank are wrong; the other has 18 of 37 tokens."""
    wrong = min(q_len, kv_len)

    def body(rank: int) -> None:
        def refused(message: str, of_others: str, lengths: tuple[int, int], **options: Any) -> None:
            q, k = (torch.zeros(1, 1, length, 4) for length in (lengths if rank == 0 else (18, 18)))
            with pytest.raises(ValueError, match=of_others if rank else message):
                ring_attention(q, k, k, mesh=dist.group.WORLD, layout=layout, **options)

        both, others = (
            (q_len, kv_len),
            rf"rank 1 says \({LENGTH}, {LENGTH}\), the others 'refused: {q_len} and {kv_len}",
        )
        refused(
            rf"got {wrong} local tokens on rank 0 of 2, expected 19 of 37 tokens in this .* of this length only",
            others,
            both,
        )
        refused(rf"length does not fit: got {wrong} local tokens .* expected 19", others, both, seq_len=LENGTH)
        same = r"key length: got 11 tokens, but this \w+ divides .* 37 tokens only"
        refused(same, same, (19, 6), seq_len=(LENGTH, 11))
        if rank == 0:
            with pytest.raises(ValueError, match=r"got 18 local tokens on rank 0 of 2, expected 19"):
                context_parallel_unshard(dist.group.WORLD, [torch.zeros(18)], [0], layout)

    run_ranks(2, body)


@each_layout
def test_whole_tensors_of_other_lengths_are_refused(layout: Layout) -> None:
    tokens, others = torch.zeros(2, LENGTH), torch.zeros(2, LENGTH + 1)
    message = r"buffer 1: got 38 tokens, but this \w+ divides sequences of 37 tokens only"

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=message):
            context_parallel_shard(dist.group.WORLD, [tokens, others], [1, 1], layout)
        with pytest.raises(ValueError, match=message):
            context_parallel(dist.group.WORLD, buffers=[tokens, others], buffer_seq_dims=[1, 1], layout=layout)
        with pytest.raises(ValueError, match=r"seq_len: got 38 tokens"):
            context_parallel(dist.group.WORLD, seq_len=38, layout=layout)
        with pytest.raises(ValueError, match=r"seq_len: got 38 tokens"):
            ContextParallel(seq_len=38, layout=layout)
        with pytest.raises(ValueError, match=r"divides sequences of 37 tokens only, got 38 tokens"):
            local_positions(dist.group.WORLD, 38, layout)

    run_ranks(1, body)


PACKED = Documents(CU_SEQLENS, within=Causal())
MASKS = [PACKED, PrefixLM(9), Batched([PACKED, Causal()])]


@pytest.mark.parametrize(("shape", "names"), [((3,), ("cp",)), ((2, 2), RING_ULYSSES)], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: repr(mask)[:48])
def test_masked_attention_under_the_layout_of_its_mask(
    mask: Mask, shape: tuple[int, ...], names: tuple[str, ...]
) -> None:
    problem = MaskedProblem(LENGTH, LENGTH, mask, batch=2, q_heads=4)
    made_for_it = [Balanced(mask, LENGTH), PerDocument(CU_SEQLENS, seq_len=LENGTH)]
    check_masked(
        [MaskedCase(problem, layout, tuple(way.items()), seed=0) for layout in made_for_it for way in WAYS[len(shape)]],
        shape,
        names,
    )
