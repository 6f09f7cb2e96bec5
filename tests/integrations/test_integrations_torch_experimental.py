"""Functions of torch's experimental context parallel under their original names."""

import functools
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import cp_dtensor
from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.integrations import torch_experimental as ours
from cp_dtensor.integrations.torch_experimental import (
    _cp_options,
    _RotateMethod,
    context_parallel,
    context_parallel_unshard,
    redirect_imports,
    set_rotate_method,
)

TORCHS = "torch.distributed.tensor.experimental"
PRIVATE = ["_attention", "_context_parallel", "_context_parallel._attention", "_context_parallel._load_balancer"]
PROBLEM = Problem(q_len=16, kv_len=16, batch=2, q_heads=4, kv_heads=2, is_causal=True, scale=0.3)
Q, K, V, GRAD_OUT = PROBLEM.draw(0)
EXPECTED = reference(PROBLEM, Q, K, V, GRAD_OUT)


@pytest.fixture(autouse=True)
def _fresh_options() -> Iterator[None]:
    _cp_options.enable_load_balance = True
    yield
    _cp_options.enable_load_balance = True
    cp_dtensor.set_rotate_method("auto")


def cp_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As models call it: views from transpose."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)


@pytest.fixture(autouse=True)
def inside_of_sdpa_kernel() -> Iterator[None]:
    """As models do; around all ranks, since it sets flags of the process, which ranks that are threads share."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def check_training(rank: int, world_size: int, layout: Layout, function: Callable[..., Any] = attention) -> None:
    """Forward and backward of this rank's shards are those of the whole sequence."""
    local = [shard(x, layout, rank, world_size).requires_grad_() for x in (Q, K, V)]
    out = function(*local)
    out.backward(shard(GRAD_OUT, layout, rank, world_size))
    for actual, expected in zip((out, *(x.grad for x in local)), EXPECTED, strict=True):
        assert actual is not None
        assert_close(actual, shard(expected, layout, rank, world_size))


@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("bound", [False, True])
def test_buffers_as_training_loops_have_them(bound: bool, container: Callable[[Any], Any]) -> None:
    def body(rank: int) -> None:
        mesh = cp_mesh(2)
        make = functools.partial(context_parallel, mesh=mesh) if bound else functools.partial(context_parallel, mesh)
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
    _cp_options.enable_load_balance = balanced

    def body(rank: int) -> None:
        mesh = cp_mesh(4)
        tokens = torch.arange(length)[None].clone()
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            assert torch.equal(tokens, shard(torch.arange(length)[None], layout, rank, 4, 1))
            (inside,) = context_parallel_unshard(mesh, [tokens], [1])
            kept = tokens.clone()
            if length == 16:
                check_training(rank, 4, layout)
        (after,) = context_parallel_unshard(mesh, [kept], [-1])
        assert torch.equal(inside, tokens)
        assert torch.equal(after, tokens)

    run_ranks(4, body)


def test_backward_after_the_context_and_after_the_settings_have_changed() -> None:
    def body(rank: int) -> None:
        local = [shard(x, HeadTail(), rank, 2).requires_grad_() for x in (Q, K, V)]
        buffer = torch.zeros(16)
        with context_parallel(cp_mesh(2), buffers=[buffer], buffer_seq_dims=[0]):
            outs = [attention(*local), checkpoint(attention, *local, use_reentrant=False)]
        _cp_options.enable_load_balance = False
        for out in outs:
            grads = torch.autograd.grad(out, local, shard(GRAD_OUT, HeadTail(), rank, 2))
            for actual, expected in zip((out, *grads), EXPECTED, strict=True):
                assert_close(actual, shard(expected, HeadTail(), rank, 2))

    run_ranks(2, body)


