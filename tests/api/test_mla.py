"""Multi-head latent attention on ranks that are threads, by every method, and its refusals."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import errors_by_rank, kinds, recorded_collectives
from support.latent_problems import LatentCase, LatentProblem, check_latents
from support.masked_checks import LAYOUTS, WAYS
from support.masked_problems import any_mask, fits
from support.problems import assert_close, shard
from support.ranks import run_ranks
from support.shared_memory import shared_memory
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from cp_dtensor import (
    Balanced,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_mla,
)
from cp_dtensor.engine import latent as latents

RANKS = 3
MASK = Documents([0, 5, 12, 24], within=Causal())


@st.composite
def cases(draw: st.DrawFn, axes: int) -> LatentCase:
    q_len, batch = draw(st.integers(1, 26)), draw(st.integers(1, 2))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(1, 26)))
    mask = draw(any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch)))
    problem = LatentProblem(
        q_len, kv_len, mask, batch, draw(st.integers(1, 7)), is_causal=draw(st.booleans()),
        bias=draw(st.sampled_from(["", "", "", "boolean bhs", "additive hs", "additive s"])), sinks=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.7, -0.3])), softcap=draw(st.sampled_from([0.0, 0.0, 0.8])),
    )  # fmt: skip
    options = draw(st.sampled_from(WAYS[axes]))
    return LatentCase(problem, draw(st.sampled_from(LAYOUTS)), tuple(options.items()), draw(st.integers(0, 1000)))


group_bytes = st.sampled_from([1, 3000, latents.EXPANDED_BYTES])
"""Limits that make a group of one head, of a few, and of all."""


@settings(max_examples=examples(30))
@given(st.lists(cases(1), min_size=1, max_size=3), st.integers(1, 5), group_bytes)
def test_any_problem_over_one_axis(some: list[LatentCase], ranks: int, most: int) -> None:
    with mock.patch.object(latents, "EXPANDED_BYTES", most):
        check_latents(some, (ranks,))


@pytest.mark.parametrize("options", WAYS[1], ids=str)
def test_rows_that_are_not_sent_between_rows_that_are(options: dict[str, str]) -> None:
    """Memory for rows that no query of a rank sees is uninitialised, so NaN in tests."""
    window_and_first_keys = SlidingWindow(4, 0) | Documents([0, 20], [0, 2])
    check_latents(
        [LatentCase(LatentProblem(20, 20, window_and_first_keys), Contiguous(), tuple(options.items()))], (2,)
    )


@pytest.mark.parametrize("layout", [HeadTail(), Striped(3)], ids=str)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_through_shared_memory(method: str, layout: Layout) -> None:
    """Rows of 16 bytes or multiples of it, as exchanges of heads need them."""
    sizes = {"q_heads": 4, "head_dim": 6, "rotary_dim": 2, "value_dim": 4, "latent_dim": 8}
    some = [
        LatentCase(LatentProblem(29, 29, mask, 2, **sizes), layout, (("method", method), ("rotate_method", "symm_mem")))
        for mask in (Full(), Documents([0, 9, 29], within=Causal()))
    ]
    with shared_memory() as machine:
        for _ in range(2):  # the second calls reuse the memory of the first
            check_latents(some, (4,))
    assert machine.copies > 0


def test_the_example_of_the_docstring() -> None:
    def body(_: int) -> Any:
        latent = torch.tensor([[[1.0], [2.0]]])
        up = torch.tensor([[3.0], [5.0]])
        q = torch.zeros(1, 1, 2, 2)
        return context_parallel_mla(q, latent, latent, up=up, mesh=dist.group.WORLD, is_causal=True)

    (out,) = run_ranks(1, body)
    torch.testing.assert_close(out.flatten(), torch.tensor([5.0, 7.5]))


def call(tensors: Any, **options: Any) -> Any:
    return context_parallel_mla(*tensors[:3], up=tensors[3], **{"mesh": dist.group.WORLD, **options})


@pytest.mark.parametrize("heads", [3, 12])
@pytest.mark.parametrize(("method", "rotate_method"), [("ring", "allgather"), ("ring", "alltoall"), ("ulysses", None)])
def test_latents_travel_once_and_not_the_keys_of_heads(method: str, rotate_method: str | None, heads: int) -> None:
    """Every rank sends R + Dr values of each of its tokens to each other rank, and gets gradients of as many back."""
    problem = LatentProblem(24, 24, Full(), 2, heads)
    row = problem.latent_dim + problem.rotary_dim

    def body(rank: int) -> None:
        *tensors, grad_out = problem.shards(problem.draw(0), HeadTail(), rank, RANKS)
        tensors[0].requires_grad_()
        call(tensors, method=method, rotate_method=rotate_method, seq_len=24).backward(grad_out)

    with recorded_collectives() as collectives:
        run_ranks(RANKS, body)
    own = 24 // RANKS * 2
    if method == "ring":  # K/V in both passes, and the gradients
        expected = 3 * own * (RANKS - 1) * row
    else:  # a collective passes a rank its own part, too; backward does not send latents again
        expected = 2 * own * RANKS * row + 2 * own * heads * (problem.head_dim + problem.value_dim)
    for rank in range(RANKS):
        assert sum(x.numel() for each in collectives if each.rank == rank for x in each.sent) == expected


GOOD = {"q": (1, 3, 8, 5), "latent": (1, 8, 6), "k_rope": (1, 8, 2), "up": (21, 6)}
BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("latent", [1.0], TypeError, "expected latent to be a torch.Tensor, got list"),
    ("k_rope", torch.ones(1, 1, 8, 2), ValueError, r"k_rope \(batch, sequence, Dr\).*k_rope \(1, 1, 8"),
    ("up", torch.ones(21, 6, dtype=torch.bfloat16), ValueError, "one dtype.*torch.bfloat16"),
    ("latent", torch.ones(1, 8, 6, device="meta"), ValueError, "one device.*cpu, meta, cpu, cpu"),
    ("latent", torch.ones(2, 8, 6), ValueError, "one batch size"),
    ("k_rope", torch.ones(1, 7, 2), ValueError, "one sequence length"),
    ("up", torch.ones(21, 5), ValueError, "as many columns as latent"),
    ("k_rope", torch.ones(1, 8, 0), ValueError, "at least one batch row, head, R and Dr"),
    ("k_rope", torch.ones(1, 8, 5), ValueError, r"q of more dims than k_rope"),
    ("up", torch.ones(20, 6), ValueError, r"rows for each of 3 heads, more than Dn = 3"),
    ("up", torch.ones(9, 6), ValueError, r"rows for each of 3 heads, more than Dn = 3; got q"),
    *((name, "DTensor", TypeError, rf"expected {name} to be a plain tensor.*to_local") for name in GOOD),
]


@pytest.mark.parametrize(("name", "bad", "error", "message"), BAD, ids=lambda each: str(each)[:20])
def test_bad_input_is_refused_before_any_collective(name: str, bad: Any, error: type[Exception], message: str) -> None:
    def body(_: int) -> None:
        good = {each: torch.ones(shape) for each, shape in GOOD.items()}
        replicated = DTensor.from_local(good[name], init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)
        call([*{**good, name: replicated if isinstance(bad, str) else bad}.values()])

    with recorded_collectives() as collectives, pytest.raises(error, match=message):
        run_ranks(2, body)
    assert kinds(collectives) == []


@pytest.mark.parametrize("grads", [False, True])
def test_ranks_that_disagree_about_the_up_projection_are_named(grads: bool) -> None:
    problem = LatentProblem(24, 24, Full())

    def body(rank: int) -> None:
        q, latent, k_rope, up, _ = problem.shards(problem.draw(0), HeadTail(), rank, 2)
        up = up.requires_grad_(rank == 1) if grads else torch.cat((up, up[: 3 * rank]))
        call((q.requires_grad_(), latent, k_rope, up), debug=True)

    errors = errors_by_rank(2, body)
    assert all(isinstance(error, ValueError) and "disagree about up" in str(error) for error in errors), errors


@pytest.mark.parametrize(
    ("ranks", "layout", "needed"),
    [
        (2, Striped(1), (0, 1, 2, 3)), (2, Balanced(MASK, 24), (0, 1, 2, 3)),  # those of the context
        *((ranks, HeadTail(), needed) for ranks in (1, RANKS) for needed in ((0,), (1,), (2,), (3,), (1, 3))),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("method", ["ring", "ulysses", "auto"])
def test_contexts_and_some_inputs_that_need_gradients(
    method: str, ranks: int, layout: Layout, needed: tuple[int, ...]
) -> None:
    problem = LatentProblem(24, 24, MASK, 2)
    (expected, *grads, _), of_up = problem.results(problem.draw(0))

    def body(rank: int) -> torch.Tensor | None:
        *tensors, grad_out = problem.shards(problem.draw(0), layout, rank, ranks)
        leaves = [tensor.requires_grad_(index in needed) for index, tensor in enumerate(tensors)]
        with context_parallel(dist.group.WORLD, layout=layout, mask=MASK):
            out = call(leaves, method=method, deterministic=len(needed) < 4)
        out.backward(grad_out)
        assert [index for index, leaf in enumerate(leaves) if leaf.grad is not None] == [*needed]
        for got, whole, dim in zip((out, *leaves[:3]), (expected, *grads), (2, 2, 1, 1), strict=True):
            found = got if got is out else got.grad
            if found is not None:
                assert_close(found, shard(whole, layout, rank, ranks, dim))
        return leaves[3].grad

    shares = run_ranks(ranks, body)
    if 3 in needed:
        assert_close(sum(shares), of_up)


def test_autocast_casts_the_weight_too() -> None:
    problem = LatentProblem(24, 24, Full())

    def body(rank: int) -> None:
        tensors = problem.shards(problem.draw(0), HeadTail(), rank, 2)[:4]
        leaves = [tensor.float().requires_grad_() for tensor in tensors]
        with torch.autocast("cpu", torch.bfloat16):
            out = call(leaves, is_causal=True)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, call([leaf.detach().bfloat16() for leaf in leaves], is_causal=True))
        out.sum().backward()
        assert {leaf.grad.dtype for leaf in leaves if leaf.grad is not None} == {torch.float32}

    run_ranks(2, body)
