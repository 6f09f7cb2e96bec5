"""Arguments of every path: a small change of each changes the output as in dense attention."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from cp_dtensor import (
    Causal,
    Contiguous,
    HeadTail,
    Layout,
    SlidingWindow,
    context_parallel,
    context_parallel_attention,
    enable_context_parallel_dispatcher,
    ring_attention,
    ulysses_attention,
)

RANKS, LENGTH = 2, 12
_generator = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, heads, LENGTH, 4, generator=_generator, dtype=torch.float64) for heads in (4, 2, 2))
BIAS = torch.randn(2, 4, LENGTH, LENGTH, generator=_generator, dtype=torch.float64)
SEEN = torch.rand(LENGTH, LENGTH, generator=_generator) > 0.3


def dense(**options: Any) -> torch.Tensor:
    """torch's, which knows neither windows nor a mask beside `is_causal`."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if options.pop("is_causal", False) or isinstance(options.get("mask"), Causal):
        seen = seen.tril()
    if isinstance(window := options.pop("mask", None), SlidingWindow):
        seen = seen.tril(window.right).triu(-window.left)
    bias = options.pop("attn_mask", None)
    if bias is not None and bias.dtype == torch.bool:
        seen, bias = seen & bias, None
    logits = torch.zeros_like(BIAS) if bias is None else bias.expand_as(BIAS)
    logits = logits.masked_fill(~seen, float("-inf"))
    k, v = K, V
    if (sinks := options.pop("sinks", None)) is not None:  # one more key, of value 0
        k, v = (F.pad(tensor, (0, 0, 0, 1)) for tensor in (K, V))
        logits = torch.cat([logits, sinks.view(1, 4, 1, 1).expand(2, 4, LENGTH, 1)], -1)
    if softcap := options.pop("softcap", 0.0):
        scaled = Q @ k.repeat_interleave(2, 1).mT / 2.0
        logits = logits + softcap * torch.tanh(scaled / softcap) - scaled
    out = F.scaled_dot_product_attention(Q, k, v, attn_mask=logits, enable_gqa=True, **options)
    return out.nan_to_num(0.0)  # rows that see nothing


# What is asked for, beginning with nothing: every one must give another output than all the others.
REQUESTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "is_causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "attn_mask": {"attn_mask": SEEN},
    "attn_mask of batch and heads": {"attn_mask": BIAS > 0},
    "additive attn_mask": {"attn_mask": BIAS},
    "additive attn_mask of heads": {"attn_mask": BIAS[:1, :, :1, :1].expand(1, 4, LENGTH, LENGTH).triu(2)},
    "causal attn_mask": {"attn_mask": BIAS, "is_causal": True},
}
WITH_VALUES = {
    "window": {"mask": SlidingWindow(2, 1)},
    "longer window": {"mask": SlidingWindow(3, 1)},
    "window and causal": {"mask": SlidingWindow(3, 2), "is_causal": True},
    "window and attn_mask": {"mask": SlidingWindow(3, 2), "attn_mask": SEEN},
}
WITH_SINKS = {
    "sinks": {"sinks": torch.arange(4).double()},
    "sinks of other heads": {"sinks": torch.arange(4).double().flip(0)},
    "sinks, causal": {"sinks": torch.arange(4).double(), "is_causal": True},
    "sinks, window": {"sinks": torch.arange(4).double(), "mask": SlidingWindow(2, 1)},
    "sinks, scale": {"sinks": torch.arange(4).double(), "scale": 0.3},
    "sinks, additive attn_mask": {"sinks": torch.arange(4).double(), "attn_mask": BIAS},
}
WITH_SOFTCAP = {
    "softcap": {"softcap": 0.5},
    "larger softcap": {"softcap": 2.0},
    "softcap, window, additive attn_mask": {"softcap": 0.5, "mask": SlidingWindow(2, 1), "attn_mask": BIAS},
}
OF_FUNCTIONS = REQUESTS | WITH_VALUES | WITH_SINKS | WITH_SOFTCAP


