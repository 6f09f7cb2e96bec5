"""Sequence operations keep to the documents of any mask of the context around them, as attention does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.recurrences import HEADS, K, check, problem
from support.sequences import Sequence, equal, normal
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Batched,
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    Mask,
    SlidingWindow,
    affine_scan,
    causal_conv1d,
    context_parallel,
    gated_delta_rule,
    halo,
    kda,
    linear_attention,
    local_runs,
    mamba2,
    shift,
)

LENGTH = 10
MASKS: list[tuple[Mask, tuple[int, ...]]] = [
    (Documents([0, 5, 10], within=Documents([0, 2, 5])), (0, 2, 5, 7, 10)),
    (Documents([0, 5, 10], within=Causal() & Documents([0, 2, 5])), (0, 2, 5, 7, 10)),
    (Documents([0, 8], within=Documents([0, 4, 8], within=Documents([0, 1, 4], within=Causal()))), (0, 1, 4, 5, 8)),
    (Documents([0, 4, 10]) & Documents([0, 6, 10]) & SlidingWindow(3, 0), (0, 4, 6, 10)),
    (Batched([Causal()]) & Documents([0, 4, 4, 10]), (0, 4, 4, 10)),
    (Documents.for_length([2, 5, 10], 10), (2, 5, 10)),  # padding first
    (Documents.for_length([4, 6], 10), (4, 6)),  # positions that look like lengths
]


TENSORS = problem("delta_rule", 1, LENGTH) | {"g": F.logsigmoid(normal(1, LENGTH, HEADS, seed=3))}


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()], ids=str)
@pytest.mark.parametrize(("mask", "edges"), MASKS, ids=str)
@pytest.mark.parametrize("method", ["scan", "heads", "relayout"])
def test_states_are_those_of_the_documents(mask: Mask, edges: tuple[int, ...], layout: Layout, method: str) -> None:
    """Out, final states and all gradients of a delta rule, token by token."""
    check("gated_delta_rule", Sequence(LENGTH, 2, layout, 1, edges), True, method=method, mask=mask)


def calls(rank: int, runs: int = 1, **options: Any) -> dict[str, Any]:
    """Every function, by name, of a rank's five tokens; `options` are those of all."""
    q, k, v, g, beta = (TENSORS[name][:, 5 * rank :][:, :5] for name in ("q", "k", "v", "g", "beta"))
    x, states = v.flatten(2), {"output_final_state": True}
    by_channel = g.unsqueeze(-1).expand(-1, -1, -1, K)
    return {
        "halo": lambda: halo(x, 2, dim=1, **options),
        "shift": lambda: shift(x, 1, dim=1, **options),
        "causal_conv1d": lambda: causal_conv1d(x, torch.ones(4, 3, dtype=x.dtype), **options),
        "gated_delta_rule": lambda: gated_delta_rule(q, k, v, g, beta, **states, **options),  # type: ignore[arg-type]
        "kda": lambda: kda(q, k, v, by_channel, beta, **states, **options),  # type: ignore[arg-type]
        "linear_attention": lambda: linear_attention(q, k, v, **states, **options),  # type: ignore[arg-type]
        "mamba2": lambda: mamba2(v, beta, -torch.ones(HEADS), q, k, return_final_states=True, **options),
        "affine_scan": lambda: affine_scan(
            torch.ones(runs, dtype=x.dtype), torch.ones(runs, 2, 2, dtype=x.dtype), **{"seq_len": LENGTH, **options}
        ),
        "local_runs": lambda: local_runs(**{"seq_len": LENGTH, **options}),
    }  # fmt: skip


def test_every_function_gives_what_it_gives_with_these_edges() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for mask, edges in MASKS[:-1]:
            runs = len(local_runs(mesh, LENGTH, Contiguous(), cu_seqlens=edges))
            with context_parallel(mesh, layout=Contiguous(), mask=mask, seq_len=LENGTH):
                passed = calls(rank, runs, mesh=mesh, cu_seqlens=edges)
                for name, call in calls(rank, runs, mesh=mesh).items():
                    equal(call(), passed[name]())

    run_ranks(2, body)


UNION = Documents([0, 5, 10], within=Causal() | Documents([0, 2, 5]))


@pytest.mark.parametrize(
    ("mask", "kind", "message"),
    [
        (UNION, NotImplementedError, "masks of a union with different documents"),
        (Causal() | Documents([0, 4, 10]), NotImplementedError, "masks of a union with different documents"),
        (Documents([0, 5, 10], within=Documents([0, 2])), NotImplementedError, "nested documents with padding between"),
        (Documents([0, 5, 10], [0, 4, 10]), NotImplementedError, "documents whose keys are at other positions"),
        (Batched([Documents([0, 4, 10]), Causal()]), NotImplementedError, "batch rows with different documents"),
        (Documents([0, 12]), ValueError, "end at 12 .* at most the lengths of the sequence, 10"),
        (Documents([0, 4, 10], within=Documents([0, 2, 6])), ValueError, "end at 6 .* at most the lengths .* 4 and 4"),
        (Documents.for_length([0, 4, 8], 8), ValueError, "for that length, expected the 10 tokens"),
        (Documents([4, 6]), ValueError, "look like the lengths of documents"),
    ],
    ids=str,
)
def test_what_every_function_refuses_by_name(mask: Mask, kind: type[Exception], message: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        with context_parallel(mesh, layout=Contiguous(), mask=mask, seq_len=LENGTH):
            for name, call in calls(rank, mesh=mesh).items():
                begins = f"^{name} takes over documents .* got " if kind is NotImplementedError else ""
                with pytest.raises(kind, match=begins + message):
                    call()

    run_ranks(2, body)


def test_a_refused_mask_does_not_concern_calls_with_documents_of_their_own() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        alone = [call() for call in calls(rank, mesh=mesh, layout=Contiguous(), cu_seqlens=[0]).values()]
        with context_parallel(mesh, layout=Contiguous(), mask=UNION, seq_len=LENGTH):
            equal([call() for call in calls(rank, mesh=mesh, cu_seqlens=[0]).values()], alone)

    run_ranks(2, body)
