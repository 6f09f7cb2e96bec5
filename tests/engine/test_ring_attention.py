"""Attention over shards equals attention on one device: out, dq, dk and dv on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from support.ring_checks import Tensors, attend, check_against_reference
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, MirroredBatch, Striped, ring_attention

TRANSPORTS = ["allgather", "alltoall"]
each_rotation = pytest.mark.parametrize("rotate_method", TRANSPORTS)


any_layout = st.one_of(
    st.sampled_from([Contiguous(), HeadTail(), MirroredBatch()]), st.builds(Striped, st.integers(1, 4))
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    q_len = draw(st.integers(0, 40))
    kv_heads = draw(st.integers(1, 2))
    return Problem(
        q_len=q_len,
        kv_len=draw(st.one_of(st.just(q_len), st.integers(0, 40))),
        batch=draw(st.integers(1, 3)),
        q_heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 4, 8])),
        is_causal=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.3, 2.0])),
    )


@settings(max_examples=examples(150))
@given(problems(), st.integers(1, 8), any_layout, st.sampled_from(TRANSPORTS), st.integers(0, 1000))
def test_any_problem_on_any_ranks_equals_one_device(
    problem: Problem, world_size: int, layout: Layout, rotate_method: str, seed: int
) -> None:
    check_against_reference(problem, world_size, layout, seed, rotate_method=rotate_method)


@each_rotation
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(1), Striped(3), MirroredBatch()], ids=repr)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_every_layout_and_mask(layout: Layout, is_causal: bool, rotate_method: str) -> None:
    problem = Problem(53, 53, batch=3, q_heads=4, kv_heads=2, is_causal=is_causal)
    check_against_reference(problem, 4, layout, rotate_method=rotate_method)


@each_rotation
@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 3), (1, 30), (30, 1), (0, 9)])
def test_more_ranks_than_tokens(q_len: int, kv_len: int, rotate_method: str) -> None:
    check_against_reference(Problem(q_len, kv_len, is_causal=True), 5, HeadTail(), rotate_method=rotate_method)


@each_rotation
def test_values_may_have_another_head_dim(rotate_method: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 21, dim, dtype=torch.float64, requires_grad=True) for dim in (4, 4, 7))
    grad_out = torch.randn(2, 2, 21, 7, dtype=torch.float64)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.backward(grad_out)
    tensors = tuple(tensor.detach() for tensor in (q, k, v)) + (grad_out,)
    options = {"rotate_method": rotate_method}
    results = run_ranks(3, attend, 3, tensors, Problem(21, 21, is_causal=True), HeadTail(), options)
    for rank, result in enumerate(results):
        for got, whole in zip(result, (out.detach(), q.grad, k.grad, v.grad), strict=True):
            torch.testing.assert_close(got, shard(whole, HeadTail(), rank, 3), rtol=1e-10, atol=1e-10)


@each_rotation
@pytest.mark.parametrize("scale", [0.0, -1.0])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_scales_of_zero_and_below(scale: float, is_causal: bool, rotate_method: str) -> None:
    problem = Problem(24, 24, is_causal=is_causal, scale=scale)
    check_against_reference(problem, 3, HeadTail(), rotate_method=rotate_method)


@each_rotation
def test_the_ring_runs_over_one_axis_of_a_mesh(rotate_method: str) -> None:
    """Ranks 0 and 1 are one ring, 2 and 3 another, with another problem."""
    problem = Problem(21, 21, is_causal=True)

    def body(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        replica, cp_rank = divmod(rank, 2)
        q, k, v, _ = (shard(tensor, HeadTail(), cp_rank, 2) for tensor in problem.draw(seed=replica))
        return ring_attention(q, k, v, mesh=mesh["cp"], is_causal=True, rotate_method=rotate_method, seq_len=21)

    for rank, out in enumerate(run_ranks(4, body)):
        replica, cp_rank = divmod(rank, 2)
        whole = reference(problem, *problem.draw(seed=replica))[0]
        torch.testing.assert_close(out, shard(whole, HeadTail(), cp_rank, 2), rtol=1e-10, atol=1e-10)


def test_both_rotations_give_the_same() -> None:
    problem = Problem(50, 50, is_causal=True)
    tensors = problem.draw(seed=3)
    by_gather, by_ring = (
        run_ranks(4, attend, 4, tensors, problem, HeadTail(), {"rotate_method": name}) for name in TRANSPORTS
    )
    for first, second in zip(by_gather, by_ring, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def with_lse(rank: int, world_size: int, tensors: Tensors, is_causal: bool, layout: Layout) -> Tensors:
    pair = tensors[0].size(2), tensors[1].size(2)
    q, k, v = (shard(tensor, layout, rank, world_size).requires_grad_() for tensor in tensors)
    out, lse = ring_attention(
        q, k, v, mesh=dist.group.WORLD, is_causal=is_causal, layout=layout, return_lse=True, seq_len=pair
    )  # fmt: skip
    assert out.requires_grad
    assert not lse.requires_grad
    return out.detach(), lse


@pytest.mark.parametrize(("dtype", "lse_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_lse_is_the_log_of_the_softmax_denominator(dtype: torch.dtype, lse_dtype: torch.dtype, is_causal: bool) -> None:
    q, k, v, _ = Problem(19, 19, dtype=dtype).draw(seed=0)
    logits = q.double() @ k.double().mT / 8**0.5
    if is_causal:
        logits = logits.masked_fill(torch.ones(19, 19, dtype=torch.bool).triu(1), float("-inf"))
    expected = logits.logsumexp(-1)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-2
    for rank, (_, lse) in enumerate(run_ranks(3, with_lse, 3, (q, k, v), is_causal, HeadTail())):
        assert lse.dtype == lse_dtype
        wanted = shard(expected, HeadTail(), rank, 3)
        torch.testing.assert_close(lse.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_queries_that_see_no_key_are_zero_with_lse_minus_infinity(is_causal: bool) -> None:
    q, k, v, _ = Problem(10, 0).draw(seed=0)
    for out, lse in run_ranks(2, with_lse, 2, (q, k, v), is_causal, HeadTail()):
        assert (out == 0).all()
        assert (lse == float("-inf")).all()


MEMORY = {
    "(B, S, H, D)": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "(B, H, D, S)": lambda tensor: tensor.mT.contiguous().mT,
    "expanded heads": lambda tensor: tensor[:, :1].expand(tensor.shape),
}


@each_rotation
@pytest.mark.parametrize("laid_out", MEMORY.values(), ids=MEMORY)
def test_inputs_may_have_any_strides(laid_out: Callable[[torch.Tensor], torch.Tensor], rotate_method: str) -> None:
    problem = Problem(24, 24, batch=2, is_causal=True)
    tensors = tuple(map(laid_out, problem.draw(seed=0)))
    expected = reference(problem, *tensors)

    def body(rank: int) -> Tensors:
        q, k, v, grad_out = (laid_out(shard(tensor, HeadTail(), rank, 3)).detach() for tensor in tensors)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = ring_attention(q, k, v, mesh=dist.group.WORLD, is_causal=True, rotate_method=rotate_method)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad_out))

    for rank, result in enumerate(run_ranks(3, body)):
        for got, whole in zip(result, expected, strict=True):
            torch.testing.assert_close(got, shard(whole, HeadTail(), rank, 3), rtol=1e-10, atol=1e-10)


def test_the_gradient_of_a_sum_is_an_expanded_scalar() -> None:
    problem = Problem(20, 20, is_causal=True)
    q, k, v, grad_out = problem.draw(seed=0)
    expected = reference(problem, q, k, v, torch.ones_like(grad_out))

    def body(rank: int) -> Tensors:
        local = [shard(tensor, HeadTail(), rank, 2).requires_grad_() for tensor in (q, k, v)]
        ring_attention(*local, mesh=dist.group.WORLD, is_causal=True).sum().backward()
        return tuple(tensor.grad for tensor in local)  # type: ignore[misc]

    for rank, grads in enumerate(run_ranks(2, body)):
        for grad, whole in zip(grads, expected[1:], strict=True):
            torch.testing.assert_close(grad, shard(whole, HeadTail(), rank, 2), rtol=1e-10, atol=1e-10)


@each_rotation
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_errors_are_at_most_one_and_a_half_times_those_of_one_device(
    dtype: torch.dtype, is_causal: bool, rotate_method: str
) -> None:
    problem = Problem(256, 256, q_heads=4, kv_heads=4, head_dim=32, is_causal=is_causal, dtype=dtype)
    tensors = problem.draw(seed=0)
    expected = reference(problem, *tensors)
    q, k, v = (tensor.clone().requires_grad_() for tensor in tensors[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    out.backward(tensors[3])
    results = run_ranks(8, attend, 8, tensors, problem, HeadTail(), {"rotate_method": rotate_method})

    def error(parts: list[torch.Tensor], wanted: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([(part.double() - want).flatten() for part, want in zip(parts, wanted, strict=True)]).norm()

    for name, index, single in (("out", 0, out.detach()), ("dq", 1, q.grad), ("dk", 2, k.grad), ("dv", 3, v.grad)):
        wanted = [shard(expected[index], HeadTail(), rank, 8) for rank in range(8)]
        ours = error([result[index] for result in results], wanted)
        theirs = error([single], [expected[index]])
        assert ours <= 1.5 * theirs, f"{name}: {ours:.3e} against {theirs:.3e} on one device"
        assert all(result[index].dtype == dtype for result in results)


def under_autocast(rank: int, tensors: Tensors, dtype: torch.dtype) -> Tensors:
    local = [shard(tensor, HeadTail(), rank, 2).requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", dtype):
        out = ring_attention(*local, mesh=dist.group.WORLD, is_causal=True)
    out.float().sum().backward()
    return (out.detach(), *(tensor.grad for tensor in local))  # type: ignore[arg-type]


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float64),  # autocast leaves it alone
        (torch.float32, torch.float32, torch.bfloat16),  # q and k come from RoPE in float32, v from a linear layer
    ],
    ids=["float32", "float64", "mixed"],
)
def test_autocast_casts_as_it_does_for_sdpa(dtypes: tuple[torch.dtype, ...], autocast_dtype: torch.dtype) -> None:
    drawn = Problem(16, 16).draw(seed=0)
    tensors = tuple(tensor.to(dtype) for tensor, dtype in zip(drawn, dtypes, strict=False))
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    with torch.autocast("cpu", autocast_dtype):
        expected = F.scaled_dot_product_attention(*leaves, is_causal=True)
    expected.float().sum().backward()
    wholes = (expected.detach(), *(leaf.grad for leaf in leaves))
    for rank, result in enumerate(run_ranks(2, under_autocast, tensors, autocast_dtype)):
        for got, whole in zip(result, wholes, strict=True):
            assert whole is not None
            wanted = shard(whole, HeadTail(), rank, 2)
            torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)  # checks the dtypes too
