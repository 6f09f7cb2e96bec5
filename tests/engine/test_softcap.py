"""Softcap of ranks that disagree, and values that are refused (`masked_checks` has the random cases)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import recorded_collectives
from support.ranks import run_ranks

from cp_dtensor import context_parallel_attention

Q = torch.zeros(1, 2, 4, 8)


def test_ranks_that_disagree() -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"disagree about softcap"):
            context_parallel_attention(Q, Q, Q, mesh=dist.group.WORLD, softcap=float(rank), debug=True)

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("softcap", "error"),
    [(-1.0, ValueError), (float("inf"), ValueError), (float("nan"), ValueError), (None, TypeError)],
)
def test_bad_values_are_refused_before_any_collective(softcap: Any, error: type[Exception]) -> None:
    with recorded_collectives() as collectives, pytest.raises(error, match="expected softcap to be"):
        run_ranks(2, lambda _: context_parallel_attention(Q, Q, Q, mesh=dist.group.WORLD, softcap=softcap))
    assert not collectives