def local(options: dict[str, Any], layout: Layout, rank: int) -> dict[str, Any]:
    if "attn_mask" not in options:
        return options
    whole = options["attn_mask"]
    rows = whole[(None,) * (4 - whole.dim())]
    return {**options, "attn_mask": shard(rows, layout, rank, RANKS)}


def by_functions(function: Any) -> Any:
    def attend(rank: int, options: dict[str, Any]) -> torch.Tensor:
        q, k, v = (shard(tensor, HeadTail(), rank, RANKS) for tensor in (Q, K, V))
        return function(q, k, v, mesh=dist.group.WORLD, enable_gqa=True, **local(options, HeadTail(), rank))

    return attend


def by_context(rank: int, options: dict[str, Any]) -> torch.Tensor:
    options = dict(options)
    q, k, v = (shard(tensor, HeadTail(), rank, RANKS) for tensor in (Q, K, V))
    with context_parallel(dist.group.WORLD, mask=options.pop("mask", None)):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **local(options, HeadTail(), rank))


def by_dtensors(rank: int, options: dict[str, Any]) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (RANKS,))
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = distribute_tensor(options["attn_mask"], mesh, [Replicate()], src_data_rank=None)
    placed = [distribute_tensor(tensor, mesh, [Shard(2)], src_data_rank=None) for tensor in (Q, K, V)]
    return F.scaled_dot_product_attention(*placed, enable_gqa=True, **options).to_local()


PATHS = {
    "ring_attention": (by_functions(ring_attention), HeadTail(), OF_FUNCTIONS),
    "ulysses_attention": (by_functions(ulysses_attention), HeadTail(), OF_FUNCTIONS),
    "context_parallel_attention": (by_functions(context_parallel_attention), HeadTail(), OF_FUNCTIONS),
    "context_parallel": (by_context, HeadTail(), REQUESTS | WITH_VALUES),
    "DTensor": (by_dtensors, Contiguous(), REQUESTS),
}


@pytest.fixture(autouse=True)
def _dispatcher() -> Iterator[None]:
    with enable_context_parallel_dispatcher():
        yield


@pytest.mark.parametrize("path", PATHS)
def test_every_argument_is_heeded(path: str) -> None:
    attend, layout, requests = PATHS[path]
    by_rank = run_ranks(RANKS, lambda rank: {name: attend(rank, request) for name, request in requests.items()})
    for rank, outs in enumerate(by_rank):
        for name, request in requests.items():
            expected = shard(dense(**request), layout, rank, RANKS)
            torch.testing.assert_close(
                outs[name], expected, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
            )
            others = [other for other in requests if other != name and torch.equal(outs[other], outs[name])]
            assert not others, f"{name} gives the same as {others}"


@pytest.mark.parametrize("path", PATHS)
def test_dropout_is_heeded(path: str) -> None:
    attend, _, _ = PATHS[path]

    def body(rank: int) -> list[torch.Tensor]:
        return [attend(rank, {"dropout_p": p}) for p in (0.0, 0.2, 0.2, 1.0)]

    for without, one, another, everything in run_ranks(RANKS, body):
        assert not torch.equal(one, without)
        assert not torch.equal(one, another), "another draw"
        assert torch.equal(everything, torch.zeros_like(everything))


@pytest.mark.parametrize("path", ["ring_attention", "ulysses_attention", "context_parallel_attention"])
def test_lse_is_that_of_what_is_seen(path: str) -> None:
    attend, layout, requests = PATHS[path]
    lse_of = run_ranks(
        RANKS, lambda rank: {name: attend(rank, {**r, "return_lse": True})[1] for name, r in requests.items()}
    )
    for rank, by_name in enumerate(lse_of):
        texts = [tuple(lse.flatten().tolist()) for lse in by_name.values()]
        assert len(set(texts)) == len(texts), "every request has another softmax denominator"
        expected = (Q @ K.repeat_interleave(2, 1).mT / 2.0 + BIAS).logsumexp(-1)
        torch.testing.assert_close(by_name["additive attn_mask"], shard(expected, layout, rank, RANKS))
