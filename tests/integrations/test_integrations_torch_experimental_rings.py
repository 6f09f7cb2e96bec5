"""`_templated_ring_attention`, called with torch's fused operators and with operators of the program's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.problems import Problem, assert_close, reference, shard
from support.processes import Processes
from support.ranks import run_ranks

from cp_dtensor import Contiguous, HeadTail, Layout
from cp_dtensor.integrations.torch_experimental import _cp_options, _templated_ring_attention

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
    out, *_ = reference(problem, q, k, v, grad_out)
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

    run_ranks(world_size, body)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("op", [CPU_FLASH, CPU_FLASH.default, aten._scaled_dot_product_flash_attention])
@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=["causal", "full"])
def test_torchs_op(problem: Problem, op: Any, balanced: bool) -> None:
    q, k, v, grad_out = problem.draw(1)
    out, *grads = reference(problem, q, k, v, grad_out)
    layout = order(problem, balanced)
    _cp_options.enable_load_balance = balanced

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

    run_ranks(2, body)


@pytest.mark.parametrize("scale", [-0.4, 0.3])
def test_scale_and_grouped_heads_of_torchs_op(scale: float) -> None:
    problem = Problem(q_len=12, kv_len=12, q_heads=4, is_causal=True, scale=scale)
    q, k, v, grad_out = problem.draw(5)
    expected = reference(problem, q, k, v, grad_out)

    def body(rank: int) -> None:
        local_q, local_k, local_v, local_grad = (shard(x, HeadTail(), rank, 2) for x in (q, k, v, grad_out))
        ring, local = (dist.group.WORLD, 2), (local_q, local_k, local_v)
        local = tuple(x.requires_grad_() for x in local)
        out, _ = _templated_ring_attention(*ring, CPU_FLASH, *local, is_causal=True, scale=scale)
        grads = torch.autograd.grad(out, local, local_grad)
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
        with pytest.raises(NotImplementedError, match="pass a fused SDPA op of torch"):
            out.sum().backward()

    run_ranks(2, body)


def over_gloo(rank: int) -> None:
    for problem in (CAUSAL, FULL):
        q, k, v, grad_out = problem.draw(2)
        expected = reference(problem, q, k, v, grad_out)
        layout = order(problem, True)
        local = [shard(x, layout, rank, 2) for x in (q, k, v, grad_out)]
        op = OwnOp()
        out, *_ = _templated_ring_attention(
            dist.group.WORLD, 2, op, *local[:3], is_causal=problem.is_causal, dropout_p=0.0, label="mine"
        )
        assert_close(out, shard(expected[0], layout, rank, 2))


def test_over_gloo(two_processes: Processes) -> None:
    two_processes.run(over_gloo)


def fused_ops_over_nccl(rank: int) -> None:
    problem = Problem(256, 256, batch=2, q_heads=4, kv_heads=4, head_dim=64, is_causal=True, dtype=torch.bfloat16)
    wholes = problem.draw(6, "cuda")
    expected = reference(problem, *wholes)
    local = [shard(x, HeadTail(), rank, 2) for x in wholes]
    for kind in ("flash", "efficient", "cudnn"):
        op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
        of_kind = {} if kind == "flash" else {"attn_bias": None, "compute_log_sumexp": True}

        def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, op: Any = op, **kwargs: Any) -> Any:
            return op(q, k, v, **kwargs)

        leaves = [x.requires_grad_() for x in local[:3]]
        for each in (op, own):  # by our ring, and called as an op of the program's own
            out, *_ = _templated_ring_attention(
                dist.group.WORLD, 2, each, *leaves, is_causal=True, dropout_p=0.0, **of_kind
            )
            grads = torch.autograd.grad(out, leaves, local[3]) if each is op else ()
            for actual, whole in zip((out, *grads), expected, strict=False):
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
def test_rows_that_see_nothing_and_padded_lse(last_dim: bool) -> None:
    """As torch's efficient op pads and its cuDNN op shapes an LSE; results have the form and dtypes of the op's."""

    def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> Any:
        lse = torch.full((*q.shape[:2], 32), float("-inf"))
        out = torch.zeros_like(q)
        if kwargs["is_causal"]:  # this rank's own keys: the last row sees the first
            out[:, :, -1], lse[:, :, q.size(2) - 1] = v[:, :, 0], 0.5
        return out, lse[:, :, : q.size(2), None] if last_dim else lse

    def body(rank: int) -> None:
        q = torch.ones(1, 1, 4, 8, dtype=torch.bfloat16)
        out, lse = _templated_ring_attention(dist.group.WORLD, 2, op, q, q, q * 3, is_causal=True)
        assert out.dtype == torch.bfloat16
        assert out[0, 0, :, 0].tolist() == [0, 0, 0, 3]
        assert lse.dtype == torch.float32
        assert lse.shape == ((1, 1, 4, 1) if last_dim else (1, 1, 4))
        assert lse.flatten().tolist() == [float("-inf")] * 3 + [0.5]

    run_ranks(2, body)


def test_an_lse_of_another_shape_is_refused() -> None:
    def body(rank: int) -> None:
        q = torch.zeros(1, 2, 4, 8)
        with pytest.raises(ValueError, match="expected an lse of shape"):
            _templated_ring_attention(dist.group.WORLD, 2, lambda q, *_, **__: (q, q[..., 0].mT), q, q, q)

    run_ranks(1, body)
