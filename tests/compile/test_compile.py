"""torch.compile(fullgraph=True) beyond steps of one front: several contexts, modules, forms of calls, and make_fx."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import (
    Function,
    Shards,
    causal,
    check_equals_eager,
    compiled,
    fresh,
    no_compilation,
    run_fresh,
)
from support.flex_checks import SCALE, block_mask, draw, one_device, window
from support.masked_problems import MaskedProblem
from support.problems import assert_close, shard
from support.processes import Processes
from support.shards import Shards as MaskedShards
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    PerDocument,
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_shard,
    local_positions,
    ring_attention,
    set_rotate_method,
    ulysses_attention,
)
from cp_dtensor.integrations import ring_flash_attn


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))


def defaults_and_constants(rank: int) -> None:
    """A layout made in compiled code; code for one default transport is not used for another."""
    mesh = world()

    def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int) -> Any:
        options = {"mesh": mesh, "layout": Striped(block=2), "is_causal": True, "enable_gqa": True}
        return ulysses_attention(q * 2.0, k, v, return_lse=True, seq_len=length, **options)[0] * 3.0

    def by_default(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_parallel_attention(q * 2.0, k, v, mesh=mesh, is_causal=True, enable_gqa=True) * 3.0

    Shards(rank, layout=Striped(2)).check(compiled(ulysses), 8)
    Shards(rank).check(compiled(by_default))
    set_rotate_method("alltoall")
    with pytest.raises(RuntimeError, match="fail_on_recompile"), no_compilation():
        compiled(by_default)(*Shards(rank).inputs())
    Shards(rank).check(compiled(by_default))
    set_rotate_method("auto")


def contexts(rank: int) -> None:
    """One function, compiled outside of contexts and in several kinds of them, is right each time."""
    mesh, function, outside = world(), compiled(causal), Shards(0, ranks=1)
    outside.check(function)
    for method, layout in (("ring", HeadTail()), ("ulysses", Contiguous()), ("auto", HeadTail())):
        for again in range(2):
            with torch.compiler.set_stance("fail_on_recompile" if again else "default"):
                with context_parallel(mesh, method=method, layout=layout, seq_len=8):
                    Shards(rank, layout=layout).check(function)
                outside.check(function)
    fresh()
    shards = Shards(rank)
    for without_grad in (torch.no_grad, torch.inference_mode):
        with without_grad():
            with context_parallel(mesh):
                shards.check_results(function(*(each.clone() for each in shards.inputs())))
            outside.check_results(function(*(each.clone() for each in outside.inputs())))


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 1.0, k, v, enable_gqa=True) * 1.0


class Two(nn.Module):
    """Two equal modules with different methods."""

    def __init__(self, mesh: DeviceMesh, *methods: str) -> None:
        super().__init__()
        styles = [ContextParallel(method=method, layout=HeadTail(), seq_len=8) for method in methods]
        self.parts = nn.ModuleList(parallelize_module(Attention(), mesh, style) for style in styles)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.parts[1](self.parts[0](q, k=k, v=v), k=k, v=v)


def modules_of_two_methods(rank: int) -> None:
    shards, two = Shards(rank), Two(world(), "ulysses", "ring")
    check_equals_eager(two, compiled(two), shards.inputs(), shards.grad)


def backends_and_forms(rank: int) -> None:
    mesh = world()

    def by_math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return ring_attention(q, k, v, mesh=mesh) + F.scaled_dot_product_attention(q, k, v)

    def three_dims(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, scale=-0.5)

    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=torch.float64)
    q, k, v = (each.detach()[:, :2] for each in Shards(rank).inputs())
    cases: list[tuple[Any, tuple[torch.Tensor, ...]]] = [
        (by_math, (q, k, v)), (three_dims, (q[0],)), (encoder, (q[:, 0],)),
    ]  # fmt: skip
    with context_parallel(mesh):
        for function, args in cases:
            assert_close(compiled(function)(*args), function(*args), function)


def autocast_in_bfloat16(rank: int) -> None:
    mesh = world()
    inputs = [each.detach().float().requires_grad_() for each in Shards(rank).inputs()]

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        named = ring_attention(q, k, v, mesh=mesh, enable_gqa=True)
        return named, F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with context_parallel(mesh), torch.autocast("cpu", torch.bfloat16):
        expected, got = both(*inputs), compiled(both)(*inputs)
    for outs in zip(got, expected, strict=True):
        assert outs[0].dtype == outs[1].dtype == torch.bfloat16
        results = [(out, *torch.autograd.grad(out.float().sum(), inputs, retain_graph=True)) for out in outs]
        assert all(map(torch.equal, *results))


def graphs_of_make_fx(rank: int) -> None:
    """Of real tensors, by default: attention is one operator there too, and no collectives that nobody waits for."""
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

    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    whole, mask = draw(32), block_mask(window, 32)
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]
    flex: list[Function] = [flex_attention, partial(context_parallel_flex_attention, mesh=mesh)]
    for function in flex:
        with torch.no_grad(), context_parallel(mesh):
            graph = make_fx(partial(function, block_mask=mask, scale=SCALE, enable_gqa=True))(*local)
            assert_close(graph(*local), shard(one_device(whole, window, None)[0], HeadTail(), rank, 2), function)
        assert "cp_dtensor.flex_keys" in graph.code
        assert "c10d" not in graph.code


def drop_ins(rank: int) -> None:
    """Functions in flash-attn's style: a window between unequal lengths, documents on all ranks, and cut ones."""
    *told, keys = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 5, 12]), True, rank, 2)

    def windowed(q: torch.Tensor, k: torch.Tensor) -> Any:
        return ring_flash_attn.ring_flash_attn_func(q[None], k[None], k[None], causal=True, window_size=(2, 0))

    def whole_documents(q: torch.Tensor, k: torch.Tensor) -> Any:
        return ring_flash_attn.zigzag_ring_flash_attn_varlen_func(q, k, k, (0, 4, 6), 8)

    def cut(q: torch.Tensor, k: torch.Tensor) -> Any:
        return ring_flash_attn.llama3_flash_attn_varlen_func(q * 2, k, k, *told, 1, keys, causal=True) * 2

    generator = torch.Generator().manual_seed(rank)
    tensors = (torch.randn(n, 2, 8, dtype=torch.float64, generator=generator) for n in (6, 6, 9))
    q, k, longer = (each.requires_grad_() for each in tensors)
    check_equals_eager(windowed, compiled(windowed), (q, longer))
    check_equals_eager(whole_documents, compiled(whole_documents), (q, k))
    check_equals_eager(cut, torch.compile(cut, backend="eager"), (q, k))  # runs between graphs


