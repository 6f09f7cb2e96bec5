"""Functional forms and contexts on DTensors: exactly the attention of full tensors, with masks, biases and sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.cases import examples
from support.dtensor_checks import CP, DP, TP, Placements, R, distributed, torch_before_2_12
from support.masked_problems import MaskedProblem, any_mask, fits
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cp_dtensor import HeadTail, context_parallel, context_parallel_attention
from cp_dtensor.spec.masks import Batched, Causal, Full

MESHES: list[tuple[tuple[int, ...], tuple[str, ...], Placements, tuple[str, ...]]] = [
    # shape, names, placements of q, k and v, methods
    ((3,), ("cp",), (CP,), ("auto", "ring", "ulysses")),
    ((2,), ("ulysses",), (CP,), ("auto", "ring", "ulysses")),
    ((2, 2), ("dp", "cp"), (DP, CP), ("auto", "ring", "ulysses")),
    ((2, 2), ("cp", "tp"), (CP, TP), ("auto", "ring", "ulysses")),
    ((2, 2), ("ring", "ulysses"), (CP, CP), ("auto", "ring", "hybrid")),
    ((2, 2), ("replicas", "cp"), (R, CP), ("auto",)),
]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Any, ...]:
    shape, names, placements, methods = draw(st.sampled_from(MESHES))
    q_len = draw(st.integers(4, 17))
    kv_len = q_len if draw(st.booleans()) else draw(st.integers(4, 17))
    batch = draw(st.sampled_from([2, 4]))
    mask = draw(any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch)))
    problem = MaskedProblem(
        q_len, kv_len, mask, batch, 4, draw(st.sampled_from([2, 4])), is_causal=draw(st.booleans()),
        bias=draw(st.sampled_from(["", "", "boolean s", "additive hs"])), sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.7])),
    )  # fmt: skip
    return shape, names, placements, draw(st.sampled_from(methods)), problem, draw(st.integers(0, 99))


def compare(name: str, got: torch.Tensor | None, expected: torch.Tensor, context: object) -> None:
    assert isinstance(got, DTensor), (name, context)
    # Locally: to gather, DTensor looks groups up by equal meshes, of which ranks that are threads have several.
    local = distribute_tensor(expected, got.device_mesh, got.placements, src_data_rank=None).to_local()
    torch.testing.assert_close(
        got.to_local(), local, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name} {context}: {text}"
    )


def check(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...], placements: Placements, method: str,
    problem: MaskedProblem, seed: int,
) -> None:  # fmt: skip
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    whole, sinks = problem.draw(seed), problem.draw_sinks(seed)
    q, k, v = distributed(whole[:3], mesh, (placements,) * 3)
    options: dict[str, Any] = {}
    replicated = (R,) * len(shape)
    if problem.bias:
        options["attn_mask"] = distribute_tensor(whole[4], mesh, replicated, src_data_rank=None)
        options["attn_mask"].requires_grad_(whole[4].is_floating_point())
    if sinks is not None:
        options["sinks"] = distribute_tensor(sinks, mesh, replicated, src_data_rank=None).requires_grad_()
    out, lse = context_parallel_attention(
        q, k, v, method=method, mask=problem.mask, is_causal=problem.is_causal, enable_gqa=True, return_lse=True,
        softcap=problem.softcap, **options,
    )  # fmt: skip
    out.backward(distribute_tensor(whole[3], mesh, out.placements, src_data_rank=None))  # type: ignore[attr-defined]
    expected = problem.reference(*whole, sinks=sinks)
    results = [out, q.grad, k.grad, v.grad, lse]
    more = list(expected[5:])
    if "attn_mask" in options and options["attn_mask"].requires_grad:
        results.append(options["attn_mask"].grad)
    if sinks is not None:
        results.append(options["sinks"].grad)
        more[-1] = more[-1].sum((0, 2))
    for name, got, want in zip(
        ("out", "dq", "dk", "dv", "lse", "d", "d"), results, (*expected[:5], *more), strict=False
    ):
        compare(name, got, want, (names, method, problem, rank))


@torch_before_2_12
@settings(max_examples=examples(25), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls())
def test_functions_equal_full_tensors(call: tuple[Any, ...]) -> None:
    run_ranks(torch.Size(call[0]).numel(), check, *call)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layout": HeadTail()}, ValueError, "expects layout to be None or Contiguous"),
    ({"mesh": "world"}, ValueError, "expects mesh to be None or that of the DTensors"),
    ({"seq_len": 13}, ValueError, "expects seq_len to be None or that of the DTensors"),
    ({"debug": True}, NotImplementedError, "debug=True compares the shards"),
    ({"method": "hybrid"}, ValueError, 'method "hybrid" expects DTensors .* over two mesh axes'),
    ({"sinks": torch.zeros(2)}, ValueError, "expected sinks to be a DTensor on the mesh of q"),
    ({"attn_mask": torch.zeros(6, 12)}, ValueError, "expected attn_mask to be a DTensor on the mesh of q"),
    ({"mask": Batched([Full()] * 3)}, ValueError, "batch"),
]


@pytest.mark.parametrize(("options", "error", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_refusals(options: dict[str, Any], error: type[Exception], message: str) -> None:
    def body(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        q = distribute_tensor(torch.zeros(2, 2, 12, 4, dtype=torch.float64), mesh, (CP,), src_data_rank=None)
        given = {**options, "mesh": dist.group.WORLD} if "mesh" in options else options
        with pytest.raises(error, match=message):
            context_parallel_attention(q, q, q, **given)

    run_ranks(2, body)


def test_plain_tensors_are_refused() -> None:
    def body(_rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        plain = torch.zeros(2, 2, 6, 4, dtype=torch.float64)
        q = distribute_tensor(torch.zeros(2, 2, 12, 4, dtype=torch.float64), mesh, (CP,), src_data_rank=None)
        with pytest.raises(TypeError, match="DeviceMesh of one dim or a ProcessGroup"):
            context_parallel_attention(plain, plain, plain)
        with pytest.raises(TypeError, match="expected q to be a plain tensor"):
            context_parallel_attention(q, q, torch.zeros(2, 2, 12, 4, dtype=torch.float64))

    run_ranks(2, body)


def test_masks_of_contexts_are_not_traced() -> None:
    """Code compiled in a context with a mask serves others, whose masks it would not read."""

    def body(_rank: int) -> None:  # of one rank: torch.fx cannot trace in two threads at once
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        q = distribute_tensor(torch.zeros(2, 2, 12, 4, dtype=torch.float64), mesh, (CP,), src_data_rank=None)
        with (
            context_parallel(mesh, mask=Causal()),
            pytest.raises(NotImplementedError, match="in compiled code"),
        ):
            make_fx(lambda: F.scaled_dot_product_attention(q, q, q))()

    run_ranks(1, body)