def test_meshes() -> None:
    """Slices of meshes of several axes, axes of one rank, an axis flattened with another for the loss."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
        for axis, world_size in ((mesh["cp"], 2), (mesh["tp"], 1), (mesh["dp", "cp"]._flatten("dp_cp"), 4)):
            with context_parallel(axis, buffers=[torch.zeros(16)], buffer_seq_dims=[0]):
                check_training(axis.get_local_rank(), world_size, HeadTail())
        with (
            pytest.raises(ValueError, match="expected a mesh of one dim"),
            context_parallel(mesh, buffers=[], buffer_seq_dims=[]),
        ):
            pass

    run_ranks(4, body)


def test_without_buffers_and_not_causal() -> None:
    problem = Problem(q_len=8, kv_len=8)
    q, k, v, _ = problem.draw(1)
    out = reference(problem, q, k, v, torch.zeros_like(q))[0]

    def body(rank: int) -> None:
        for balanced in (True, False):
            _cp_options.enable_load_balance = balanced
            layout = HeadTail() if balanced else Contiguous()
            with context_parallel(cp_mesh(2)):
                check_training(rank, 2, layout)
                local = F.scaled_dot_product_attention(*(shard(x, layout, rank, 2) for x in (q, k, v)))
            assert_close(local, shard(out, layout, rank, 2))

    run_ranks(2, body)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_blocks(fullgraph: bool) -> None:
    def body(rank: int) -> None:
        block = torch.compile(attention, backend="eager", fullgraph=fullgraph)
        with context_parallel(cp_mesh(1)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_training(rank, 1, HeadTail(), block)
            check_training(rank, 1, HeadTail(), functools.partial(checkpoint, block, use_reentrant=False))

    run_ranks(1, body)


def test_options_and_rotate_method() -> None:
    assert _cp_options.rotate_method is _RotateMethod.ALL_GATHER
    assert transport_by_name(None).name == "auto"
    set_rotate_method("alltoall")
    assert _cp_options.rotate_method is _RotateMethod.ALL_TO_ALL
    assert transport_by_name(None).name == "alltoall"
    _cp_options.rotate_method = _RotateMethod.ALL_GATHER
    assert transport_by_name(None).name == "allgather"
    _cp_options.convert_to_f32 = False
    _cp_options.convert_to_f32 = True
    with pytest.raises(NotImplementedError, match="unknown rotate method"):
        set_rotate_method("broadcast")
    with pytest.raises(ValueError, match="_RotateMethod"):
        _cp_options.rotate_method = "alltoall"  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        _cp_options.enable_loadbalance = True  # type: ignore[attr-defined]


def contents() -> dict[str, dict[str, Any]]:
    names = [TORCHS, *(f"{TORCHS}.{name}" for name in PRIVATE)]
    return {name: dict(vars(importlib.import_module(name))) for name in names}


def test_redirected_imports_and_back() -> None:
    before, modules = contents(), dict(sys.modules)
    first = redirect_imports()
    with redirect_imports():
        first.close()
        first.close()
        assert importlib.import_module(TORCHS).context_parallel is context_parallel
        for name in PRIVATE[:3]:
            module = importlib.import_module(f"{TORCHS}.{name}")
            for ours_name in ours.__all__:
                if ours_name != "redirect_imports":
                    assert vars(module)[ours_name] is getattr(ours, ours_name)
        balancers = importlib.import_module(f"{TORCHS}._context_parallel._load_balancer")
        assert balancers._HeadTailLoadBalancer is ours._HeadTailLoadBalancer
        assert importlib.import_module(TORCHS).local_map is before[TORCHS]["local_map"]
    assert contents() == before
    assert sys.modules == modules


def test_what_others_replace_meanwhile_stays_theirs() -> None:
    module = importlib.import_module(f"{TORCHS}._attention")
    original = module.set_rotate_method
    with redirect_imports():
        module.set_rotate_method = theirs = lambda name: None
    assert module.set_rotate_method is theirs
    module.set_rotate_method = original


def test_signatures_are_torchs() -> None:
    torchs = importlib.import_module(f"{TORCHS}._context_parallel._attention")
    for name in (
        "context_parallel", "context_parallel_unshard", "set_rotate_method", "_ContextParallel",
        "_templated_ring_attention", "_context_parallel_shard", "_enable_context_parallel_dispatcher",
        "_disable_context_parallel_dispatcher",
    ):  # fmt: skip
        theirs = list(inspect.signature(getattr(torchs, name)).parameters.values())
        own = list(inspect.signature(getattr(ours, name)).parameters.values())
        assert [(p.name, p.kind) for p in own][: len(theirs)] == [(p.name, p.kind) for p in theirs]
        assert all(p.default is not p.empty for p in own[len(theirs) :])


def test_replaced_rings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(f"{TORCHS}._context_parallel._attention")

    def body(rank: int) -> None:
        mesh = cp_mesh(2)
        with pytest.raises(NotImplementedError, match="would have no effect"), context_parallel(mesh):
            pass

    with redirect_imports():
        with monkeypatch.context() as patch:
            patch.setattr(module, "_templated_ring_attention", lambda *args, **kwargs: None)
            run_ranks(2, body)
        with monkeypatch.context() as patch:
            patch.setattr(module._SDPAMerger, "step", lambda *args: None)
            run_ranks(2, body)


@pytest.mark.parametrize(
    ("buffers", "dims", "message"),
    [
        (torch.zeros(4, 2), [0], "expected buffers to be a sequence such as a list, got Tensor"),
        ([torch.zeros(4)], 0, "expected buffer_seq_dims to be a sequence such as a list, got int"),
        ([None], [0], "buffer 0: expected a plain torch.Tensor that every rank has whole, got NoneType"),
        ([torch.zeros(4)], [None], "buffer 0: expected an integer sequence dim, got None"),
    ],
)
def test_buffers_that_are_none_are_refused_by_name(buffers: Any, dims: Any, message: str) -> None:
    def body(rank: int) -> None:
        with context_parallel(cp_mesh(2), buffers=buffers, buffer_seq_dims=dims):
            pytest.fail("entered")

    with pytest.raises(TypeError, match=message):
        run_ranks(2, body)
