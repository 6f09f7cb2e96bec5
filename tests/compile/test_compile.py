"""torch.compile(fullgraph=True), forward and backward, for every form of attention call, on real processes."""

from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile_checks import Function, Shards, causal, compiled, fresh, no_compilation
from support.problems import assert_close
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor import (
    ContextParallel,
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    context_parallel,
    context_parallel_attention,
    enable_context_parallel_dispatcher,
    ring_attention,
    set_rotate_method,
    ulysses_attention,
)

LENGTHS = (9, 10, 12, 13, 16)
METHODS = ("ring", "ulysses", "auto")


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


def functions(rank: int) -> None:
    fresh()
    mesh = world()

    def ring(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> torch.Tensor:
        return ring_attention(q * 2.0, k, v, mesh=mesh, layout=layout, is_causal=True, enable_gqa=True, seq_len=8) * 3.0

    def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: DeviceMesh, length: int) -> torch.Tensor:
        layout = Striped(block=2)  # made in compiled code
        options = {"mesh": mesh, "layout": layout, "is_causal": True, "enable_gqa": True, "seq_len": length}
        return ulysses_attention(q * 2.0, k, v, return_lse=True, **options)[0] * 3.0

    def by_default(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return context_parallel_attention(q * 2.0, k, v, mesh=mesh, is_causal=True, enable_gqa=True) * 3.0

    for layout in (Striped(3), MirroredBatch()):
        Shards(rank, layout=layout).check(compiled(ring), mesh, layout)
        with no_compilation():
            Shards(rank, layout=layout).check(compiled(ring), mesh, layout)
    Shards(rank, layout=Striped(2)).check(compiled(ulysses), mesh, 8)
    Shards(rank).check(compiled(by_default), mesh)
    set_rotate_method("alltoall")  # what has been compiled for the default of before is not used
    with pytest.raises(RuntimeError, match="fail_on_recompile"), no_compilation():
        compiled(by_default)(*Shards(rank).inputs(), mesh)
    Shards(rank).check(compiled(by_default), mesh)
    set_rotate_method("auto")


def step_in_context(function: Function, shards: Shards, mesh: DeviceMesh, **options: Any) -> None:
    length = shards.whole[0].size(2)
    context = context_parallel(mesh, buffers=[torch.arange(length)], buffer_seq_dims=[0], **options)
    with ExitStack() as stack:
        stack.enter_context(context)
        shards.check(function, leave=stack.close)  # backward comes after it


def contexts(rank: int) -> None:
    """One function, compiled outside of contexts and in several kinds of them, is right each time."""
    fresh()
    mesh = world()
    function = compiled(causal)
    outside = Shards(0, ranks=1)
    outside.check(function)
    for method, layout in product(METHODS, (HeadTail(), Contiguous())):
        shards = Shards(rank, layout=layout)
        step_in_context(function, shards, mesh, method=method, layout=layout)
        with no_compilation():
            step_in_context(function, shards, mesh, method=method, layout=layout)
            outside.check(function)
    fresh()
    shards = Shards(rank)
    for without_grad in (torch.no_grad, torch.inference_mode):
        with context_parallel(mesh), without_grad():
            shards.check_results(function(*(each.clone() for each in shards.inputs())))
        with without_grad():
            outside.check_results(function(*(each.clone() for each in outside.inputs())))


def lengths(rank: int) -> None:
    fresh()
    mesh = world()
    function = compiled(causal, dynamic=True)

    def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> torch.Tensor:
        return ulysses_attention(q * 2.0, k, v, mesh=mesh, is_causal=True, enable_gqa=True, seq_len=length) * 3.0

    named = compiled(by_name, dynamic=True)

    def step(length: int) -> None:
        step_in_context(function, Shards(rank, length), mesh)
        Shards(rank, length).check(named, length)

    step(11)
    with no_compilation():
        for length in LENGTHS:  # of most, the two ranks have different shares
            step(length)


def dtensors(rank: int, on: Shard) -> None:
    fresh()
    mesh = world()

    def step(function: Function, length: int) -> None:
        shards = Shards(rank, length)
        q, k, v, grad = (distribute_tensor(each, mesh, [on]) for each in shards.whole)
        inputs = [each.requires_grad_() for each in (q, k, v)]
        out = function(*inputs)
        assert isinstance(out, DTensor)
        assert out.placements == (on,)
        for got, expected in zip((out, *torch.autograd.grad(out, inputs, grad)), shards.expected, strict=True):
            assert_close(got.full_tensor(), expected, length)

    with enable_context_parallel_dispatcher():
        function = compiled(causal)
        step(function, 8)
        step(function, 12)  # now compiled for any length that divides
        with no_compilation():
            step(function, 12)
            step(function, 20)
        fresh()
        step(compiled(causal, dynamic=False), 9)


@pytest.mark.parametrize("on", [Shard(2), Shard(1)], ids=str)
def test_dtensors(two_processes: Processes, on: Shard) -> None:
    two_processes.run(dtensors, on)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, *, k: torch.Tensor, v: torch.Tensor, nothing: None = None) -> torch.Tensor:
        return causal(q, k, v)


