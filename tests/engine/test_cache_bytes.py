"""What calls leave behind: caches are bounded by bytes, so that masks and layouts of old batches are freed."""

import gc
import random
import sys
import weakref
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks

from cp_dtensor import Causal, Contiguous, Documents, PerDocument, context_parallel
from cp_dtensor.engine import planner
from cp_dtensor.spec.cache import LRUCache

WORLD, DOCUMENTS, STEPS, KEPT = 2, 100, 24, 4


def caches() -> Iterator[LRUCache[Any]]:
    """All caches by bytes of the package, but those of process groups."""
    for name, module in list(sys.modules.items()):
        if name.startswith("cp_dtensor"):
            for value in vars(module).values():
                owner = value if isinstance(value, LRUCache) else getattr(value, "cache_clear", None)
                found = getattr(owner, "__self__", owner)
                if isinstance(found, LRUCache):
                    yield found


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "per document"])
def test_old_batches_are_freed(layout: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(LRUCache[Any]):
        def __init__(self) -> None:
            super().__init__(most_bytes=1, least=KEPT)

    found = list(caches())
    assert len(found) >= 10
    for cache in found:
        monkeypatch.setattr(cache, "_most_bytes", 1)
        monkeypatch.setattr(cache, "_least", KEPT)
    monkeypatch.setattr(planner, "LRUCache", Small)

    seed = random.random()

    def body(rank: int) -> list[weakref.ref[Any]]:
        draw, masks = random.Random(seed), []
        for _ in range(STEPS):
            edges = [0, *accumulate(draw.randint(1, 3) for _ in range(DOCUMENTS))]
            mask = Documents(edges, within=Causal())
            divided = Contiguous() if layout == "contiguous" else PerDocument(edges)
            x = torch.randn(1, 2, divided.local_length(edges[-1], rank, WORLD), 4, requires_grad=True)
            with context_parallel(dist.group.WORLD, mask=mask, layout=divided, method=method, seq_len=edges[-1]):
                for _layer in range(2):
                    F.scaled_dot_product_attention(x, x, x).sum().backward()
            masks += [weakref.ref(mask), *([] if layout == "contiguous" else [weakref.ref(divided)])]
        return masks[len(masks) // STEPS :]  # the first call of a kind fills caches that later ones do not need

    masks = run_ranks(WORLD, body)
    gc.collect()
    for of_rank in masks:
        alive = [each() is not None for each in of_rank]
        assert not any(alive[: len(alive) // 2]), alive


def test_plans_of_other_lengths_stay() -> None:
    """Lengths that change at every call have small plans: thousands fit, and none are dropped together."""

    def body(rank: int) -> int:
        for length in range(2, 80):
            x = torch.randn(1, 1, Contiguous().local_length(length, rank, WORLD), 4)
            with context_parallel(dist.group.WORLD, layout=Contiguous(), seq_len=length):
                F.scaled_dot_product_attention(x, x, x, is_causal=True)
        plans = planner._plans[dist.group.WORLD]  # type: ignore[index]
        assert len(plans) == 78
        return plans.nbytes // len(plans)

    assert max(run_ranks(WORLD, body)) < 16_000
