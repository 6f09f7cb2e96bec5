"""Dropout inside the attention kernels, bit by bit equal to `dropout.kept_reference`.

In a matrix product, a thread of an Ampere or Hopper GPU holds rows i and i + 8 at columns j, j + 1, j + 8 and j + 9
(and others). The 8 elements of a counter are therefore in one thread, which calls Philox once for them. In a transposed
product, columns j and j + 1 are in two threads, and both make the call. This needs positions in runs; otherwise there
is one call for each element.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

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
    """(ROWS, COLUMNS): True for kept weights at positions from `load_positions` (in runs: OF_RUN 8 and 4).

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
    """(COLUMNS, ROWS): the transpose of `which_are_kept`, from column positions with OF_RUN 8."""
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

    Uses `tl.where` instead of `tl.join`, since every version of Triton keeps the thread layout through it.
    """
    first_rows = tl.where(kv_half == 0, words[0].reshape(SHAPE), words[1].reshape(SHAPE))
    second_rows = tl.where(kv_half == 0, words[2].reshape(SHAPE), words[3].reshape(SHAPE))
    return tl.where(q_half == 0, first_rows, second_rows)


@triton.jit
def _one_by_one(q_position, kv_position, dropout):
    """The word that begins with the number of each element; positions broadcast to the block."""
    c0, c1, c2, c3, key_0, key_1 = _philox(
        q_position & ~_HALF_RUN, kv_position & ~(_HALF_RUN + 1), dropout, _ROUNDS - 1
    )  # fmt: skip
    # The last round computes only the product that has the word, or half of it.
    is_second = (q_position & _HALF_RUN) != 0
    factor = tl.where(is_second, _FACTOR_0, _FACTOR_1).to(tl.uint32)
    product = tl.where(is_second, c0, c2).to(tl.uint64) * factor.to(tl.uint64)
    upper = (product >> 32).to(tl.uint32) ^ tl.where(is_second, c3 ^ key_1, c1 ^ key_0)
    return tl.where((kv_position & _HALF_RUN) != 0, product.to(tl.uint32), upper) << _shift(kv_position)


@triton.jit
def _shift(kv_position):
    """Bits by which to shift a word left so that it begins with the number of a column."""
    return (16 - 16 * (kv_position & 1)).to(tl.uint32)


@triton.jit
def _philox(q_position, kv_position, dropout, ROUNDS: tl.constexpr):
    """Four words for positions that broadcast, and the keys of the next round.

    Each product is computed for as few elements as it depends on: the first two rounds cost little.
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
    """Positions of BLOCK rows or columns from `start` on, 0 beyond `length`.

    IN_RUNS: only the positions that `_philox` needs: the first half of each run (OF_RUN 8), or every other position of
    that half (OF_RUN 4).
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
    dropout: Dropout | None, unused: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[bool, bool, float]]:
    """Kernel arguments: `(seed, positions)`, numbers of DROPOUT_NOT_SPECIALIZED, and `(DROPOUT, IN_RUNS, scale)`."""
    if dropout is None:
        return (unused, unused, unused), (0, 0, 0, 0, 0), (False, False, 1.0)
    assert dropout.p > 0, "no limit keeps everything"
    positions = (dropout.q_positions, dropout.kv_positions)
    strides = [x.stride(0) if x.dim() == 2 and x.size(0) > 1 else 0 for x in positions]
    limit = (dropout.threshold << 16) - 1
    if limit >= 2**31:  # Triton takes the signed 32-bit number with the same bits
        limit -= 2**32
    numbers = (*strides, dropout.first_batch, dropout.first_head, limit)
    return (dropout.seed, *positions), numbers, (True, dropout.in_runs, dropout.scale)
