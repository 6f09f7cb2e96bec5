"""Shards, load balancers, masks, modules and DTensors under the names of torch's experimental context parallel."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as torchs
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, HeadTail, Layout
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
)

PROBLEM = Problem(q_len=16, kv_len=16, batch=2, is_causal=True)
Q, K, V, GRAD_OUT = PROBLEM.draw(0)
EXPECTED = reference(PROBLEM, Q, K, V, GRAD_OUT)
SDPA, FLEX = _ContextParallel.AttentionType.SDPA, _ContextParallel.AttentionType.FLEX


@pytest.fixture(autouse=True)
def _fresh_options() -> Iterator[None]:
    _cp_options.enable_load_balance = True
    yield
    _cp_options.enable_load_balance = True
    _disable_context_parallel_dispatcher()


class Reversing(_LoadBalancer):
    """An order of the program's own."""

    def _generate_indices(self, restore: bool = False) -> torch.Tensor:
        return torch.arange(15, -1, -1)[None]


def cp_mesh(world_size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def test_balancers_are_torchs() -> None:
    mask = create_block_mask(causal, 2, 1, 1024, 1024, device="cpu")
    pairs: list[tuple[Any, Any]] = [
        (_HeadTailLoadBalancer(24, 3, "cpu"), torchs._HeadTailLoadBalancer(24, 3, "cpu")),
        (_PTRRLoadBalancer(mask, 4), torchs._PTRRLoadBalancer(mask, 4)),
        (_PerDocumentHeadTailLoadBalancer([[8]], 2, "cpu"), torchs._PerDocumentHeadTailLoadBalancer([[8]], 2, "cpu")),
    ]
    for own, theirs in pairs:
        assert torch.equal(own._generate_indices().long(), theirs._generate_indices().long())
        assert torch.equal(own._generate_indices(restore=True), theirs._generate_indices(restore=True))
    times = torch.tensor([9, 14, 2, 20, 10, 15, 8, 14, 16, 19, 15, 3, 12, 1, 12, 10])
    groups = _PTRRLoadBalancer.ptrr_scheduling(times, 4)
    assert torch.equal(groups, torchs._PTRRLoadBalancer.ptrr_scheduling(times, 4))
    # Rank-major as in torch 2.14: before, the order was document after document, and a rank had whole documents.
    by_document = _PerDocumentHeadTailLoadBalancer([[4, 12], [8, 8]], 2, "cpu")._generate_indices()
    assert by_document[0, :8].tolist() == [0, 3, 4, 5, 6, 13, 14, 15]
    assert by_document[1, :8].tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    with pytest.raises(ValueError, match="multiples of 4"):
        _PerDocumentHeadTailLoadBalancer([[6]], 2, "cpu")._generate_indices()


@pytest.mark.parametrize(
    "balancer",
    [
        None,
        _HeadTailLoadBalancer(16, 2, "cpu"),
        torchs._HeadTailLoadBalancer(16, 2, "cpu"),  # made before imports were redirected
        _PerDocumentHeadTailLoadBalancer([[4, 12], [8, 8]], 2, "cpu"),
        Reversing(),
    ],
    ids=lambda balancer: type(balancer).__name__,
)
def test_shard_and_unshard(balancer: Any) -> None:
    def body(rank: int) -> None:
        mesh = cp_mesh()
        indices = torch.arange(16)[None] if balancer is None else balancer._generate_indices().long()
        tokens, hidden = torch.arange(32).view(2, 16), torch.arange(96.0).view(2, 3, 16).requires_grad_()
        buffers, dims = {"tokens": tokens, "more": [hidden]}, {"tokens": 1, "more": [-1]}
        shards = _context_parallel_shard(mesh, buffers, dims, balancer)
        mine = indices.expand(2, -1).chunk(2, dim=1)[rank]
        assert torch.equal(shards["tokens"], tokens.gather(1, mine))
        assert torch.equal(shards["more"][0], hidden.gather(2, mine[:, None].expand(-1, 3, -1)))
        shards["more"][0].sum().backward()
        assert hidden.grad is not None
        assert hidden.grad.sum() == 2 * 3 * 8
        back = context_parallel_unshard(mesh, [shards["tokens"], *shards["more"]], [1, 2], balancer)
        assert torch.equal(back[0], tokens)
        assert torch.equal(back[1], hidden)
        assert not back[1].requires_grad
        positions = torch.arange(16)
        if indices.size(0) == 1:
            (local,) = _context_parallel_shard(mesh, (positions,), (0,), balancer)
            assert torch.equal(local, indices[0].chunk(2)[rank])
        else:
            with pytest.raises(ValueError, match="2 batch rows"):
                _context_parallel_shard(mesh, (positions,), (0,), balancer)

    run_ranks(2, body)


def test_unshard_without_a_balancer_knows_the_order_or_refuses() -> None:
    def body(rank: int) -> None:
        mesh, tokens = cp_mesh(), torch.arange(16)
        shards = _context_parallel_shard(mesh, [tokens], [0])
        assert torch.equal(context_parallel_unshard(mesh, shards, [0])[0], tokens)
        assert _cp_options.enable_load_balance  # which torch's helper switches off for everybody
        balancer = _HeadTailLoadBalancer(16, 2, "cpu")
        _context_parallel_shard(mesh, [tokens], [0], balancer)
        kept = tokens.clone()
        with context_parallel(mesh, buffers=[kept], buffer_seq_dims=[0], no_restore_buffers={kept}):
            pass
        with pytest.raises(ValueError, match=r"Contiguous\(\), HeadTail\(\); pass the right one"):
            context_parallel_unshard(mesh, [kept], [0])
        assert torch.equal(context_parallel_unshard(mesh, [kept], [0], balancer)[0], tokens)
        uneven = _context_parallel_shard(mesh, [torch.arange(5)], [0])
        assert torch.equal(context_parallel_unshard(mesh, uneven, [0])[0], torch.arange(5))
        other = _context_parallel_shard(mesh, [torch.arange(6)], [0], _HeadTailLoadBalancer(6, 2, "cpu"))
        assert torch.equal(context_parallel_unshard(mesh, other, [0])[0], torch.arange(6))

    run_ranks(2, body)


def test_shard_refuses_what_does_not_fit() -> None:
    def body(rank: int) -> None:
        mesh, tokens = cp_mesh(), torch.arange(16)
        with pytest.raises(ValueError, match="one sequence dim per buffer"):
            _context_parallel_shard(mesh, [tokens], [0, 1])
        with pytest.raises(ValueError, match=r"Unknown buffer type: .* expected buffer 0"):
            _context_parallel_shard(mesh, ["text"], [0])
        with pytest.raises(ValueError, match="out of range"):
            _context_parallel_shard(mesh, [tokens], [1])
        with pytest.raises(ValueError, match="a load balancer for 2 ranks, got one for 3"):
            _context_parallel_shard(mesh, [tokens], [0], _HeadTailLoadBalancer(16, 3, "cpu"))
        with pytest.raises(ValueError, match="indices of shape"):
            _context_parallel_shard(mesh, [tokens], [0], _HeadTailLoadBalancer(8, 2, "cpu"))
        with pytest.raises(TypeError, match="_LoadBalancer"):
            _context_parallel_shard(mesh, [tokens], [0], "headtail")

    run_ranks(2, body)


class Inner(nn.Module):
    """Attention whose inputs are (B, S, H, D), as newer clients have it."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("kind", ["plain", "dtensor", "checkpointed"])
@pytest.mark.parametrize("layout", [HeadTail(), Contiguous()], ids=repr)
def test_modules_with_sdpa(layout: Layout, kind: str) -> None:
    def body(rank: int) -> None:
        mesh = cp_mesh()
        balancer = _HeadTailLoadBalancer(16, 2, "cpu") if layout == HeadTail() else None
        module = parallelize_module(Inner(), mesh, _ContextParallel(1, SDPA))
        whole = [x.transpose(1, 2).contiguous() for x in (Q, K, V)]
        local = [x.requires_grad_() for x in _context_parallel_shard(mesh, whole, [1, 1, 1], balancer)]
        if kind == "checkpointed":
            out = checkpoint(module, *local, use_reentrant=False)
        elif kind == "dtensor":
            out = module(*(DTensor.from_local(x, mesh, [Shard(1)]) for x in local))
        else:
            out = module(local[0], k=local[1], v=local[2])
        out.backward(shard(GRAD_OUT.transpose(1, 2), layout, rank, 2, 1))
        for actual, expected in zip((out, *(x.grad for x in local)), EXPECTED, strict=True):
            assert_close(actual.transpose(1, 2), shard(expected, layout, rank, 2))
        with pytest.raises(ValueError, match=r"Shard\(1\)"):
            module(*(DTensor.from_local(x, mesh, [Shard(2)]) for x in local))

    run_ranks(2, body)


def test_a_recompute_after_the_order_has_changed_is_refused() -> None:
    def body(rank: int) -> None:
        mesh = cp_mesh()
        module = parallelize_module(Inner(), mesh, _ContextParallel(1, SDPA))
        whole = [x.transpose(1, 2) for x in (Q, K, V)]
        local = [
            x.requires_grad_()
            for x in _context_parallel_shard(mesh, whole, [1, 1, 1], _HeadTailLoadBalancer(16, 2, "cpu"))
        ]
        out = checkpoint(module, *local, use_reentrant=False)
        _context_parallel_shard(mesh, [torch.arange(8)], [0])
        with pytest.raises(ValueError, match="several orders"):
            out.sum().backward()
        _context_parallel_shard(mesh, [torch.arange(16)], [0], Reversing())
        with pytest.raises(NotImplementedError, match="load balancer's order"):
            module(*local)

    run_ranks(2, body)


@pytest.mark.parametrize("layout", [HeadTail(), Contiguous()], ids=repr)
def test_dtensors_with_the_dispatcher(layout: Layout) -> None:
    """DTensors of shards, which a balancer may have reordered, beside data parallelism."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        balancer = _HeadTailLoadBalancer(16, 2, "cpu") if layout == HeadTail() else None
        rows = slice(rank // 2, rank // 2 + 1)
        whole = [x[rows].transpose(1, 2) for x in (Q, K, V)]
        local = [x.requires_grad_() for x in _context_parallel_shard(mesh["cp"], whole, [1, 1, 1], balancer)]
        placed = [DTensor.from_local(x, mesh, [Shard(0), Shard(1)]) for x in local]
        _enable_context_parallel_dispatcher()
        _enable_context_parallel_dispatcher()
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in placed), is_causal=True)
        assert isinstance(out, DTensor)
        assert out.shape == Q.shape
        out.to_local().backward(shard(GRAD_OUT[rows], layout, rank % 2, 2))
        results = (out.to_local(), *(x.grad.transpose(1, 2) for x in local if x.grad is not None))
        for actual, expected in zip(results, EXPECTED, strict=True):
            assert_close(actual, shard(expected[rows], layout, rank % 2, 2))
        if layout == HeadTail():
            uneven = [placed[0].transpose(1, 2), placed[1].transpose(1, 2), placed[2].full_tensor().transpose(1, 2)]
            with pytest.raises(NotImplementedError, match="placed alike"):
                F.scaled_dot_product_attention(*uneven, is_causal=True)

    run_ranks(4, body)
    _disable_context_parallel_dispatcher()


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
            masks = {"mask": whole_mask, "other": whole_mask}
            buffers = {"q": q, "k": k, "v": v, "out": expected, **masks}
            dims = dict.fromkeys("qkv", 2) | {"out": 2, "mask": 2, "other": 2}
            local = _context_parallel_shard(mesh, buffers, dims, balancer)
            assert isinstance(local["other"], BlockMask)
            with torch.no_grad():
                out = module(local["q"], local["k"], value=local["v"], block_mask=local["mask"])
            torch.testing.assert_close(out, local["out"], rtol=1e-4, atol=1e-5)
        with pytest.raises(TypeError, match="value"):
            module(local["q"], local["k"])

    run_ranks(2, body)


