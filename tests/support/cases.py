"""Number of cases of random differential tests: `pytest --cases N` for nights."""

from __future__ import annotations

import pytest

_chosen: list[int] = []


def choose_cases(config: pytest.Config) -> None:
    """Takes the number of the command line, before tests are imported."""
    number = config.getoption("--cases")
    if number is not None:
        if number < 1:
            raise pytest.UsageError(f"--cases: expected a positive integer, got {number}")
        _chosen[:] = [number]


def examples(usual: int) -> int:
    """Returns `usual`, or the number of the command line."""
    return _chosen[0] if _chosen else usual
