"""`_templated_ring_attention`, its backward and `_SDPAMerger`, called with custom attention operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes
from support.ranks import run_ranks

from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.integrations.torch_experimental import (
    _cp_options,
    _SDPAMerger,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

aten = torch.ops.aten
CPU_FLASH = aten._scaled_dot_product_flash_attention_for_cpu
CAUSAL = Problem(q_len=12, kv_len=12, batch=2, is_causal=True)
FULL = Problem(q_len=12, kv_len=12, batch=2)
CROSS = Problem(q_len=6, kv_len=12, batch=2)


@pytest.fixture(autouse=True)
def _fresh_options() -> Iterator[None]:
    _cp_options.enable_load_balance = True
    yield
    _cp_options.enable_load_balance = True


class OwnOp:
    """Attention in float64 as an op of a program; records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, **kwargs: Any) -> Any:
        assert (k if k._base is None else k._base).is_contiguous()
        self.calls.append((q.size(2), k.size(2), is_causal))
        assert kwargs == {"dropout_p": 0.0, "label": "mine"}
        logits = masked_logits(q, k, is_causal)
        return logits.softmax(-1) @ v, logits.logsumexp(-1), f"call {len(self.calls)}"

    def backward(self, *, grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, **kwargs: Any) -> Any:
        value, out, lse = kwargs["value"], kwargs["out"], kwargs["logsumexp"]
        weights = (masked_logits(query, key, kwargs["is_causal"]) - lse[..., None]).exp()
        grad_logits = weights * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) / query.size(3) ** 0.5
        return grad_logits @ key, grad_logits.mT @ query, weights.mT @ grad, "more"


def masked_logits(q: torch.Tensor, k: torch.Tensor, is_causal: bool) -> torch.Tensor:
    logits = q @ k.mT / q.size(3) ** 0.5
    return logits + torch.full_like(logits[0, 0], float("-inf")).triu(1) if is_causal else logits


def order(problem: Problem, balanced: bool) -> Layout:
    return HeadTail() if balanced and problem.is_causal else Contiguous()


