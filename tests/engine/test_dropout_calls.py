"""Dropout of sharded sequences: one pattern for all methods and layouts, a new seed a call, saved for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from matrix.features import same_seeds
from support.problems import Problem, shard
from support.ranks import run_ranks
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Causal,
    Documents,
    HeadTail,
    Layout,
    Mask,
    Striped,
    context_parallel,
    context_parallel_attention,
)
from cp_dtensor.attention.backends import interval
from cp_dtensor.attention.masked import Dropout
from cp_dtensor.attention.triton.dropout import are_in_runs


@pytest.mark.parametrize(
    ("layout", "length", "method", "mask", "expected"),
    [
        (HeadTail(), 128, "ring", Causal(), True),
        (HeadTail(), 128, "ring", Documents([0, 5, 45, 103, 128], within=Causal()), True),
        (HeadTail(), 120, "ring", Causal(), False),
        (HeadTail(), 120, "ulysses", Causal(), True),  # which has the whole sequence
        (Striped(2), 128, "ring", Causal(), False),
    ],
    ids=str,
)
def test_kernels_are_told_of_runs_of_positions(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, length: int, method: str, mask: Mask, expected: bool
) -> None:
    seen = []

    def noticed(*args: Any) -> Dropout:
        seen.append(Dropout(*args))
        return seen[-1]

    monkeypatch.setattr(interval, "Dropout", noticed)

    def body(rank: int) -> None:
        x = shard(torch.ones(1, 2, length, 4), layout, rank, 2)
        options: dict[str, Any] = {"layout": layout, "method": method, "mask": mask, "dropout_p": 0.3}
        context_parallel_attention(x, x, x, mesh=dist.group.WORLD, **options)

    with same_seeds():
        run_ranks(2, body)
    assert seen
    for dropout in seen:
        assert dropout.in_runs == (are_in_runs(dropout.q_positions) and are_in_runs(dropout.kv_positions))
    assert all(dropout.in_runs for dropout in seen) is expected


def on_one_rank(body: Callable[[], Any]) -> Any:
    def alone(_rank: int) -> Any:
        with context_parallel(dist.group.WORLD):
            return body()

    return run_ranks(1, alone)[0]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.3) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def test_a_seed_reproduces_it_and_calls_differ() -> None:
    *qkv, _ = Problem(19, 19).draw(0)

    def body() -> None:
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append((sdpa(*qkv), sdpa(*qkv)))
        assert all(map(torch.equal, *results))
        assert not torch.equal(*results[0])
        assert not sdpa(*qkv, dropout_p=1.0).any()

    on_one_rank(body)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_under_a_checkpoint_drops_the_same(use_reentrant: bool) -> None:
    *qkv, grad_out = Problem(19, 19).draw(0)

    def gradients(checkpointed: bool) -> tuple[Any, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in qkv]
        torch.manual_seed(5)
        out = checkpoint(sdpa, *leaves, use_reentrant=use_reentrant) if checkpointed else sdpa(*leaves)
        torch.rand(3)  # the generator moves on before backward
        out.backward(grad_out)
        return out.detach(), *(leaf.grad for leaf in leaves)

    plain, recomputed = on_one_rank(lambda: (gradients(False), gradients(True)))
    assert all(map(torch.equal, plain, recomputed))
