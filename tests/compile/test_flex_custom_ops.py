"""Operators of compiled FlexAttention of shards, and refusals in compiled code, on two processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import compiled, fresh
from support.flex_checks import block_mask, context, draw, window
from support.problems import shard
from support.processes import Processes
from support.ranks import RanksFailed
from torch.nn.attention.flex_attention import flex_attention

from cp_dtensor import Causal, HeadTail, PerDocument
from cp_dtensor.engine.call import Call
from cp_dtensor.integrations.unified import RingAttnMode


def refusals(rank: int) -> None:
    fresh()
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64) + rank
    masked = compiled(lambda q, mask: flex_attention(q, q, q, block_mask=mask), backend="eager")

    def fails(match: str, call: Callable[[], object]) -> None:
        with torch.no_grad(), pytest.raises(Exception, match=match):
            call()

    with context():
        fails(r"block mask .*, got one of \(8, 8\)", lambda: masked(q, block_mask(window, 8)))
        message = r"block mask .*, got one of \(17, 17\)" if rank == 0 else "disagree about global"
        fails(message, lambda: masked(q, block_mask(window, 17)))
    of_one_length = compiled(lambda q, mask: flex_attention(q, q, q, block_mask=mask), backend="eager")
    layout = PerDocument([0, 16])
    with context(layout=layout), torch.no_grad():
        of_one_length(q, block_mask(window, 16))
    with context(layout=layout, mask=Causal()):  # of an equal key
        fails("does not take the mask of its context", lambda: of_one_length(q, block_mask(window, 16)))


def each_rank_alone(rank: int) -> None:
    fresh()
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64) + rank
    code = compiled(lambda q: flex_attention(q, q, q), backend="eager")
    with torch.no_grad(), RingAttnMode(dist.group.WORLD):
        code(q)
        with RingAttnMode.disable(), pytest.raises(Exception, match="left to each rank alone"):
            code(q)


def one_rank_differs(rank: int) -> None:
    fresh()
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    code = compiled(lambda q, mask: flex_attention(q, q, q, block_mask=mask), backend="eager")
    with torch.no_grad(), context(debug=True):
        code(q, block_mask(window, 16 + rank))


def test_in_debug_mode_masks_of_different_lengths_are_refused_on_all_ranks(two_processes: Processes) -> None:
    with pytest.raises(RanksFailed) as failed:
        two_processes.run(one_rank_differs)
    assert all("disagree about global" in str(error) for error in failed.value.errors)


def operators(rank: int) -> None:
    """Real and fake implementations agree."""
    q, k, v = (shard(tensor, HeadTail(), rank, 2) for tensor in draw(61)[:3])
    arguments = q, k, v, Call.of(dist.group.WORLD, layout=HeadTail()).key, 61, 61, True, 0.5, True
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cp_dtensor.flex_keys.default, arguments, test_utils=checks)


@pytest.mark.parametrize("body", [refusals, each_rank_alone, operators])
def test_on_two_processes(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
