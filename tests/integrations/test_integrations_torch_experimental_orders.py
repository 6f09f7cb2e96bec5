"""The order of shards of `_context_parallel_shard` in contexts that are opened afterwards, as in torch."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail
from cp_dtensor.integrations import torch_experimental as ours

PROBLEM = Problem(q_len=16, kv_len=16, batch=2, is_causal=True)
Q, K, V, GRAD_OUT = PROBLEM.draw(0)
EXPECTED = reference(PROBLEM, Q, K, V, GRAD_OUT)


@pytest.fixture(autouse=True)
def _fresh_options() -> Iterator[None]:
    ours._cp_options.enable_load_balance = True
    yield
    ours._cp_options.enable_load_balance = True


@pytest.mark.parametrize("has_buffer", [False, True])
@pytest.mark.parametrize("is_balanced", [False, True])
def test_contexts_have_the_order_of_the_latest_shards(is_balanced: bool, has_buffer: bool) -> None:
    layout = HeadTail() if is_balanced else Contiguous()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        if is_balanced:  # an earlier order is replaced
            ours._context_parallel_shard(mesh, [Q], [2])
        balancer = ours._HeadTailLoadBalancer(16, 2, "cpu") if is_balanced else None
        local = [x.requires_grad_() for x in ours._context_parallel_shard(mesh, [Q, K, V], [2, 2, 2], balancer)]
        rope = torch.arange(16)
        buffers = {"buffers": [rope], "buffer_seq_dims": [0]} if has_buffer else {}
        with ours.context_parallel(mesh, **buffers):
            assert not has_buffer or torch.equal(rope, shard(torch.arange(16)[None, None], layout, rank, 2)[0, 0])
            out = F.scaled_dot_product_attention(*local, is_causal=True)
        grads = torch.autograd.grad(out, local, shard(GRAD_OUT, layout, rank, 2))
        for actual, expected in zip((out, *grads), EXPECTED, strict=True):
            torch.testing.assert_close(actual, shard(expected, layout, rank, 2), rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_a_context_that_does_not_open_leaves_no_order() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with (
            pytest.raises(ValueError, match="disagree about buffer 0"),
            ours.context_parallel(mesh, buffers=[torch.zeros(8 + 4 * rank)], buffer_seq_dims=[0]),
        ):
            pytest.fail("entered")
        assert ours._cp_options.orders.of_group(mesh.get_group()) == []

    run_ranks(2, body)
