"""Dropout inside of the attention kernels: see `attention_dropout`, whose numbers these are bit by bit.

A thread of a Hopper or Ampere GPU has, of a product of matrices, rows i and i + 8 and columns j, j + 1, j + 8 and j + 9
(and others). So the 8 elements of a counter are in one thread, which calls Philox once for them, and nothing is
exchanged. Of a transposed product j and j + 1 are in two threads, which both make the call. All of this holds where
positions are in runs; elsewhere each element has a call of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cp_dtensor.attention.triton.dropout import PHILOX_FACTORS, PHILOX_KEY_STEPS, PHILOX_ROUNDS, RUN, Dropout

_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_FACTOR_0 = tl.constexpr(PHILOX_FACTORS[0])
_FACTOR_1 = tl.constexpr(PHILOX_FACTORS[1])
_KEY_STEP_0 = tl.constexpr(PHILOX_KEY_STEPS[0])
_KEY_STEP_1 = tl.constexpr(PHILOX_KEY_STEPS[1])
_RUN = tl.constexpr(RUN)
_HALF_RUN = tl.constexpr(RUN // 2)
_QUARTER_RUN = tl.constexpr(RUN // 4)


@triton.jit
def which_are_kept(
    q_position, kv_position, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_RUNS: tl.constexpr
):  # fmt: skip
    """(ROWS, COLUMNS), boolean, of the positions that `load_positions` gives, in runs 8 of rows and 4 of columns.

    `dropout` is (seed, batch row, query head, the largest word whose first 16 bits are dropped).
    """
    if IN_RUNS:
        words = _philox(q_position[:, None], kv_position[None, :], dropout, _ROUNDS)
        split: tl.constexpr = (ROWS // _RUN, 1, _HALF_RUN, COLUMNS // _RUN, 1, _QUARTER_RUN, 1)
        either = tl.arange(0, 2)
        word = _of_halves(
            words, either[None, :, None, None, None, None, None], either[None, None, None, None, :, None, None], split
        )
        word = (word << _shift(either)).reshape(ROWS, COLUMNS)
    else:
        word = _one_by_one(q_position[:, None], kv_position[None, :], dropout)
    return word > dropout[3].to(tl.uint32, bitcast=True)


@triton.jit
def which_are_kept_transposed(
    q_position, kv_position, dropout, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_RUNS: tl.constexpr
):  # fmt: skip
    """(COLUMNS, ROWS): as `which_are_kept`, but of 8 columns in a run."""
    if IN_RUNS:
        words = _philox(q_position[None, :], (kv_position & ~1)[:, None], dropout, _ROUNDS)
        split: tl.constexpr = (COLUMNS // _RUN, 1, _HALF_RUN, ROWS // _RUN, 1, _HALF_RUN)
        either = tl.arange(0, 2)
        word = _of_halves(
            words, either[None, None, None, None, :, None], either[None, :, None, None, None, None], split
        )  # fmt: skip
        word = word.reshape(COLUMNS, ROWS) << _shift(tl.arange(0, COLUMNS))[:, None]
    else:
        word = _one_by_one(q_position[None, :], kv_position[:, None], dropout)
    return word > dropout[3].to(tl.uint32, bitcast=True)


@triton.jit
def _of_halves(words, q_half, kv_half, SHAPE: tl.constexpr):
    """The word of each half of a run of rows and of columns, from four words that reshape to SHAPE.

    By choosing, not by `tl.join`: layouts of threads pass through it in every version of Triton.
    """
    first_rows = tl.where(kv_half == 0, words[0].reshape(SHAPE), words[1].reshape(SHAPE))
    second_rows = tl.where(kv_half == 0, words[2].reshape(SHAPE), words[3].reshape(SHAPE))
    return tl.where(q_half == 0, first_rows, second_rows)


@triton.jit
def _one_by_one(q_position, kv_position, dropout):
    """For each element the word that begins with its number; positions broadcast to the block."""
    c0, c1, c2, c3, key_0, key_1 = _philox(
        q_position & ~_HALF_RUN, kv_position & ~(_HALF_RUN + 1), dropout, _ROUNDS - 1
    )  # fmt: skip
    # Of the last round the one product that gives the word, or half of it.
    is_second = (q_position & _HALF_RUN) != 0
    factor = tl.where(is_second, _FACTOR_0, _FACTOR_1).to(tl.uint32)
    product = tl.where(is_second, c0, c2).to(tl.uint64) * factor.to(tl.uint64)
    upper = (product >> 32).to(tl.uint32) ^ tl.where(is_second, c3 ^ key_1, c1 ^ key_0)
    return tl.where((kv_position & _HALF_RUN) != 0, product.to(tl.uint32), upper) << _shift(kv_position)


@triton.jit
def _shift(kv_position):
    """By how many bits to the left a word begins with the number of a column."""
    return (16 - 16 * (kv_position & 1)).to(tl.uint32)


@triton.jit
def _philox(q_position, kv_position, dropout, ROUNDS: tl.constexpr):
    """Four words for each of positions that broadcast, and the keys of the next round.

    Each product is computed on as few elements as it depends on: the first two rounds are nearly free.
    """
    seed, batch, head, _ = dropout
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = q_position.to(tl.uint32, bitcast=True)
    c1 = kv_position.to(tl.uint32, bitcast=True)
    c2 = batch.to(tl.uint32)
    c3 = head.to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        # One instruction gives both halves of a product of 64 bits.
        product_0 = c0.to(tl.uint64) * _FACTOR_0
        product_1 = c2.to(tl.uint64) * _FACTOR_1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c1 = product_1.to(tl.uint32)
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c3 = product_0.to(tl.uint32)
        key_0 = tl.add(key_0, _KEY_STEP_0, sanitize_overflow=False)
        key_1 = tl.add(key_1, _KEY_STEP_1, sanitize_overflow=False)
    return c0, c1, c2, c3, key_0, key_1


@triton.jit
def load_positions(positions, start, length, BLOCK: tl.constexpr, IN_RUNS: tl.constexpr, OF_RUN: tl.constexpr):
    """Of BLOCK rows or columns from `start` on, 0 beyond `length`.

    IN_RUNS: only those by which the others are known: of each run the first half (OF_RUN 8), and of that the even
    places (OF_RUN 4).
    """
    if IN_RUNS:
        index = tl.arange(0, BLOCK // _RUN * OF_RUN)
        index = index // OF_RUN * _RUN + index % OF_RUN * (_HALF_RUN // OF_RUN)
    else:
        index = tl.arange(0, BLOCK)
    return tl.load(positions + start + index, mask=start + index < length, other=0)


DROPOUT_NOT_SPECIALIZED = ["q_position_stride_b", "kv_position_stride_b", "first_batch", "first_head", "dropout_limit"]
DROPOUT_NOT_ALIGNED = ["seed_ptr", "q_position_ptr", "kv_position_ptr"]


def dropout_arguments(
    dropout: Dropout | None, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int, int, int]:
    """What kernels take: seed, positions, their strides over the batch, first batch row and head, limit."""
    if dropout is None:
        return unused, unused, unused, 0, 0, 0, 0, 0
    assert dropout.p > 0, "no limit keeps everything"
    q_positions, kv_positions = dropout.q_positions, dropout.kv_positions
    q_stride, kv_stride = (x.stride(0) if x.dim() == 2 and x.size(0) > 1 else 0 for x in (q_positions, kv_positions))
    return (
        dropout.seed, q_positions, kv_positions, q_stride, kv_stride, dropout.first_batch, dropout.first_head,
        _as_signed((dropout.threshold << 16) - 1),
    )  # fmt: skip


def _as_signed(word: int) -> int:
    """32 bits as the number that Triton takes for one of 32 bits."""
    return word - 2**32 if word >= 2**31 else word
