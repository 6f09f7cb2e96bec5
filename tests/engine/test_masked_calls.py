"""Every mask, bias, layout, length and method: out, lse and all gradients equal dense attention."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.collectives import errors_by_rank
from support.masked_checks import MaskedCase, check_masked, masked_cases
from support.masked_problems import MaskedProblem
from support.problems import shard
from support.ranks import run_ranks
from support.staging import BY_HEAD

from cp_dtensor import (
    Causal,
    Full,
    HeadTail,
    MirroredBatch,
    PerDocument,
    SlidingWindow,
    context_parallel_attention,
)
from cp_dtensor.attention.masked import attention_delta
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.comm.transports import ROTATE_METHODS

few = settings(max_examples=examples(5), deadline=None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_over_one_axis(ranks: int) -> None:
    @few
    @given(st.lists(masked_cases(axes=1), min_size=6, max_size=6))
    def check(cases: list[MaskedCase]) -> None:
        check_masked(cases, (ranks,))

    check()


def test_in_a_stage_for_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROTATE_METHODS, "allgather", AllGather(BY_HEAD))

    @few
    @given(st.lists(masked_cases(axes=1), min_size=6, max_size=6))
    def check(cases: list[MaskedCase]) -> None:
        gathered = (("method", "ring"), ("rotate_method", "allgather"))
        check_masked([replace(case, options=gathered) for case in cases], (3,))

    check()


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ((2, 2), ("ring", "ulysses")),
        ((3, 2), ("ulysses", "ring")),
        ((2, 3), ("cp_node", "cp_gpu")),
    ],
)
def test_over_two_axes(shape: tuple[int, int], names: tuple[str, str]) -> None:
    @few
    @given(st.lists(masked_cases(axes=2), min_size=6, max_size=6))
    def check(cases: list[MaskedCase]) -> None:
        check_masked(cases, shape, names)

    check()


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_plain_masks_over_layouts_of_many_pieces(method: str) -> None:
    """By row: by shape every pair of pieces would be a tile."""
    layout = PerDocument(range(0, 121, 3))
    problems = [MaskedProblem(120, 120, mask) for mask in (Causal(), Full())]
    check_masked([MaskedCase(problem, layout, (("method", method),), 1) for problem in problems], (3,))


def test_delta_is_computed_once_for_all_tiles_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In rings, however many tiles there are: each rank's backward reads out and its gradient once."""
    computed: list[tuple[int, ...]] = []

    def counted(grad_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        computed.append(tuple(out.shape))
        return attention_delta(grad_out, out)

    for module in ("engine.ring", "attention.masked"):
        monkeypatch.setattr(f"cp_dtensor.{module}.attention_delta", counted)
    problem = MaskedProblem(24, 24, SlidingWindow(17, 0))
    for rotate_method in ("alltoall", "allgather"):
        computed.clear()
        options = (("method", "ring"), ("rotate_method", rotate_method))
        check_masked([MaskedCase(problem, HeadTail(), options, 1)], (3,))
        assert len(computed) == 3  # one on each rank
        assert {shape[2] for shape in computed} == {8}


def test_key_masks_where_batch_rows_are_divided_differently_and_a_rank_has_one_query() -> None:
    """Its mask looks alike with and without query rows; the others show which it is."""
    case = MaskedProblem(5, 5, Causal(), batch=2, bias="boolean h")
    whole = case.draw(3)
    expected = case.reference(*whole)[0]

    def body(rank: int, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (shard(tensor, MirroredBatch(), rank, 3) for tensor in whole[:3])
        return context_parallel_attention(
            q, k, v, mesh=dist.group.WORLD, layout=MirroredBatch(), is_causal=True, attn_mask=mask, seq_len=5
        )

    for rank, out in enumerate(run_ranks(3, lambda rank: body(rank, whole[4]))):
        torch.testing.assert_close(out, shard(expected, MirroredBatch(), rank, 3), rtol=1e-10, atol=1e-10)

    rows = [2, 2, 1]
    errors = errors_by_rank(3, lambda rank: body(rank, whole[4].expand(-1, -1, rows[rank], -1)))
    assert {type(error) for error in errors} == {ValueError}
    assert all("needs all 2 batch rows" in str(error) for error in errors)
