"""Torch's experimental context parallel by its names: contexts, redirected imports, shards, masks, modules, DTensors.

Attention in contexts is in tests/matrix.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import cp_dtensor
from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.comm.transports import transport_by_name
from cp_dtensor.integrations import torch_experimental as ours
from cp_dtensor.integrations.torch_experimental import (
    _context_parallel_shard,
    _ContextParallel,
    _cp_options,
    _disable_context_parallel_dispatcher,
    _enable_context_parallel_dispatcher,
    _HeadTailLoadBalancer,
    _LoadBalancer,
    _PerDocumentHeadTailLoadBalancer,
    _PTRRLoadBalancer,
    context_parallel,
    context_parallel_unshard,
    redirect_imports,
    set_rotate_method,
)

TORCHS = "torch.distributed.tensor.experimental"
PRIVATE = ["_attention", "_context_parallel", "_context_parallel._attention"]
PROBLEM = Problem(q_len=16, kv_len=16, batch=2, is_causal=True)
Q, K, V, GRAD_OUT = PROBLEM.draw(0)
EXPECTED = reference(PROBLEM, Q, K, V, GRAD_OUT)
HEAD_TAIL = _HeadTailLoadBalancer(16, 2, "cpu")
SDPA, FLEX = _ContextParallel.AttentionType.SDPA, _ContextParallel.AttentionType.FLEX
each_layout = pytest.mark.parametrize("layout", [HeadTail(), Contiguous()], ids=repr)


@pytest.fixture(autouse=True)
def torchs_options() -> Iterator[None]:
    """Give torch its initial options back."""
    before = dict(vars(_cp_options))
    yield
    vars(_cp_options).update(before)
    cp_dtensor.set_rotate_method("auto")
    _disable_context_parallel_dispatcher()


def cp_mesh(world_size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))


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
        assert torch.equal(inside[0], tokens)
        assert torch.equal(inside[1], torch.arange(20))
        assert torch.equal(context_parallel_unshard(mesh, [kept], [-1])[0], tokens)

    run_ranks(4, body)


def test_meshes() -> None:
    """Slices of meshes of several axes, axes of one rank, an axis flattened with another for the loss."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1, 2, 2, 1), mesh_dim_names=("pp", "dp", "cp", "tp"))
        for axis, world_size in ((mesh["cp"], 2), (mesh["tp"], 1), (mesh["dp", "cp"]._flatten("dp_cp"), 4)):
            tokens = torch.arange(16)
            with context_parallel(axis, buffers=[tokens], buffer_seq_dims=[0]):
                assert torch.equal(tokens, shard(torch.arange(16), HeadTail(), axis.get_local_rank(), world_size, 0))
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


# Shards, masks, modules and DTensors


class Reversing(_LoadBalancer):
    """An order of the program's own."""

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        return torch.arange(15, -1, -1)[None]


def balancer_of(layout: Layout) -> _LoadBalancer | None:
    return HEAD_TAIL if layout == HeadTail() else None


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


@pytest.mark.parametrize(
    "balancer",
    [None, HEAD_TAIL, _PerDocumentHeadTailLoadBalancer([[4, 12], [8, 8]], 2, "cpu"), Reversing()],
    ids=lambda balancer: type(balancer).__name__,
)
def test_shard_and_unshard(balancer: Any) -> None:
    def body(rank: int) -> None:
        mesh = cp_mesh()
        indices = torch.arange(16)[None] if balancer is None else balancer._generate_indices().long()
        tokens, hidden = torch.arange(32).view(2, 16), torch.arange(96.0).view(2, 3, 16)
        hidden.requires_grad_(balancer in (None, HEAD_TAIL))
        buffers, dims = {"tokens": tokens, "more": [hidden]}, {"tokens": 1, "more": [-1]}
        shards = _context_parallel_shard(mesh, buffers, dims, balancer)
        assert _cp_options.enable_load_balance == (balancer is not None)
        mine = indices.expand(2, -1).chunk(2, dim=1)[rank]
        assert torch.equal(shards["tokens"], tokens.gather(1, mine))
        assert torch.equal(shards["more"][0], hidden.gather(2, mine[:, None].expand(-1, 3, -1)))
        if hidden.requires_grad:
            (grad,) = torch.autograd.grad(shards["more"][0].sum(), hidden)
            assert grad.sum() == 2 * 3 * 8
        back = context_parallel_unshard(mesh, [shards["tokens"], *shards["more"]], [1, 2], balancer)
        assert torch.equal(back[0], tokens)
        assert torch.equal(back[1], hidden)
        assert not back[1].requires_grad
        if indices.size(0) == 1:
            (local,) = _context_parallel_shard(mesh, (torch.arange(16),), (0,), balancer)
            assert torch.equal(local, indices[0].chunk(2)[rank])
        else:
            with pytest.raises(ValueError, match="Cannot rearrange buffer"):
                _context_parallel_shard(mesh, (torch.arange(16),), (0,), balancer)

    run_ranks(2, body)