def lse_of(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return masked_logits(q, k, problem.is_causal).logsumexp(-1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("problem", [CAUSAL, FULL, CROSS], ids=["causal", "full", "cross"])
def test_an_op_of_the_programs_own(problem: Problem, balanced: bool, world_size: int) -> None:
    q, k, v, grad_out = problem.draw(0)
    out, *grads = reference(problem, q, k, v, grad_out)
    layout = order(problem, balanced)
    _cp_options.enable_load_balance = balanced

    def body(rank: int) -> None:
        def mine(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor, layout, rank, world_size)

        op = OwnOp()
        local = [mine(x) for x in (q, k, v)]
        seq_dim = 2 if problem.is_causal else 1  # programs without a mask pass anything
        ring = (dist.group.WORLD, seq_dim)
        local_out, lse, *rest = _templated_ring_attention(
            *ring, op, *local, is_causal=problem.is_causal, dropout_p=0.0, label="mine"
        )
        assert_close(local_out, mine(out))
        assert_close(lse, shard(lse_of(problem, q, k), layout, rank, world_size))
        assert rest == [f"call {len(op.calls)}"]
        skipped = 0 if balanced or not problem.is_causal else world_size - 1 - rank
        assert len(op.calls) == world_size - skipped  # one call for each rank's keys
        assert [is_causal for _, _, is_causal in op.calls] == [problem.is_causal] + [False] * (len(op.calls) - 1)
        *local_grads, more = _templated_ring_attention_backward(
            *ring, op.backward, mine(grad_out), "grad", *local, local_out, lse, problem.is_causal, label="mine"
        )
        assert more == "more"
        for actual, expected in zip(local_grads, grads, strict=True):
            assert_close(actual, mine(expected))

    run_ranks(world_size, body)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("op", [CPU_FLASH, CPU_FLASH.default, aten._scaled_dot_product_flash_attention])
@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=["causal", "full"])
def test_torchs_op(problem: Problem, op: Any, balanced: bool) -> None:
    q, k, v, grad_out = problem.draw(1)
    out, *grads = reference(problem, q, k, v, grad_out)
    layout = order(problem, balanced)
    _cp_options.enable_load_balance = balanced
    backward_op = getattr(aten, f"{op.__name__.partition('.')[0]}_backward")

    def body(rank: int) -> None:
        def mine(tensor: torch.Tensor) -> torch.Tensor:
            return shard(tensor, layout, rank, 2)

        local = [mine(x).requires_grad_() for x in (q, k, v)]
        result = _templated_ring_attention(
            dist.group.WORLD, 2, op, query=local[0], key=local[1], value=local[2], is_causal=problem.is_causal,
            dropout_p=0.0, scale=None,
        )  # fmt: skip
        assert len(result) == (9 if op is aten._scaled_dot_product_flash_attention else 2)
        assert_close(result[0], mine(out))
        assert_close(result[1], shard(lse_of(problem, q, k), layout, rank, 2))
        result[0].backward(mine(grad_out))
        for tensor, expected in zip(local, grads, strict=True):
            assert tensor.grad is not None
            assert_close(tensor.grad, mine(expected))
        detached = [x.detach() for x in (*local, *result[:2])]
        local_grads = _templated_ring_attention_backward(
            dist.group.WORLD, 2, backward_op, mine(grad_out), "grad_out", *detached, problem.is_causal, dropout_p=0.0
        )
        for actual, expected in zip(local_grads, grads, strict=True):
            assert_close(actual, mine(expected))

    run_ranks(2, body)


@pytest.mark.parametrize("scale", [-0.4, 0.3])
def test_scale_and_grouped_heads_of_torchs_op(scale: float) -> None:
    problem = Problem(q_len=12, kv_len=12, q_heads=4, is_causal=True, scale=scale)
    q, k, v, grad_out = problem.draw(5)
    expected = reference(problem, q, k, v, grad_out)

    def body(rank: int) -> None:
        local_q, local_k, local_v, local_grad = (shard(x, HeadTail(), rank, 2) for x in (q, k, v, grad_out))
        ring, local = (dist.group.WORLD, 2), (local_q, local_k, local_v)
        out, lse = _templated_ring_attention(*ring, CPU_FLASH, *local, is_causal=True, scale=scale)
        grads = _templated_ring_attention_backward(
            *ring, aten._scaled_dot_product_flash_attention_for_cpu_backward.default, local_grad, "grad_out", *local,
            out, lse, True, scale=scale,
        )  # fmt: skip
        for actual, whole in zip((out, *grads), expected, strict=True):
            assert_close(actual, shard(whole, HeadTail(), rank, 2))

    run_ranks(2, body)


def test_refusals() -> None:
    q, k, v, _ = CAUSAL.draw(0)

    def body(rank: int) -> None:
        local = [shard(x, HeadTail(), rank, 2) for x in (q, k, v)]
        world = dist.group.WORLD
        with pytest.raises(NotImplementedError, match="dropout"):
            _templated_ring_attention(world, 2, OwnOp(), *local, dropout_p=0.1)
        with pytest.raises(NotImplementedError, match="dropout"):
            _templated_ring_attention(world, 2, CPU_FLASH, *local, dropout_p=0.1)
        with pytest.raises(NotImplementedError, match="attn_mask"):
            _templated_ring_attention(world, 2, CPU_FLASH, *local, attn_bias=torch.zeros(1))
        with pytest.raises(NotImplementedError, match=r"CUDNN_ATTENTION, the only .*(.|\n)*are on cpu, not cuda"):
            _templated_ring_attention(world, 2, aten._scaled_dot_product_cudnn_attention, *local)
        with pytest.raises(NotImplementedError, match="seq_dim=1"):
            _templated_ring_attention(world, 1, OwnOp(), *local, is_causal=True)
        with pytest.raises(NotImplementedError, match="is_causal requires the same query"):
            _templated_ring_attention(world, 2, OwnOp(), local[0][:, :, :2], *local[1:], is_causal=True)
        short = [x[:, :, : 2 + rank] for x in local[1:]]
        with pytest.raises(ValueError, match="same shapes on every rank"):
            _templated_ring_attention(world, 2, OwnOp(), local[0], *short)
        wants_grad = local[0].clone().requires_grad_()
        out, *_ = _templated_ring_attention(world, 2, OwnOp(), wants_grad, *local[1:], dropout_p=0.0, label="mine")
        with pytest.raises(NotImplementedError, match="_templated_ring_attention_backward"):
            out.sum().backward()

    run_ranks(2, body)


def over_gloo(rank: int) -> None:
    for problem in (CAUSAL, FULL):
        q, k, v, grad_out = problem.draw(2)
        expected = reference(problem, q, k, v, grad_out)
        layout = order(problem, True)
        local = [shard(x, layout, rank, 2) for x in (q, k, v, grad_out)]
        op = OwnOp()
        out, lse, *_ = _templated_ring_attention(
            dist.group.WORLD, 2, op, *local[:3], is_causal=problem.is_causal, dropout_p=0.0, label="mine"
        )
        grads = _templated_ring_attention_backward(
            dist.group.WORLD, 2, op.backward, local[3], "grad", *local[:3], out, lse, problem.is_causal
        )
        for actual, whole in zip((out, *grads[:3]), expected, strict=True):
            assert_close(actual, shard(whole, layout, rank, 2))


def test_over_gloo(two_processes: Processes) -> None:
    two_processes.run(over_gloo)


def fused_ops_over_nccl(rank: int) -> None:
    problem = Problem(256, 256, batch=2, q_heads=4, kv_heads=4, head_dim=64, is_causal=True, dtype=torch.bfloat16)
    wholes = problem.draw(6, "cuda")
    expected = reference(problem, *wholes)
    local = [shard(x, HeadTail(), rank, 2) for x in wholes]
    for kind in ("flash", "efficient", "cudnn"):
        names = {"flash": "grad_out", "efficient": "grad_out_", "cudnn": "grad_out"}
        op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
        backward_op = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
        of_kind = {} if kind == "flash" else {"attn_bias": None, "compute_log_sumexp": True}

        def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, op: Any = op, **kwargs: Any) -> Any:
            return op(q, k, v, **kwargs)

        for each in (op, own):  # by our ring, and called as an op of the program's own
            out, lse, *_ = _templated_ring_attention(
                dist.group.WORLD, 2, each, *local[:3], is_causal=True, dropout_p=0.0, **of_kind
            )
            grads = _templated_ring_attention_backward(
                dist.group.WORLD, 2, backward_op, local[3], names[kind], *local[:3], out, lse, True, dropout_p=0.0
            )
            for actual, whole in zip((out, *grads[:3]), expected, strict=True):
                error = (actual.double() - shard(whole, HeadTail(), rank, 2)).norm() / whole.norm()
                assert error < 5e-3, (kind, error)