class Two(nn.Module):
    """The first of two equal modules is by heads; the second, alone, is a ring."""

    def __init__(self, mesh: DeviceMesh, first: str, second: str, layout: Layout) -> None:
        super().__init__()
        for name, method in (("first", first), ("second", second)):
            style = ContextParallel(method=method, layout=layout, seq_len=8)
            self.add_module(name, parallelize_module(Attention(), mesh, style))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(q, k=k, v=v), k=k, v=v)


def by_name(function: Function) -> Function:
    return lambda q, k, v: function(q, k=k, v=v)


def modules(rank: int) -> None:
    fresh()
    mesh = world()
    shards = Shards(rank)
    for method in METHODS:
        module = parallelize_module(Attention(), mesh, ContextParallel(method=method))
        function = by_name(compiled(module))
        shards.check(function)
        with no_compilation():
            shards.check(function)
    for first, second, layout in (("ulysses", "ring", HeadTail()), ("ring", "ulysses", HeadTail())):
        two = Two(mesh, first, second, layout)
        results = []
        for function in (two, compiled(two)):
            inputs = shards.inputs()
            out = function(*inputs)
            results.append((out, *torch.autograd.grad(out, inputs, shards.grad)))
        for eager, got in zip(*results, strict=True):
            assert_close(got, eager, (first, second))


def backends_and_forms(rank: int) -> None:
    fresh()
    mesh = world()

    def by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            named = ring_attention(q, k, v, mesh=mesh)
            return named + F.scaled_dot_product_attention(q, k, v)

    def three_dims(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, scale=-0.5)

    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    q, k, v = (each.detach()[:, :2] for each in Shards(rank).inputs())
    hidden = q[:, 0].detach()
    with context_parallel(mesh):
        assert_close(compiled(by_math)(q, k, v), by_math(q, k, v), "math")
        assert_close(compiled(three_dims)(q[0]), three_dims(q[0]), "three dims, negative scale")
        assert_close(compiled(encoder)(hidden), encoder(hidden), "encoder layer")


def graphs_of_make_fx(rank: int) -> None:
    """Of real tensors, by default: attention is one operator there too, and no collectives that nobody waits for."""
    fresh()
    mesh, shards = world(), Shards(rank)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = causal(q, k, v)
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    for method in ("ring", "ulysses"):
        with context_parallel(mesh, method=method):
            graph = make_fx(step)(*shards.inputs(), shards.grad)
            shards.check_results(*graph(*shards.inputs(), shards.grad))
        assert "cp_dtensor" in graph.code
        assert "c10d" not in graph.code


@pytest.mark.parametrize("body", [functions, contexts, lengths, modules, backends_and_forms, graphs_of_make_fx])
def test_on_two_processes(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
