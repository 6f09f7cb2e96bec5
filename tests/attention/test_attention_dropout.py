"""Dropout in masked attention: its pattern is a function of seed and positions, equal in kernels and reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.attention_kernels import (
    EXACT,
    NARROW,
    SCALE,
    SMALL,
    biases_of,
    check,
    draw,
    masks_of,
    patterns,
    through_kernels,
)
from support.devices import interpreted
from support.dropouts import dropout_in_runs, dropout_of, moved

from cp_dtensor.attention.masked import Dropout, RowMask, attention_forward
from cp_dtensor.attention.triton.dropout import kept_reference


def moved_by(dropout: Dropout, rows: int, columns: int, step: int = 1) -> Dropout:
    """Positions times `step`, and moved on."""
    positions = dropout.q_positions * step + rows, dropout.kv_positions * step + columns
    return replace(dropout, q_positions=positions[0], kv_positions=positions[1], in_runs=False)


@interpreted
@pytest.mark.parametrize(("blocks", "tma"), [((16, 16), False), ((64, 32), True), ((16, 64), True)], ids=str)
def test_kernels_of_runs_keep_what_the_reference_keeps(device: str, blocks: tuple[int, int], tma: bool) -> None:
    rows, columns = 22, 40
    dropout = dropout_in_runs(rows, columns)
    expected = kept_reference(dropout, 2, 2, range(rows), range(columns))
    config = replace(SMALL, block_rows=blocks[0], block_columns=blocks[1], tma=tma)
    for got in patterns(dropout, rows, columns, config, device):
        assert torch.equal(got, expected)


@interpreted
@pytest.mark.parametrize(
    ("by", "step"),
    [
        ((1, 7), 1), ((7, 1), 1), ((0, 1), 2), ((3, 0), 5),
        *(pytest.param((n, 8 - n), 1, marks=pytest.mark.sweep) for n in (2, 3, 4, 5, 6)),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_keep_what_the_reference_keeps_wherever_runs_begin(device: str, by: tuple[int, int], step: int) -> None:
    """Moved by a part of a run, and in stripes."""
    rows, columns = 17, 32
    dropout = moved_by(dropout_in_runs(rows, columns), *by, step)
    expected = kept_reference(dropout, 2, 2, range(rows), range(columns))
    for got in patterns(dropout, rows, columns, SMALL, device):
        assert torch.equal(got, expected)


@interpreted
@pytest.mark.parametrize(
    ("kind", "bias"), [("full", "none"), ("causal", "boolean"), ("any intervals", "additive"), ("documents", "none")]
)
def test_kernels_compute_what_the_reference_computes(device: str, kind: str, bias: str) -> None:
    tensors = draw(device, 20, 37, heads=(2, 1), batch=2)
    check(tensors, masks_of(20, 37)[kind], biases_of(2, 20, 37)[bias], replace(SMALL, tma=True), dropout_of(20, 37))


@interpreted
@pytest.mark.parametrize("dim", [64, 128])
def test_default_configs(device: str, dim: int) -> None:
    tensors = draw(device, 70, 75, heads=(2, 1), dims=(dim, dim), dtype=NARROW[device], batch=2)
    for dropout in (dropout_of(70, 75), dropout_in_runs(70, 75)):
        check(tensors, RowMask(causal_offset=5), config=None, dropout=dropout)


@interpreted
def test_everything_may_be_dropped(device: str) -> None:
    tensors = draw(device, 18, 21, batch=2, dtype=EXACT[device])
    dropout = moved(dropout_of(18, 21, 1.0), device)
    results = through_kernels(tensors, tensors[0], RowMask(), None, SMALL, dropout)
    assert all((x == 0).all() for x in (results[0], *results[2:]))
    assert torch.equal(results[1], through_kernels(tensors, tensors[0], RowMask(), None, SMALL)[1])
    assert (attention_forward(*tensors, RowMask(), SCALE, dropout=dropout)[0] == 0).all()
