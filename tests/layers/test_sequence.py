"""Halos, shifts, changes of layout and convolutions along sharded sequences, on ranks that are threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import kinds, recorded_collectives
from support.ranks import run_ranks
from support.sequences import (
    LAYOUTS,
    Sequence,
    check_layer,
    convolved,
    equal,
    halos,
    normal,
    sequences,
    shifted,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Causal,
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    Striped,
    causal_conv1d,
    context_parallel,
    halo,
    relayout,
    shift,
)


def check_rows(
    sequence: Sequence, operation: Callable[[torch.Tensor], torch.Tensor],
    expected: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:  # fmt: skip
    """Compares results and gradients of a linear operation on shards with those of the whole sequence."""
    whole = normal(sequence.batch, sequence.length, 2).requires_grad_()
    wanted = [expected(whole, rank) for rank in range(sequence.ranks)]
    grads = [normal(*each.shape, seed=1 + rank) for rank, each in enumerate(wanted)]
    (whole_grad,) = torch.autograd.grad(wanted, whole, grads)

    def body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = sequence.shard(whole.detach(), rank).requires_grad_()
        out = operation(x)
        return out.detach(), torch.autograd.grad(out, x, grads[rank])[0]

    for rank, (out, grad) in enumerate(run_ranks(sequence.ranks, body)):
        assert out.is_contiguous()
        equal(out, wanted[rank].detach())
        equal(grad, sequence.shard(whole_grad, rank))


@settings(max_examples=examples(60))
@given(sequences(), st.integers(-9, 9))
def test_shift(sequence: Sequence, n: int) -> None:
    check_rows(
        sequence,
        lambda x: shift(x, n, mesh=dist.group.WORLD, dim=1, **sequence.options()),  # type: ignore[arg-type]
        lambda whole, rank: sequence.shard(shifted(sequence, whole, n), rank),
    )


@settings(max_examples=examples(60))
@given(sequences(), st.integers(0, 7))
def test_halo(sequence: Sequence, left: int) -> None:
    check_rows(
        sequence,
        lambda x: halo(x, left, mesh=dist.group.WORLD, dim=-2, **sequence.options()),  # type: ignore[arg-type]
        lambda whole, rank: halos(sequence, whole, left, rank),
    )


@settings(max_examples=examples(60))
@given(sequences(), st.sampled_from(LAYOUTS))
def test_relayout(sequence: Sequence, target: Layout) -> None:
    in_target = Sequence(sequence.length, sequence.ranks, target, sequence.batch)
    check_rows(
        sequence,
        lambda x: relayout(x, sequence.layout, target, mesh=dist.group.WORLD, dim=1, seq_len=sequence.length),
        lambda whole, rank: in_target.shard(whole, rank),
    )


@settings(max_examples=examples(60))
@given(sequences(), st.integers(1, 5), st.booleans(), st.sampled_from([None, "silu", "swish"]))
def test_causal_conv1d(sequence: Sequence, width: int, has_bias: bool, activation: str | None) -> None:
    def ours(mesh: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return causal_conv1d(*tensors, mesh=mesh, activation=activation, **sequence.options())  # type: ignore[arg-type]

    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        return convolved(sequence, *tensors, *[None] * (not has_bias), activation)  # type: ignore[arg-type]

    parameters = [normal(3, width, seed=1), normal(3, seed=2)][: 1 + has_bias]
    check_layer(sequence, ours, reference, [normal(sequence.batch, sequence.length, 3)], parameters)


def test_one_exchange_each() -> None:
    def body(rank: int) -> None:
        x = torch.ones(2, 4, 3)
        options: dict[str, Any] = {"mesh": dist.group.WORLD, "layout": Striped(1), "seq_len": 16}
        shift(x, -1, dim=1, **options)
        halo(x, 3, dim=1, **options)
        causal_conv1d(x, torch.ones(3, 4), **options)
        relayout(x, Striped(1), Contiguous(), mesh=dist.group.WORLD, dim=1, seq_len=16)

    with recorded_collectives() as collectives:
        run_ranks(4, body)
    assert len(kinds(collectives)) == 4


@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 3, 2), (2, 1, 3)])
def test_several_axes(shape: tuple[int, ...]) -> None:
    sequence = Sequence(17, math.prod(shape), HeadTail(), 2, (0, 5, 6, 17))
    check_layer(
        sequence, lambda mesh, x: shift(x, -2, mesh=mesh, dim=1, **sequence.options()),  # type: ignore[arg-type]
        lambda x: shifted(sequence, x, -2), [normal(2, 17, 3)], mesh_shape=shape,
    )  # fmt: skip


def test_second_derivatives() -> None:
    """The gradient of a gradient of a linear operation is the operation."""

    def body(rank: int) -> None:
        x = normal(1, 4, 2, seed=rank).requires_grad_()
        y = shift(x**3, 1, mesh=dist.group.WORLD, dim=1, layout=HeadTail())
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        inner = shift(torch.ones_like(x), -1, mesh=dist.group.WORLD, dim=1, layout=HeadTail())
        equal(second, 30 * x.detach() ** 4 * inner)

    run_ranks(2, body)


DTYPES = [torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8, torch.uint16, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_first_dims(dtype: torch.dtype) -> None:
    whole = torch.arange(11) % 2
    sequence = Sequence(11, 3, Striped(2))

    def body(rank: int) -> None:
        x = sequence.shard(whole[None], rank)[0].to(dtype)
        got = shift(x, 1, mesh=dist.group.WORLD, dim=0, layout=Striped(2), seq_len=11)
        expected = sequence.shard(shifted(sequence, whole[None], 1), rank)[0].to(dtype)
        assert got.dtype == dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))

    run_ranks(3, body)


@pytest.mark.parametrize("alone", range(3))
def test_a_checkpoint_of_a_convolution_repeats_its_exchange_on_ranks_without_tokens(alone: int) -> None:
    """Where one tensor alone has a gradient; a checkpoint stops its recompute when it has every saved tensor again."""
    sequence = Sequence(2, 3, Contiguous())

    def ours(mesh: Any, *tensors: torch.Tensor) -> Any:
        convolution = partial(causal_conv1d, mesh=mesh, layout=Contiguous(), activation="silu", seq_len=2)
        return checkpoint(convolution, *tensors, use_reentrant=False)

    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        return convolved(sequence, *tensors, activation="silu")  # type: ignore[arg-type]

    parameters = normal(3, 4, seed=1), normal(3, seed=2)
    check_layer(sequence, ours, reference, [normal(1, 2, 3)], parameters, alone=alone)


# DTensors


@pytest.mark.parametrize("length", [8, 5, 1])
def test_dtensors(length: int) -> None:
    sequence = Sequence(length, 4, Contiguous(), 2, (0, length // 2, length))
    whole, weight = normal(2, length, 6), normal(6, 3, seed=1)
    grad_out = normal(2, length, 6, seed=2)
    leaves = [whole.clone().requires_grad_(), weight.clone().requires_grad_()]
    wanted = convolved(sequence, leaves[0], leaves[1], None, "silu")
    expected = torch.autograd.grad(wanted, leaves, grad_out)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("cp", "tp"))
        x = distribute_tensor(whole, mesh, [Shard(1), Shard(2)]).requires_grad_()
        w = distribute_tensor(weight, mesh, [Replicate(), Shard(0)]).requires_grad_()
        out = causal_conv1d(x, w, activation="silu", cu_seqlens=sequence.edges)
        assert isinstance(out, DTensor)
        assert tuple(out.placements) == (Shard(1), Shard(2))
        grads = torch.autograd.grad(out, [x, w], distribute_tensor(grad_out, mesh, out.placements))
        equal(out.full_tensor().detach(), wanted.detach())
        for got, of_all in zip(grads, expected, strict=True):
            assert isinstance(got, DTensor)
            equal(got.full_tensor(), of_all)
        moved = shift(x, -1, dim=1)
        equal(moved.full_tensor().detach(), shifted(Sequence(length, 4, Contiguous()), whole, -1))
        before = halo(x, 2, dim=1)
        assert before.shape == (2, 8, 6)
        assert before.to_local().shape == (2, 2, 3)

    run_ranks(8, body)


def test_partial_sums_are_reduced_first() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        x = DTensor.from_local(torch.tensor([1.0, 2.0]) + 2 * (rank // 2), mesh, [Shard(0), Partial()])
        got = shift(x, 1, dim=0)
        assert got.full_tensor().tolist() == [0, 2, 4, 6]

    run_ranks(4, body)


# Contexts


def test_layout_documents_and_length_of_the_context() -> None:
    whole = torch.arange(10.0).view(1, 10, 1)
    edges = (0, 4, 10)
    sequence = Sequence(10, 2, Striped(2), 1, edges)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = sequence.shard(whole, rank)
        with context_parallel(mesh, layout=Striped(2), mask=Documents(edges, within=Causal()), seq_len=10):
            assert torch.equal(shift(x, 1, mesh=mesh, dim=1), sequence.shard(shifted(sequence, whole, 1), rank))
            alone = Sequence(10, 2, Striped(2))
            one = shift(x, 1, mesh=mesh, dim=1, cu_seqlens=[0])
            assert torch.equal(one, sequence.shard(shifted(alone, whole, 1), rank))

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert kinds(collectives) == ["AllToAllBase", "AllToAllBase"]


def test_gradients_of_rows_with_several_copies_are_rounded_once() -> None:
    """Rows in the halos of many ranks, in bfloat16."""

    def body(rank: int, dtype: torch.dtype) -> torch.Tensor:
        x = torch.zeros(1, 8, 64, dtype=dtype).requires_grad_()
        out = halo(x, 40, mesh=dist.group.WORLD, layout=Contiguous(), dim=1, seq_len=64)
        grad_out = normal(*out.shape, seed=rank).bfloat16().to(dtype)  # type: ignore[union-attr]
        return torch.autograd.grad(out, x, grad_out)[0]  # type: ignore[arg-type]

    wanted = run_ranks(8, lambda rank: body(rank, torch.float64).float().bfloat16())
    for got, rounded in zip(run_ranks(8, lambda rank: body(rank, torch.bfloat16)), wanted, strict=True):
        different = (got != rounded).double().mean()  # float32 sums may round the other way in a tie
        assert different < 0.01
