"""Gated delta rule, KDA, Mamba-2 and linear attention of sharded sequences, on ranks that are threads."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collectives import kinds, recorded_collectives
from support.ranks import run_ranks
from support.recurrences import HEADS, KINDS, K, V, check, layer, problem
from support.sequences import Sequence, check_layer, equal, normal, recurrence, sequences
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    Striped,
    affine_scan,
    gated_delta_rule,
    kda,
    linear_attention,
    local_runs,
    mamba2,
)
from cp_dtensor.layers.rows import SequenceLayout
from cp_dtensor.layers.scan import scan_plan


@settings(max_examples=40)
@given(st.sampled_from(KINDS), sequences(longest=20), st.booleans())
def test_layers(kind: str, sequence: Sequence, with_states: bool) -> None:
    check(kind, sequence, with_states)


@settings(max_examples=30)
@given(
    st.sampled_from(KINDS), sequences(longest=16, most_ranks=4), st.booleans(), st.sampled_from(["heads", "relayout"])
)
def test_other_methods(kind: str, sequence: Sequence, with_states: bool, method: str) -> None:
    check(kind, sequence, with_states, method=method)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_heads_along_an_axis_beside_one_of_one_rank(shape: tuple[int, int]) -> None:
    check("kda", Sequence(7, 2, HeadTail(), 1, (0, 3, 7)), True, shape, method="heads")


@pytest.mark.parametrize("kind", KINDS)
def test_several_chunks(kind: str) -> None:
    check(kind, Sequence(150, 2, HeadTail(), 1, (0, 70, 150)), True)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "simple_gla", "gla"])
def test_decays_of_minus_infinity(kind: str) -> None:
    """exp of them is 0: the state begins again."""

    def forgets(tensors: dict[str, torch.Tensor]) -> None:
        for position in (0, 3, 4, 69, 80, 149):
            tensors["g"][:, position] = float("-inf")

    check(kind, Sequence(150, 2, HeadTail(), 1, (0, 70, 150)), True, change=forgets)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "kda", "simple_gla", "gla"])
def test_small_decays_keep_their_digits_after_strong_ones(kind: str) -> None:
    tensors = problem(kind, 1, 64)
    tensors["g"] = tensors["g"] * 1e-3
    tensors["g"][:, ::8] = -1e4
    wanted, _ = recurrence(Sequence(64, 1, Contiguous()), **{"g": None, "beta": None, **tensors}, scale=1.0)  # type: ignore[arg-type]

    def body(rank: int) -> None:
        single = {name: x.float() for name, x in tensors.items()}
        out = layer(kind, single, mesh=dist.group.WORLD, layout=Contiguous(), scale=1.0)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)

    run_ranks(1, body)


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(("kind", "method"), [("gated_delta_rule", "scan"), ("gla", "scan"), ("kda", "relayout")])
def test_several_axes(kind: str, method: str, shape: tuple[int, ...]) -> None:
    check(kind, Sequence(13, math.prod(shape), HeadTail(), 1, (2, 5, 13)), True, shape, method=method)


@settings(max_examples=20)
@given(sequences(longest=16))
def test_mamba2(sequence: Sequence) -> None:
    batch, length = sequence.batch, sequence.length
    tokens = [normal(batch, length, 2, 3), normal(batch, length, 2, seed=1)]
    tokens += [normal(batch, length, 1, 4, seed=2), normal(batch, length, 1, 4, seed=3)]
    parameters = [-normal(2, seed=4).exp(), normal(2, seed=5), normal(2, seed=6)]

    def ours(mesh: Any, *tensors: torch.Tensor) -> Any:
        x, dt, b, c, a, d, bias = tensors
        options = {"dt_softplus": True, "dt_limit": (0.3, 1.5), **sequence.options()}
        return mamba2(x, dt, a, b, c, D=d, dt_bias=bias, mesh=mesh, **options)  # type: ignore[arg-type]

    def reference(*tensors: torch.Tensor) -> torch.Tensor:
        x, dt, b, c, a, d, bias = tensors
        step = F.softplus(dt + bias).clamp(0.3, 1.5)
        return recurrence(sequence, c, b, x * step.unsqueeze(-1), step * a, None, 1.0)[0] + d.unsqueeze(-1) * x

    check_layer(sequence, ours, reference, tokens, parameters)


def test_bfloat16_of_mamba2_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 40, 2, 3), (1, 40, 1, 4), (1, 40, 1, 4))
    x, b, c = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
    dt, a = torch.rand(1, 40, 2, generator=generator), -torch.ones(2)

    def body(rank: int) -> None:
        got = mamba2(x, dt, a, b, c, mesh=dist.group.WORLD, D=torch.ones(2))
        wide = mamba2(x.float(), dt, a, b.float(), c.float(), mesh=dist.group.WORLD, D=torch.ones(2))
        assert torch.equal(got, wide.bfloat16())  # type: ignore[arg-type, union-attr]

    run_ranks(1, body)


@pytest.mark.parametrize("method", ["scan", "relayout"])
def test_a_checkpoint_that_ends_with_the_layer_repeats_its_exchanges_on_ranks_without_tokens(method: str) -> None:
    """A checkpoint stops its recompute when it has every saved tensor again, perhaps before an exchange."""
    saving = partial(checkpoint, use_reentrant=False)
    check("gated_delta_rule", Sequence(2, 3, Contiguous()), False, method=method, around=saving)


@pytest.mark.parametrize("kind", ["matrices", "diagonals", "numbers", "one number"])
@pytest.mark.parametrize("edges", [None, (0, 5, 6, 17)], ids=str)
@pytest.mark.parametrize("layout", [Contiguous(), HeadTail(), Striped(3)], ids=str)
def test_affine_scan(layout: Layout, edges: tuple[int, ...] | None, kind: str) -> None:
    """Against the runs of all ranks in the order of positions."""
    sequence, documents = Sequence(17, 3, layout, 1, edges), len(edges or (0, 0)) - 1
    shape = {"matrices": (2, 3, 3), "diagonals": (2, 3), "numbers": (2,), "one number": ()}[kind]
    heads = () if kind == "one number" else (2,)
    runs = run_ranks(3, lambda rank: local_runs(dist.group.WORLD, 17, layout, cu_seqlens=edges))
    transitions = [normal(len(of_rank), *shape, seed=rank).requires_grad_() for rank, of_rank in enumerate(runs)]
    states = [normal(len(of_rank), *heads, 3, 2, seed=9 + rank).requires_grad_() for rank, of_rank in enumerate(runs)]
    initial = normal(documents, *heads, 3, 2, seed=20).requires_grad_()
    entering = [[torch.empty(0)] * len(of_rank) for of_rank in runs]
    finals = []
    for document, (start, stop) in enumerate(pairwise(edges or (0, 17))):
        current = initial[document]
        places = [(at, rank, i) for rank, of_rank in enumerate(runs) for i, (at, _) in enumerate(of_rank)]
        for _, rank, i in sorted(each for each in places if start <= each[0] < stop):
            entering[rank][i] = current
            matrix = transitions[rank][i]
            moved = (
                matrix @ current
                if kind == "matrices"
                else matrix[(..., *[None] * (current.dim() - matrix.dim()))] * current
            )
            current = moved + states[rank][i]
        finals.append(current)
    wanted = [*[torch.stack(each) for each in entering], torch.stack(finals)]
    grads = [normal(*each.shape, seed=30 + i) for i, each in enumerate(wanted)]
    expected = torch.autograd.grad(wanted, [*transitions, *states, initial], grads)

    def body(rank: int) -> torch.Tensor:
        leaves = [x.detach().clone().requires_grad_() for x in (transitions[rank], states[rank], initial)]
        out, ends = affine_scan(
            *leaves[:2], mesh=dist.group.WORLD, seq_len=17, layout=sequence.layout, cu_seqlens=edges,
            initial_state=leaves[2], output_final_state=True,
        )  # fmt: skip
        equal(out.detach(), wanted[rank].detach())
        equal(ends.detach(), wanted[-1].detach())
        found = torch.autograd.grad([out, ends], leaves, [grads[rank], grads[-1] / 3])
        equal(found[0], expected[rank])
        equal(found[1], expected[3 + rank])
        return found[2]

    equal(sum(run_ranks(3, body), torch.zeros(())), expected[-1])


@pytest.mark.parametrize("with_gradient", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_checkpoint_that_ends_with_a_scan_repeats_its_exchange_on_every_rank(with_gradient: tuple[int, ...]) -> None:
    """The states that enter the first runs need nothing of other ranks."""

    def body(rank: int) -> None:
        given = [normal(1, 3, 3, seed=rank), normal(1, 3, 2, seed=9 + rank), normal(1, 3, 2, seed=20)]
        leaves = [given[index].requires_grad_() for index in with_gradient]

        def scan(transition: torch.Tensor, state: torch.Tensor, initial: torch.Tensor) -> Any:
            options: dict[str, Any] = {"mesh": dist.group.WORLD, "seq_len": 6, "layout": Contiguous()}
            return affine_scan(transition, state, initial_state=initial, **options)

        expected = torch.autograd.grad(scan(*given).square().sum(), leaves)
        out: Any = checkpoint(scan, *given, use_reentrant=False)
        for got, wanted in zip(torch.autograd.grad(out.square().sum(), leaves), expected, strict=True):
            equal(got, wanted)

    run_ranks(3, body)


def test_one_exchange_forward_and_one_backward_whose_size_does_not_grow() -> None:
    sizes = []
    for length in (64, 1024):

        def body(rank: int, length: int = length) -> None:
            tensors = problem("gated_delta_rule", 1, length // 4)
            mine = {name: x.requires_grad_() for name, x in tensors.items()}
            layer("gated_delta_rule", mine, mesh=dist.group.WORLD, layout=Contiguous(), seq_len=length).sum().backward()

        with recorded_collectives() as collectives:
            run_ranks(4, body)
        assert kinds(collectives) == ["AllGather", "ReduceScatter"]
        sizes.append([each.sent[0].numel() for each in collectives if each.rank == 0])
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == HEADS * K * (K + V)


def test_documents_within_one_rank_send_nothing() -> None:
    def body(rank: int) -> None:
        tensors = problem("kda", 1, 4)
        layer("kda", tensors, mesh=dist.group.WORLD, layout=Contiguous(), seq_len=8, cu_seqlens=[0, 1, 4, 8])

    with recorded_collectives() as collectives:
        run_ranks(2, body)
    assert not collectives


@pytest.mark.parametrize("method", ["scan", "heads"])
@pytest.mark.parametrize(("of_keys", "heads"), [(2, 4), (1, 12), (3, 12)])
def test_dtensors(of_keys: int, heads: int, method: str) -> None:
    """Heads over 2 ranks: of 3 heads of keys, the second is read on both."""
    tensors, sequence = problem("gated_delta_rule", 1, 11, heads), Sequence(11, 2, Contiguous())
    tensors |= {name: normal(1, 11, of_keys, K, seed=index) for index, name in enumerate("qk")}
    for x in tensors.values():
        x.requires_grad_()
    wanted, _ = recurrence(sequence, **tensors, scale=0.5)
    expected = torch.autograd.grad(wanted.square().sum(), list(tensors.values()))

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        placed = {
            name: distribute_tensor(x.detach(), mesh, [Shard(1), Shard(2)]).requires_grad_()
            for name, x in tensors.items()
        }
        out: Any = gated_delta_rule(**placed, scale=0.5, method=method)
        assert isinstance(out, DTensor)
        assert tuple(out.placements) == (Shard(1), Shard(2))
        equal(out.full_tensor(), wanted)
        for got, of_all in zip(torch.autograd.grad(out.square().sum(), list(placed.values())), expected, strict=True):
            equal(got.full_tensor(), of_all)  # type: ignore[attr-defined]
        with pytest.raises(NotImplementedError, match="takes and returns no states"):
            gated_delta_rule(**placed, output_final_state=True)

    run_ranks(4, body)


def test_norms_of_queries_and_keys() -> None:
    def body(rank: int) -> None:
        x = problem("delta_rule", 1, 5)
        options: dict[str, Any] = {"mesh": dist.group.WORLD, "seq_len": 5}
        normed = {**x, **{name: F.normalize(x[name], dim=-1) for name in "qk"}}
        got = layer("delta_rule", {**x, "k": 7 * x["k"]}, use_qk_l2norm_in_kernel=True, **options)
        torch.testing.assert_close(got, layer("delta_rule", normed, **options), rtol=1e-5, atol=1e-5)

    run_ranks(1, body)


def test_examples_of_docstrings() -> None:
    def body(rank: int) -> None:
        mesh = dist.group.WORLD
        one, v = torch.ones(1, 2, 1, 1), torch.tensor([[[[2.0]], [[4.0]]]])
        beta, half = torch.full((1, 2, 1), 0.5), torch.full((1, 2, 1, 1), math.log(0.5))
        results = [
            gated_delta_rule(one, one, v, None, beta, mesh=mesh),
            kda(one, one, v, half, beta, mesh=mesh),
            linear_attention(one, one, v, mesh=mesh),
            mamba2(v, torch.ones(1, 2, 1), torch.tensor([-math.log(2)]), one, one, mesh=mesh),
            mamba2(one, -one[..., 0], -one[0, 0, 0], one, one, mesh=mesh),  # steps below zero are clamped
        ]
        shown = torch.stack([x.flatten() for x in results])  # type: ignore[union-attr]
        torch.testing.assert_close(shown, torch.tensor([[1, 2.5], [1, 2.25], [2, 6], [2, 5], [0, 0.0]]))

    run_ranks(1, body)


def test_example_of_affine_scan() -> None:
    def body(rank: int) -> float:
        two, added = torch.full((1,), 2.0), torch.tensor([[1.0], [5.0]][rank]).view(1, 1, 1)
        return affine_scan(two, added, mesh=dist.group.WORLD, seq_len=2, layout=Contiguous()).item()  # type: ignore[union-attr]

    assert run_ranks(2, body) == [0, 1]


# Plans of scans


class Position(int):
    """An integer that counts how often such integers are compared."""

    compared: ClassVar[int] = 0

    def _count(self) -> None:
        Position.compared += 1

    def __lt__(self, other: Any) -> bool:
        self._count()
        return int(self) < int(other)

    def __le__(self, other: Any) -> bool:
        self._count()
        return int(self) <= int(other)

    def __gt__(self, other: Any) -> bool:
        self._count()
        return int(self) > int(other)


def test_documents_without_tokens_and_tokens_without_documents() -> None:
    sequence = SequenceLayout(Contiguous(), 12, 2, edges=(1, 2, 2, 8, 8, 10))
    assert scan_plan(sequence, 0, False).documents == (None, 0, 2)
    assert scan_plan(sequence, 1, False).documents == (2, 4, None)


def test_comparisons_of_many_documents_are_not_the_square_of_their_number() -> None:
    edges = tuple(map(Position, range(0, 1202, 2)))
    plan = scan_plan(SequenceLayout(Contiguous(), 1200, 2, edges=edges), 0, True)
    assert plan.documents == tuple(range(300))
    assert Position.compared < 600 * 600 / 4