@pytest.mark.gpu(2, nccl=True)
def test_fused_ops_over_nccl() -> None:
    processes = Processes(2, backend="nccl")
    try:
        processes.run(fused_ops_over_nccl)
    finally:
        processes.stop()


@pytest.mark.parametrize("last_dim", [False, True])
@pytest.mark.parametrize("rows", [8, 7])
def test_merger(rows: int, last_dim: bool) -> None:
    problem = Problem(q_len=rows, kv_len=9, batch=2)
    q, k, v, _ = problem.draw(3)
    merger = _SDPAMerger(True, 2)
    whole, first_rows = [], rows // 2 + rows % 2
    for keys, first in (((0, 4), 0), ((4, 6), 0), ((6, 9), first_rows)):
        logits = masked_logits(q[:, :, first:], k[:, :, keys[0] : keys[1]], False)
        out, lse = logits.softmax(-1) @ v[:, :, keys[0] : keys[1]], logits.logsumexp(-1)
        whole.append((out.clone(), lse.clone()))
        lse = lse[..., None] if last_dim else lse
        merger.step(out, lse, first > 0)
        assert torch.equal(out, whole[-1][0])  # what an op returns is left alone
    out, lse = merger.results()
    assert out.dtype == torch.float64
    lse = lse.squeeze(-1) if last_dim else lse
    logits = masked_logits(q, k, False)
    logits[:, :, :first_rows, 6:] = float("-inf")
    assert_close(out, logits.softmax(-1) @ v)
    assert_close(lse, logits.logsumexp(-1))


def test_merger_of_rows_that_see_nothing_and_of_padded_lse() -> None:
    merger = _SDPAMerger(True, 2)
    nothing = torch.full((1, 1, 32), float("-inf"))
    for _ in range(2):
        merger.step(torch.zeros(1, 1, 3, 4, dtype=torch.bfloat16), nothing, False)
    out, lse = merger.results()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, nothing[..., :3])


def test_merger_refuses_what_does_not_fit() -> None:
    out, lse = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)
    with pytest.raises(RuntimeError, match="partial=True"):
        _SDPAMerger(True, 2).step(out, lse, True)
    with pytest.raises(RuntimeError, match="at least one"):
        _SDPAMerger(True, 2).results()
    merger = _SDPAMerger(False, 2)
    merger.step(out, lse, False)
    with pytest.raises(ValueError, match="expected a result of shape"):
        merger.step(out[:, :, :3], lse[:, :, :3], False)
    with pytest.raises(ValueError, match="expected an lse of shape"):
        merger.step(out, lse.transpose(1, 2), False)
