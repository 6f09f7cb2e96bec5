"""Dropout whose pattern is a function of a seed and of global positions, and not of tiling, layout or kernel.

Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes four words of
32 bits from a counter. Here the counter is (query position i, key position j, batch row, query head), where i has bit 3
clear and j has bits 0 and 3 clear. The words hold 8 numbers of 16 bits, for query positions i and i + 8 and key
positions j, j + 1, j + 8 and j + 9. The module `common` has the reason for this choice of 8 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cp_dtensor.plan.tiling import RUN

PHILOX_ROUNDS = 7
"""The fewest rounds that pass BigCrush in the paper. 10 rounds would cost the kernels 75% more products."""

PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_BITS = 16
_WORD = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of softmax weights: weight (b, h, i, j) is kept iff its number is >= `threshold`, then times `scale`.

    The number is uniform in [0, 2^16) and a function of `seed`, q_positions_i, kv_positions_j, first_batch + b and
    first_head + h alone. The lse is that of the softmax without dropout, so partial results merge as without dropout.

    Args:
        p: probability to drop, in [0, 1], rounded to a multiple of 2^-16 (not to 0 or 1); 1 drops everything.
        seed: int64, one element, on the device of q; kernels read it, so the host does not wait for the GPU.
        q_positions: int32, (S,) or (B, S), the last dim contiguous: global positions of the rows.
        kv_positions: int32, (T,) or (B, T), the last dim contiguous: global positions of the columns.
        first_batch, first_head: global index of q's first batch row and first query head.
        in_runs: True only if `are_in_runs` holds for both positions; kernels are then faster.
    """

    p: float
    seed: Tensor
    q_positions: Tensor
    kv_positions: Tensor
    first_batch: int = 0
    first_head: int = 0
    in_runs: bool = False

    @property
    def threshold(self) -> int:
        """Number of the 2^16 values that are dropped."""
        return round(self.p) << _BITS if self.p in (0, 1) else min(max(1, round(self.p * 2**_BITS)), 2**_BITS - 1)

    @property
    def scale(self) -> float:
        """The factor of kept weights, so that the mean is that without dropout; 1 if none is kept."""
        return 2**_BITS / (2**_BITS - self.threshold) if self.p < 1 else 1.0


def are_in_runs(positions: Tensor) -> bool:
    """Return whether positions, along the last dim, are in runs of 16 from multiples of 16; the last may be shorter.

    Reads the values: pass tensors on the host.

    >>> are_in_runs(torch.cat([torch.arange(32, 64), torch.arange(0, 5)])), are_in_runs(torch.arange(3, 40))
    (True, False)
    """
    index = torch.arange(positions.size(-1), device=positions.device)
    begin = positions[..., index // RUN * RUN]
    return bool(((begin % RUN == 0) & (positions == begin + index % RUN)).all())


def kept_reference(dropout: Dropout, batch: int, heads: int, rows: range, columns: range) -> Tensor:
    """Return (batch, heads, rows, columns): True for kept weights.

    >>> position = torch.arange(8, dtype=torch.int32)
    >>> dropout = Dropout(0.5, torch.tensor(1), position, position)
    >>> kept_reference(dropout, 1, 1, range(2), range(8)).int().tolist()
    [[[[1, 1, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 1, 0, 1]]]]
    """
    device = dropout.seed.device
    q_position = torch.atleast_2d(dropout.q_positions)[:, None, rows.start : rows.stop, None].long()
    kv_position = torch.atleast_2d(dropout.kv_positions)[:, None, None, columns.start : columns.stop].long()
    counter = (
        q_position & (_WORD - 8),
        kv_position & (_WORD - 9),
        torch.arange(batch, device=device).view(-1, 1, 1, 1) + dropout.first_batch,
        torch.arange(heads, device=device).view(-1, 1, 1) + dropout.first_head,
    )
    words = philox_reference(dropout.seed.view(()), counter)
    is_second = (kv_position & 8) != 0
    halves = [torch.where(is_second, words[i + 1], words[i]) for i in (0, 2)]
    word = torch.where((q_position & 8) != 0, halves[1], halves[0])
    return ((word >> (kv_position & 1) * _BITS) & (2**_BITS - 1)) >= dropout.threshold


def philox_reference(seed: Tensor, counter: tuple[Tensor, ...], rounds: int = PHILOX_ROUNDS) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32, in int64, from counters in [0, 2^32) that broadcast and a seed of 64 bits.

    Counters broadcast as late as possible: most of the first two rounds is computed for rows or columns alone.
    """
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high_0, low_0 = _product(PHILOX_FACTORS[0], c0)
        high_1, low_1 = _product(PHILOX_FACTORS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = (key_0 + PHILOX_KEY_STEPS[0]) & _WORD, (key_1 + PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(factor: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of the product with x in [0, 2^32), for a factor in [2^31, 2^32).

    The product with factor - 2^32 fits 63 bits; its lower bits are equal, its upper bits are less by x.
    """
    product = x * (factor - 2**32)
    return (product >> 32) + x, product & _WORD
