"""Launches of compiled functions, recorded in one call and repeated with other tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cp_dtensor.attention.backends.launches import Launches

SHAPE = (3, 4)


def tensors(seed: int) -> tuple[Tensor, ...]:
    """Returns an input and two results, which are not written yet."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return values, torch.full(SHAPE, float("nan")), torch.full(SHAPE, float("nan"))


def first(x: Tensor, doubled: Tensor, flag: object) -> None:
    """Writes all of its workspace."""
    assert flag is None
    doubled.copy_(2 * x)


def second(
    doubled: Tensor, tables: tuple[Tensor, ...], counts: Tensor, factor: float, out: Tensor, also: Tensor
) -> None:
    """Adds to its workspace, which begins as zeros."""
    assert counts.dtype == torch.int32
    assert not counts.any()
    counts += 1
    torch.add(doubled * factor, tables[0], out=out)
    also.copy_(doubled * counts)


def recorded(values: tuple[Tensor, ...], table: Tensor) -> list[tuple[Any, tuple[Any, ...]]]:
    """Makes a call of two functions; returns it with its arguments."""
    x, out, also = values
    doubled, counts = torch.empty(SHAPE), torch.zeros(SHAPE, dtype=torch.int32)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (first, (x.detach(), doubled, None)),
        (second, (doubled, (table, table[:0]), counts, 3.0, out.detach(), also)),
    ]
    for function, arguments in calls:
        function(*arguments)
    return calls


def test_calls_are_repeated_with_other_tensors() -> None:
    table = torch.randn(SHAPE)
    values = tensors(0)
    launches = Launches.of(recorded(values, table), values, [table, table[:0]])
    assert launches is not None
    table += 1  # is read again, not copied
    for seed in (1, 2):
        x, out, also = others = tensors(seed)
        launches.launch(others)
        assert torch.equal(out, 6 * x + table)
        assert torch.equal(also, 2 * x)
    kept = [each for _, arguments, _ in launches.calls for each in arguments if isinstance(each, Tensor)]
    assert not kept, "tensors of a call do not stay in the record"
    assert torch.equal(values[2], 2 * values[0]), "and later calls do not write to those of the first one"


def alone(x: Tensor, counts: Tensor, out: Tensor) -> None:
    """Adds to its workspace, which begins as zeros."""
    counts += 1
    out.copy_(x * counts)


def test_the_workspace_of_a_single_function_begins_as_zeros() -> None:
    x, out, _ = tensors(0)
    launches = Launches.of([(alone, (x, torch.ones(()), out))], (x, out))
    assert launches is not None
    for seed in (1, 2):
        x, out, _ = tensors(seed)
        launches.launch((x, out))
        assert torch.equal(out, x)


@pytest.mark.parametrize("problem", ["nothing called", "a tensor twice", "another object", "a tensor in a tuple"])
def test_calls_that_cannot_be_repeated(problem: str) -> None:
    x, out, also = tensors(0)
    calls, of_call = {
        "nothing called": ([], (x, out)),
        "a tensor twice": ([(alone, (x, x, out))], (x, x, out)),
        "another object": ([(alone, (x, object(), out))], (x, out)),
        "a tensor in a tuple": ([(alone, (x, (None, also), out))], (x, out)),
    }[problem]
    assert Launches.of(calls, of_call) is None
    assert Launches.of([(alone, (x, also, out))], (x, out)) is not None
