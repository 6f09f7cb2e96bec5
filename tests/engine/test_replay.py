"""Plans that are replayed, with a function that stands for a CUDA graph: when passes are captured, and what is kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from cp_dtensor import Documents, SlidingWindow, context_parallel_attention
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.engine import replay
from cp_dtensor.engine.autograd import AttentionPlan, CallValues, Gradients, Result
from cp_dtensor.engine.replay import ReplayedPlan, refuse_unreplayable

Tensors = tuple[torch.Tensor, ...]


class Group:
    """Stands for a process group."""


class Ranks:
    """Stands for the ranks of one axis."""

    def __init__(self) -> None:
        self.outer: Any = Group()
        self.inner = None


class Products(AttentionPlan):
    """out = q k v sinks scale, and a tensor of its own that backward needs."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    def forward(self, q: Any, k: Any, v: Any, call: CallValues, needs_lse: bool) -> Result:
        self.passes.append("forward")
        sinks = 1.0 if call.modifiers.sinks is None else call.modifiers.sinks
        out, lse = q * k * v * sinks * call.scale, q.sum(-1)
        return out, lse, (q, k, v, out, lse, k * v * sinks)

    def backward(self, grad_out: Any, saved: Tensors, call: CallValues, grad_bias: Any) -> Gradients:
        self.passes.append("backward")
        q, k, v, _, _, of_q = saved
        return grad_out * of_q * call.scale, grad_out * q * v * call.scale, grad_out * q * k * call.scale

    def abandon(self, ranks: Any) -> None:
        raise NotImplementedError


