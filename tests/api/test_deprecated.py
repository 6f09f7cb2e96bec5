"""Old spellings of keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks

from cp_dtensor import Striped, context_parallel, context_parallel_shard, context_parallel_unshard, varlen_attention
from cp_dtensor.integrations.unified import UlyssesAttnMode

RANKS, LENGTH = 2, 8


def in_context(**options: Any) -> torch.Tensor:
    x = torch.arange(LENGTH, dtype=torch.float64).view(1, 1, LENGTH, 1).repeat(1, 1, 1, 2)
    with context_parallel(dist.group.WORLD, **options):
        (shard,) = context_parallel_shard(dist.group.WORLD, [x], [2])
        return F.scaled_dot_product_attention(shard, shard, shard, is_causal=True)


def in_a_mode(**options: Any) -> torch.Tensor:
    x = torch.arange(LENGTH, dtype=torch.float64).view(1, 1, LENGTH, 1)[:, :, dist.get_rank() :: RANKS]
    with UlyssesAttnMode(layout=Striped(1), **options):
        return F.scaled_dot_product_attention(x, x, x)


def packed(**options: Any) -> torch.Tensor:
    x = dist.get_rank() + torch.linspace(0, 1, 4 * 3 * 2, dtype=torch.float64).view(4, 3, 2)
    result = varlen_attention(x, x, x, mesh=dist.group.WORLD, cu_seqlens=[0, LENGTH], **options)
    assert isinstance(result, torch.Tensor)
    return result


CALLS: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any], dict[str, Any]]] = {
    "shard": (
        lambda **dims: context_parallel_shard(dist.group.WORLD, [torch.arange(LENGTH)], **dims)[0],
        {"seq_dims": [0]},
        {"buffer_seq_dims": [0]},
    ),
    "unshard": (
        lambda **dims: context_parallel_unshard(dist.group.WORLD, [torch.arange(4) + dist.get_rank()], **dims)[0],
        {"seq_dims": [0]},
        {"buffer_seq_dims": [0]},
    ),
    "context": (in_context, {"seq_lens": [LENGTH]}, {"seq_len": LENGTH}),
    "mode": (in_a_mode, {"seq_lens": [LENGTH]}, {"seq_len": LENGTH}),
    "varlen": (packed, {"window": (1, None)}, {"window_size": (1, -1)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_old_spelling_warns_and_gives_the_same(name: str) -> None:
    call, old, new = CALLS[name]
    ((old_name, _),), ((new_name, _),) = old.items(), new.items()

    def both(rank: int) -> None:
        with pytest.raises(TypeError, match=f"got {new_name}= and its old spelling {old_name}="):
            call(**old, **new)

    expected = run_ranks(RANKS, lambda rank: call(**new))
    with pytest.warns(DeprecationWarning, match=f"{old_name}= is now {new_name}=") as warned:
        found = run_ranks(RANKS, lambda rank: call(**old))
    assert {warning.filename for warning in warned} == {__file__}
    assert all(map(torch.equal, found, expected))
    run_ranks(RANKS, both)
