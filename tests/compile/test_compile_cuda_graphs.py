"""Operators that Inductor may capture in CUDA graphs, and allocations outside their memory pool, without GPUs."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from support.compile_checks import Shards, causal, compiled, fresh
from support.processes import Processes
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import ATTENTION_OPS, SlidingWindow, context_parallel, context_parallel_attention
from cp_dtensor._torch import cache, prepared


def is_left_out(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.cudagraph_unsafe in operator.tags


def operators_of(rank: int) -> dict[str, list[str]]:
    """Ours, forward and backward, in several compiled calls."""
    mesh = init_device_mesh("cpu", (2,))

    def function(**options: Any) -> Any:
        return lambda q, k, v: context_parallel_attention(
            q * 2.0, k, v, mesh=mesh, is_causal=True, enable_gqa=True, **options
        )

    in_context = context_parallel(mesh, seq_len=8)
    cases = {
        "known": (function(seq_len=8), nullcontext()),
        "ranks x local length": (function(), nullcontext()),
        "debug": (function(seq_len=8, debug=True), nullcontext()),
        "debug, not followed by Dynamo": (function(seq_len=8, debug=True), nullcontext()),
        "context": (causal, in_context),
    }
    found: dict[str, list[str]] = {}
    for name, (code, context) in cases.items():
        fresh()
        operators = found[name] = []

        def compiler(graph: torch.fx.GraphModule, _: Any, operators: list[str] = operators) -> Any:
            ours = [node.target for node in graph.graph.nodes if str(node.target).startswith("cp_dtensor.")]
            operators += [f"{target.__name__} {is_left_out(target)}" for target in ours]
            return make_boxed_func(graph.forward)

        shards = Shards(rank)
        with context:
            inputs = shards.inputs()
            is_followed = name != "debug, not followed by Dynamo"
            captured = compiled(code, backend=aot_autograd(fw_compiler=compiler)) if is_followed else None
            out = (captured or aot_function(code, fw_compiler=compiler))(*inputs)
            torch.autograd.grad(out, inputs, shards.grad)
    return found


def test_a_graph_has_only_what_is_known_when_it_is_made(two_processes: Processes) -> None:
    """A replay would be of the lengths and masks that there were: those operators have a tag that keeps them out."""
    apart = ["attention.live True", "attention_backward.live True"]
    known = ["attention.default False", "attention_backward.default False"]
    for found in two_processes.run(operators_of):
        assert found.pop("known") == found.pop("ranks x local length") == known
        assert all(operators == apart for operators in found.values()), found


def test_both_may_be_kept_by_checkpoints() -> None:
    assert {torch.ops.cp_dtensor.attention.default, torch.ops.cp_dtensor.attention.live} < set(ATTENTION_OPS)


def test_flex_attention_finds_lengths() -> None:
    for name in ("flex_keys", "flex_keys_backward"):
        assert is_left_out(getattr(torch.ops.cp_dtensor, name).default)


@pytest.fixture
def in_memory_of_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if Inductor ran this thread's code for the last time before it captures it; returns calls of CUDA."""
    calls: list[str] = []
    answers = {"is_initialized": True, "current_device": 0, "is_current_stream_capturing": False}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, mock.Mock(return_value=answer))
    monkeypatch.setattr(torch.cuda, "device", mock.Mock(return_value=nullcontext()))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(cache, "_is_in_memory_of_graphs", mock.Mock(return_value=True))
    return calls


def test_what_lasts_is_made_by_another_thread(in_memory_of_graphs: list[str]) -> None:
    """Whose allocations are not from the memory of graphs; and it is ordered with what this thread has launched."""
    makers: list[int] = []

    def make() -> torch.Tensor:
        makers.append(threading.get_ident())
        in_memory_of_graphs.append("make")
        return torch.zeros(3)

    with torch.inference_mode():
        made = prepared(make)
    assert makers != [threading.get_ident()]
    assert not made.is_inference()
    assert in_memory_of_graphs == ["synchronize", "make", "synchronize"]
    made.add_(1.0)


def test_errors_of_the_other_thread_arrive(in_memory_of_graphs: list[str]) -> None:
    def make() -> SlidingWindow:
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        prepared(make)


def test_elsewhere_this_thread_makes_it() -> None:
    with torch.inference_mode():
        maker, made = prepared(lambda: (threading.get_ident(), torch.zeros(3)))
    assert maker == threading.get_ident()
    assert not made.is_inference()
    assert not made.requires_grad
