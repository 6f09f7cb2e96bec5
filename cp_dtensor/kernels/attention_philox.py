"""Dropout inside of the attention kernels: see `attention_dropout`, whose numbers these are bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_dtensor.kernels.attention_dropout import PHILOX_FACTORS, PHILOX_KEY_STEPS, PHILOX_ROUNDS, Dropout

_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_FACTOR_0 = tl.constexpr(PHILOX_FACTORS[0])
_FACTOR_1 = tl.constexpr(PHILOX_FACTORS[1])
_KEY_STEP_0 = tl.constexpr(PHILOX_KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(PHILOX_KEY_STEPS[1])


@triton.jit
def dropout_factors(q_position, kv_position, dropout):
    """What elements of the softmax are multiplied with: 0, or 1 / (1 - p).

    `q_position` and `kv_position` (int32) broadcast to the block. `dropout` is (seed, batch row, query head,
    threshold, 1 / (1 - p)). Each product is computed on as few elements as it depends on: the first two rounds are
    nearly free, and of the last ones only what the first word needs is left by the compiler.
    """
    seed, batch, head, threshold, scale = dropout
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = q_position.to(tl.uint32, bitcast=True)
    c1 = kv_position.to(tl.uint32, bitcast=True)
    c2 = batch.to(tl.uint32)
    c3 = head.to(tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        # One instruction gives both halves of a product of 64 bits.
        product_0 = c0.to(tl.uint64) * _FACTOR_0
        product_1 = c2.to(tl.uint64) * _FACTOR_1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c3 = product_0.to(tl.uint32)
        key_0 = tl.add(key_0, _KEY_STEP_0, sanitize_overflow=False)
        key_1 = tl.add(key_1, _KEY_STEP_1, sanitize_overflow=False)
    return tl.where((c0 >> 8).to(tl.int32) >= threshold, scale, 0.0)


@triton.jit
def load_positions(positions, index, length):
    """Of rows or columns; 0 beyond the last one."""
    return tl.load(positions + index, mask=index < length, other=0)


DROPOUT_NOT_SPECIALIZED = ["q_position_stride_b", "kv_position_stride_b", "first_batch", "first_head", "threshold"]
DROPOUT_NOT_ALIGNED = ["seed_ptr", "q_position_ptr", "kv_position_ptr"]


def dropout_arguments(
    dropout: Dropout | None, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int, int, float]:
    """What kernels take: seed, positions, their strides over the batch, first batch row and head, threshold, scale."""
    if dropout is None:
        return unused, unused, unused, 0, 0, 0, 0, 0, 0.0
    q_positions, kv_positions = dropout.q_positions, dropout.kv_positions
    q_stride, kv_stride = (x.stride(0) if x.dim() == 2 and x.size(0) > 1 else 0 for x in (q_positions, kv_positions))
    return (
        dropout.seed, q_positions, kv_positions, q_stride, kv_stride, dropout.first_batch, dropout.first_head,
        dropout.threshold, dropout.scale,
    )  # fmt: skip