def test_unshard_without_a_balancer_knows_the_order_or_refuses() -> None:
    def body(rank: int) -> None:
        mesh, tokens = cp_mesh(), torch.arange(16)
        for length, balancer in ((5, None), (6, _HeadTailLoadBalancer(6, 2, "cpu")), (16, HEAD_TAIL)):
            whole = torch.arange(length)
            local = _context_parallel_shard(mesh, [whole], [0], balancer)
            dist.barrier()  # the flag is one of the process, which ranks that are threads share
            assert torch.equal(context_parallel_unshard(mesh, local, [0])[0], whole)
        _context_parallel_shard(mesh, [tokens], [0])
        with pytest.raises(ValueError, match=r"HeadTail\(\), Contiguous\(\); pass the right one"):
            context_parallel_unshard(mesh, local, [0])
        assert torch.equal(context_parallel_unshard(mesh, local, [0], HEAD_TAIL)[0], tokens)
        _context_parallel_shard(mesh, [tokens], [0], Reversing())
        dist.barrier()
        _cp_options.enable_load_balance = False  # by the program, which has shards of its own from here on
        assert torch.equal(context_parallel_unshard(mesh, [tokens.chunk(2)[rank]], [0])[0], tokens)

    run_ranks(2, body)


def test_shard_refuses_what_does_not_fit() -> None:
    tokens, mask = torch.arange(16), create_block_mask(causal, 1, 1, 384, 384, device="cpu")
    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (([tokens], [0, 1]), ValueError, "one sequence dim per buffer, got 2 for 1"),
        ((["text"], [0]), ValueError, r"buffer 0: expected a torch.Tensor or a BlockMask, got str"),
        (([tokens], [1]), ValueError, "buffer 0: sequence dim 1 is out of range"),
        (([tokens], [0], _HeadTailLoadBalancer(16, 3, "cpu")), ValueError, "2 ranks, got a _HeadTail.* for 3"),
        (([tokens], [0], _HeadTailLoadBalancer(8, 2, "cpu")), ValueError, "for 16 tokens, got a _HeadTail.* for 8"),
        (([mask], [0]), NotImplementedError, "world size 2 .*BLOCK_SIZE 128"),
    ]

    def body(rank: int) -> None:
        for arguments, error, message in refused:
            with pytest.raises(error, match=message):
                _context_parallel_shard(cp_mesh(), *arguments)
        with pytest.raises(ValueError, match=r"2 ranks, got a _HeadTail.* for 3"):
            context_parallel_unshard(cp_mesh(), [tokens], [0], _HeadTailLoadBalancer(32, 3, "cpu"))

    run_ranks(2, body)


