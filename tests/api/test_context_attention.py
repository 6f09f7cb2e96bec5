"""Attention modules and forms of calls inside `context_parallel`, and refusals."""

from collections.abc import Callable
from operator import eq
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank
from support.problems import Problem, reference, shard
from support.ranks import run_ranks
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from cp_dtensor import Contiguous, HeadTail, Striped, context_parallel
from cp_dtensor.spec.layouts import shard_lengths

WORLD = 3
LENGTH = 11
BATCH, HEADS, WIDTH = 2, 2, 8
WAYS_TO_CALL: dict[str, Callable[..., torch.Tensor]] = {
    "by attribute": lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs),
    "imported by name": imported_by_name,
    "torch._C._nn": torch._C._nn.scaled_dot_product_attention,
    "torch.ops": torch.ops.aten.scaled_dot_product_attention,
}


def context(**kwargs: Any) -> context_parallel:
    return context_parallel(dist.group.WORLD, **kwargs)


def assert_close(actual: torch.Tensor | None, expected: torch.Tensor | None, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_sdpa(
    problem: Problem, sdpa: Callable[..., torch.Tensor] = imported_by_name, world_size: int = WORLD
) -> None:
    """`sdpa` of the ranks' shards, and its gradients, are those of one device."""
    whole = problem.draw(0)
    expected = [shard_of(each, world_size) for each in reference(problem, *whole)]

    def body(rank: int) -> None:
        q, k, v, grad_out = (shard(each, HeadTail(), rank, world_size) for each in whole)
        leaves = [each.requires_grad_() for each in (q, k, v)]
        with context(seq_len={problem.q_len, problem.kv_len}):
            out = sdpa(*leaves)
            out.backward(grad_out)
            with torch.inference_mode():
                assert_close(sdpa(*(leaf.detach().clone() for leaf in leaves)), expected[0][rank])
        for actual, shards in zip((out, *(leaf.grad for leaf in leaves)), expected, strict=True):
            assert_close(actual, shards[rank])

    run_ranks(world_size, body)


def shard_of(whole: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    return [shard(whole, HeadTail(), rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("way", WAYS_TO_CALL)
def test_sdpa_is_that_of_the_whole_sequence_however_it_is_called(way: str) -> None:
    problem = Problem(q_len=LENGTH, kv_len=LENGTH, batch=2, is_causal=True)
    assert_sdpa(problem, lambda *qkv: WAYS_TO_CALL[way](*qkv, is_causal=True))


@pytest.mark.parametrize("backends", [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]])
@pytest.mark.parametrize("set_priority", [False, True])
def test_inside_of_sdpa_kernel(backends: list[SDPBackend], set_priority: bool) -> None:
    with sdpa_kernel(backends, set_priority=set_priority):  # around all ranks: it sets flags of the process
        assert_sdpa(
            Problem(q_len=LENGTH, kv_len=LENGTH, is_causal=True), lambda *qkv: imported_by_name(*qkv, is_causal=True)
        )


def test_autocast_casts_as_for_plain_sdpa() -> None:
    problem = Problem(q_len=64, kv_len=64, is_causal=True, dtype=torch.float32)
    whole = problem.draw(0)
    exact = reference(problem, *whole)[0]
    with torch.autocast("cpu", torch.bfloat16):
        alone = imported_by_name(*whole[:3], is_causal=True)
    allowed = 1.5 * (alone.double() - exact).norm() / 2**0.5  # of one rank of two

    def body(rank: int) -> None:
        leaves = [shard(each, HeadTail(), rank, 2).requires_grad_() for each in whole[:3]]
        with torch.autocast("cpu", torch.bfloat16), context():
            out = imported_by_name(*leaves, is_causal=True)
        assert out.dtype == alone.dtype == torch.bfloat16
        assert (out.double() - shard(exact, HeadTail(), rank, 2)).norm() < allowed
        out.sum().backward()
        assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)

    run_ranks(2, body)


@pytest.mark.parametrize("buffer_length", range(6, 13))
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped()], ids=repr)
def test_attention_over_a_length_that_no_buffer_has(layout: Any, buffer_length: int) -> None:
    """Refused on every rank where some own as many tokens of the one length as of the other."""
    problem = Problem(q_len=9, kv_len=9, is_causal=True)
    whole = problem.draw(0)
    expected = reference(problem, *whole)[0]

    def body(rank: int) -> None:
        q, k, v = (shard(each, layout, rank, 4) for each in whole[:3])
        with context(buffers=[torch.arange(buffer_length)], buffer_seq_dims=[0], layout=layout, seq_len=9):
            assert_close(imported_by_name(q, k, v, is_causal=True), shard(expected, layout, rank, 4))

    look_alike = any(map(eq, shard_lengths(layout, 9, 4), shard_lengths(layout, buffer_length, 4)))
    if buffer_length == 9 or not look_alike:
        run_ranks(4, body)
        return
    for error in errors_by_rank(4, body):
        assert "both declared, have equally long shards on some ranks. Pad one" in str(error)


