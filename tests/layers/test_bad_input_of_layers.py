"""Layers refuse arguments that do not fit, by name and before any exchange, and calls that differ between ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.collectives import check_refused_before_any_exchange, errors_by_rank, recorded_collectives
from support.ranks import run_ranks
from support.recurrences import HEADS, K, V, layer, problem
from support.sequences import normal
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Contiguous,
    HeadTail,
    Layout,
    MirroredBatch,
    Striped,
    affine_scan,
    causal_conv1d,
    explain_recurrence,
    explain_sparse,
    gated_delta_rule,
    halo,
    local_runs,
    mamba2,
    relayout,
    select_pooled,
    shift,
)

Call = Callable[[Any], object]
"""Takes a group."""


class NoDataclass(Layout):
    def segments(self, seq_len: int, rank: int, world_size: int, group: int = 0) -> Any:
        return Contiguous().segments(seq_len, rank, world_size)


def _shift(x: Any = None, n: Any = 1, dim: int = 0, **options: Any) -> Call:
    return lambda mesh: shift(torch.ones(2) if x is None else x, n, dim=dim, **{"mesh": mesh, **options})


def _relayout(target: Any) -> Call:
    return lambda mesh: relayout(torch.ones(2), None, target, mesh=mesh, dim=0)


def _select(batch: int) -> Call:
    x = torch.ones(batch, 4, 1, 2)
    given: dict[str, Any] = {"size": 2, "topk": 1, "layout": MirroredBatch()}
    return lambda mesh: select_pooled(x, x[:, :2, 0], x[..., 0], mesh=mesh, **given)


def _conv(channels: int, *weight: int, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> Call:
    made = torch.ones(*weight, dtype=dtype, device=device)
    return lambda mesh: causal_conv1d(torch.ones(1, 2, channels), made, mesh=mesh, **options)


GIVEN: dict[str, torch.Tensor] = {
    "q": normal(1, 3, 1, K), "k": normal(1, 3, 1, K), "v": normal(1, 3, HEADS, V), "g": -normal(1, 3, HEADS).abs(),
    "beta": normal(1, 3, HEADS).sigmoid(),
}  # fmt: skip
OF_MAMBA2 = {
    "x": normal(1, 3, 2, 2), "dt": normal(1, 3, 2), "A": normal(2), "B": normal(1, 3, 1, 3), "C": normal(1, 3, 1, 3)
}  # fmt: skip
NARROW = normal(1, 3, 1, 0)


def _rule(**changed: Any) -> Call:
    return lambda mesh: gated_delta_rule(**{**GIVEN, **changed}, mesh=mesh)


def _mamba2(**changed: Any) -> Call:
    return lambda mesh: mamba2(**{**OF_MAMBA2, **changed}, mesh=mesh)


def _scan(transition: torch.Tensor, state: torch.Tensor, initial: Any = None, length: int = 4, **options: Any) -> Call:
    return lambda mesh: affine_scan(transition, state, mesh=mesh, seq_len=length, initial_state=initial, **options)


def _explain(**changed: Any) -> Call:
    return lambda mesh: explain_recurrence(mesh, **{"seq_len": 8, "heads": 4, **changed})


SCANNED, DOCUMENTS = (normal(1, 2), normal(1, 2, 2)), [0, 0, 0, 0, 1, 1, 1, 1]
BAD: list[tuple[str, Call]] = [
    ("expects x to be a torch.Tensor, got list", _shift([1])),
    ("expects n to be an integer, got 1.0", _shift(n=1.0)),
    ("left to be an integer >= 0, got -1", lambda mesh: halo(torch.ones(2), -1, mesh=mesh, dim=0)),
    (r"shift: sequence dim 2 is out of range for shape \(2, 2\)", _shift(torch.ones(2, 2), dim=2)),
    ("expected mesh", _shift(mesh=None)),
    ("ascending", _shift(cu_seqlens=[3, 1])),
    ("cu_seqlens up to 9, expected at most the length of the sequence, 4", _shift(cu_seqlens=[0, 9], seq_len=4)),
    ("got 2 local tokens", _shift(seq_len=400)),
    ("documents of a tensor with values", _shift(cu_seqlens=torch.ones(2, device="meta").int())),
    ("target to be a Layout", _relayout("head")),
    ("shift: MirroredBatch.* divides rows of the batch", _shift(layout=MirroredBatch())),
    ("relayout: MirroredBatch.* divides rows of the batch", _relayout(MirroredBatch())),
    ("local_runs: MirroredBatch.* divides rows", lambda mesh: local_runs(mesh, 8, MirroredBatch())),
    ("to be frozen dataclasses, got NoDataclass", _relayout(NoDataclass())),
    ("weight", _conv(3, 2, 4)),
    (r"at least one of channels; got .* weight torch.float32 \(0, 4\)", _conv(0, 0, 4)),
    ("got tensors on cpu and meta", _conv(3, 3, 4, device="meta")),
    ("activation", _conv(3, 3, 4, activation="relu")),
    ("bias of one floating dtype; got x torch.float32 .*, weight torch.float64", _conv(3, 3, 4, dtype=torch.float64)),
    # Recurrences
    (r"expects q \(batch, tokens, groups, K\); got \(1, 3, 2\)", _rule(q=normal(1, 3, 2))),
    (
        r"k \(batch, tokens, groups, K\), where batch 1, tokens 3, groups 1, K 3; got \(1, 4, 1, 3\)",
        _rule(k=normal(1, 4, 1, K)),
    ),
    ("a multiple of the 4 groups as heads; got q", _rule(q=normal(1, 3, 4, K), k=normal(1, 3, 4, K))),
    (r"beta \(batch, tokens, heads\)", _rule(beta=normal(1, 3, 1))),
    ("beta to be a torch.Tensor, got NoneType", _rule(beta=None)),
    (r"g \(batch, tokens, heads\)", _rule(g=normal(1, 3, 1))),
    ("v to be a torch.Tensor", _rule(v=[1])),
    ("expects q, k, v of one floating dtype; got q torch.float64", _rule(v=normal(1, 3, HEADS, V).float())),
    (r"initial_state \(states, heads, K, V\), where .*; got", _rule(initial_state=normal(1, HEADS, V, K))),
    (r"at least one of K; got q torch.float64 \(1, 3, 1, 0\)", _rule(q=NARROW, k=NARROW)),
    ("expected a finite scale, got nan", _rule(scale=float("nan"))),
    ("expected a finite scale, got -inf", _rule(scale=-float("inf"))),
    ("a CPU or a CUDA device; got tensors on cpu and meta", _rule(beta=GIVEN["beta"].to("meta"))),
    ("cpu and meta", _rule(initial_state=torch.empty(1, HEADS, K, V, dtype=torch.float64, device="meta"))),
    ("one batch row|initial state", _rule(initial_state=normal(3, HEADS, K, V))),
    (r"method to be one of \('auto', 'scan', 'relayout', 'heads'\), got 'ring'", _rule(method="ring")),
    (r"B \(batch, tokens, groups, N\), where batch 1, tokens 3, heads 2, P 2; got \(1, 3, 1\)",
     _mamba2(B=normal(1, 3, 1))),
    (r"A \(heads\), where .* heads 2, .*; got \(\)", _mamba2(A=torch.tensor(-0.7))),
    (r"dt_bias \(heads\), .*; got \(1,\)", _mamba2(dt_bias=normal(1))),
    (r"D \(heads\) or \(heads, P\), .*; got \(3,\)", _mamba2(D=normal(3))),
    ("D to be a torch.Tensor, got float", _mamba2(D=1.0)),
    ("a multiple of the 3 groups as heads; got x", _mamba2(B=normal(1, 3, 3, 3), C=normal(1, 3, 3, 3))),
    (r"at least one of N; got .* B .*, 0\)", _mamba2(B=NARROW, C=NARROW)),
    (r"dt_limit to be a smallest and a largest dt, got \(nan, 1.0\)", _mamba2(dt_limit=(float("nan"), 1.0))),
    (r"dt_limit .* got \(1.0, 0.0\)", _mamba2(dt_limit=(1.0, 0.0))),
    ("a CPU or a CUDA device; got tensors on cpu and meta", _mamba2(dt=torch.ones(1, 3, 2, device="meta"))),
    (r"initial_states \(states, heads, P, N\), .*; got \(1, 2, 3, 2\)", _mamba2(initial_states=normal(1, 2, 3, 2))),
    # Scans, and predictions
    ("expects one dtype, got transition torch.float32, state torch.float64", _scan(SCANNED[0].float(), SCANNED[1])),
    ("expects one dtype, got initial_state torch.float32, state torch.float64", _scan(*SCANNED, SCANNED[1].float())),
    ("up to 9, expected at most", _scan(*SCANNED, length=8, cu_seqlens=[0, 9])),
    ("look like a document id", _scan(*SCANNED, length=8, cu_seqlens=DOCUMENTS)),
    ("up to 9, expected at most", lambda mesh: local_runs(mesh, 8, cu_seqlens=[0, 9])),
    ("look like a document id", lambda mesh: local_runs(mesh, 8, cu_seqlens=DOCUMENTS)),
    ("expected layer to be one of gated_delta_rule, kda, linear_attention, mamba2, got 'mamba'",
     _explain(layer="mamba")),
    ("expected heads to be an integer >= 1, got 0", _explain(heads=0)),
    ("expected heads to be a multiple of key_heads, got 4 and 3", _explain(key_heads=3)),
    ("expected row_dim to be an integer >= 1, got 0", lambda mesh: explain_sparse(mesh, seq_len=8, row_dim=0)),
    ("expected dtype to be a floating", lambda mesh: explain_sparse(mesh, seq_len=8, dtype=torch.int32)),
]  # fmt: skip


def test_refused_before_any_exchange() -> None:
    check_refused_before_any_exchange(BAD)


def test_heads_that_do_not_divide() -> None:
    def body(rank: int) -> None:
        mesh: Any = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp_node", "cp_gpu"))
        options: dict[str, Any] = {"layout": Contiguous(), "method": "heads"}
        with pytest.raises(ValueError, match=r'"heads" expects .* one mesh axis .* got 2 heads and 4 ranks along 1'):
            layer("kda", problem("kda", 1, 3), mesh=dist.group.WORLD, **options)
        with pytest.raises(ValueError, match="got 4 heads and 4 ranks along 2"):
            layer("kda", problem("kda", 1, 3, 4), mesh=mesh, **options)

    with recorded_collectives() as collectives:
        run_ranks(4, body)
    assert not [each for each in collectives if "AllToAll" in each.kind]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda rank: shift(torch.ones(2 + 5 * rank), 1, mesh=dist.group.WORLD, dim=0),  # type: ignore[arg-type]
            "global length: rank 1 says 14, the others 4. Where nothing declares",
        ),
        (
            lambda rank: gated_delta_rule(**GIVEN, mesh=dist.group.WORLD, layout=Striped() if rank else HeadTail()),  # type: ignore[arg-type]
            "layout: rank 1 says",
        ),
        (
            lambda rank: _rule(initial_state=normal(1 + rank, HEADS, K, V))(dist.group.WORLD),
            "(initial state of each batch row, 1, got|global length: rank 1 says 'refused)",
        ),
        (
            lambda rank: _select(1 + rank)(dist.group.WORLD),
            "(divides all batch rows alike|shape: rank 1 says)",
        ),
    ],
)
def test_different_calls_are_refused_on_every_rank(call: Callable[[int], object], message: str) -> None:
    assert all(re.search(message, str(error)) for error in errors_by_rank(2, call))
