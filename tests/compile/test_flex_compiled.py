"""FlexAttention of shards in compiled code, on two processes: called in contexts, whole models, and as a function.

FlexAttention has no gradients on CPUs; tests of gradients use a stand-in that torch.compile differentiates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import compiled, fresh, no_compilation
from support.flex_checks import (
    SCALE,
    block_mask,
    context,
    distance,
    documents,
    draw,
    one_device,
    traceable,
    window,
)
from support.problems import assert_close, shard
from support.processes import Processes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Balanced,
    BalancedBlocks,
    HeadTail,
    Layout,
    MirroredBatch,
    PerDocument,
    SlidingWindow,
    Striped,
    _torch,
    context_parallel_flex_attention,
)


def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
    """FlexAttention between other operations."""
    return flex_attention(q * 2.0, k, v, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True) * 3.0


def function(layout: Layout, seq_len: int | None) -> Callable[..., torch.Tensor]:
    """As `model`, by `context_parallel_flex_attention`."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
        out = context_parallel_flex_attention(
            q * 2.0, k, v, mesh=dist.group.WORLD, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True,
            layout=layout, seq_len=seq_len,
        )  # fmt: skip
        return out * 3.0  # type: ignore[operator]

    return call


def on_one_device(whole: list[torch.Tensor], mask: Any, score: Any) -> list[torch.Tensor]:
    out, dq, dk, dv, _ = one_device([whole[0] * 2.0, *whole[1:3], whole[3] * 3.0], mask, score)
    return [out * 3.0, dq * 2.0, dk, dv]


CASES = ((documents, distance), (window, None), (None, distance), (None, None))


def forward(rank: int, layout: Layout, length: int, options: dict[str, Any], number: int) -> None:
    fresh()
    in_context = compiled(model, **options)
    alone = compiled(flex_attention, **options)
    as_function = compiled(function(layout, length), **options)
    whole = draw(length)
    local = [shard(tensor, layout, rank, 2) for tensor in whole[:3]]
    for index, (mask_mod, score) in enumerate(CASES[:number]):
        mask = None if mask_mod is None else block_mask(mask_mod, length)
        expected = shard(on_one_device(whole, mask_mod, score)[0], layout, rank, 2)
        for again in range(2):
            with torch.no_grad(), no_compilation() if again else warnings.catch_warnings():
                with context(layout=layout, seq_len=length):
                    assert_close(in_context(*local, mask, score), expected, "model")
                    if number > 1 and index < 2:
                        out = alone(local[0] * 2.0, *local[1:], score, mask, SCALE, True)
                        assert_close(out * 3.0, expected, "flex_attention")
                if number > 1 and index < 2:
                    assert_close(as_function(*local, mask, score), expected, "function")


@pytest.mark.parametrize(
    ("layout", "length", "options", "number"),
    [
        (HeadTail(), 64, {}, 4),
        (HeadTail(), 61, {"dynamic": True, "backend": "eager"}, 2),
        (Striped(1), 45, {"backend": "eager"}, 1),
        (MirroredBatch(), 45, {}, 1),
        (HeadTail(), 1, {}, 1),
    ],
    ids=str,
)
def test_whole_models_and_the_function_itself(
    two_processes: Processes, layout: Layout, length: int, options: dict[str, Any], number: int
) -> None:
    """Compiled once for all contexts, with `fullgraph=True`. Of one token, one rank has none."""
    two_processes.run(forward, layout, length, options, number)


def graphs_of_make_fx(rank: int) -> None:
    """make_fx traces real tensors by default; K/V are gathered by the operator there too, without bare collectives."""
    fresh()
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    whole, mask = draw(32), block_mask(window, 32)
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]
    expected = shard(on_one_device(whole, window, distance)[0], HeadTail(), rank, 2)
    for call in (model, function(HeadTail(), None)):
        with torch.no_grad(), context():
            graph = make_fx(partial(call, mask=mask, score=distance))(*local)
            assert_close(graph(*local), expected, call)
        assert "cp_dtensor.flex_keys" in graph.code
        assert "c10d" not in graph.code


def layouts_of_one_length(rank: int) -> None:
    """Each context has other documents and a layout made for them; neither is a constant of the compiled code."""
    fresh()
    whole, mask = draw(64), block_mask(documents, 64)
    expected = on_one_device(whole, documents, distance)
    code = compiled(model)
    blocks = [BalancedBlocks(work, 8, 64) for work in ((1, 2, 3, 4, 5, 6, 7, 8), (9, 1, 1, 9, 1, 1, 1, 1))]
    layouts = (
        PerDocument([0, 13, 26, 64]), PerDocument([0, 40, 64]), Balanced(SlidingWindow(9, 0), 64), *blocks, HeadTail(),
    )  # fmt: skip
    for again, layout in enumerate(layouts):
        *local, _ = (shard(tensor, layout, rank, 2) for tensor in whole)
        recompiles = again in (0, 3, 5)  # the last one is part of the code, and so is that blocks stay whole
        with torch.no_grad(), warnings.catch_warnings() if recompiles else no_compilation(), context(layout=layout):
            assert_close(code(*local, mask, distance), shard(expected[0], layout, rank, 2), layout)
    with mock.patch.object(_torch, "original_flex_attention", traceable):
        code = compiled(lambda *args: checkpoint(model, *args, use_reentrant=False))
        for again, layout in enumerate(layouts[:5]):
            *local, grad = (shard(tensor, layout, rank, 2) for tensor in whole)
            inputs = [tensor.clone().requires_grad_() for tensor in local]
            with warnings.catch_warnings() if again in (0, 3) else no_compilation(), context(layout=layout):
                out = code(*inputs, mask, distance)
            results = (out, *torch.autograd.grad(out, inputs, grad))  # computed again, after the context
            for got, whole_result, name in zip(results, expected, ("out", "dq", "dk", "dv"), strict=True):
                assert_close(got, shard(whole_result, layout, rank, 2), (layout, name))


