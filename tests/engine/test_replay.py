"""Plans that are replayed, with recorded operations in the place of CUDA graphs: what is captured, kept and refused."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import (
    Batched,
    ContextParallel,
    Documents,
    PeerError,
    SlidingWindow,
    context_parallel,
    context_parallel_attention,
    ring_attention,
    ulysses_attention,
)
from cp_dtensor._torch import cuda_graph
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.comm import symm_mem_workspace
from cp_dtensor.comm.calls import NO_SIGNATURE
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.comm.symm_mem_workspace import Workspace
from cp_dtensor.engine import replay
from cp_dtensor.engine.attend import Attention
from cp_dtensor.engine.base import Done, Gradients, Plan, Result, Values
from cp_dtensor.engine.base import Tensors as CallTensors
from cp_dtensor.engine.call import Call
from cp_dtensor.engine.planner import planned
from cp_dtensor.engine.replay import ReplayedPlan, refuse_unreplayable, replayed
from cp_dtensor.engine.ring import RingPlan
from cp_dtensor.spec.model_masks import Bands, Keys

Tensors = tuple[torch.Tensor, ...]
DOUBLE = torch.float64


class Group:
    """Stands for a process group."""


class Ranks:
    """Stands for the ranks of one axis."""

    def __init__(self) -> None:
        self.outer: Any = Group()
        self.inner = None


class Stream:
    """Stands for a CUDA stream."""

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        Machine.waits.append((self.name, other.name))


class Graph:
    """Stands for a CUDA graph: repeats recorded operations, which write to the same memory again."""

    def __init__(self) -> None:
        self.recorded: list[Any] = []
        Machine.graphs += 1

    def replay(self) -> None:
        time.sleep(Machine.seconds)
        for operation, arguments, options, results in self.recorded:
            if "empty" in operation.name():
                continue
            new = operation(*arguments, **options)
            for old, again in zip(tree_leaves(results), tree_leaves(new), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != again.data_ptr():
                    old.copy_(again)


class Recording(TorchDispatchMode):
    """Adds the operations of a capture to a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        results = operation(*arguments, **(options or {}))
        self.graph.recorded.append((operation, arguments, options or {}, results))
        return results


class Machine:
    """State of the simulated GPU: current stream, symmetric buffer, captured graphs, and waits between streams."""

    graphs = 0
    seconds = 0.0
    """Of a replay."""
    waits: list[tuple[str, str]]
    """Streams that wait for others, and streams of which the allocator knows that they use arguments of graphs."""
    stream: Stream
    buffers: list[Any]

    @classmethod
    def buffer(cls) -> Any:
        """A symmetric buffer, as far as streams go."""
        made: Any = object.__new__(Workspace)
        made._last_stream = made.last_call = None
        return made


