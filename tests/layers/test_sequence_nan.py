"""NaN and infinity in recurrent layers and convolutions reach later tokens of their document, and no other one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.recurrences import layer, problem
from support.sequences import Sequence, normal

from cp_dtensor import Contiguous, HeadTail, Layout, Striped, causal_conv1d, gated_delta_rule, linear_attention

LENGTH, EDGES, PLACE = 300, (0, 100, 200, 300), 150
WAYS: list[tuple[Layout, str, float]] = [
    (Contiguous(), "scan", math.nan), (HeadTail(), "scan", math.inf), (HeadTail(), "heads", math.nan),
    (Striped(8), "relayout", math.nan),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "method", "value"), WAYS, ids=str)
@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "simple_gla"])
def test_states_carry_it_to_later_tokens(kind: str, layout: Layout, method: str, value: float) -> None:
    """On all ranks; earlier tokens of its chunk may have it, too, of up to 64 tokens and 16 with decays by channel."""
    sequence, chunk = Sequence(LENGTH, 2, layout, 1, EDGES), 16 if kind == "kda" else 64
    for name in problem(kind, 1, LENGTH):
        whole = problem(kind, 1, LENGTH)
        whole[name][:, PLACE] = value

        def body(rank: int, whole: dict[str, torch.Tensor] = whole) -> Any:
            mine = {each: sequence.shard(x, rank).requires_grad_() for each, x in whole.items()}
            options = {"method": method, "output_final_state": True, **sequence.options()}
            out, finals = layer(kind, mine, mesh=dist.group.WORLD, **options)
            (grad,) = torch.autograd.grad(out.sum(), mine["v"])
            places = sequence.shard(torch.arange(LENGTH).view(1, LENGTH), rank).flatten()
            bad, bad_grad = ((~x.isfinite()).flatten(2).any(2).flatten() for x in (out, grad))
            return places[bad], places[bad_grad], (~finals.isfinite()).flatten(1).any(1).tolist()

        results = run_ranks(2, body)
        reached, reached_by_grad = ({place for each in results for place in each[part].tolist()} for part in (0, 1))
        later = {PLACE} if name == "q" else {*range(PLACE, 200)}
        assert later <= reached <= {*range(max(PLACE - chunk + 1, 100), 200)}
        assert name != "q" or reached == later
        assert reached_by_grad <= {*range(100, 200)}
        for _, _, finals in results:
            assert finals == [False, name != "q", False]


def test_of_an_initial_state() -> None:
    """Also in documents without tokens."""
    whole, edges = problem("gated_delta_rule", 1, LENGTH), (0, 100, 100, 300)
    sequence = Sequence(LENGTH, 2, HeadTail(), 1, edges)
    for method in ("scan", "heads", "relayout"):
        for document, places in ((0, range(100)), (1, range(0)), (2, range(100, 300))):

            def body(rank: int, method: str = method, document: int = document) -> Any:
                initial = torch.zeros(3, 2, 3, 2, dtype=torch.float64)
                initial[document] = math.nan
                options: Any = {"initial_state": initial, "output_final_state": True, **sequence.options()}
                shards: Any = {name: sequence.shard(x, rank) for name, x in whole.items()}
                out, finals = gated_delta_rule(**shards, mesh=dist.group.WORLD, method=method, **options)
                mine = sequence.shard(torch.arange(LENGTH).view(1, LENGTH), rank).flatten()
                return mine[out.isnan().any(3).any(2).flatten()].tolist(), finals.isnan().flatten(1).any(1).tolist()

            results = run_ranks(2, body)
            assert sorted(results[0][0] + results[1][0]) == [*places]
            assert all(finals == [each == document for each in range(3)] for _, finals in results)


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(8)], ids=str)
def test_convolutions_carry_it_by_their_width(layout: Layout) -> None:
    for place in (148, 150, 199):  # 200 is another document, 150 another rank in Contiguous()
        sequence, whole = Sequence(LENGTH, 2, layout, 1, EDGES), normal(1, LENGTH, 2)
        whole[:, place] = math.nan

        def body(rank: int, whole: torch.Tensor = whole, sequence: Sequence = sequence) -> list[int]:
            options: Any = sequence.options()
            out = causal_conv1d(sequence.shard(whole, rank), normal(2, 4), mesh=dist.group.WORLD, **options)
            places = sequence.shard(torch.arange(LENGTH).view(1, LENGTH), rank).flatten()
            found: list[int] = places[out.isnan().any(2).flatten()].tolist()
            return found

        results = run_ranks(2, body)
        assert sorted(results[0] + results[1]) == [*range(place, min(place + 4, 200))]


@pytest.mark.parametrize("method", ["scan", "heads", "relayout"])
@pytest.mark.parametrize(("length", "edges"), [(0, (0, 0)), (0, None), (6, (0, 0, 0)), (6, (6, 6, 6))], ids=str)
def test_initial_states_of_empty_documents_have_gradients_of_zero(
    length: int, edges: tuple[int, ...] | None, method: str
) -> None:
    sequence, documents = Sequence(length, 2, Contiguous(), 1, edges), len(edges or (0, 0)) - 1

    def body(rank: int) -> None:
        tokens = [sequence.shard(normal(1, length, 2, 3), rank) for _ in "qkv"]
        initial = torch.full((documents, 2, 3, 3), math.nan, dtype=torch.float64, requires_grad=True)
        options: Any = sequence.options()
        out: Any = linear_attention(*tokens, mesh=dist.group.WORLD, method=method, initial_state=initial, **options)
        assert not out.isnan().any()
        out.sum().backward()
        assert initial.grad is not None
        assert not initial.grad.any()

    run_ranks(2, body)
