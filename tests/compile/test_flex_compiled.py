"""FlexAttention of shards in compiled code, on two processes, without gradients: it has none on CPUs.

`test_steps`, `test_flex_modules` and the matrix show gradients, by a stand-in that torch.compile differentiates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import compiled, fresh, no_compilation
from support.flex_checks import SCALE, block_mask, context, distance, documents, draw, one_device, window
from support.problems import assert_close, shard
from support.processes import Processes
from support.ranks import RanksFailed
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from cp_dtensor import Causal, HeadTail, Layout, MirroredBatch, PerDocument, Striped, context_parallel_flex_attention
from cp_dtensor.engine.call import Call
from cp_dtensor.integrations.unified import RingAttnMode


def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
    """FlexAttention between other operations."""
    return flex_attention(q * 2.0, k, v, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True) * 3.0  # type: ignore[operator]


def function(layout: Layout, seq_len: int | None) -> Callable[..., torch.Tensor]:
    """As `model`, by `context_parallel_flex_attention`."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> torch.Tensor:
        out: Any = context_parallel_flex_attention(
            q * 2.0, k, v, mesh=dist.group.WORLD, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True,
            layout=layout, seq_len=seq_len,
        )  # fmt: skip
        return out * 3.0

    return call


def expected_of(whole: list[torch.Tensor], mask: Any, score: Any = None) -> torch.Tensor:
    return one_device([whole[0] * 2.0, *whole[1:]], mask, score)[0] * 3.0


def may_compile(step: int) -> Any:
    return no_compilation() if step else warnings.catch_warnings()


CASES = ((documents, distance), (window, None), (None, distance), (None, None))


def forward(rank: int, layout: Layout, length: int, options: dict[str, Any], number: int) -> None:
    in_context, alone = compiled(model, **options), compiled(flex_attention, **options)
    as_function = compiled(function(layout, length), **options)
    whole = draw(length)
    local = [shard(tensor, layout, rank, 2) for tensor in whole[:3]]
    for index, (mask_mod, score) in enumerate(CASES[:number]):
        mask = None if mask_mod is None else block_mask(mask_mod, length)
        expected = shard(expected_of(whole, mask_mod, score), layout, rank, 2)
        for again in range(2):
            with may_compile(again):
                with context(layout=layout, seq_len=length):
                    assert_close(in_context(*local, mask, score), expected, "model")
                    if number > 1 and index < 2:
                        out = alone(local[0] * 2.0, *local[1:], score, mask, SCALE, True)
                        assert_close(out * 3.0, expected, "flex_attention")
                if number > 1 and index < 2:
                    assert_close(as_function(*local, mask, score), expected, "function")


def masks_of_many_steps(rank: int) -> None:
    """Masks that the compiled function makes or gets, outside and inside of contexts; their shapes stay."""
    whole = draw(40)
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]

    def reaching(limit: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda b, h, q, kv: (q >= kv) & (q - kv < limit)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        return model(q, k, v, block_mask(reaching(limit), 40), None)

    making, given = compiled(step), compiled(model)
    for again, limit in enumerate(map(torch.tensor, (3, 9, 20))):
        expected, mask = expected_of(whole, reaching(limit)), block_mask(reaching(limit), 40)
        with may_compile(again):
            assert_close(given(*whole[:3], mask, None), expected, "outside")
            with context():
                for code, argument in ((making, (limit,)), (given, (mask, None))):
                    assert_close(code(*local, *argument), shard(expected, HeadTail(), rank, 2), "inside")


def uncompiled(rank: int) -> None:
    """Uncompiled, torch's FlexAttention compiles itself with the backend "eager"."""
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    whole = draw(60)
    q, k, v = (shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3])
    for mask_mod, score in ((window, None), (documents, distance), (None, None)):
        mask = None if mask_mod is None else block_mask(mask_mod, 60)
        expected = shard(expected_of(whole, mask_mod, score), HeadTail(), rank, 2)
        for again in range(3):
            with may_compile(again), context():
                out, aux = flex_attention(q * 2.0, k, v, score, mask, SCALE, True, return_aux=AuxRequest(lse=True))
                assert aux.lse.shape == out.shape[:3]  # type: ignore[union-attr]
                assert_close(out * 3.0, expected, "uncompiled")  # type: ignore[operator]


def promises(rank: int) -> None:
    """What is promised of the whole mask is not promised of rows."""
    whole, mask, taken = draw(32), block_mask(window, 32), []
    local = [shard(tensor, HeadTail(), rank, 2) for tensor in whole[:3]]

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        taken.extend(node.args[6] for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph

    options = {"BLOCKS_ARE_CONTIGUOUS": True, "bwd_ROWS_GUARANTEED_SAFE": True, "BLOCK_M": 64}
    with context():
        out = compiled(flex_attention, backend=backend)(*local, None, mask, SCALE, True, False, options)
    assert_close(out, shard(one_device(whole, window, None)[0], HeadTail(), rank, 2), "out")
    (of_graph,) = taken
    assert of_graph["BLOCK_M"] == 64
    assert not any(of_graph.get(name) for name in options if name != "BLOCK_M")


def refusals(rank: int) -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64) + rank

    def attend(q: torch.Tensor, mask: Any) -> Any:
        return flex_attention(q, q, q, block_mask=mask)

    masked, of_one_length = compiled(attend, backend="eager"), compiled(lambda *args: attend(*args), backend="eager")
    with context():
        with pytest.raises(Exception, match=r"block mask .*, got one of \(8, 8\)"):
            masked(q, block_mask(window, 8))
        # Of 17 tokens rank 1 would have fewer, so it finds out by comparing.
        message = "disagree about global" if rank else r"block mask .*, got one of \(17, 17\)"
        with pytest.raises(Exception, match=message):
            masked(q, block_mask(window, 17))
    layout = PerDocument([0, 16])
    with context(layout=layout):
        of_one_length(q, block_mask(window, 16))
    refused = pytest.raises(Exception, match="does not take the mask of its context")
    with context(layout=layout, mask=Causal()), refused:  # of an equal key
        of_one_length(q, block_mask(window, 16))
    alone = compiled(lambda q: flex_attention(q, q, q), backend="eager")
    with RingAttnMode(dist.group.WORLD):
        alone(q)
        with RingAttnMode.disable(), pytest.raises(Exception, match="left to each rank alone"):
            alone(q)


def operators(rank: int) -> None:
    """Real and fake implementations agree."""
    q, k, v = (shard(tensor, HeadTail(), rank, 2) for tensor in draw(61)[:3])
    arguments = q, k, v, Call.of(dist.group.WORLD, layout=HeadTail()).key, 61, 61, True, 0.5, True
    torch.library.opcheck(
        torch.ops.cp_dtensor.flex_keys.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


def run(rank: int, body: Callable[..., None], *args: Any) -> None:
    fresh()
    with torch.no_grad():
        body(rank, *args)


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
    two_processes.run(run, forward, layout, length, options, number)


@pytest.mark.parametrize(
    "body", [masks_of_many_steps, uncompiled, promises, refusals, operators], ids=lambda body: body.__name__
)
def test_flex_attention(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(run, body)


def one_rank_differs(rank: int) -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    code = compiled(lambda q, mask: flex_attention(q, q, q, block_mask=mask), backend="eager")
    with context(debug=True):
        code(q, block_mask(window, 16 + rank))


def test_in_debug_mode_masks_of_different_lengths_are_refused_on_all_ranks(two_processes: Processes) -> None:
    with pytest.raises(RanksFailed) as failed:
        two_processes.run(run, one_rank_differs)
    assert all("disagree about global" in str(error) for error in failed.value.errors)
