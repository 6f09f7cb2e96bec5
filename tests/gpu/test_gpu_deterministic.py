"""`deterministic=True` on two GPUs: equal bits from deterministic kernels, for these calls only."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from support.gpu_checks import WORLD_SIZE
from support.processes import Processes

from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.attention.backends.interval import IntervalAttention
from cp_dtensor.integrations.long_context import LongContextAttentionQKVPacked, set_seq_parallel_pg
from cp_dtensor.integrations.ring_flash_attn import zigzag_ring_flash_attn_qkvpacked_func

pytestmark = pytest.mark.gpu(WORLD_SIZE)
LENGTH, HEADS = 1024, 2 * WORLD_SIZE


def _entries(rank: int) -> dict[str, Any]:
    mesh = set_seq_parallel_pg(WORLD_SIZE, 1, rank, WORLD_SIZE, device_type="cuda")
    return {
        "zigzag": zigzag_ring_flash_attn_qkvpacked_func,
        "ulysses": LongContextAttentionQKVPacked(ring_impl_type="zigzag", mesh=mesh),
    }


def _attend(attend: Any, qkv: torch.Tensor, grad_out: torch.Tensor, **options: Any) -> tuple[list[torch.Tensor], bool]:
    """out and the gradient of qkv, and whether deterministic kernels have computed it: ours or FlashAttention-4's."""
    leaf, used = qkv.clone().requires_grad_(), list[bool]()

    def noted(kind: type[AttentionBackend]) -> Any:
        original = kind.backward

        def backward(self: Any, *arguments: Any) -> Any:
            used.append(kind is IntervalAttention or self.deterministic)
            return original(self, *arguments)

        return mock.patch.object(kind, "backward", backward)

    with noted(IntervalAttention), noted(Flash4Attention):
        out = attend(leaf, causal=True, **options)
        assert not torch.are_deterministic_algorithms_enabled()
        out.backward(grad_out)
    return [out.detach(), leaf.grad], any(used)


def _complaints(rank: int) -> list[str]:
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(rank)
    shapes = ((2, LENGTH, 3, HEADS, 64), (2, LENGTH, HEADS, 64))
    qkv, grad_out = (torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes)
    draw, found = random.Random(rank), []
    for name, attend in _entries(rank).items():
        _, ours = _attend(attend, qkv, grad_out)
        found += [f"{name}: by deterministic kernels, unasked"] * ours
        first, ours = _attend(attend, qkv, grad_out, deterministic=True)
        found += [f"{name}: by other kernels"] * (not ours)
        for _ in range(3):
            torch.cuda._sleep(draw.randrange(1_000_000))
            again, _ = _attend(attend, qkv, grad_out, deterministic=True)
            found += [f"{name}: other bits"] * (not all(map(torch.equal, first, again)))
    return found


def test_drop_ins_give_equal_bits(gpus: Processes) -> None:
    for complaints in gpus.run(_complaints):
        assert not complaints, complaints
