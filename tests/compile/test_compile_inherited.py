"""Compiled calls in contexts whose mask or layout they cannot inherit, modules in modules, positions between graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.compile_checks import compiled, fresh
from support.masked_problems import MaskedProblem
from support.problems import assert_close, shard
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

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
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    local_positions,
)

LENGTH = 12
FIRST, SECOND = Documents([0, 5, 12], within=Causal()), Documents([0, 2, 9, 12])
BALANCED = Balanced(FIRST, LENGTH)
Function = Callable[..., torch.Tensor]


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * 1.0, k, v, enable_gqa=True) * 1.0


def function(**options: Any) -> Function:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return context_parallel_attention(q * 1.0, k, v, mesh=dist.group.WORLD, enable_gqa=True, **options)

    return compiled(attend)


def module(**options: Any) -> Function:
    return compiled(parallelize_module(Attention(), dist.group.WORLD, ContextParallel(**options)))


def context(**options: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **options)


def check(attend: Function, mask: Mask, layout: Layout, around: Any = None) -> None:
    """Checks out on this rank."""
    whole = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2).draw(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2).reference(*whole)[0]
    with around or nullcontext(), torch.no_grad():
        out = attend(*(shard(tensor, layout, rank, ranks) for tensor in whole[:3]))
    assert_close(out, shard(expected, layout, rank, ranks), (mask, layout))


REFUSED = "in compiled code inside of a context whose mask or layout may differ"
CALLS: list[tuple[str, dict[str, Any], Layout, Mask | str]] = [
    ("both", {"layout": Striped(1)}, Contiguous(), REFUSED),
    ("both", {"layout": Contiguous()}, Contiguous(), REFUSED),
    ("both", {"mask": Full()}, BALANCED, REFUSED),
    ("both", {"mask": Full()}, Contiguous(), Full()),
    ("both", {"mask": Full(), "layout": Contiguous(), "method": "ulysses"}, BALANCED, Full()),
    ("function", {"method": "ulysses"}, Contiguous(), FIRST),
    ("module", {"method": "ulysses"}, Contiguous(), REFUSED),
]
"""Forms, options of the call, the layout of its context, which has a mask, and the mask that holds or the message."""


def calls_in_a_masked_context(_rank: int) -> None:
    for forms, options, layout, expected in CALLS:
        for form in (function, module):
            if forms not in ("both", form.__name__):
                continue
            fresh()
            attend, around = form(**options), context(mask=FIRST, layout=layout)
            if isinstance(expected, Mask):
                check(attend, expected, options.get("layout", layout), around)
                continue
            with around, pytest.raises(Exception, match=expected):
                attend(*torch.ones(3, 1, 2, 6, 4))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = compiled(inner)

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return self.inner(*qkv)


def modules_in_modules(_rank: int) -> None:
    fresh()
    inner = parallelize_module(Attention(), dist.group.WORLD, ContextParallel())
    for mask in (FIRST, SECOND):
        style = ContextParallel(layout=Contiguous(), mask=mask)
        check(parallelize_module(Outer(inner), dist.group.WORLD, style), mask, Contiguous())


def positions(rank: int) -> None:
    """Between graphs; each run has those of its context."""
    fresh()
    warnings.filterwarnings("ignore", "Dynamo (detected|does not know)")  # of the code of Balanced
    world, whole = dist.group.WORLD, torch.arange(LENGTH)

    def shard_and_positions(x: torch.Tensor) -> torch.Tensor:
        return context_parallel_shard(world, [x * 2], [0])[0] + local_positions(world, LENGTH)

    attend = torch.compile(shard_and_positions, backend="aot_eager")
    assert_close(attend(whole), 3 * shard(whole, HeadTail(), rank, 2, seq_dim=0), "outside")
    for layout in (BALANCED, Balanced(SECOND, LENGTH), Contiguous()):
        with context(layout=layout):
            assert_close(attend(whole), 3 * shard(whole, layout, rank, 2, seq_dim=0), layout)


@pytest.mark.parametrize("body", [calls_in_a_masked_context, modules_in_modules, positions])
def test_inherited(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)


def two_axes(_rank: int) -> None:
    """A module over two axes takes the mask and the layout of its context, and refuses the sinks."""
    fresh()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    attend = compiled(parallelize_module(Attention(), mesh, ContextParallel()))
    check(attend, FIRST, Contiguous(), context_parallel(mesh, mask=FIRST, layout=Contiguous()))
    fresh()
    with context_parallel(mesh, sinks=torch.zeros(4)), pytest.raises(Exception, match="does not take the sinks"):
        attend(*torch.ones(3, 2, 4, 3, 4))


def test_modules_over_two_axes(four_processes: Processes) -> None:
    four_processes.run(two_axes)
