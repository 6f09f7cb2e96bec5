"""torch's `varlen_attn` inside of a context: documents of the whole sequences, of one batch row or of several."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from support.masked_problems import MaskedProblem
from support.packed_calls import documents, edges_of, packed_attention
from support.problems import shard
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Batched, Causal, Documents, HeadTail, Layout, SlidingWindow, context_parallel

LENGTH = 14
ONE_ROW = [0, 3, 3, 9, LENGTH]
TWO_ROWS = (ONE_ROW, [0, 1, 13, LENGTH])


def check(
    rank: int,
    ranks: int,
    case: MaskedProblem,
    layout: Layout,
    window: tuple[int, int],
) -> None:
    """Out, lse and gradients in a context that is open."""
    whole = case.draw(1)
    out, dq, dk, dv, lse = case.reference(*whole)
    q, k, v, grad_out = case.shard(whole, layout, rank, ranks)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    edges = edges_of(case.mask, case.batch, (case.q_len, case.kv_len))
    got_out, got_lse = packed_attention(*leaves, *edges, window)
    assert not got_lse.requires_grad
    got = (got_out, *torch.autograd.grad(got_out, leaves, grad_out), got_lse)
    for name, ours, expected in zip(("out", "dq", "dk", "dv", "lse"), got, (out, dq, dk, dv, lse), strict=True):
        expected = shard(expected, layout, rank, ranks).to(ours.dtype)
        torch.testing.assert_close(
            ours, expected, rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name} of {case} in {layout}: {text}"
        )


def test_queries_and_keys_of_different_lengths() -> None:
    """The last query of a document stands at its last key."""
    rows = [Documents([0, 2, 2, 9], [0, 5, 6, 11]), Documents([0, 4, 9], [0, 3, 11])]

    def body(rank: int) -> None:
        for window in (3, 1), (-1, 0):
            within = Causal("bottom_right") if window == (-1, 0) else SlidingWindow(*window, "bottom_right")
            masks = [replace(row, within=within) for row in rows]
            for mask, batch in (masks[0], 1), (Batched(masks), 2):
                with context_parallel(dist.group.WORLD, seq_len=(9, 11)):
                    check(rank, 3, MaskedProblem(9, 11, mask, batch, 4, 2), HeadTail(), window)

    run_ranks(3, body)


def test_what_the_context_masks_is_masked_as_well() -> None:
    within = documents(*TWO_ROWS, within=Causal())
    mask = Batched([row & SlidingWindow(2, 0) for row in within.masks]) if isinstance(within, Batched) else within

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        case = MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2)
        edges = edges_of(within, 2, (LENGTH, LENGTH))

        whole = case.draw(1)
        q, k, v, _ = case.shard(whole, HeadTail(), rank, 2)
        with context_parallel(mesh, seq_len=LENGTH, mask=SlidingWindow(2, 0)):
            out, _ = packed_attention(q, k, v, *edges, (-1, 0))
        expected = shard(case.reference(*whole)[0], HeadTail(), rank, 2)
        torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

    run_ranks(2, body)


def test_scale_inference_and_edges_that_are_written_to() -> None:
    """Also where torch does not count what is written: collectives do not either."""
    first, second = documents(ONE_ROW, within=Causal()), documents([0, 3, 7, 9, LENGTH], within=Causal())

    def body(rank: int) -> None:
        edges, _ = edges_of(first, 1, (LENGTH, LENGTH))
        with context_parallel(dist.group.WORLD, seq_len=LENGTH):
            for guard in (torch.no_grad, torch.inference_mode):
                for mask in (first, second):
                    edges.data.copy_(edges_of(mask, 1, (LENGTH, LENGTH))[0])
                    case = MaskedProblem(LENGTH, LENGTH, mask, 1, 2, 2)
                    whole = case.draw(2)
                    q, k, v, _ = case.shard(whole, HeadTail(), rank, 2)
                    with guard():
                        out, _ = packed_attention(q * 2, k, v, edges, edges, (-1, 0), scale=0.25)
                    expected = shard(case.reference(*whole)[0], HeadTail(), rank, 2)  # with a scale of 4^-0.5
                    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)

    run_ranks(2, body)