class Inner(nn.Module):
    """Attention whose inputs are (B, S, H, D), as newer clients have it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def shards(mesh: DeviceMesh, layout: Layout, rows: slice = slice(None)) -> list[torch.Tensor]:
    """Return q, k and v (B, S, H, D)."""
    whole = [x[rows].transpose(1, 2).contiguous() for x in (Q, K, V)]
    local = _context_parallel_shard(mesh, whole, [1, 1, 1], balancer_of(layout))
    return [x.requires_grad_() for x in local]


def check(out: torch.Tensor, leaves: list[torch.Tensor], layout: Layout, rank: int, rows: slice = slice(None)) -> None:
    grads = torch.autograd.grad(out, leaves, shard(GRAD_OUT[rows].transpose(1, 2), layout, rank, 2, 1))
    for actual, expected in zip((out, *grads), EXPECTED, strict=True):
        assert_close(actual.transpose(1, 2), shard(expected[rows], layout, rank, 2))


def module_of(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Inner(), mesh, _ContextParallel(1, SDPA))


@each_layout
def test_modules_with_sdpa(layout: Layout) -> None:
    """A recompute has the order of the first computation, or is refused."""

    def body(rank: int) -> None:
        mesh = cp_mesh()
        module, local = module_of(mesh), shards(mesh, layout)
        _enable_context_parallel_dispatcher()
        dist.barrier()
        check(module(local[0], k=local[1], v=local[2]), local, layout, rank)
        check(checkpoint(module, *local, use_reentrant=False), local, layout, rank)
        recomputed = checkpoint(module, *local, use_reentrant=False)
        _context_parallel_shard(mesh, [torch.arange(8)], [0])  # of another length
        check(recomputed, local, layout, rank)
        recomputed = checkpoint(module, *local, use_reentrant=False)
        _context_parallel_shard(mesh, [torch.arange(16)], [0], Reversing())
        with pytest.raises(ValueError, match="several orders"):
            recomputed.sum().backward()
        with pytest.raises(NotImplementedError, match="load balancer's order"):
            module(*local)

    run_ranks(2, body)


def compiled_modules(rank: int) -> None:
    """Code is compiled for each order: it looks the order up when it is traced."""
    mesh = cp_mesh()
    module = torch.compile(module_of(mesh), backend="aot_eager", dynamic=False)
    _enable_context_parallel_dispatcher()
    for layout in (HeadTail(), Contiguous(), HeadTail()):
        local = shards(mesh, layout)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo warns of parts of DTensor
            check(module(*local), local, layout, rank)
    _disable_context_parallel_dispatcher()


@pytest.mark.sweep
def test_compiled_modules(two_processes: Processes) -> None:
    two_processes.run(compiled_modules)


@each_layout
def test_dtensors_with_the_dispatcher(layout: Layout) -> None:
    """DTensors of shards, which a balancer may have reordered, beside data parallelism."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        rows = slice(rank // 2, rank // 2 + 1)
        local = shards(mesh["cp"], layout, rows)
        q, k, v = (DTensor.from_local(x, mesh, [Shard(0), Shard(1)]).transpose(1, 2) for x in local)
        _enable_context_parallel_dispatcher()
        _enable_context_parallel_dispatcher()
        dist.barrier()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert isinstance(out, DTensor)
        assert out.shape == Q.shape
        check(out.to_local().transpose(1, 2), local, layout, rank % 2, rows)
        if layout == HeadTail():
            with pytest.raises(NotImplementedError, match=r"placed alike .* got q .* v .* torch.Tensor"):
                F.scaled_dot_product_attention(q, k, v.full_tensor(), is_causal=True)
            _context_parallel_shard(mesh["cp"], [torch.arange(16)], [0], Reversing())
            with pytest.raises(NotImplementedError, match="load balancer's order"):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)

    run_ranks(4, body)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_and_modules_with_flex_attention() -> None:
    """On the CPU flex_attention has no backward, and is slow uncompiled: one small case of each order."""
    problem = Problem(q_len=512, kv_len=512, is_causal=True, dtype=torch.float32)
    q, k, v, grad_out = problem.draw(4)
    expected = reference(problem, q, k, v, grad_out)[0].float()

    class Flex(nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> Any:
            return flex_attention(query, key, value, **kwargs)

    def body(rank: int) -> None:
        mesh = cp_mesh()
        module = parallelize_module(Flex(), mesh, _ContextParallel(2, FLEX))
        whole_mask = create_block_mask(causal, 1, 1, 512, 512, device="cpu")
        for balancer in (None, _HeadTailLoadBalancer(512, 2, "cpu"), _PTRRLoadBalancer(whole_mask, 2)):
            dist.barrier()  # torch makes masks in the order that its flag says
            buffers = {"q": q, "k": k, "v": v, "out": expected, "mask": whole_mask}
            local = _context_parallel_shard(mesh, buffers, dict.fromkeys(buffers, 2), balancer)
            dist.barrier()
            assert isinstance(local["mask"], BlockMask)
            with torch.no_grad():
                out = module(local["q"], local["k"], value=local["v"], block_mask=local["mask"])
            torch.testing.assert_close(out, local["out"], rtol=1e-4, atol=1e-5)

    with mock.patch.object(torch, "compile", lambda function, **_: function):  # of the making of masks: seconds
        run_ranks(2, body)


SIMULATION = """
import torch, torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from cp_dtensor.integrations import torch_experimental as ours
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
whole = torch.arange(32).view(2, 16)
for balancer in (None, ours._HeadTailLoadBalancer(16, 2, "cpu")):
    order = torch.arange(16)[None] if balancer is None else balancer._generate_indices()
    expected = whole[:, order[0]].chunk(2, 1)
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
        (shard,) = ours._context_parallel_shard(mesh, [torch.arange(32).view(2, 16)], [1], balancer)
        for rank in range(4):
            assert torch.equal(shard._local_tensors[rank], expected[rank % 2]), (balancer, rank, shard)
"""


def test_shards_of_simulated_ranks() -> None:
    """Under torch's `LocalTensorMode` one process has the shards of all ranks."""
    done = subprocess.run([sys.executable, "-c", SIMULATION], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def attention_of_dtensors(rank: int, layout: Layout, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Compute causal attention, or under a mask, of DTensors made of shards in a layout, under the dispatcher."""
    mesh = cp_mesh()
    q, k, v = (DTensor.from_local(shard(x, layout, rank, 2), mesh, [Shard(2)]) for x in (Q, K, V))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    assert isinstance(out, DTensor)
    return out.to_local()


def test_dtensors_in_an_order_that_nothing_has_noted() -> None:
    """Torch takes them for head-tail shards while its flag is set; no order is guessed."""
    _enable_context_parallel_dispatcher()
    with pytest.raises(ValueError, match="causal attention of DTensors over 16 tokens, which no context"):
        run_ranks(2, attention_of_dtensors, HeadTail())
    _cp_options.enable_load_balance = False
    for rank, out in enumerate(run_ranks(2, attention_of_dtensors, Contiguous())):
        assert_close(out, shard(EXPECTED[0], Contiguous(), rank, 2), "out")


def test_masks_of_reordered_shards_are_refused() -> None:
    _enable_context_parallel_dispatcher()

    def body(rank: int) -> None:
        _context_parallel_shard(cp_mesh(), [Q], [2], HEAD_TAIL)
        attention_of_dtensors(rank, HeadTail(), torch.ones(16, 16, dtype=torch.bool).tril())

    with pytest.raises(NotImplementedError, match="order expects attn_mask=None"):
        run_ranks(2, body)


@pytest.mark.parametrize(("length", "balanced"), [(16, True), (6, False)])
def test_a_context_sets_the_flag_that_torchs_own_ring_reads(length: int, balanced: bool) -> None:
    def body(rank: int) -> None:
        with context_parallel(cp_mesh(), buffers=[torch.zeros(length)], buffer_seq_dims=[0]):
            dist.barrier()
            assert _cp_options.enable_load_balance == balanced
            dist.barrier()
        dist.barrier()
        assert _cp_options.enable_load_balance

    run_ranks(2, body)


def test_a_shard_that_fails_leaves_the_flag_and_the_orders() -> None:
    def body(rank: int) -> None:
        mesh = cp_mesh()
        _context_parallel_shard(mesh, [Q], [2], HEAD_TAIL)
        mask = create_block_mask(causal, None, None, 100, 100, device="cpu")  # not whole blocks for two ranks
        with pytest.raises(NotImplementedError):
            _context_parallel_shard(mesh, [mask], [0], None)
        dist.barrier()
        assert _cp_options.enable_load_balance
        assert_close(context_parallel_unshard(mesh, [shard(Q, HeadTail(), rank, 2)], [2])[0], Q, "whole")

    run_ranks(2, body)
