"""Calls in a context with a layout or mask of its own, which they do not take over: refused where they say nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import kinds, recorded_collectives
from support.compile_checks import compiled, fresh
from support.processes import Processes
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    context_parallel,
    context_parallel_attention,
    context_parallel_flex_attention,
    context_parallel_shard,
    context_parallel_unshard,
    local_positions,
    ring_attention,
    ulysses_attention,
    varlen_attention,
)
from cp_dtensor.integrations.unified import UnifiedAttnMode

RANKS, LENGTH = 2, 8
MASK = Documents([0, 3, 8], within=Causal())
Call = Callable[..., object]


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def here() -> torch.Tensor:
    return torch.ones(1, 2, LENGTH // RANKS, 4)


def module(mesh: Any, **options: Any) -> object:
    return parallelize_module(Attention(), mesh, ContextParallel(**options))(here())


def attend(function: Call) -> Call:
    return lambda mesh, **options: function(here(), here(), here(), mesh=mesh, **options)


WITH_LAYOUT: dict[str, Call] = {
    "context_parallel_shard": lambda mesh, **options: context_parallel_shard(mesh, [torch.ones(8)], [0], **options),
    "context_parallel_unshard": lambda mesh, **options: context_parallel_unshard(mesh, [torch.ones(4)], [0], **options),
    "local_positions": lambda mesh, **options: local_positions(mesh, LENGTH, **options),
    "context_parallel_flex_attention": attend(context_parallel_flex_attention),
}
WITH_BOTH: dict[str, Call] = {
    "context_parallel_attention": attend(context_parallel_attention),
    "ring_attention": attend(ring_attention),
    "ulysses_attention": attend(ulysses_attention),
    "ContextParallel": module,
}


def refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("layout", [Contiguous(), Balanced(MASK, LENGTH)], ids=["Contiguous", "Balanced"])
@pytest.mark.parametrize("name", [*WITH_LAYOUT, *WITH_BOTH])
def test_a_layout_that_is_left_out(name: str, layout: Any) -> None:
    call = {**WITH_LAYOUT, **WITH_BOTH}[name]

    def works(mesh: object, **options: Any) -> None:
        if name != "context_parallel_flex_attention":  # which wants to be compiled
            call(mesh, **options)

    def body(rank: int) -> None:
        world, mesh = dist.group.WORLD, init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "rows"))["cp"]
        with context_parallel(mesh, layout=layout):
            works(mesh, layout=layout)
            works(mesh, layout=HeadTail())
            refused(lambda: call(mesh), r"got layout=None, which stands for HeadTail\(\), .* whose layout is")
            refused(lambda: call(mesh.get_group()), "got layout=None")
        works(mesh)
        with context_parallel(mesh):
            works(mesh)
        with context_parallel(world, layout=Contiguous()):  # over other ranks
            works(mesh)

    run_ranks(4, body)


@pytest.mark.parametrize("name", WITH_BOTH)
def test_a_mask_that_is_left_out(name: str) -> None:
    call = WITH_BOTH[name]

    def body(rank: int) -> None:
        world = dist.group.WORLD
        with context_parallel(world, mask=MASK):
            refused(lambda: call(world), r"got mask=None inside .* whose mask, Documents\(.*\), it does not take over")
            call(world, mask=Full())
            call(world, mask=MASK)
            varlen_attention(*[torch.ones(4, 2, 4)] * 3, mesh=world, cu_seqlens=[0, 8])
        with context_parallel(world, mask=Full()):
            call(world)

    run_ranks(RANKS, body)


def test_nothing_is_sent_before() -> None:
    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD, layout=Contiguous()):
            for call in (*WITH_LAYOUT.values(), *WITH_BOTH.values()):
                refused(lambda call=call: call(dist.group.WORLD), "got layout=None")  # type: ignore[misc]

    with recorded_collectives() as calls:
        run_ranks(RANKS, body)
    assert kinds(calls) == []


def test_modules_inside_of_modules() -> None:
    def body(rank: int) -> None:
        world = dist.group.WORLD
        inner = parallelize_module(Attention(), world, ContextParallel())
        outer = parallelize_module(nn.Sequential(inner), world, ContextParallel(layout=Contiguous()))
        for each in (outer, copy.deepcopy(outer)):
            refused(lambda each=each: each(here()), "ContextParallel got layout=None")
        parallelize_module(nn.Sequential(inner), world, ContextParallel(layout=HeadTail()))(here())

    run_ranks(RANKS, body)


def test_the_drop_in_mode_is_contiguous() -> None:
    def body(rank: int) -> None:
        with UnifiedAttnMode():
            refused(lambda: context_parallel_shard(dist.group.WORLD, [torch.ones(8)], [0]), r"is Contiguous\(\)")

    run_ranks(RANKS, body)


def test_what_is_computed_again_in_another_context_is_not_judged_by_it() -> None:
    def body(rank: int) -> None:
        world = dist.group.WORLD
        leaf = here().requires_grad_()
        attention = parallelize_module(Attention(), world, ContextParallel())
        out = checkpoint(attention, leaf, use_reentrant=False)
        with context_parallel(world, layout=Contiguous(), mask=MASK):
            out.sum().backward()

    run_ranks(RANKS, body)


def compiled_calls(_rank: int) -> None:
    fresh()
    mesh: DeviceMesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    for name, call in WITH_BOTH.items():
        if name == "ContextParallel":
            attention = parallelize_module(Attention(), mesh, ContextParallel())
            function = compiled(lambda attention=attention: attention(here()))
        else:
            function = compiled(lambda call=call: call(mesh))
        function()
        for options, message in (({"layout": Contiguous()}, "got layout=None"), ({"mask": MASK}, "got mask=None")):
            with context_parallel(mesh, **options), pytest.raises(Exception, match=message):
                function()
        function()


def test_compiled_calls(two_processes: Processes) -> None:
    two_processes.run(compiled_calls)
