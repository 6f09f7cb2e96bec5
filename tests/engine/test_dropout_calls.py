"""Dropout of sharded sequences: one pattern for all methods and layouts, a new seed a call, saved for backward."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.method_checks import place
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    Striped,
    context_parallel,
    context_parallel_attention,
)
from cp_dtensor.attention.backends import interval
from cp_dtensor.attention.masked import Dropout
from cp_dtensor.attention.triton.dropout import are_in_runs

Tensors = tuple[torch.Tensor, ...]
LENGTH, DROPOUT = 19, 0.3


def drawn(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads, LENGTH, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))


def attend(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...], layout: Layout, options: dict[str, Any]
) -> tuple[int, Tensors]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    here = place(list(coordinate), names, shape)
    *qkv, grad_out = (shard(tensor, layout, here, mesh.size()) for tensor in drawn())
    leaves = [tensor.requires_grad_() for tensor in qkv]
    sinks = torch.tensor([0.5, -1.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    out = context_parallel_attention(
        *leaves, mesh=mesh, layout=layout, dropout_p=DROPOUT, sinks=sinks, is_causal=True, enable_gqa=True,
        seq_len=LENGTH, **options,
    )  # fmt: skip
    out.backward(grad_out)
    return here, (out.detach(), *(leaf.grad for leaf in (*leaves, sinks)))


@pytest.fixture
def _same_seed_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads share a generator, so each would draw another seed."""
    monkeypatch.setattr(torch, "randint", lambda *_args, **_options: torch.tensor(1234567))


@pytest.mark.usefixtures("_same_seed_everywhere")
@pytest.mark.parametrize("layout", [HeadTail(), Striped(2), MirroredBatch()], ids=str)
@pytest.mark.parametrize(
    ("shape", "names", "method"),
    [
        ((2,), ("cp",), "ring"),
        ((3,), ("cp",), "ulysses"),
        ((2, 2), ("ring", "ulysses"), "hybrid"),
        ((2, 2), ("cp_node", "cp_gpu"), "ring"),
    ],
)
def test_every_way_to_split_drops_the_same(
    shape: tuple[int, ...], names: tuple[str, ...], method: str, layout: Layout
) -> None:
    ((_, alone),) = run_ranks(1, attend, (1,), ("cp",), Contiguous(), {})
    size = torch.Size(shape).numel()
    for transport in ("allgather", "alltoall"):
        options = {"method": method, "rotate_method": transport}
        by_rank = run_ranks(size, attend, shape, names, layout, options)
        torch.testing.assert_close(sum(results[-1] for _, results in by_rank), alone[-1], rtol=1e-10, atol=1e-10)
        for here, results in by_rank:
            for name, got, whole in zip(("out", "dq", "dk", "dv"), results[:-1], alone[:-1], strict=True):
                torch.testing.assert_close(
                    got,
                    shard(whole, layout, here, size),
                    rtol=1e-10,
                    atol=1e-10,
                    msg=lambda text, n=name: f"{n}: {text}",
                )


@pytest.mark.usefixtures("_same_seed_everywhere")
@pytest.mark.parametrize(
    ("layout", "length", "method", "mask", "expected"),
    [
        (HeadTail(), 128, "ring", Causal(), True),
        (HeadTail(), 128, "ring", Documents([0, 5, 45, 103, 128], within=Causal()), True),
        (HeadTail(), 120, "ring", Causal(), False),
        (HeadTail(), 120, "ulysses", Causal(), True),  # which has the whole sequence
        (Striped(2), 128, "ring", Causal(), False),
    ],
    ids=str,
)
def test_kernels_are_told_of_runs_of_positions(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, length: int, method: str, mask: Mask, expected: bool
) -> None:
    seen = []

    def noticed(*args: Any) -> Dropout:
        seen.append(Dropout(*args))
        return seen[-1]

    monkeypatch.setattr(interval, "Dropout", noticed)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        whole = torch.randn(1, 2, length, 4, generator=torch.Generator().manual_seed(0))
        local = shard(whole, layout, rank, 2)
        options = {"layout": layout, "method": method, "mask": mask}
        context_parallel_attention(local, local, local, mesh=mesh, dropout_p=DROPOUT, **options)

    run_ranks(2, body)
    assert seen
    for dropout in seen:
        assert dropout.in_runs == (are_in_runs(dropout.q_positions) and are_in_runs(dropout.kv_positions))
    assert all(dropout.in_runs for dropout in seen) is expected


def on_one_rank(body: Any, *args: Any) -> Any:
    def alone(_rank: int) -> Any:
        with context_parallel(dist.group.WORLD):
            return body(*args)

    return run_ranks(1, alone)[0]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = DROPOUT) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, enable_gqa=True)


def test_a_seed_reproduces_it_and_calls_differ() -> None:
    q, k, v, _ = drawn()

    def body() -> None:
        results = []
        for _ in range(2):
            torch.manual_seed(3)
            results.append((sdpa(q, k, v), sdpa(q, k, v)))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        assert not torch.equal(results[0][0], results[0][1])

    on_one_rank(body)


def test_gradients_are_those_of_what_was_dropped() -> None:
    """Finite differences, with the seed of every evaluation the same."""
    tensors = tuple(tensor[:1, :, :5, :3].clone().requires_grad_() for tensor in drawn()[:3])

    def fixed(*leaves: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(11)
        return sdpa(*leaves, dropout_p=0.4)

    on_one_rank(lambda: torch.autograd.gradcheck(fixed, tensors))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_under_a_checkpoint_drops_the_same(use_reentrant: bool) -> None:
    q, k, v, grad_out = drawn()

    def gradients(checkpointed: bool) -> Tensors:
        leaves = tuple(tensor.clone().requires_grad_() for tensor in (q, k, v))
        torch.manual_seed(5)
        out = checkpoint(sdpa, *leaves, use_reentrant=use_reentrant) if checkpointed else sdpa(*leaves)
        torch.rand(3)  # the generator moves on before backward
        out.backward(grad_out)
        return out.detach(), *(leaf.grad for leaf in leaves)

    plain, recomputed = on_one_rank(lambda: (gradients(False), gradients(True)))
    for one, other in zip(plain, recomputed, strict=True):
        assert torch.equal(one, other)


def test_dropping_everything_gives_zeros() -> None:
    q, k, v, _ = drawn()
    out = on_one_rank(lambda: sdpa(q, k, v, 1.0))
    assert torch.equal(out, torch.zeros_like(out))