def test_meta_tensors_are_left_to_torch() -> None:
    def body(rank: int) -> None:
        q = torch.empty(1, 2, 5, 4, device="meta")
        with context():
            assert imported_by_name(q, q, q).shape == q.shape

    run_ranks(2, body)


def attention(batch_first: bool, is_causal: bool) -> nn.Module:
    class SelfAttention(nn.MultiheadAttention):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            length = hidden.size(1 if batch_first else 0)
            hidden_from = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
            mask = hidden_from if is_causal else None
            return super().forward(hidden, hidden, hidden, need_weights=False, is_causal=is_causal, attn_mask=mask)[0]

    return SelfAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64)


def encoder_layer(batch_first: bool, norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )


@pytest.mark.parametrize("mode", ["train", "eval", "inference_mode"])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("build", [attention, encoder_layer])
def test_modules_of_torch(build: Callable[[bool, bool], nn.Module], option: bool, batch_first: bool, mode: str) -> None:
    torch.manual_seed(0)
    dim = 1 if batch_first else 0
    whole = torch.randn((BATCH, LENGTH, WIDTH) if batch_first else (LENGTH, BATCH, WIDTH), dtype=torch.float64)
    weights = build(batch_first, option).state_dict()

    def run(hidden: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        module = build(batch_first, option)
        module.load_state_dict(weights)
        module.train(mode == "train")
        with torch.inference_mode(mode == "inference_mode"):
            out = module(hidden)
        if out.requires_grad:
            (out**2).sum().backward()
        return out.detach(), [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    alone, alone_grads = run(whole)

    def body(rank: int) -> list[torch.Tensor]:
        hidden = whole.clone()
        with context(buffers=[hidden], buffer_seq_dims=[dim]):
            out, grads = run(hidden)
        order = shard(torch.arange(LENGTH), HeadTail(), rank, WORLD, 0)
        assert_close(out, alone.index_select(dim, order))
        return grads

    totals = [sum(parts) for parts in zip(*run_ranks(WORLD, body), strict=True)]
    assert len(totals) == len(alone_grads) == (len(weights) if mode in ("train", "eval") else 0)
    for total, expected in zip(totals, alone_grads, strict=True):
        assert_close(total, expected)


def test_one_key_head_is_for_all_query_heads() -> None:
    """SDPA broadcasts it, as Falcon's attention expects: without `enable_gqa`."""
    problem = Problem(q_len=LENGTH, kv_len=LENGTH, q_heads=4, kv_heads=1, is_causal=True)
    assert_sdpa(problem, lambda *qkv: imported_by_name(*qkv, is_causal=True))


def test_what_shards_cannot_have_is_refused_and_not_ignored() -> None:
    q = torch.randn(1, HEADS, 4, WIDTH)

    def body(rank: int) -> None:
        hidden = q[:, 0]
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        dropping = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        with context():
            if rank != 0:  # which would have to join a collective
                return
            for module_call in (module, dropping.eval()):
                with pytest.raises(NotImplementedError, match="need_weights=False"):
                    module_call(hidden, hidden, hidden)
            with pytest.raises(ValueError, match="key heads as query heads"):
                imported_by_name(torch.cat([q, q], 1), q, q)

    run_ranks(2, body)
