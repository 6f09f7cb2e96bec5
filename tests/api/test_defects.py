"""Defects of torch's experimental context parallelism that this package avoids, named after the user's case."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.dtensor_checks import CP, DP, GROUPED, TP, R, check_equals_full_tensors
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa_imported_by_name
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Contiguous,
    HeadTail,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    enable_context_parallel_dispatcher,
    ring_attention,
    set_rotate_method,
)
from cp_dtensor.api.buffers import InPlaceShard
from cp_dtensor.attention.merge import merge

WORLD = 4
CAUSAL = Problem(16, 16, is_causal=True)


class Attended:
    """Shards of a problem on one rank, in head-tail order, and what must come out."""

    def __init__(self, problem: Problem, rank: int, world_size: int = WORLD, device: str = "cpu") -> None:
        self.problem = problem
        *qkv, grad_out = problem.draw(seed=0, device=device)
        whole = (*qkv, grad_out, *reference(problem, *qkv, grad_out))
        shards = [shard(tensor, HeadTail(), rank, world_size) for tensor in whole]
        self.q, self.k, self.v = (tensor.requires_grad_() for tensor in shards[:3])
        self.grad_out, *self.expected = shards[3:]

    def sdpa(self, function: Callable[..., torch.Tensor] = F.scaled_dot_product_attention) -> torch.Tensor:
        return function(self.q, self.k, self.v, is_causal=self.problem.is_causal)

    def check(self, out: torch.Tensor, tolerance: float = 1e-10) -> None:
        out.backward(self.grad_out)
        for actual, expected in zip((out, self.q.grad, self.k.grad, self.v.grad), self.expected, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def on_every_rank(body: Callable[[Attended], None], problem: Problem = CAUSAL) -> None:
    run_ranks(WORLD, lambda rank: body(Attended(problem, rank)))


def attend_in_context(shards: Attended) -> None:
    with context_parallel(dist.group.WORLD, seq_len=shards.problem.q_len):
        out = shards.sdpa()
    shards.check(out)


def test_backward_after_leaving_the_context() -> None:
    on_every_rank(attend_in_context)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoint_recompute_after_exit(use_reentrant: bool) -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            out = checkpoint(causal, shards.q, shards.k, shards.v, use_reentrant=use_reentrant)
        shards.check(out)

    on_every_rank(body)


def test_settings_change_between_forward_and_backward() -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            out = shards.sdpa()
        dist.barrier()
        set_rotate_method("alltoall")
        with context_parallel(dist.group.WORLD, layout=Contiguous()):
            shards.check(out)

    try:
        on_every_rank(body)
    finally:
        set_rotate_method("auto")


def test_dtensor_inputs_to_sdpa_inside_the_context() -> None:
    def body(rank: int) -> None:
        check_equals_full_tensors(rank, (4,), GROUPED, ((CP,),) * 3, context=context_parallel(dist.group.WORLD))

    run_ranks(WORLD, body)


@pytest.mark.parametrize("placement", [TP, DP], ids=["heads", "batch"])
def test_dtensors_sharded_on_heads_or_batch_while_the_dispatcher_is_on(placement: Any) -> None:
    with enable_context_parallel_dispatcher():
        run_ranks(WORLD, check_equals_full_tensors, (WORLD,), GROUPED, ((placement,),) * 3, (placement,))


def test_tensor_parallel_and_context_parallel_on_a_two_dim_mesh() -> None:
    with enable_context_parallel_dispatcher():
        run_ranks(WORLD, check_equals_full_tensors, (2, 2), GROUPED, ((CP, TP),) * 3, (CP, TP))


def test_non_causal_attention_with_load_balance() -> None:
    on_every_rank(attend_in_context, Problem(16, 16))


def test_queries_sharded_and_keys_replicated() -> None:
    cross = Problem(16, 12)
    with enable_context_parallel_dispatcher():
        run_ranks(WORLD, check_equals_full_tensors, (WORLD,), cross, ((CP,), (R,), (R,)), (CP,))


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "flash"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.04)])
def test_cpu_tensors_and_the_math_backend(backend: SDPBackend, dtype: torch.dtype, tolerance: float) -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            out = shards.sdpa()
        assert out.dtype == dtype
        shards.check(out, tolerance)

    with sdpa_kernel(backend):
        on_every_rank(body, Problem(16, 16, is_causal=True, dtype=dtype))


def on_one_gpu(problem: Problem, backend: SDPBackend, tolerance: float) -> None:
    """Ranks are threads that share a GPU."""

    def body(rank: int) -> None:
        shards = Attended(problem, rank, 2, "cuda")
        out = ring_attention(shards.q, shards.k, shards.v, mesh=dist.group.WORLD, is_causal=True)
        # A transposed gradient, as of models that go on in (B, S, H, D): its strides are not those of out.
        shards.grad_out = shards.grad_out.transpose(1, 2).contiguous().transpose(1, 2)
        with torch.autograd.set_multithreading_enabled(False):  # autograd has but one thread for a GPU
            shards.check(out, tolerance)

    with sdpa_kernel(backend):
        run_ranks(2, body)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], ids=["math", "efficient"])
def test_float32_on_a_gpu(backend: SDPBackend) -> None:
    on_one_gpu(Problem(256, 256, head_dim=64, is_causal=True, dtype=torch.float32), backend, 2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 100, 250, 258])
def test_efficient_backward_with_a_local_length_that_is_no_multiple_of_64(length: int) -> None:
    problem = Problem(length, length, head_dim=64, is_causal=True, dtype=torch.bfloat16)
    on_one_gpu(problem, SDPBackend.EFFICIENT_ATTENTION, 0.04)


@pytest.mark.gpu
def test_cudnn_backward_with_differing_strides_of_out_and_its_gradient() -> None:
    problem = Problem(256, 256, head_dim=64, is_causal=True, dtype=torch.bfloat16)
    on_one_gpu(problem, SDPBackend.CUDNN_ATTENTION, 0.04)


@pytest.mark.parametrize("length", [1, 6, 9, 15, 17])
def test_sequence_length_not_divisible_by_twice_the_ranks(length: int) -> None:
    on_every_rank(attend_in_context, Problem(length, length, is_causal=True))


def test_context_without_buffers() -> None:
    def body(shards: Attended) -> None:
        with context_parallel(init_device_mesh("cpu", (WORLD,))):
            shards.check(shards.sdpa())

    on_every_rank(body)


def test_error_while_entering_the_context_restores_earlier_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    swap_in = InPlaceShard._swap_in

    def second_fails(contents: InPlaceShard) -> torch.Tensor:
        if len(contents.buffer.tensor) == 8:
            raise MemoryError
        return swap_in(contents)

    monkeypatch.setattr(InPlaceShard, "_swap_in", second_fails)

    def body(rank: int) -> None:
        first, second = torch.arange(16.0), torch.arange(8.0)
        context = context_parallel(dist.group.WORLD, buffers=[first, second], buffer_seq_dims=[0, 0])
        with pytest.raises(MemoryError), context:
            pass
        assert (first.tolist(), second.tolist()) == (list(range(16)), list(range(8)))
        q = torch.randn(1, 1, rank + 1, 4)
        assert F.scaled_dot_product_attention(q, q, q).shape == q.shape  # of this rank alone: nobody waits for others

    run_ranks(WORLD, body)


def test_nested_contexts() -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            with context_parallel(dist.group.WORLD, layout=Contiguous(), rotate_method="alltoall"):
                pass
            out = shards.sdpa()
        shards.check(out)

    on_every_rank(body)


def test_shard_helper_used_inside_the_context() -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            context_parallel_shard(dist.group.WORLD, [torch.arange(16)], [0], Contiguous())
            out = shards.sdpa()  # still in head-tail order
        shards.check(out)
        q = shards.q.detach()
        torch.testing.assert_close(causal(q, q, q)[:, :, :1], q[:, :, :1])  # SDPA is plain again: the first row

    on_every_rank(body)


@pytest.mark.parametrize("layout", [None, Contiguous()], ids=repr)
@pytest.mark.parametrize("seq_dim", [0, 1])
def test_unshard_is_the_inverse_of_shard_with_and_without_a_layout(layout: Any, seq_dim: int) -> None:
    def body(rank: int) -> None:
        whole = torch.arange(64).view(8, 8)
        shards = context_parallel_shard(dist.group.WORLD, [whole], [seq_dim], layout)
        (again,) = context_parallel_unshard(dist.group.WORLD, shards, [seq_dim], layout)
        assert torch.equal(again, whole)

    run_ranks(WORLD, body)


def positions(length: int, rank: int) -> list[int]:
    return [position for part in HeadTail().segments(length, rank, WORLD) for position in part.positions()]


def test_buffers_of_different_lengths() -> None:
    def body(rank: int) -> None:
        buffers = [torch.arange(16), torch.arange(9)]
        with context_parallel(dist.group.WORLD, buffers=buffers, buffer_seq_dims=[0, 0]):
            assert [each.tolist() for each in buffers] == [positions(16, rank), positions(9, rank)]
        assert [each.tolist() for each in buffers] == [list(range(16)), list(range(9))]

    run_ranks(WORLD, body)


def test_query_masked_out_of_two_merged_blocks() -> None:
    unseen, seen = torch.full((1, 1, 1), float("-inf")), torch.zeros(1, 1, 1)
    out, lse = torch.zeros(1, 1, 1, 2), unseen.clone()
    merge(out, lse, out, lse, [((0, 1), torch.zeros(1, 1, 1, 2), unseen)])
    assert (out.flatten().tolist(), lse.item()) == ([0.0, 0.0], float("-inf"))
    merge(out, lse, out, lse, [((0, 1), torch.ones(1, 1, 1, 2), seen)])
    assert (out.flatten().tolist(), lse.item()) == ([1.0, 1.0], 0.0)


def test_sdpa_imported_by_name_before_the_context() -> None:
    def body(shards: Attended) -> None:
        with context_parallel(dist.group.WORLD):
            out = shards.sdpa(sdpa_imported_by_name)
        shards.check(out)

    on_every_rank(body)
