"""Mistakes inside of contexts that give wrong numbers: dims, masks, layouts and threads that were mixed up."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank
from support.masked_problems import MaskedProblem
from support.problems import shard
from support.processes import Processes
from support.ranks import run_ranks
from support.shards import Shards
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Contiguous,
    Full,
    HeadTail,
    Striped,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    ring_attention,
)

LENGTH, RANKS = 32, 4
HEADS = LENGTH // RANKS
"""As many heads as tokens of a shard."""


def group() -> Any:
    return dist.group.WORLD


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yields a list that has the texts of all warnings at the end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def assert_warned(ranks: int, body: Callable[[int], None], *words: str, times: int = 1) -> None:
    """Checks that each rank warns so often, and with these words."""
    with recorded() as texts:
        run_ranks(ranks, body)
    assert [all(word in text for word in words) for text in texts] == [True] * ranks * times, texts


# Dims


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


def rows_of_heads(x: torch.Tensor) -> torch.Tensor:
    """(B, S, C) as (B, S, H, D), the transpose forgotten."""
    return x.unflatten(-1, (-1, 8))


def of_length(x: torch.Tensor) -> torch.Tensor:
    """Queries of all tokens, for each row that is left of the batch."""
    return torch.randn(x.size(0), 2, LENGTH, 8)


OTHER_DIMS: list[tuple[tuple[int, ...], int, Callable[[torch.Tensor], torch.Tensor], str]] = [
    ((2, 8, LENGTH, 16), 1, itself, "for buffer 1 maybe 2"),  # the heads
    ((2, 8, LENGTH, 16), 3, itself, "for buffer 1 maybe 2"),  # the head dim
    ((2, LENGTH, 6, 16), 1, itself, r"maybe q\.transpose\(1, 2\)"),
    ((2, LENGTH, 6 * 8), 1, rows_of_heads, r"maybe q\.transpose\(1, 2\)"),
    ((LENGTH, 6 * 8), 0, rows_of_heads, r"maybe q\.transpose\(1, 2\)"),
    ((3, 2, 8, LENGTH, 16), 2, itself, "for buffer 1 maybe 3"),
    ((8, LENGTH), 0, of_length, "for buffer 1 maybe 1"), ((8, LENGTH, 8), 0, of_length, "for buffer 1 maybe 1"),
    ((12, 2, LENGTH, 8), 0, of_length, "for buffer 1 maybe 2"),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dim", "q_of", "hint"), OTHER_DIMS)
def test_another_dim_than_the_sequence(
    shape: tuple[int, ...], dim: int, q_of: Callable[[torch.Tensor], torch.Tensor], hint: str
) -> None:
    whole = drawn(*shape)

    def body(rank: int) -> None:
        x, other = whole.clone(), torch.arange(5 * RANKS)
        try:
            with context_parallel(group(), buffers=[other, x], buffer_seq_dims=[0, dim]):
                q = q_of(x)
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
        finally:
            assert torch.equal(x, whole)

    errors = errors_by_rank(RANKS, body)
    assert {type(error) for error in errors} == {ValueError}
    (message,) = {str(error) for error in errors}
    with pytest.raises(ValueError, match=rf"^buffer 1 of shape .* is sharded along dim {dim}, and q .*{hint}"):
        raise ValueError(message)


@pytest.mark.parametrize("shape", [(16, 8), (16, 2, 8)])
def test_a_sequence_dim_that_is_the_first_is_no_mistake(shape: tuple[int, ...]) -> None:
    """Although the shard is as long as the batch and the queries are as long as another dim."""

    def body(rank: int) -> None:
        x = drawn(*shape)
        with context_parallel(group(), buffers=[x], buffer_seq_dims=[0]):
            F.scaled_dot_product_attention(*[torch.randn(x.size(0), 2, 8, 8)] * 3, is_causal=True)

    run_ranks(2, body)


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_rows_of_heads_that_no_buffer_explains_are_warned_of_once(kv_heads: int) -> None:
    """They may be heads: as many as a rank has tokens."""
    q, k = drawn(2, HEADS, 6, 16), drawn(2, HEADS, kv_heads, 16)

    def body(rank: int) -> None:
        for _ in range(2):
            tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
            with context_parallel(group(), buffers=[tokens], buffer_seq_dims=[1]):
                for length in (1, 2):
                    F.scaled_dot_product_attention(*(x.repeat(1, 1, length, 1) + rank for x in (q, k, k)))

    assert_warned(RANKS, body, "maybe q.transpose(1, 2)", "seq_len=24")


@pytest.mark.parametrize(
    ("q_len", "kv_len", "kv_heads", "transposed", "seq_len"),
    [
        (LENGTH, LENGTH, HEADS, False, None), (LENGTH, 20, HEADS, False, None), (LENGTH, 7, HEADS, False, 7),
        (20, LENGTH, HEADS, False, None), (20, 20, HEADS, True, None), (20, 20, 2, False, None),
        (20, 20, HEADS, False, 20), (7, 12, HEADS, True, 7), (64, 64, HEADS, True, None),
    ],
)  # fmt: skip
def test_as_many_heads_as_tokens_of_a_shard_are_no_mistake(
    q_len: int, kv_len: int, kv_heads: int, transposed: bool, seq_len: int | None
) -> None:
    """Also attention over lengths that no buffer has, where keys are laid out as projections are."""
    problem = MaskedProblem(q_len, kv_len, Full(), 2, HEADS, kv_heads)

    def attend(shards: Shards, *qkv: torch.Tensor) -> torch.Tensor:
        return shards.sdpa(*(x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x for x in qkv))

    def body(rank: int) -> None:
        heads, hidden = (drawn(2, HEADS, LENGTH, 8), 2), (drawn(2, LENGTH, 48), 1)
        for buffers in (
            [heads, (drawn(2, LENGTH), 1)], [hidden], [hidden, (drawn(2, 2 * LENGTH), 1), (drawn(LENGTH), 0)], []
        ):  # fmt: skip
            shards = Shards(rank, problem, Contiguous(), RANKS)
            given = {"buffers": [x for x, _ in buffers], "buffer_seq_dims": [dim for _, dim in buffers]}
            around = partial(context_parallel, group(), layout=Contiguous(), seq_len=seq_len, **given)
            shards.check(partial(attend, shards), around)

    run_ranks(RANKS, body)


# Masks


@pytest.mark.parametrize("form", ["context", "function"])
def test_a_float_mask_of_zeros_and_ones_is_warned_of_once_for_each_kind(form: str) -> None:
    whole = drawn(1, 2, LENGTH, 8)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    expected = F.scaled_dot_product_attention(whole, whole, whole, mask)

    def attend(q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if form == "function":
            return ring_attention(q, q, q, mesh=group(), attn_mask=mask)
        with context_parallel(group(), seq_len=LENGTH):
            return F.scaled_dot_product_attention(q, q, q, mask)

    def body(rank: int) -> None:
        q, rows = shard(whole, HeadTail(), rank, 2), shard(mask, HeadTail(), rank, 2, 0)
        for _ in range(2):
            found = attend(q, rows)
            torch.testing.assert_close(found, shard(expected, HeadTail(), rank, 2), rtol=1e-10, atol=1e-10)

    assert_warned(2, body, "has zeros and ones only", "attn_mask.bool()")


def test_masks_that_are_no_mistake() -> None:
    seen = torch.ones(LENGTH, LENGTH).tril()
    random = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    half = torch.cat([seen[:, 1:], seen[:, :1] / 2], dim=1)
    masks = [seen.bool(), seen * 0, seen * 0 + 1, (1 - seen) * -1e9, random, half, seen.clone().requires_grad_()]

    def body(rank: int) -> None:
        q = shard(drawn(1, 2, LENGTH, 8), HeadTail(), rank, 2).float()
        for mask in masks:
            rows = shard(mask.detach(), HeadTail(), rank, 2, 0).requires_grad_(mask.requires_grad)
            with context_parallel(group(), seq_len=LENGTH):
                F.scaled_dot_product_attention(q, q, q, rows)

    run_ranks(2, body)


# Layouts


def test_an_inner_context_of_another_layout_without_buffers_is_warned_of_once() -> None:
    def body(rank: int) -> None:
        for _ in range(2):
            x = torch.arange(LENGTH)
            with context_parallel(group(), buffers=[x], buffer_seq_dims=[0], layout=Contiguous()):
                for options in ({}, {"seq_len": LENGTH}):
                    with context_parallel(group(), method="ring", **options):
                        pass

    assert_warned(2, body, "in HeadTail()", "Pass layout=Contiguous()")


def test_inner_contexts_that_are_no_mistake() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        rows, cols = mesh.get_group(0), mesh.get_group(1)
        x, y = torch.arange(LENGTH), torch.arange(LENGTH)
        inner: list[tuple[Any, dict[str, Any]]] = [
            (rows, {"layout": Contiguous()}),
            (rows, {"layout": Striped(), "seq_len": 2 * LENGTH}),  # other sequences
            (rows, {"buffers": [y], "buffer_seq_dims": [0]}),
            (cols, {}),
        ]
        with context_parallel(rows, buffers=[x], buffer_seq_dims=[0], layout=Contiguous()):
            for ranks, options in inner:
                with context_parallel(ranks, **options):
                    pass
        with context_parallel(rows, layout=Contiguous()), context_parallel(rows):
            pass

    run_ranks(4, body)


# What is whole already


@pytest.mark.parametrize("layout", [HeadTail(), Contiguous()], ids=repr)
def test_unsharding_what_is_whole_is_warned_of_once_for_each_kind(layout: HeadTail | Contiguous) -> None:
    def body(rank: int) -> None:
        mesh = group()
        tokens, hidden = drawn(1, LENGTH), drawn(1, LENGTH, 4)
        expected = [tokens.clone(), hidden.clone()]
        with context_parallel(mesh, buffers=[tokens, hidden], buffer_seq_dims=[1, 1], layout=layout):
            found = context_parallel_unshard(mesh, [tokens, hidden * 1], [1, 1], layout)
        assert all(map(torch.equal, found, expected))
        for _ in range(2):
            context_parallel_unshard(mesh, [tokens], [1], layout)  # restored
            context_parallel_unshard(mesh, [found[1]], [1], layout)  # again

    assert_warned(2, body, f"buffer 0 of shape (1, {LENGTH}", "is equal on all 2 ranks", times=2)


def test_shards_that_are_no_mistake() -> None:
    def body(rank: int) -> None:
        mesh = group()
        x = drawn(2, LENGTH)
        (mine,) = context_parallel_shard(mesh, [x], [1])
        assert torch.equal(context_parallel_unshard(mesh, [mine], [1])[0], x)
        positions = torch.arange(4)[None]  # of packed documents, each in the shard of one rank
        context_parallel_unshard(mesh, [positions], [1], Contiguous())
        context_parallel_unshard(mesh, [torch.ones(2, 5), torch.zeros(2, 0), torch.ones(2, 5 + rank)], [1, 1, 1])

    run_ranks(2, body)
    run_ranks(1, lambda _: context_parallel_unshard(group(), [drawn(2, LENGTH)], [1]))


# Threads


def attend_in_threads(rank: int) -> int:
    q = drawn(1, 2, LENGTH, 8) + rank

    def attend() -> None:
        F.scaled_dot_product_attention(q, q, q)

    def in_thread(function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    def in_own_context() -> None:
        with context_parallel(group(), seq_len=2 * LENGTH):
            attend()

    def recomputed() -> None:
        x = q.clone().requires_grad_()
        checkpoint(lambda y: F.scaled_dot_product_attention(y, y, y), x, use_reentrant=False).sum().backward()

    with recorded() as texts:
        in_thread(attend)
        with context_parallel(group(), seq_len=2 * LENGTH):
            attend()
            in_thread(in_own_context)
            recomputed()
        in_thread(attend)
    assert not texts
    with recorded() as texts, context_parallel(group(), seq_len=2 * LENGTH):
        for _ in range(2):
            in_thread(attend)
    assert "in a thread without a context while another thread has one" in texts[0]
    return len(texts)


def test_attention_in_a_thread_beside_that_of_the_context_is_warned_of_once(two_processes: Processes) -> None:
    assert two_processes.run(attend_in_threads) == [1, 1]