@contextmanager
def capture(graph: Graph, *, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    """Stands for `torch.cuda.graph`."""
    before, Machine.stream = Machine.stream, stream
    assert capture_error_mode == "thread_local"
    with Recording(graph):
        yield
    Machine.stream = before


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine.graphs, Machine.waits, Machine.stream, Machine.buffers = 0, [], Stream("A"), [Machine.buffer()]
    Machine.seconds = 0.0
    for name, value in (
        ("CUDAGraph", Graph), ("graph", capture), ("Stream", lambda _: Stream("capture")),
        ("stream", lambda _: nullcontext()), ("synchronize", lambda _: None),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    recorded: Any = lambda _, stream: Machine.waits.append((stream.name, "allocator"))  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    for module in (cuda_graph, replay):
        monkeypatch.setattr(module, "current_stream", lambda _: Machine.stream)
    monkeypatch.setattr(replay, "current_workspace", lambda _: Machine.buffers[0])
    monkeypatch.setattr(symm_mem_workspace, "_is_capturing", lambda stream: False)


class Products(Plan):
    """out = q k v sinks scale + softcap, and tensors that backward needs."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    def forward(self, q: Any, k: Any, v: Any, call: Values, needs_lse: bool) -> Result:
        self.passes.append("forward")
        Machine.buffers[0].follow(Machine.stream, "K/V", q)
        sinks = 1.0 if call.modifiers.sinks is None else call.modifiers.sinks
        out, lse = q * k * v * sinks * call.scale + call.modifiers.softcap, q.sum(-1).float()
        return out, lse, (q, k, v, out, lse, k * v * sinks)

    def backward(self, grad_out: Any, saved: Tensors, call: Values, grad_bias: Any) -> Gradients:
        self.passes.append("backward")
        q, k, v, _, lse, of_q = saved
        return (
            of_q * grad_out * call.scale,
            q * v * grad_out * call.scale,
            q * k * grad_out * call.scale + lse[..., None],
        )

    def abandon(self, ranks: Any) -> None:
        self.passes.append("abandoned")


def drawn(rows: int = 5, dtype: torch.dtype = DOUBLE) -> Tensors:
    return tuple(torch.randn(1, rows, 2, 3, dtype=dtype).transpose(1, 2) for _ in "qkvg")


def both(plan: Plan, inputs: Tensors, call: Values, needs_lse: bool = True) -> tuple[Tensors, Tensors]:
    *qkv, grad_out = inputs
    out, lse, saved = plan.forward(*qkv, call, needs_lse)
    return (out, lse, *saved), plan.backward(grad_out, saved, call, None)


def values(ranks: Any, scale: float = 0.5, modifiers: Modifiers = NO_MODIFIERS) -> Values:
    return Values(modifiers, ranks, scale)


def check(ours: Tensors, expected: Tensors) -> None:
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("sinks", [False, True])
def test_results_are_those_of_the_plan_and_stay(sinks: bool) -> None:
    inner, ranks = Products(), Ranks()
    plan, kept = ReplayedPlan(inner, False), []
    for step in range(5):
        inputs = drawn()
        modifiers = Modifiers(sinks=torch.randn(3, dtype=DOUBLE)) if sinks else NO_MODIFIERS
        call = values(ranks, modifiers=modifiers)
        results, grads = both(plan, inputs, call)
        want, want_grads = both(Products(), inputs, call)
        assert [x is y for x, y in zip(results[2:5], inputs, strict=False)] == [True] * 3, "saved are the arguments"
        assert results[5] is results[0], "and the results"
        kept += [(results, want), (grads, want_grads)]
        assert Machine.graphs == (0 if step == 0 else 2)
    for ours, expected in kept:
        check(ours, expected)
    assert len(inner.passes) == 6, "twice eagerly, and once in the capture"


def test_other_calls_have_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_PASSES", 32)
    ranks, inputs = Ranks(), drawn()
    plans = ReplayedPlan(Products(), False), ReplayedPlan(Products(), False)
    fused = torch.randn(1, 5, 4, 2, 3, dtype=DOUBLE).permute(2, 0, 3, 1, 4)
    sinks = Modifiers(sinks=torch.randn(3, dtype=DOUBLE))
    kinds: list[tuple[int, Any, Values, bool]] = [
        (0, inputs, values(ranks), True), (0, drawn(7), values(ranks), True), (0, fused, values(ranks), True),
        (0, drawn(dtype=torch.float32), values(ranks), True), (0, inputs, values(ranks, 0.25), True),
        (0, inputs, values(ranks, modifiers=Modifiers(softcap=2.0)), True), (0, inputs, values(ranks), False),
        (0, inputs, values(ranks, modifiers=sinks), True), (1, inputs, values(ranks), True),
        (0, [x[:, :, :3] for x in inputs], values(ranks), True),
    ]  # fmt: skip
    for _ in range(4):
        for plan, given, call, needs_lse in kinds:
            ours, expected = (both(each, tuple(given), call, needs_lse) for each in (plans[plan], Products()))
            for a, b in zip(ours, expected, strict=True):
                check(a, b)
    assert Machine.graphs == 10 + 8, "backward is that of the first kind without lse, and with sinks"


def test_shared_elements_become_dense_in_the_graph() -> None:
    ranks, plan = Ranks(), ReplayedPlan(Products(), False)
    for _ in range(4):
        *qkv, grad_out = drawn()
        inputs = (*qkv, grad_out[:, :, :1].expand(-1, -1, 5, -1))
        for ours, expected in zip(
            both(plan, inputs, values(ranks)), both(Products(), inputs, values(ranks)), strict=True
        ):
            check(ours, expected)
    assert Machine.graphs == 2


def test_after_another_buffer_is_mapped_a_pass_runs_eagerly() -> None:
    inner, ranks = Products(), Ranks()
    plan, inputs = ReplayedPlan(inner, False), drawn()
    for _ in range(2):
        made = Machine.graphs
        for graphs, passes in ((0, 2), (2, 4), (2, 0), (2, 0)):
            inner.passes.clear()
            both(plan, inputs, values(ranks))
            assert (Machine.graphs - made, len(inner.passes)) == (graphs, passes)
        Machine.buffers[0] = Machine.buffer()


def test_calls_on_other_streams_wait_for_replays() -> None:
    """The buffer and the memory of the graph are in use on the stream of the latest call."""
    plan, ranks = ReplayedPlan(Products(), False), Ranks()
    for calls in (2, 3):  # the latest call has captured, or replayed
        Machine.stream = first = Stream(f"first of {calls}")
        for _ in range(calls):
            plan.forward(*drawn()[:3], values(ranks), True)
        Machine.stream, Machine.waits = Stream("second"), []
        Machine.buffers[0].follow(Machine.stream, "K/V", drawn()[0])
        assert ("second", first.name) in Machine.waits, "an eager call of the group"
        Machine.waits = []
        plan.forward(*drawn()[:3], values(ranks), True)
        assert {("second", first.name), ("second", "allocator")} <= {*Machine.waits}, "a replay"


def test_threads_share_a_graph() -> None:
    plan, ranks, right = ReplayedPlan(Products(), False), Ranks(), []
    for _ in range(2):
        plan.forward(*drawn()[:3], values(ranks), True)
    Machine.seconds = 1e-3

    def replays() -> None:
        for _ in range(20):
            q, k, v, _ = drawn()
            right.append(torch.equal(plan.forward(q, k, v, values(ranks), True)[0], q * k * v * 1.0 * 0.5 + 0.0))

    threads = [threading.Thread(target=replays) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 40


def test_training_replays_what_inference_has_captured() -> None:
    plan, ranks = ReplayedPlan(Products(), False), Ranks()
    for step in range(4):
        inputs = drawn()
        with torch.inference_mode(step < 2):
            results = plan.forward(*inputs[:3], values(ranks), True)
        check(results[:2], Products().forward(*inputs[:3], values(ranks), True)[:2])
    assert Machine.graphs == 1


def test_a_pass_that_cannot_be_captured_stays_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inner, ranks = Products(), Ranks()
    plan, tries = ReplayedPlan(inner, False), []

    def full(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise torch.OutOfMemoryError("no memory is left for the test")

    monkeypatch.setattr(torch.cuda, "graph", full)
    for _ in range(4):
        inputs = drawn()
        results = plan.forward(*inputs[:3], values(ranks), True)
        check(results[:2], Products().forward(*inputs[:3], values(ranks), True)[:2])
    assert (len(inner.passes), len(tries)) == (4, 1)
    assert "could not be captured, and stays eager: OutOfMemoryError: no memory is left" in caplog.text


def test_nothing_is_captured_after_a_wait_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, ranks, asked = ReplayedPlan(Products(), False), Ranks(), []
    plan.forward(*drawn()[:3], values(ranks), True)

    def failed(group: Any) -> Any:
        asked.append(group)
        if len(asked) > 1:
            raise PeerError("rank 1 did not come")
        return Machine.buffers[0]

    monkeypatch.setattr(replay, "current_workspace", failed)
    with pytest.raises(PeerError, match="rank 1"):
        plan.forward(*drawn()[:3], values(ranks), True)
    assert Machine.graphs == 0


def test_the_rest_is_that_of_the_plan() -> None:
    inner, ranks = Products(), Ranks()
    plan = ReplayedPlan(inner, True)
    plan.abandon(ranks)  # type: ignore[arg-type]
    assert (inner.passes, plan.saves_rows_of_others) == (["abandoned"], True)


def test_the_latest_kinds_are_kept_while_their_group_lives() -> None:
    ranks, plan = Ranks(), ReplayedPlan(Products(), False)
    for rows in range(1, 30):
        for _ in range(2):
            both(plan, drawn(rows), values(ranks))
    assert len(replay._passes.get(ranks.outer, None, list)) == replay._MOST_PASSES  # type: ignore[arg-type]
    group = weakref.ref(ranks.outer)
    del ranks
    gc.collect()
    assert group() is None


def test_a_graph_of_the_user_has_the_pass_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, ranks = Products(), Ranks()
    plan = ReplayedPlan(inner, False)
    for _ in range(3):
        both(plan, drawn(), values(ranks))
    inner.passes.clear()
    monkeypatch.setattr(replay, "capturing", lambda: True)
    both(plan, drawn(), values(ranks))
    assert inner.passes == ["forward", "backward"]


def test_calls_without_heads_launch_nothing() -> None:
    plan, ranks = ReplayedPlan(Products(), False), Ranks()
    for _ in range(3):
        both(plan, tuple(x[:, :0] for x in drawn()), values(ranks))
    assert Machine.graphs == 0


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("grows", [False, True], ids=["", "the first backward maps another buffer"])
def test_checkpoints_recompute_what_is_replayed(layers: int, grows: bool) -> None:
    """Selective ones compare the operations of a recompute with those of forward."""

    class Growing(Products):
        def backward(self, *arguments: Any) -> Gradients:
            if grows and self.passes.count("backward") == 0:
                Machine.buffers[0] = Machine.buffer()
            return super().backward(*arguments)

    ranks: Any = Ranks()
    plans = [ReplayedPlan(Growing(), False), Products()]
    call = Call(ranks, scale=0.5)
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def layer(plan: Plan, q: Any, k: Any, v: Any) -> torch.Tensor:
        done = Done(call, plan, (8, 8), 0.5, NO_SIGNATURE)
        with mock.patch("cp_dtensor.engine.run.planned", return_value=done):
            return Attention.apply(call, True, *CallTensors(q * 1, k * 1, v * 1))[0]

    for _ in range(4):
        gradients = []
        inputs = drawn()[:3]
        for plan in plans:
            leaves = [x.detach().requires_grad_() for x in inputs]
            x = leaves[0]
            for _ in range(layers):
                x = checkpoint(layer, plan, x, *leaves[1:], use_reentrant=False, context_fn=contexts)
            x.sum().backward()
            gradients.append(tuple(leaf.grad for leaf in leaves if leaf.grad is not None))
        check(*gradients)
    assert Machine.graphs >= 2


def test_calls_that_cannot_be_replayed_are_refused() -> None:
    on_gpu: Any = type("Tensor", (), {"is_cuda": True})()
    ranks: Any = Ranks()
    for tensors, options, mask, message in (
        ({"bias": torch.zeros(1, 1, 2, 2)}, {}, SlidingWindow(2, 0), "attn_mask"),
        ({}, {"dropout_p": 0.1}, SlidingWindow(2, 0), "dropout_p"),
        ({"up": torch.zeros(1, 2, 2)}, {}, SlidingWindow(2, 0), "latents"),
        ({}, {}, Documents((0, 3, 8)) & SlidingWindow(2, 0), "packed documents"),
        ({}, {}, Documents((0, 3, 8)) | SlidingWindow(2, 0), "packed documents"),
        ({}, {}, SlidingWindow(2, 0) & Keys(((0, 5),)), "packed documents and padding"),
        ({}, {}, Bands.of_rows([[(0, 1)], [(0, 2)]], 2), "packed documents and padding"),
        ({}, {}, Batched([Documents((0, 3, 8)), Documents((0, 5, 8))]), "packed documents"),
    ):
        with pytest.raises(NotImplementedError, match=f"replay=True takes no {message}"):
            refuse_unreplayable(Call(ranks, mask=mask, **options), CallTensors(on_gpu, on_gpu, on_gpu, **tensors))
    t = CallTensors(on_gpu, on_gpu, on_gpu)
    refuse_unreplayable(Call(ranks, mask=SlidingWindow(2, 0), softcap=5.0), t)
    refuse_unreplayable(Call(ranks, mask=Batched([SlidingWindow(2, 0), SlidingWindow(3, 0)])), t)


class Sdpa(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def _on_cpu(rank: int) -> None:
    x, mesh = torch.randn(1, 2, 4, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    refused = pytest.raises(NotImplementedError, match="expected CUDA tensors, got those on cpu")
    for function in (context_parallel_attention, ring_attention, ulysses_attention):
        with refused:
            function(x, x, x, mesh=mesh, seq_len=8, replay=True)
    dtensor = DTensor.from_local(x, mesh, [Shard(2)])
    with refused:
        context_parallel_attention(dtensor, dtensor, dtensor, replay=True)
    for given in (x, dtensor):
        with context_parallel(mesh, seq_len=8, replay=True), refused:
            Sdpa()(given)
    with refused:
        parallelize_module(Sdpa(), mesh, ContextParallel(seq_len=8, replay=True))(x)
    with pytest.raises(TypeError, match="expected replay to be True or False, got 1"):
        context_parallel_attention(x, x, x, mesh=mesh, seq_len=8, replay=1)  # type: ignore[arg-type]


def test_every_front_end_refuses_cpu_tensors() -> None:
    run_ranks(2, _on_cpu)


def _plans(rank: int) -> None:
    x = torch.randn(1, 4, 4, 8)
    for mesh, method in (
        (dist.group.WORLD, "ring"), (dist.group.WORLD, "ulysses"),
        (init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")), "ring"),
    ):  # fmt: skip
        call, t = Call.of(mesh, method=method, is_causal=True, seq_len=16, scale=1.0), CallTensors(x, x, x)
        plan = planned(call, t).plan
        with pytest.raises(NotImplementedError, match="needs ranks that share GPU memory"):
            replayed(plan, "cuda")
        if isinstance(plan, RingPlan):
            replayed(replace(plan, transport=SymmetricMemory()), "cuda")
        assert replace(call, replay=True).key == call.key


def test_collectives_are_not_replayed() -> None:
    run_ranks(4, _plans)