# Contexts whose mask or layout a call cannot inherit, modules in modules, positions between graphs

LENGTH = 12
FIRST, SECOND = Documents([0, 5, 12], within=Causal()), Documents([0, 2, 9, 12])
BALANCED = Balanced(FIRST, LENGTH)


def function(**options: Any) -> Function:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_parallel_attention(q * 1.0, k, v, mesh=dist.group.WORLD, enable_gqa=True, **options)

    return compiled(attend)


def module(inner: nn.Module | None = None, **options: Any) -> Function:
    return compiled(parallelize_module(inner or Attention(), dist.group.WORLD, ContextParallel(**options)))


def context(**options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **options)


def check(attend: Function, mask: Mask, layout: Layout, around: Any = None) -> None:
    """Checks out on this rank."""
    problem = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2)
    shards = MaskedShards(dist.get_rank(), problem, layout, dist.get_world_size())
    with around or nullcontext(), torch.no_grad():
        shards.check_results(attend(shards.q, shards.k, shards.v))


REFUSED = "in compiled code inside of a context whose mask or layout may differ"
CALLS: list[tuple[tuple[Any, ...], dict[str, Any], Layout, Mask | str]] = [
    ((function, module), {"layout": Striped(1)}, Contiguous(), REFUSED),
    ((function, module), {"layout": Contiguous()}, Contiguous(), REFUSED),
    ((function, module), {"mask": Full()}, BALANCED, REFUSED),
    ((function, module), {"mask": Full()}, Contiguous(), Full()),
    ((function, module), {"mask": Full(), "layout": Contiguous(), "method": "ulysses"}, BALANCED, Full()),
    ((function,), {"method": "ulysses"}, Contiguous(), FIRST),
    ((module,), {"method": "ulysses"}, Contiguous(), REFUSED),
]
"""Forms, options of the call, the layout of its context, which has a mask, and the mask that holds or the message."""


def calls_in_a_masked_context(_rank: int) -> None:
    for forms, options, layout, expected in CALLS:
        for form in forms:
            fresh()
            attend, around = form(**options), context(mask=FIRST, layout=layout)
            if isinstance(expected, Mask):
                check(attend, expected, options.get("layout", layout), around)
                continue
            with around, pytest.raises(Exception, match=expected):
                attend(*torch.ones(3, 1, 2, 6, 4))


class Outer(nn.Module):
    def __init__(self, inner: Function) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return self.inner(*qkv)


def modules_in_modules(_rank: int) -> None:
    inner = module()
    for mask in (FIRST, SECOND):
        style = ContextParallel(layout=Contiguous(), mask=mask)
        check(parallelize_module(Outer(inner), dist.group.WORLD, style), mask, Contiguous())


def positions(rank: int) -> None:
    """Between graphs; each run has those of its context."""
    whole = torch.arange(LENGTH)

    def shard_and_positions(x: torch.Tensor) -> torch.Tensor:
        return context_parallel_shard(dist.group.WORLD, [x * 2], [0])[0] + local_positions(dist.group.WORLD, LENGTH)

    attend = torch.compile(shard_and_positions, backend="eager")
    assert_close(attend(whole), 3 * shard(whole, HeadTail(), rank, 2, seq_dim=0), "outside")
    layout = PerDocument([0, 5, LENGTH])
    with context(layout=layout):
        assert_close(attend(whole), 3 * shard(whole, layout, rank, 2, seq_dim=0), layout)


BODIES = (
    defaults_and_constants, contexts, modules_of_two_methods, backends_and_forms, autocast_in_bfloat16,
    graphs_of_make_fx, drop_ins, calls_in_a_masked_context, modules_in_modules, positions,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_compiled(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(run_fresh, body)


def two_axes(_rank: int) -> None:
    """A module over two axes takes the mask and the layout of its context, and refuses the sinks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    attend = compiled(parallelize_module(Attention(), mesh, ContextParallel()))
    check(attend, FIRST, Contiguous(), context_parallel(mesh, mask=FIRST, layout=Contiguous()))
    fresh()
    with context_parallel(mesh, sinks=torch.zeros(4)), pytest.raises(Exception, match="does not take the sinks"):
        attend(*torch.ones(3, 2, 4, 3, 4))


def test_modules_over_two_axes(four_processes: Processes) -> None:
    four_processes.run(run_fresh, two_axes)
