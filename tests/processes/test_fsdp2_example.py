"""The script of docs/start.md: losses on two processes equal those of one device without FSDP2."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from support.processes import Processes

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 3


def losses(rank: int, cp_size: int) -> list[float]:
    """Of the script, on every rank."""
    sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("fsdp2").train(cp_size, STEPS)


def alone(data_ranks: int) -> list[float]:
    """Of one device, on the batches of all ranks."""
    sys.path.insert(0, str(EXAMPLES))
    fsdp2 = importlib.import_module("fsdp2")
    torch.manual_seed(0)
    model = fsdp2.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    means = []
    for step in range(STEPS):
        batches = [fsdp2.batch(step, data_rank, "cpu") for data_rank in range(data_ranks)]
        tokens, labels, positions = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = model(tokens, positions, labels) / (labels != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    return means


@pytest.mark.parametrize("cp_size", [2, 1])
def test_losses_are_those_of_one_device(two_processes: Processes, cp_size: int) -> None:
    expected = alone(2 // cp_size)
    for found in two_processes.run(losses, cp_size):
        assert found == pytest.approx(expected, abs=2e-5)


def test_the_script_has_fewer_than_100_lines() -> None:
    assert len((EXAMPLES / "fsdp2.py").read_text().splitlines()) < 100
