"""Operators that Inductor may capture in CUDA graphs, and allocations outside their memory pool, without GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
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


APART = ["attention.live True", "attention_backward.live True"]
KNOWN = ["attention.default False", "attention_backward.default False"]
CALLS: list[tuple[dict[str, Any] | None, bool, list[str]]] = [
    ({"seq_len": 8}, True, KNOWN), ({}, True, KNOWN), ({"seq_len": 8, "debug": True}, True, APART),
    ({"seq_len": 8, "debug": True}, False, APART), (None, True, APART),
]  # fmt: skip
"""Options of a function, None for SDPA in a context; whether Dynamo follows it; our operators and their tag."""


def operators_of(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for options, is_followed, expected in CALLS:
        fresh()
        found: list[str] = []

        def compiler(graph: torch.fx.GraphModule, _: Any, found: list[str] = found) -> Any:
            ours = [node.target for node in graph.graph.nodes if str(node.target).startswith("cp_dtensor.")]
            found += [f"{target.__name__} {is_left_out(target)}" for target in ours]
            return make_boxed_func(graph.forward)

        given = {"mesh": mesh, "is_causal": True, "enable_gqa": True, **(options or {})}
        code: Any = (
            causal if options is None else lambda q, k, v, o=given: context_parallel_attention(q * 2.0, k, v, **o)
        )
        shards = Shards(rank)
        with context_parallel(mesh, seq_len=8) if options is None else nullcontext():
            inputs = shards.inputs()
            captured = compiled(code, backend=aot_autograd(fw_compiler=compiler)) if is_followed else None
            out = (captured or aot_function(code, fw_compiler=compiler))(*inputs)
            torch.autograd.grad(out, inputs, shards.grad)
        assert found == expected, options


def test_a_graph_has_only_what_is_known_when_it_is_made(two_processes: Processes) -> None:
    """A replay would be of the lengths and masks that there were: those operators have a tag that keeps them out."""
    two_processes.run(operators_of)
    for name in ("flex_keys", "flex_keys_backward"):  # which find lengths
        assert is_left_out(getattr(torch.ops.cp_dtensor, name).default)
    # Checkpoints may keep both.
    assert {torch.ops.cp_dtensor.attention.default, torch.ops.cp_dtensor.attention.live} < set(ATTENTION_OPS)


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


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_of_ulysses_stay_on_the_stream_of_graphs(stages: int) -> None:
    """By which Inductor's last run is known, that is: that what outlives it must not lie in the memory of graphs."""
    pytest.importorskip("cp_dtensor.comm.triton_kernels")
    from support.stream_model.programs import ulysses
    from support.stream_model.recording import Group

    group = Group(2)
    made_on: list[bool] = []
    for rank in group.ranks:
        main = rank.current

        def is_of_graphs(*_: Any, rank: Any = rank, main: Any = main) -> bool:
            return rank.current is main

        def prepared(make: Callable[[], Any], is_of_graphs: Callable[[], bool] = is_of_graphs) -> Any:
            made_on.append(is_of_graphs())
            return make()

        with (
            mock.patch.object(cache, "_is_in_memory_of_graphs", is_of_graphs),
            mock.patch.object(cache, "prepared", prepared),
        ):
            group.record(rank, ulysses(stages, True, True))
            tables = len(made_on)
            with rank.capture():
                group.record(rank, ulysses(stages, True, True))
        assert len(made_on) == tables > 0, "a capture finds all that it needs"
    assert all(made_on)
