"""Sequence operations keep to the documents of any mask of the context around them, as attention does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sequences import Sequence, convolved, halos, normal, recurrence, shifted
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
from cp_dtensor.layers.rows import SequenceLayout

LENGTH, HEADS, K, V = 10, 2, 3, 2
MASKS: list[tuple[Mask, tuple[int, ...]]] = [
    (Documents([0, 5, 10], within=Documents([0, 2, 5])), (0, 2, 5, 7, 10)),
    (Documents([0, 5, 10], within=Causal() & Documents([0, 2, 5])), (0, 2, 5, 7, 10)),
    (Documents([0, 8], within=Documents([0, 4, 8], within=Documents([0, 1, 4], within=Causal()))), (0, 1, 4, 5, 8)),
    (Documents([0, 4, 10]) & Documents([0, 6, 10]) & SlidingWindow(3, 0), (0, 4, 6, 10)),
    (Batched([Causal()]) & Documents([0, 4, 4, 10]), (0, 4, 4, 10)),
    (Documents.for_length([2, 5, 10], 10), (2, 5, 10)),  # padding first
    (Documents.for_length([4, 6], 10), (4, 6)),  # positions that look like lengths
]


def equal(got: object, expected: object) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


TENSORS = {
    "q": normal(1, LENGTH, HEADS, K), "k": F.normalize(normal(1, LENGTH, HEADS, K, seed=1), dim=-1),
    "v": normal(1, LENGTH, HEADS, V, seed=2), "g": F.logsigmoid(normal(1, LENGTH, HEADS, seed=3)),
    "beta": normal(1, LENGTH, HEADS, seed=4).sigmoid(),
}  # fmt: skip


@pytest.mark.parametrize("layout", [Contiguous(), HeadTail()], ids=str)
@pytest.mark.parametrize(("mask", "edges"), MASKS, ids=str)
@pytest.mark.parametrize("method", ["scan", "heads", "relayout"])
def test_states_are_those_of_the_documents(mask: Mask, edges: tuple[int, ...], layout: Layout, method: str) -> None:
    """Out, final states and all gradients of a delta rule, token by token."""
    sequence, documents = Sequence(LENGTH, 2, layout, 1, edges), len(edges) - 1
    whole = {name: x.clone().requires_grad_() for name, x in TENSORS.items()}
    initial = normal(documents, HEADS, K, V, seed=5).requires_grad_()
    wanted, finals = recurrence(sequence, **whole, scale=0.5, initial=initial.unsqueeze(1))
    if edges.count(4) == 2:  # the reference leaves out empty documents
        finals = torch.cat([finals[:1], initial[1:2].unsqueeze(1), finals[1:]])
    grad_out, grad_final = normal(*wanted.shape, seed=6), normal(*initial.shape, seed=7)
    used = [*whole.values(), initial]
    expected = torch.autograd.grad([wanted, finals.squeeze(1)], used, [grad_out, grad_final])

    def body(rank: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,))
        mine = {name: sequence.shard(x.detach(), rank).requires_grad_() for name, x in whole.items()}
        state = initial.detach().clone().requires_grad_()
        with context_parallel(mesh, layout=layout, mask=mask, seq_len=LENGTH):
            out, ends = gated_delta_rule(
                **mine, mesh=mesh, scale=0.5, initial_state=state, output_final_state=True, method=method
            )
        grads = torch.autograd.grad(
            [out, ends], [*mine.values(), state], [sequence.shard(grad_out, rank), grad_final / 2]
        )
        equal(out.detach(), sequence.shard(wanted.detach(), rank))
        equal(ends.detach(), finals.detach().squeeze(1))
        equal(grads[:-1], tuple(sequence.shard(each, rank) for each in expected[:-1]))
        return grads[-1]

    equal(sum(run_ranks(2, body), torch.zeros(())), expected[-1])


@pytest.mark.parametrize(("mask", "edges"), MASKS, ids=str)
def test_rows_are_those_of_the_documents(mask: Mask, edges: tuple[int, ...]) -> None:
    sequence = Sequence(LENGTH, 2, HeadTail(), 1, edges)
    whole, weight = normal(1, LENGTH, 3).requires_grad_(), normal(3, 4, seed=1)
    convolution, moved = convolved(sequence, whole, weight, None, None), shifted(sequence, whole, -1)
    grad_out = normal(1, LENGTH, 3, seed=2)
    expected = [torch.autograd.grad(each, whole, grad_out)[0] for each in (convolution, moved)]

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = sequence.shard(whole.detach(), rank).requires_grad_()
        with context_parallel(mesh, layout=HeadTail(), mask=mask, seq_len=LENGTH):
            outs = causal_conv1d(x, weight, mesh=mesh), shift(x, -1, mesh=mesh, dim=1)
            equal(halo(x, 3, mesh=mesh, dim=1).detach(), halos(sequence, whole.detach(), 3, rank))
            assert local_runs(mesh, LENGTH) == SequenceLayout(HeadTail(), LENGTH, 2, 0, edges).pieces(rank)
        for out, of_whole, grad in zip(outs, (convolution, moved), expected, strict=True):
            equal(out.detach(), sequence.shard(of_whole.detach(), rank))
            equal(torch.autograd.grad(out, x, sequence.shard(grad_out, rank))[0], sequence.shard(grad, rank))

    run_ranks(2, body)


def calls(rank: int, runs: int = 1, **options: Any) -> dict[str, Any]:
    """Every function, by name, of a rank's five tokens; `options` are those of all."""
    q, k, v, g, beta = (x[:, 5 * rank :][:, :5] for x in TENSORS.values())
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