def test_block_masks_of_shards() -> None:
    """Shards keep the block size, unless such blocks are not whole on any rank."""

    def body(rank: int) -> None:
        mesh = cp_mesh()
        balancer = _HeadTailLoadBalancer(512, 2, "cpu")
        with pytest.raises(NotImplementedError, match=r"world size 2 .* BLOCK_SIZE 128: .* has whole blocks"):
            _context_parallel_shard(mesh, [create_block_mask(causal, 1, 1, 384, 384, device="cpu")], [0])
        with pytest.raises(ValueError, match="as many keys as queries"):
            _context_parallel_shard(mesh, [create_block_mask(causal, 1, 1, 512, 1024, device="cpu")], [0], balancer)
        order = balancer._generate_indices()[0]
        seen = order[rank * 256 : rank * 256 + 256, None] >= order
        for blocks, kept in (((64, 32), (64, 32)), ((512, 512), (128, 128))):
            whole_mask = create_block_mask(causal, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=blocks)
            (local_mask,) = _context_parallel_shard(mesh, [whole_mask], [2], balancer)
            wanted = create_block_mask(lambda b, h, i, j: seen[i, j], 1, 1, 256, 512, "cpu", kept)
            assert kept == local_mask.BLOCK_SIZE
            assert torch.equal(local_mask.to_dense(), wanted.to_dense())

    run_ranks(2, body)


SIMULATION = """
import torch, torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from cp_dtensor.integrations import torch_experimental as ours
dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
whole = torch.arange(32).view(2, 16)
for balancer in (
    None,
    ours._HeadTailLoadBalancer(16, 2, "cpu"),
    ours._PerDocumentHeadTailLoadBalancer([[4, 12]], 2, "cpu"),
    ours._PerDocumentHeadTailLoadBalancer([[4, 12], [8, 8]], 2, "cpu"),
):
    order = torch.arange(16)[None] if balancer is None else balancer._generate_indices()
    expected = torch.stack([row[order[i % len(order)]] for i, row in enumerate(whole)]).chunk(2, 1)
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))["cp"]
        for given in (whole, torch.arange(32).view(2, 16)):
            (shard,) = ours._context_parallel_shard(mesh, [given], [1], balancer)
            for rank in range(4):
                assert torch.equal(shard._local_tensors[rank], expected[rank % 2]), (balancer, rank, shard)
"""


def test_shards_of_simulated_ranks() -> None:
    """Under torch's `LocalTensorMode` one process has the shards of all ranks."""
    done = subprocess.run([sys.executable, "-c", SIMULATION], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
