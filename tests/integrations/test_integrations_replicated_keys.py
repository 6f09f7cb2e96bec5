"""`replicated_keys` and `disable` of attention modes, with and without recomputation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.attention_modes import WORLD, Mode, each_mode, rank_in_sequence
from support.problems import Problem, assert_close, reference, shard
from support.ranks import run_ranks
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Contiguous, context_parallel
from cp_dtensor.integrations.unified import RingAttnMode, UlyssesAttnMode, UnifiedAttnMode


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@each_mode
def test_keys_that_every_rank_has_whole(mode: Callable[..., Mode], recompute: str | None, masked: bool) -> None:
    q, k, v, grad_out = (tensor.requires_grad_() for tensor in Problem(16, 5, batch=2, q_heads=4, kv_heads=4).draw(0))
    mask = torch.rand(2, 1, 16, 5) < 0.7 if masked else None
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    grads = torch.autograd.grad(expected, (q, k, v), grad_out)

    def body(rank: int) -> list[torch.Tensor]:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor.detach(), Contiguous(), rank_in_sequence(mode, rank), WORLD)

        leaves = [local(q).requires_grad_(), *(tensor.detach().requires_grad_() for tensor in (k, v))]
        local_mask = None if mask is None else local(mask)

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(*qkv, local_mask)

        opened = mode()
        with opened, opened.replicated_keys():
            if recompute is None:
                out = attend(*leaves)
            else:
                out = checkpoint(attend, *leaves, use_reentrant=recompute == "reentrant")
        out.backward(local(grad_out))
        assert_close(out, local(expected))
        assert_close(leaves[0].grad, local(grads[0]))
        return [leaf.grad for leaf in leaves[1:] if leaf.grad is not None]

    for parts, wanted in zip(zip(*run_ranks(WORLD, body), strict=True), grads[1:], strict=True):
        assert_close(sum(parts), wanted)  # type: ignore[arg-type]


def test_attention_that_is_whole_on_every_rank() -> None:
    q, k, v, _ = Problem(5, 5).draw(0)
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def body(rank: int) -> None:
        with UnifiedAttnMode(), UnifiedAttnMode.disable():
            assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True), causal)
            mask = torch.ones(5, 5, dtype=torch.bool).tril()
            assert_close(F.scaled_dot_product_attention(q, k, v, mask), causal)
            assert F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).shape == q.shape
            with UnifiedAttnMode.replicated_keys(), UnifiedAttnMode.disable():
                assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True), causal)
        for nothing_to_do in (UnifiedAttnMode.disable(), RingAttnMode.replicated_keys()):
            with nothing_to_do:
                assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True), causal)

    run_ranks(2, body)


def test_the_innermost_context_holds() -> None:
    problem = Problem(12, 12, is_causal=True)
    q, k, v, _ = whole = problem.draw(0)
    expected = reference(problem, *whole)[0]

    def sdpa(*qkv: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    def body(rank: int) -> None:
        local = [shard(tensor, Contiguous(), rank, 2) for tensor in (q, k, v)]
        wanted, alone = shard(expected, Contiguous(), rank, 2), sdpa(*local)
        mode = UlyssesAttnMode()
        for _ in range(2):  # a mode may be entered again
            with mode:
                assert_close(sdpa(*local), wanted)
                with mode.disable():
                    assert_close(sdpa(*local), alone)
                    with RingAttnMode():
                        assert_close(sdpa(*local), wanted)
                        with RingAttnMode.disable():
                            assert_close(sdpa(*local), alone)
                        assert_close(sdpa(*local), wanted)
                    assert_close(sdpa(*local), alone)
                    with context_parallel(dist.group.WORLD, layout=Contiguous()):
                        assert_close(sdpa(*local), wanted)
                assert_close(sdpa(*local), wanted)
                with pytest.raises(RuntimeError, match="already entered"), mode:
                    pass
        dist.barrier()
        assert_close(sdpa(*local), alone)

    run_ranks(2, body)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")
