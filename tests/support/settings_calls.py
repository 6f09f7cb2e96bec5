"""Calls of every front of the matrix, run under the user's settings of torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from matrix.features import Case, expected
from matrix.fronts import FRONTS, case_of
from matrix.worlds import WORLDS, World, compare, leaves_of, mesh_of

from cp_dtensor import Striped, context_parallel_shard, context_parallel_unshard, local_positions
from cp_dtensor.integrations.ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens
from support.ranks import run_ranks
from support.settings_state import cold_caches, thread_state

Setting = Callable[[], AbstractContextManager[object]]


class Call(NamedTuple):
    """A case of a front."""

    front: str
    world: World
    case: Case


def _call(name: str, features: tuple[str, ...], world: str, base: Case | None = None) -> Call:
    case = case_of(name, features, WORLDS[world].size, base)
    assert case is not None
    return Call(name, WORLDS[world], case)


def _feature(name: str) -> str:
    return next(each for each in ("documents", "window", "causal") if each not in FRONTS[name].lacks)


CALLS = {
    **{name: _call(name, (_feature(name),), "threads(2)") for name in FRONTS},
    "everything": _call(
        "function", ("window", "float_bias", "sinks", "deterministic"), "threads(2x2)",
        Case(method="hybrid", layout=Striped(2)),
    ),
}  # fmt: skip


def check_call(name: str, setting: Setting = nullcontext, training: bool = True) -> None:
    """Checks a first call, with empty caches, under a setting of each rank's thread, and a cached call without it.

    Results and gradients must equal those of dense attention in float64.
    """
    call = CALLS[name]
    expected(call.case)
    cold_caches()
    with FRONTS[call.front].patch(False):
        run_ranks(call.world.size, _attend_twice, call, setting, training)


def _attend_twice(_rank: int, call: Call, setting: Setting, training: bool) -> None:
    front, mesh, case = FRONTS[call.front], mesh_of(call.world), call.case
    x, grad_out = leaves_of(case, mesh)
    leaves = {name: leaf for name, leaf in x.items() if leaf.requires_grad}
    for of_thread, backward in ((setting, training), (nullcontext, True)):
        given = dict(x)
        with torch.set_grad_enabled(backward):
            around = front.around(case, mesh, given)
        with of_thread():
            before = thread_state()
            check_positions(case.lengths[0])
            with around:
                out = front.call(case, mesh, given)
            if backward:
                out.backward(grad_out)
            assert thread_state() == before
        grads = {name: leaf.grad for name, leaf in leaves.items()} if backward else {}
        compare(case if backward else replace(case, around="no_grad"), mesh, {"out": out.detach(), **grads}, front)
        for leaf in leaves.values():
            leaf.grad = None


def check_positions(length: int) -> None:
    """Checks what is made of lengths and of documents: shards, positions, and what drop-ins prepare."""
    world, size = dist.group.WORLD, dist.get_world_size()
    whole = torch.arange(length, device="cpu")
    (mine,) = context_parallel_shard(world, [whole], [0])
    assert torch.equal(mine, local_positions(world, length, device="cpu"))
    assert torch.equal(context_parallel_unshard(world, [mine], [0])[0], whole)
    edges = torch.tensor([0, 2, 4 * size], dtype=torch.int32, device="cpu")
    *told, keys = llama3_flash_attn_prepare_cu_seqlens(edges, False, dist.get_rank(), size)
    assert told[0].device == edges.device
    assert keys.stop <= 4 * size
