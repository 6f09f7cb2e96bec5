"""Dropout whose pattern is a function of a seed and of global positions, and so of no tiling, layout or kernel.

Philox4x32 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011) makes four words of
32 bits from a counter. Here the counter is (query position, key position, batch row, query head), and its words are 8
numbers of 16 bits: for 2 query positions, that of the counter and the one 8 later, and 4 key positions, that of the
counter, the next, and those 8 later. So query positions of counters have bit 3 clear, and key positions bits 0 and 3.
Which 8 elements share a counter is chosen for the kernels, see `attention_philox`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from cp_dtensor.plan.tiling import RUN

PHILOX_ROUNDS = 7
"""The fewest in which the paper finds no flaw (BigCrush). Kernels wait for them: 10 would cost 75% more products."""

PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

_BITS = 16
_WORD = 2**32 - 1


@dataclass(frozen=True, eq=False)
class Dropout:
    """Element (b, h, i, j) of the softmax is kept iff its number is >= `threshold`, and then multiplied by `scale`.

    The number is a function of `seed`, q_positions_i, kv_positions_j, first_batch + b and first_head + h alone, uniform
    in [0, 2^16). lse is that of the softmax before: partial results merge as they do without dropout.

    Args:
        p: probability to drop, in [0, 1], rounded to a multiple of 2^-16 (not to 0 or 1); 1 drops everything.
        seed: int64, of one element, on the device of q; read by the kernels, which does not wait for the GPU.
        q_positions: int32, (S,) or (B, S), the last dim contiguous: which rows of the whole problem these are.
        kv_positions: int32, (T,) or (B, T), likewise of columns.
        first_batch, first_head: of the whole problem, where these of q begin; heads are query heads.
        in_runs: promises that rows and columns are runs as `are_in_runs` says, for which kernels are faster.
    """

    p: float
    seed: torch.Tensor
    q_positions: torch.Tensor
    kv_positions: torch.Tensor
    first_batch: int = 0
    first_head: int = 0
    in_runs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"a probability to drop is in [0, 1], got {self.p}")
        if self.seed.dtype != torch.int64 or self.seed.numel() != 1:
            raise ValueError(f"seed must be one int64, got {self.seed.dtype} of {tuple(self.seed.shape)}")
        for x in (self.q_positions, self.kv_positions):
            if x.dtype != torch.int32 or x.dim() not in (1, 2) or (x.stride(-1) != 1 and x.size(-1) > 1):
                raise ValueError(
                    f"positions must be int32 of one or two dims, the last contiguous; got {x.dtype} of "
                    f"{tuple(x.shape)} with strides {x.stride()}"
                )

    @property
    def threshold(self) -> int:
        """How many of the 2^16 numbers are dropped."""
        return round(self.p) << _BITS if self.p in (0, 1) else min(max(1, round(self.p * 2**_BITS)), 2**_BITS - 1)

    @property
    def scale(self) -> float:
        """What kept elements are multiplied with, so that the mean is that without dropout; 1 if none is kept."""
        return 2**_BITS / (2**_BITS - self.threshold) if self.p < 1 else 1.0

    def tile(self, rows: slice, columns: slice) -> Dropout:
        """That of some rows and columns."""
        return replace(
            self,
            q_positions=self.q_positions[..., rows],
            kv_positions=self.kv_positions[..., columns],
            in_runs=self.in_runs
            and _begins_with_run(rows, self.q_positions)
            and _begins_with_run(columns, self.kv_positions),
        )


def _begins_with_run(part: slice, positions: torch.Tensor) -> bool:
    start, _, step = part.indices(positions.size(-1))
    return start % RUN == 0 and step == 1


def are_in_runs(positions: torch.Tensor) -> bool:
    """Whether positions, along the last dim, come in runs of 16 (the last one may be shorter) from multiples of 16 on.

    Looks at the numbers, so they had better be on the host.

    >>> are_in_runs(torch.cat([torch.arange(32, 64), torch.arange(0, 5)])), are_in_runs(torch.arange(3, 40))
    (True, False)
    """
    index = torch.arange(positions.size(-1), device=positions.device)
    begin = positions[..., index // RUN * RUN]
    return bool(((begin % RUN == 0) & (positions == begin + index % RUN)).all())


def kept_reference(dropout: Dropout, batch: int, heads: int, rows: range, columns: range) -> torch.Tensor:
    """(batch, heads, rows, columns): whether elements are kept.

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


def philox_reference(
    seed: torch.Tensor, counter: tuple[torch.Tensor, ...], rounds: int = PHILOX_ROUNDS
) -> tuple[torch.Tensor, ...]:
    """The four words of Philox4x32, in int64, from counters in [0, 2^32) that broadcast and a seed of 64 bits.

    Computed as late as it can be broadcast: the first two rounds are mostly of rows or of columns alone.
    """
    key_0, key_1 = seed & _WORD, (seed >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high_0, low_0 = _product(PHILOX_FACTORS[0], c0)
        high_1, low_1 = _product(PHILOX_FACTORS[1], c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, low_1, high_0 ^ c3 ^ key_1, low_0
        key_0, key_1 = (key_0 + PHILOX_KEY_STEPS[0]) & _WORD, (key_1 + PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(factor: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Upper and lower 32 bits of the product with x in [0, 2^32), for a factor in [2^31, 2^32).

    The product with factor - 2^32 fits 63 bits; it has the same lower bits, and upper ones that are less by x.
    """
    product = x * (factor - 2**32)
    return (product >> 32) + x, product & _WORD
