"""Names of yunchang 0.6.4 besides the layers with two axes: Ulysses alone, dictionaries and extraction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.problems import Problem, reference
from support.ranks import run_ranks

from cp_dtensor.integrations import long_context, ring_flash_attn, unified
from cp_dtensor.integrations.long_context import AsyncLongContextAttention, AttnType, UlyssesAttention
from cp_dtensor.integrations.unified import UnifiedAttnMode, in_batch_attn_func

RANKS = 2
PROBLEM = Problem(12, 12, batch=2, q_heads=4, kv_heads=2, is_causal=True)


def heads_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()


def check(attend: Any, ring_impl_type: str = "basic") -> None:
    """`attend(rank)` makes a function of this rank's q, k and v (B, S, H, D)."""
    drawn = PROBLEM.draw(0)
    expected = [heads_last(tensor) for tensor in reference(PROBLEM, *drawn)]
    extract = long_context.EXTRACT_FUNC_DICT[ring_impl_type]

    def body(rank: int) -> None:
        def local(tensor: torch.Tensor) -> torch.Tensor:
            return extract(tensor, rank, RANKS, rd=RANKS, ud=1)

        *leaves, grad_out = (local(heads_last(tensor)) for tensor in drawn)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        out = attend(rank)(*leaves)
        grads = torch.autograd.grad(out, leaves, grad_out)
        for got, wanted in zip((out, *grads), expected, strict=True):
            torch.testing.assert_close(got, local(wanted), rtol=1e-10, atol=1e-10)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("attn_type", [AttnType.TORCH_MATH, AttnType.TORCH_CUDNN, "torch_flash", AttnType.FA])
def test_ulysses_attention(attn_type: Any) -> None:
    check(lambda rank: lambda q, k, v: UlyssesAttention(attn_type=attn_type)(q, k, v, causal=True))


@pytest.mark.parametrize("ring_impl_type", ["basic", "zigzag", "strip"])
def test_async_layers_and_dictionaries_of_rings(ring_impl_type: str) -> None:
    def layer(rank: int) -> Any:
        mesh = long_context.set_seq_parallel_pg(1, RANKS, rank, RANKS, device_type="cpu")
        made = AsyncLongContextAttention(ring_impl_type=ring_impl_type, mesh=mesh)
        return lambda q, k, v: made(q, k, v, causal=True)

    def ring(rank: int) -> Any:
        return lambda q, k, v: long_context.RING_IMPL_DICT[ring_impl_type](q, k, v, causal=True)

    check(layer, ring_impl_type)
    check(ring, ring_impl_type)


def test_dictionaries_have_the_functions_of_their_names() -> None:
    for name, kind in {"basic": "ring", "zigzag": "zigzag_ring", "strip": "stripe"}.items():
        packed = long_context.RING_IMPL_QKVPACKED_DICT[name]
        assert packed == getattr(ring_flash_attn, f"{kind}_flash_attn_qkvpacked_func")
    whole = torch.arange(16).view(1, 16)
    shards = {
        name: getattr(long_context, f"{name}_extract_local")(whole, 1, 4, 2, 2).tolist()
        for name in ("basic", "zigzag", "stripe")
    }
    assert shards == {"basic": [[4, 5, 6, 7]], "zigzag": [[12, 13, 14, 15]], "stripe": [[8, 10, 12, 14]]}
    assert long_context.basic_extract_local(whole, 1, 4).tolist() == shards["basic"], "as in yunchang"
    for name in ("zigzag", "stripe"):
        with pytest.raises(ValueError, match="got rd=None and ud=None"):
            getattr(long_context, f"{name}_extract_local")(whole, 1, 4)


def test_refusals() -> None:
    def body(rank: int) -> None:
        for attn_type in (AttnType.NPU, "sage_fp16"):
            with pytest.raises(NotImplementedError, match="one of the exact kernels"):
                UlyssesAttention(attn_type=attn_type)
        with pytest.raises(ValueError, match="expected scatter_idx=2 and gather_idx=1"):
            UlyssesAttention(scatter_idx=1)
        q = torch.zeros(1, 3, 2, 4)
        with pytest.raises(NotImplementedError, match="ALiBi"):
            UlyssesAttention()(q, q, q, alibi_slopes=torch.ones(2))

    run_ranks(RANKS, body)
    q = torch.zeros(1, 3, 2, 4)
    with pytest.raises(NotImplementedError, match="takes neither attn_mask nor is_causal=True"):
        in_batch_attn_func(q, q, q, is_causal=True)


def test_attention_over_all_rows_of_the_batch_and_all_ranks() -> None:
    q, k, v = (torch.randn(2, 3, 8, 4, dtype=torch.float64) for _ in range(3))
    logits = torch.einsum("bhqd,chkd->bhqck", q, k) / 2
    expected = torch.einsum("bhqck,chkd->bhqd", logits.flatten(3).softmax(3).unflatten(3, (2, 8)), v)
    torch.testing.assert_close(in_batch_attn_func(q, k, v), expected)

    def body(rank: int) -> None:
        with UnifiedAttnMode():
            out = unified.in_batch_attn_func(*(tensor.chunk(RANKS, 2)[rank] for tensor in (q, k, v)))
        torch.testing.assert_close(out, expected.chunk(RANKS, 2)[rank])

    run_ranks(RANKS, body)
