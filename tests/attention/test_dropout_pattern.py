"""The dropout pattern: a function of seed and positions, with independent numbers from each counter."""

from __future__ import annotations

from itertools import product
from math import comb

import pytest
import torch
from support.dropouts import dropout_of, ordered

from cp_dtensor.attention.triton.dropout import are_in_runs, kept_reference, philox_reference

ONES = 2**32 - 1
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
# Of Random123, the library of the paper's authors: rounds, counter, key, words.
KNOWN_ANSWERS = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, (ONES, ONES), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, PI, (0xA4093822, 0x299F31D0), (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers(
    rounds: int, counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    seed = key[0] + (key[1] - 2**32 * (key[1] >> 31)) * 2**32  # 64 bits as a signed number
    got = philox_reference(torch.tensor(seed), tuple(torch.tensor(x) for x in counter), rounds)
    assert tuple(map(int, got)) == words


def test_an_element_is_a_number_of_its_counter() -> None:
    """2 query positions and 4 key positions share a counter."""
    dropout = dropout_of(50, 40)
    kept = kept_reference(dropout, 2, 3, range(1, 50), range(2, 40))
    for batch, head, row, column in product((0, 1), (0, 2), range(1, 50, 3), range(2, 40)):
        q, kv = int(dropout.q_positions[batch, row]), int(dropout.kv_positions[batch, column])
        counter = ((q - (q & 8)) % 2**32, (kv - (kv & 9)) % 2**32, 3 + batch, 5 + head)
        words = philox_reference(dropout.seed, tuple(torch.tensor(x) for x in counter))
        number = int(words[(q >> 3 & 1) * 2 + (kv >> 3 & 1)]) >> 16 * (kv & 1) & 0xFFFF
        assert kept[batch, head, row - 1, column - 2].item() == (number / 2**16 >= dropout.threshold / 2**16)


def test_probabilities_are_multiples_of_2_to_the_minus_16() -> None:
    for p, threshold in ((0.0, 0), (1e-9, 1), (0.1, 6554), (0.5, 2**15), (1 - 1e-9, 2**16 - 1), (1.0, 2**16)):
        dropout = ordered(p, 1, 2, 2)
        assert dropout.threshold == threshold
        assert dropout.scale * (1 - threshold / 2**16) == pytest.approx(float(p < 1), rel=1e-12)


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (torch.arange(40), True),
        (torch.arange(-32, 7), True),
        (torch.cat([torch.arange(64, 96), torch.arange(16, 33)]), True),
        (torch.arange(0), True),
        (torch.stack([torch.arange(20), torch.arange(20) + 16]), True),
        (torch.stack([torch.arange(20), torch.arange(20) + 1]), False),
        (torch.arange(8, 48), False),
        (torch.arange(0, 80, 2), False),
        (torch.cat([torch.arange(8), torch.arange(16, 32)]), False),
        (torch.arange(20).flip(0), False),
    ],
)
def test_what_runs_are(positions: torch.Tensor, expected: bool) -> None:
    assert are_in_runs(positions) is expected


NEAR = [(0, 1), (1, 0), (1, 1), (0, 8), (8, 0), (8, 8), (0, 9), (8, 1), (8, 9), (0, 16), (16, 0)]
"""Distances of elements in rows and columns, those of what shares a counter among them."""


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.97, 1.0])
def test_fractions_are_kept(p: float) -> None:
    """The kept fraction of all weights, and of each row, column and head."""
    count = 200
    kept = kept_reference(ordered(p, 7, count, count), 2, 3, range(count), range(count)).double()
    for dims in ((), (0, 1, 2), (0, 1, 3), (0, 2, 3)):
        fractions = kept.mean(dims) if dims else kept.mean()
        drawn = kept.numel() / fractions.numel()
        spread = (p * (1 - p) / drawn) ** 0.5
        tail = 0 if p in (0, 1) else 10 / drawn  # of small numbers of elements that are dropped
        assert ((fractions - (1 - p)).abs() <= 5 * spread + tail).all()


def test_seeds_heads_batch_rows_and_neighbours_are_independent() -> None:
    count = 100
    kept = kept_reference(ordered(0.5, 1, count, count), 2, 2, range(count), range(count)).double() - 0.5
    other = kept_reference(ordered(0.5, 1 + 2**32, count, count), 2, 2, range(count), range(count)).double() - 0.5
    pairs = [(kept, other), (kept, kept.mT), (kept[0], kept[1]), (kept[:, 0], kept[:, 1])]
    pairs += [(kept[..., r:, c:], kept[..., : count - r, : count - c]) for r, c in NEAR]
    pairs += [(kept[..., r:, : count - c], kept[..., : count - r, c:]) for r, c in NEAR]
    for x, y in pairs:
        assert abs(4 * (x * y).mean().item()) <= 5 / x.numel() ** 0.5


def test_what_shares_a_counter_is_independent() -> None:
    """Each pair of the 8 elements, at a probability that is no half, and how many of the 8 are kept."""
    count, p = 320, 0.2
    kept = kept_reference(ordered(p, 3, count, count), 2, 2, range(count), range(count)).double()
    runs = kept.unflatten(-1, (-1, 2, 4, 2)).unflatten(2, (-1, 2, 8))
    groups = runs.movedim((3, 6, 8), (0, 1, 2)).reshape(8, -1)  # rows, halves of runs of columns, and neighbours
    drawn = groups.size(1)
    assert ((groups.mean(1) - (1 - p)).abs() <= 5 * (p * (1 - p) / drawn) ** 0.5).all()
    correlation = groups.corrcoef() - torch.eye(8, dtype=torch.float64)
    assert (correlation.abs() <= 5 / drawn**0.5).all()
    for number in range(9):
        expected = comb(8, number) * (1 - p) ** number * p ** (8 - number)
        found = (groups.sum(0) == number).double().mean().item()
        assert abs(found - expected) <= 5 * (expected / drawn) ** 0.5