class Graph:
    """Stands for `Replay`: calls the function again, with memory of its own that the next call overwrites."""

    made = 0

    def __init__(self, function: Callable[..., Tensors], arguments: Tensors) -> None:
        Graph.made += 1
        self.function, self.memory = function, tuple(x.clone() for x in arguments)
        self.results: Tensors | None = None

    def __call__(self, *arguments: torch.Tensor) -> Tensors:
        for own, given in zip(self.memory, arguments, strict=True):
            assert own.shape == given.shape
            own.copy_(given)
        results = self.function(*self.memory)
        if self.results is not None:
            for old, new in zip(self.results, results, strict=True):
                old.copy_(new)
        self.results = self.results or results
        given_back = {id(x): x.clone() for x in results} | dict(zip(map(id, self.memory), arguments, strict=True))
        return tuple(given_back[id(x)] for x in results)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The symmetric buffers that calls use, to be changed by the test."""
    buffers: list[object] = [object()]
    monkeypatch.setattr(replay, "Replay", Graph)
    monkeypatch.setattr(replay, "_follow", lambda ranks, like: tuple(buffers))
    monkeypatch.setattr(Graph, "made", 0)
    return buffers


def drawn(rows: int = 5) -> Tensors:
    return tuple(torch.randn(1, 2, rows, 3, dtype=torch.float64) for _ in "qkvg")


def both(plan: AttentionPlan, inputs: Tensors, call: CallValues, needs_lse: bool = True) -> tuple[Tensors, Tensors]:
    *qkv, grad_out = inputs
    out, lse, saved = plan.forward(*qkv, call, needs_lse)
    return (out, lse, *saved), plan.backward(grad_out, saved, call, None)


def values(ranks: Any, scale: float = 0.5, modifiers: Modifiers = NO_MODIFIERS) -> CallValues:
    return CallValues(modifiers, ranks, scale)


@pytest.mark.parametrize("sinks", [False, True])
def test_results_are_those_of_the_plan_and_stay(used: list[object], sinks: bool) -> None:
    inner, ranks = Products(), Ranks()
    plan, kept = ReplayedPlan(inner, False), []
    for step in range(5):
        inputs = drawn()
        modifiers = Modifiers(sinks=torch.randn(3, dtype=torch.float64)) if sinks else NO_MODIFIERS
        call = values(ranks, modifiers=modifiers)
        results, grads = both(plan, inputs, call)
        want, want_grads = both(Products(), inputs, call)
        assert [x is y for x, y in zip(results[2:5], inputs, strict=False)] == [True] * 3, "saved are the arguments"
        assert results[5] is results[0], "and the results"
        kept += [*zip(results, want, strict=True), *zip(grads, want_grads, strict=True)]
        assert Graph.made == (0 if step == 0 else 2)
    for ours, expected in kept:
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def test_other_calls_have_other_graphs(used: list[object]) -> None:
    ranks = Ranks()
    plan = ReplayedPlan(Products(), False)
    inputs = drawn()
    turned = tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in inputs)
    kinds: list[tuple[Tensors, CallValues, bool]] = [
        (inputs, values(ranks), True), (drawn(7), values(ranks), True), (turned, values(ranks), True),
        (inputs, values(ranks, 0.25), True), (inputs, values(ranks), False),
    ]  # fmt: skip
    for _ in range(3):
        for given, call, needs_lse in kinds:
            results, grads = both(plan, given, call, needs_lse)
            want, want_grads = both(Products(), given, call)
            for ours, expected in zip((*results, *grads), (*want, *want_grads), strict=True):
                torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert Graph.made == 5 + 4, "the last two kinds have one backward in common with the first"


def test_after_other_buffers_are_mapped_a_pass_runs_eagerly_once(used: list[object]) -> None:
    inner, ranks = Products(), Ranks()
    plan, inputs = ReplayedPlan(inner, False), drawn()

    def passes() -> int:
        inner.passes.clear()
        both(plan, inputs, values(ranks))
        return len(inner.passes)

    for _ in range(2):
        made = Graph.made
        for expected in (0, 2, 2):
            passes()
            assert Graph.made - made == expected
        used[0] = object()


def test_the_latest_kinds_are_kept_while_their_group_lives(used: list[object]) -> None:
    ranks, plan = Ranks(), ReplayedPlan(Products(), False)
    for rows in range(1, 30):
        for _ in range(2):
            both(plan, drawn(rows), values(ranks))
    assert len(replay._passes[ranks.outer]) == replay._MOST_PASSES
    for known in replay._passes[ranks.outer]._entries.values():
        known.replay.function = None  # type: ignore[union-attr,assignment]  # a graph has no function
    group = weakref.ref(ranks.outer)
    del ranks
    gc.collect()
    assert group() is None


def test_calls_without_heads_launch_nothing(used: list[object]) -> None:
    plan, ranks = ReplayedPlan(Products(), False), Ranks()
    for _ in range(3):
        both(plan, tuple(x[:, :0] for x in drawn()), values(ranks))
    assert Graph.made == 0


def test_calls_that_cannot_be_replayed_are_refused() -> None:
    on_gpu: Any = type("Tensor", (), {"is_cuda": True})()
    for modifiers, mask, message in (
        (Modifiers(bias=torch.zeros(1, 1, 2, 2)), SlidingWindow(2, 0), "attn_mask"),
        (Modifiers(dropout_p=0.1), SlidingWindow(2, 0), "dropout_p"),
        (Modifiers(up=torch.zeros(1, 2, 2)), SlidingWindow(2, 0), "latents"),
        (NO_MODIFIERS, Documents((0, 3, 8)) & SlidingWindow(2, 0), "packed documents"),
    ):
        with pytest.raises(NotImplementedError, match=f"replay=True takes no {message}"):
            refuse_unreplayable(on_gpu, mask, modifiers)
    refuse_unreplayable(on_gpu, SlidingWindow(2, 0), Modifiers(softcap=5.0))


def _on_cpu(rank: int) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="expected CUDA tensors, got tensors on cpu"):
        context_parallel_attention(x, x, x, mesh=dist.group.WORLD, seq_len=8, replay=True)
    with pytest.raises(TypeError, match="expected replay to be True or False, got 1"):
        context_parallel_attention(x, x, x, mesh=dist.group.WORLD, seq_len=8, replay=1)  # type: ignore[arg-type]


def test_cpu_tensors_are_refused() -> None:
    run_ranks(2, _on_cpu)
