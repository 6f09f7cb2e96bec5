"""Dropouts at positions of each kind, for tests of the attention kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from cp_dtensor.attention.triton.dropout import Dropout


def moved(dropout: Dropout, device: str) -> Dropout:
    """Returns the dropout with its tensors on a device."""
    names = ("seed", "q_positions", "kv_positions")
    return replace(dropout, **{name: getattr(dropout, name).to(device) for name in names})


def dropout_of(rows: int, columns: int, p: float = 0.3) -> Dropout:
    """Returns a dropout for a batch of 2 with different, unordered positions."""
    generator = torch.Generator().manual_seed(columns)
    positions = [torch.randint(-(2**31), 2**31, (2, n), generator=generator).int() for n in (rows, columns)]
    return Dropout(p, torch.tensor(-(2**62) - 12345), *positions, first_batch=3, first_head=5)


def dropout_in_runs(rows: int, columns: int, p: float = 0.3) -> Dropout:
    """Returns a dropout like `dropout_of`, in unordered runs of 16 positions that begin at multiples of 16."""
    generator = torch.Generator().manual_seed(columns)
    within = torch.arange(max(rows, columns)) % 16
    positions = [
        torch.stack([(torch.randperm(99, generator=generator) * 16 - 800).repeat_interleave(16)[:n] for _ in range(2)])
        + within[:n]
        for n in (rows, columns)
    ]
    return replace(
        dropout_of(rows, columns, p), q_positions=positions[0].int(), kv_positions=positions[1].int(), in_runs=True
    )


def ordered(p: float, seed: int, rows: int, columns: int) -> Dropout:
    """Returns a dropout at positions from 0 on."""
    return Dropout(p, torch.tensor(seed), *(torch.arange(n, dtype=torch.int32) for n in (rows, columns)))
