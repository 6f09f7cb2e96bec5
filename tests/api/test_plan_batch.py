"""Training steps by `plan_batch` against the same batch in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.collectives import errors_by_rank
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import context_parallel, plan_batch

WORLD = 4
SHAPE: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}


def loss_of(
    weights: Sequence[torch.Tensor], tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The sum of token losses of a model with one attention layer, whose positions count from each document's start."""
    table, project = weights
    hidden = F.embedding(tokens, table) + torch.sin(positions[..., None] / 50 ** (torch.arange(16) / 16))
    q, k, v = (hidden @ project).unflatten(-1, (8, 8)).transpose(1, 2).split([4, 2, 2], 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
    logits = out @ out.new_ones(32, 16) / 32 @ table.T + hidden @ table.T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def problem(lengths: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Weights, and tokens and labels of each document; the last token of a document has no label."""
    generator = torch.Generator().manual_seed(sum(lengths))
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((30, 16), (16, 64))]
    tokens = [torch.randint(30, (length,), generator=generator) for length in lengths]
    labels = [F.pad(each[1:], (0, 1), value=-100) for each in tokens]
    return [weight.requires_grad_() for weight in weights], tokens, labels


@pytest.mark.parametrize(
    ("lengths", "tokens_per_rank"),
    [([90, 7, 3, 41, 2, 16, 30, 11, 64, 5], 32), ([1], 8), ([100, 3], 30), ([9, 9, 9, 9], 9), ([40, 1, 1], 64)],
    ids=str,
)
def test_losses_and_gradients_are_those_of_one_process(lengths: list[int], tokens_per_rank: int) -> None:
    weights, tokens, labels = problem(lengths)
    targets = max(1, sum(int((each != -100).sum()) for each in labels))
    alone = sum(
        loss_of(weights, text[None], label[None], torch.arange(len(text))[None])
        for text, label in zip(tokens, labels, strict=True)
    )
    assert isinstance(alone, torch.Tensor)
    wanted = torch.autograd.grad(alone / targets, weights)

    def train(rank: int) -> tuple[list[torch.Tensor], torch.Tensor, list[tuple[int, ...]]]:
        mesh = init_device_mesh("cpu", (WORLD,))
        mine, *_ = problem(lengths)
        plan = plan_batch(lengths, mesh, tokens_per_rank=tokens_per_rank, targets=targets, **SHAPE)
        again = plan_batch(lengths, mesh, tokens_per_rank=tokens_per_rank, targets=targets, **SHAPE)
        assert [step.mesh.get_group() for step in plan] == [step.mesh.get_group() for step in again]  # made once
        loss = torch.zeros((), dtype=torch.float64)
        for step in plan:
            buffers = [step.pack(tokens), step.pack(labels), step.positions()]
            with context_parallel(
                step.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], mask=step.mask, layout=step.layout
            ):
                assert buffers[0].numel() <= tokens_per_rank + 1  # a layout gives some ranks one token more
                part = step.scale * loss_of(mine, *buffers)
                part.backward()
                loss += part.detach()
        for each in (loss, *(weight.grad for weight in mine)):
            dist.all_reduce(each)  # FSDP and DDP average
        return [weight.grad / WORLD for weight in mine], loss / WORLD, [step.documents for step in plan]  # type: ignore[operator]

    for gradients, loss, _ in run_ranks(WORLD, train):
        torch.testing.assert_close(loss, alone.detach() / targets, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients, list(wanted), rtol=1e-10, atol=1e-12)


def test_the_table() -> None:
    def table(rank: int) -> str:
        return str(plan_batch([6000, 300, 200], init_device_mesh("cpu", (2,)), tokens_per_rank=4096, **SHAPE))

    first, second = run_ranks(2, table)
    assert first == second
    header, *rows = first.splitlines()
    assert header.split("  ")[0] == "step"
    assert [row.split()[:4] for row in rows] == [["0", "2", "3", rows[0].split()[3]]]


@pytest.mark.parametrize(
    ("lengths", "changed", "message"),
    [
        ([], {}, r"expected lengths to be positive integers, one at least; got \[\]"),
        ([4, 0], {}, r"expected lengths to be positive integers, one at least; got \[4, 0\]"),
        ([33], {}, "expected documents of at most 4 ranks x 8 tokens; got 33"),
        ([4], {"tokens_per_rank": 0}, "expected tokens_per_rank to be an integer >= 1, got 0"),
        ([4], {"targets": 0}, "expected targets to be an integer >= 1; got 0"),
        ([4], {"hardware": "a fast one"}, "expected hardware to be a GPU"),
        ([4], {"hardware": 1e15}, "expected hardware to be a Hardware or the name of one; got 1000000000000000"),
        ([4], {"q_heads": 3}, "expected q_heads to be a multiple of kv_heads; got 3 and 2"),
    ],
)
def test_bad_arguments(lengths: list[int], changed: dict[str, Any], message: str) -> None:
    def plan(rank: int) -> None:
        plan_batch(lengths, init_device_mesh("cpu", (WORLD,)), **{"tokens_per_rank": 8, **SHAPE, **changed})

    for error in errors_by_rank(WORLD, plan):
        with pytest.raises((TypeError, ValueError), match=message):
            raise error


def test_batches_that_differ_between_ranks() -> None:
    def plan(rank: int) -> None:
        plan_batch([4, 4 + rank // 3], init_device_mesh("cpu", (WORLD,)), tokens_per_rank=8, **SHAPE)

    for error in errors_by_rank(WORLD, plan):
        with pytest.raises(ValueError, match=r"disagree about lengths: rank 3 says \[4, 5\], the others \[4, 4\]"):
            raise error


def test_a_mesh_of_two_axes_and_documents_of_other_lengths_are_refused() -> None:
    def plan(rank: int) -> None:
        with pytest.raises(ValueError, match="expected a mesh with one axis"):
            plan_batch([4], init_device_mesh("cpu", (2, 2)), tokens_per_rank=8, **SHAPE)
        mesh = init_device_mesh("cpu", (4,))
        assert isinstance(mesh, DeviceMesh)
        (step,) = plan_batch([4], mesh, tokens_per_rank=8, **SHAPE)
        with pytest.raises(ValueError, match=r"expected document 0 to have 4 tokens; got .*\[5\]"):
            step.pack([torch.zeros(5)])

    run_ranks(WORLD, plan)
