"""Contexts, options and redirected imports of torch's experimental context parallel; attention is in tests/matrix."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dtensor
from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.integrations import torch_experimental as ours
from cp_dtensor.integrations.torch_experimental import (
    _cp_options,
    context_parallel,
    context_parallel_unshard,
    redirect_imports,
    set_rotate_method,
)

TORCHS = "torch.distributed.tensor.experimental"
PRIVATE = ["_attention", "_context_parallel", "_context_parallel._attention"]
PROBLEM = Problem(q_len=16, kv_len=16, batch=2, q_heads=4, kv_heads=2, is_causal=True, scale=0.3)
WHOLE = PROBLEM.draw(0)
EXPECTED = reference(PROBLEM, *WHOLE)


@pytest.fixture(autouse=True)
def torchs_options() -> Iterator[None]:
    """Give torch its initial options back."""
    before = dict(vars(_cp_options))
    yield
    vars(_cp_options).update(before)
    cp_dtensor.set_rotate_method("auto")


@pytest.fixture(autouse=True)
def inside_of_sdpa_kernel() -> Iterator[None]:
    """As models do; around all ranks, since it sets flags of the process, which ranks that are threads share."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def cp_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))


def check_training(rank: int, world_size: int, layout: Layout) -> None:
    """Forward and backward of this rank's shards are those of the whole sequence."""
    *local, grad_out = (shard(x, layout, rank, world_size) for x in WHOLE)
    # As models have them: views from transpose.
    q, k, v = (x.transpose(1, 2).contiguous().requires_grad_() for x in local)
    views = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(*views, is_causal=True, scale=0.3, enable_gqa=True)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    for actual, expected in zip((out, *(grad.transpose(1, 2) for grad in grads)), EXPECTED, strict=True):
        assert_close(actual, shard(expected, layout, rank, world_size))


@pytest.mark.parametrize("container", [list, tuple])
def test_buffers_as_training_loops_have_them(container: Callable[[Any], Any]) -> None:
    def body(rank: int) -> None:
        make = partial(context_parallel, mesh=cp_mesh(2))
        tokens, labels = torch.arange(32).view(2, 16), torch.arange(32, 64).view(2, 16)
        freqs = [torch.polar(torch.ones(16, 4), torch.arange(64.0).view(16, 4) + stage) for stage in range(2)]
        mask = torch.ones(2, 16, dtype=torch.bool)
        buffers, dims = container([tokens, labels, mask, *freqs]), container([1, 1, 1, 0, 0])
        whole = [x.clone() for x in buffers]
        context = make(buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={tokens, labels})
        assert tokens.shape == (2, 16)  # sharded on entry, not on creation
        inside = [shard(x, HeadTail(), rank, 2, dim) for x, dim in zip(whole, dims, strict=True)]
        with context:
            assert all(map(torch.equal, buffers, inside))
            check_training(rank, 2, HeadTail())
        assert all(map(torch.equal, buffers, [*inside[:2], *whole[2:]]))
        make(buffers=[tokens], buffer_seq_dims=[1])  # never entered

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("length", "balanced", "layout"),
    [(16, True, HeadTail()), (16, False, Contiguous()), (14, True, Contiguous()), (13, True, Contiguous())],
)
def test_order_of_shards_is_torchs(length: int, balanced: bool, layout: Layout) -> None:
    """And unsharding knows it, inside and after the context, for lengths of other buffers, too."""
    _cp_options.enable_load_balance = balanced

    def body(rank: int) -> None:
        mesh = cp_mesh(4)
        tokens, others = torch.arange(length)[None].clone(), torch.arange(20)
        with context_parallel(mesh, buffers=[tokens, others], buffer_seq_dims=[1, 0]):
            assert torch.equal(tokens, shard(torch.arange(length)[None], layout, rank, 4, 1))
            inside = context_parallel_unshard(mesh, [tokens, others], [1, 0])
            kept = tokens.clone()
            if length == 16:
                check_training(rank, 4, layout)
        assert torch.equal(inside[0], tokens)
        assert torch.equal(inside[1], torch.arange(20))
        assert torch.equal(context_parallel_unshard(mesh, [kept], [-1])[0], tokens)

    run_ranks(4, body)


def test_meshes() -> None:
    """Slices of meshes of several axes, axes of one rank, an axis flattened with another for the loss."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
        for axis, world_size in ((mesh["cp"], 2), (mesh["tp"], 1), (mesh["dp", "cp"]._flatten("dp_cp"), 4)):
            with context_parallel(axis):
                check_training(axis.get_local_rank(), world_size, HeadTail())
        with pytest.raises(ValueError, match=r"expected a mesh of one dim.*got 4 dims"), context_parallel(mesh):
            pytest.fail("entered")

    run_ranks(4, body)


def test_rotate_method() -> None:
    methods = type(_cp_options.rotate_method)
    assert transport_by_name(None).name == "auto"
    for name, torchs in (("alltoall", methods.ALL_TO_ALL), ("allgather", methods.ALL_GATHER)):
        set_rotate_method(name)
        assert transport_by_name(None).name == name
        assert _cp_options.rotate_method is torchs
    with pytest.raises(NotImplementedError, match="unknown rotate method"):
        set_rotate_method("broadcast")


def contents() -> dict[str, dict[str, Any]]:
    names = [TORCHS, *(f"{TORCHS}.{name}" for name in PRIVATE)]
    return {name: dict(vars(importlib.import_module(name))) for name in names}


def test_redirected_imports_and_back() -> None:
    before, modules = contents(), dict(sys.modules)
    first = redirect_imports()
    with redirect_imports():
        first.close()
        first.close()
        for name, module in contents().items():
            changed = {each for each, value in module.items() if before[name][each] is not value}
            names = {"context_parallel"} if name == TORCHS else {*ours.OURS}
            assert {each: module[each] for each in changed} == {each: ours.OURS[each] for each in names}
    assert contents() == before
    assert sys.modules == modules
    module: Any = sys.modules[f"{TORCHS}._attention"]
    with redirect_imports():
        module.set_rotate_method = theirs = lambda name: None
    assert module.set_rotate_method is theirs, "what others replace meanwhile stays theirs"
    module.set_rotate_method = before[module.__name__]["set_rotate_method"]


def test_names_are_torchs() -> None:
    """Ours have torch's signatures; the others are torch's own objects, which read torch's own options."""
    torchs = vars(importlib.import_module(f"{TORCHS}._context_parallel._attention"))
    balancers = vars(importlib.import_module(f"{TORCHS}._context_parallel._load_balancer"))
    for name in ("_HeadTailLoadBalancer", "_PTRRLoadBalancer", "_PerDocumentHeadTailLoadBalancer", "_LoadBalancer"):
        assert getattr(ours, name) is balancers[name]
    for name in ("_ContextParallel", "_RotateMethod", "_cp_options", "_templated_ring_attention", "flex_cp_allgather"):
        assert getattr(ours, name) is torchs[name]
    with pytest.raises(ImportError, match="cannot import name 'context_paralel'"):
        from cp_dtensor.integrations.torch_experimental import context_paralel  # noqa: F401
    for name, own in ours.OURS.items():
        theirs = list(inspect.signature(torchs[name]).parameters.values())
        parameters = list(inspect.signature(own).parameters.values())
        assert [(p.name, p.kind) for p in parameters][: len(theirs)] == [(p.name, p.kind) for p in theirs]
        assert all(p.default is not p.empty for p in parameters[len(theirs) :])
        assert own.__doc__