def outside_and_inside(rank: int) -> None:
    fresh()
    whole, mask = draw(40), block_mask(window, 40)
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]
    expected = on_one_device(whole, window, None)[0]
    code = compiled(model)
    with torch.no_grad():
        for again in range(3):
            with no_compilation() if again else warnings.catch_warnings():
                assert_close(code(*whole[:3], mask, None), expected, "outside")
                with context():
                    assert_close(code(*local, mask, None), shard(expected, HeadTail(), rank, 2), "inside")


def masks_of_many_steps(rank: int) -> None:
    """Masks that the compiled function makes; their shapes stay."""
    fresh()
    whole = draw(40)
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]

    def reaching(limit: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda b, h, q, kv: (q >= kv) & (q - kv < limit)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        return model(q, k, v, block_mask(reaching(limit), 40), None)

    making = compiled(step)
    with torch.no_grad(), context():
        for again, limit in enumerate(map(torch.tensor, (3, 9, 20))):
            expected = shard(on_one_device(whole, reaching(limit), None)[0], HeadTail(), rank, 2)
            with no_compilation() if again else warnings.catch_warnings():
                assert_close(making(*local, limit), expected, limit)


def gradients(rank: int, layout: Layout, length: int) -> None:
    fresh()
    whole = draw(length)
    *local, grad = (shard(tensor, layout, rank, 2) for tensor in whole)
    with mock.patch.object(_torch, "original_flex_attention", traceable):
        codes = [compiled(model), compiled(function(layout, length))]
        for mask_mod, score in (CASES[0], CASES[-1]):
            mask = None if mask_mod is None else block_mask(mask_mod, length)
            expected = on_one_device(whole, mask_mod, score)
            for code in codes if mask else codes[1:]:  # without a mask, the code of a model takes equal shards
                inputs = [tensor.clone().requires_grad_() for tensor in local]
                with context(layout=layout, seq_len=length):
                    out = code(*inputs, mask, score)
                results = (out, *torch.autograd.grad(out, inputs, grad))  # after the context
                for got, whole_result, name in zip(results, expected, ("out", "dq", "dk", "dv"), strict=True):
                    assert_close(got, shard(whole_result, layout, rank, 2), name)


@pytest.mark.parametrize(("layout", "length"), [(HeadTail(), 61), (MirroredBatch(), 45)], ids=str)
def test_gradients_of_gathered_kv(two_processes: Processes, layout: Layout, length: int) -> None:
    two_processes.run(gradients, layout, length)


def uncompiled(rank: int) -> None:
    """Uncompiled, torch's FlexAttention compiles itself with the backend \"eager\"."""
    fresh()
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    whole = draw(60)
    q, k, v = (shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3])
    q = q * 2.0
    with torch.no_grad():
        for mask_mod, score in ((window, None), (documents, distance), (None, None)):
            mask = None if mask_mod is None else block_mask(mask_mod, 60)
            expected = shard(on_one_device(whole, mask_mod, score)[0], HeadTail(), rank, 2)
            for again in range(3):
                with no_compilation() if again else warnings.catch_warnings(), context():
                    out, aux = flex_attention(q, k, v, score, mask, SCALE, True, return_aux=AuxRequest(lse=True))
                    assert aux.lse.shape == out.shape[:3]
                    assert_close(out * 3.0, expected, "uncompiled")


def promises(rank: int) -> None:
    fresh()
    whole, mask = draw(32), block_mask(window, 32)
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]
    taken = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        taken.extend(node.args[6] for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph

    options = {"BLOCKS_ARE_CONTIGUOUS": True, "bwd_ROWS_GUARANTEED_SAFE": True, "BLOCK_M": 64}
    call = compiled(flex_attention, backend=backend)
    with torch.no_grad(), context():
        out = call(*local, None, mask, SCALE, True, False, options)
    assert_close(out, shard(one_device(whole, window, None)[0], HeadTail(), rank, 2), "out")
    assert len(taken) == 1
    assert taken[0]["BLOCK_M"] == 64
    assert not any(taken[0].get(name) for name in options if name != "BLOCK_M")


@pytest.mark.parametrize(
    "body", [graphs_of_make_fx, layouts_of_one_length, outside_and_inside, masks_of_many_steps, uncompiled, promises]
)
def test_on_two_processes(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
