"""Launches of compiled functions, recorded in one call and repeated with other tensors.

Calls of several functions, with tables: tests/attention/test_package_flex.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cp_dtensor.attention.backends.launches import Launches

SHAPE = (3, 4)


def tensors(seed: int) -> tuple[Tensor, ...]:
    """Returns an input and two results, which are not written yet."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    return values, torch.full(SHAPE, float("nan")), torch.full(SHAPE, float("nan"))


def alone(x: Tensor, counts: Tensor, out: Tensor) -> None:
    """Adds to its workspace, which begins as zeros."""
    counts += 1
    out.copy_(x * counts)


def test_calls_are_repeated_with_other_tensors_and_a_workspace_of_zeros() -> None:
    first, out, _ = tensors(0)
    launches = Launches.of([(alone, (first, torch.ones(()), out))], (first, out))
    assert launches is not None
    for seed in (1, 2):
        x, result, _ = tensors(seed)
        launches.launch((x, result))
        assert torch.equal(result, x)
    assert out.isnan().all(), "later calls do not write to the tensors of the first one"
    assert not [each for _, arguments, _ in launches.calls for each in arguments if isinstance(each, Tensor)]


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
