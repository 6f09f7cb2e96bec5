"""Checks of masked attention on ranks that are threads, by every method, against dense attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import (
    Balanced,
    BalancedBlocks,
    Contiguous,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    PerDocument,
    Striped,
    context_parallel_attention,
)
from support.masked_problems import MaskedProblem, Tensors, any_mask, fits
from support.problems import assert_close, shard
from support.ranks import run_ranks

NAMES = ("out", "dq", "dk", "dv", "lse")
BIASES = (
    "", "", "", "boolean bhs", "boolean s", "boolean b", "additive bhs", "additive hs", "additive s", "additive h",
)  # fmt: skip
LAYOUTS: tuple[Layout, ...] = (Contiguous(), HeadTail(), MirroredBatch(), Striped(1), Striped(3))
# Over one axis, over two axes that are rings, and over two axes of which the inner one exchanges heads.
RINGS = [{"method": "ring", "rotate_method": transport} for transport in ("allgather", "alltoall")]
WAYS: dict[int, tuple[dict[str, str], ...]] = {
    axes: (*RINGS, {"method": heads}, {"method": "auto"}) for axes, heads in ((1, "ulysses"), (2, "hybrid"))
}


def place(coordinate: list[int], names: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Returns the rank in the sequence; the inner axis is the one called "ulysses", or the second."""
    if len(shape) == 1:
        return coordinate[0]
    inner = names.index("ulysses") if "ulysses" in names else 1
    return coordinate[1 - inner] * shape[inner] + coordinate[inner]


@dataclass(frozen=True)
class MaskedCase:
    """Problem with a layout and options of the call."""

    problem: MaskedProblem
    layout: Layout
    options: tuple[tuple[str, Any], ...]
    seed: int


@st.composite
def _layouts_for(draw: st.DrawFn, mask: Mask, length: int) -> Layout:
    """Draws a layout that is made for a mask or a length."""
    edges = sorted(draw(st.lists(st.integers(0, length), min_size=1, max_size=4)))
    work = tuple(draw(st.lists(st.integers(0, 9), min_size=length, max_size=length)))
    made = [PerDocument(edges, seq_len=length), BalancedBlocks(work, 1, length)]
    return draw(st.sampled_from([*made, Balanced(mask, length, tolerance=draw(st.sampled_from([0.0, 0.01])))]))


@st.composite
def masked_cases(draw: st.DrawFn, axes: int, biases: tuple[str, ...] = BIASES) -> MaskedCase:
    q_len, batch = draw(st.integers(0, 26)), draw(st.integers(1, 3))
    kv_len = draw(st.one_of(st.just(q_len), st.integers(0, 26)))
    mask = draw(any_mask(q_len, kv_len, batch).filter(lambda mask: fits(mask, q_len, kv_len, batch)))
    kv_heads = draw(st.integers(1, 5))
    problem = MaskedProblem(
        q_len, kv_len, mask, batch, kv_heads * draw(st.integers(1, 3)), kv_heads, is_causal=draw(st.booleans()),
        bias=draw(st.sampled_from(biases)), broadcast_keys=draw(st.integers(0, 5)) == 0, sinks=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 0.8])), scale=draw(st.sampled_from([None, None, 0.3, -0.3, 0.0])),
    )  # fmt: skip
    layout = draw(st.sampled_from(LAYOUTS))
    if q_len == kv_len > 0 and draw(st.booleans()):
        layout = draw(_layouts_for(mask, q_len))
    options = draw(st.sampled_from(WAYS[axes]))
    return MaskedCase(problem, layout, tuple(options.items()), draw(st.integers(0, 1000)))


def _attend_all(
    rank: int, cases: list[tuple[MaskedCase, Tensors]], shape: tuple[int, ...], names: tuple[str, ...]
) -> list[tuple[int, Tensors]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    here = place(list(mesh.get_coordinate() or []), names, shape)
    results = []
    for case, tensors in cases:
        q, k, v, grad_out, *bias = case.problem.shard(tensors, case.layout, here, mesh.size())
        leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in (q, k, v, *bias)]
        sinks = case.problem.draw_sinks(case.seed)
        out, lse = context_parallel_attention(
            *leaves[:3], mesh=mesh, layout=case.layout, mask=case.problem.mask, is_causal=case.problem.is_causal,
            attn_mask=leaves[3] if bias else None, sinks=None if sinks is None else sinks.requires_grad_(),
            softcap=case.problem.softcap, scale=case.problem.scale, return_lse=True,
            enable_gqa=case.problem.q_heads != case.problem.kv_heads,
            seq_len=(case.problem.q_len, case.problem.kv_len), **dict(case.options),
        )  # fmt: skip
        out.backward(grad_out)
        grads = [leaf.grad for leaf in (*leaves, *([] if sinks is None else [sinks])) if leaf.requires_grad]
        results.append((here, (out.detach(), *grads[:3], lse, *grads[3:])))
    return results


def check_masked(cases: list[MaskedCase], shape: tuple[int, ...], names: tuple[str, ...] = ("cp",)) -> None:
    """Checks several cases on one set of ranks, since starting ranks takes longer than a case."""
    drawn = [(case, case.problem.draw(case.seed)) for case in cases]
    expected = [case.problem.reference(*tensors, sinks=case.problem.draw_sinks(case.seed)) for case, tensors in drawn]
    size = torch.Size(shape).numel()
    by_rank = run_ranks(size, _attend_all, drawn, shape, names)
    for index, (case, wholes) in enumerate(zip(cases, expected, strict=True)):
        results = [of_rank[index] for of_rank in by_rank]
        for here, result in results:
            for name, got, whole in zip(NAMES, result[:5], wholes[:5], strict=True):
                assert_close(got, shard(whole, case.layout, here, size), f"{name} of place {here}, {case}")
            if case.problem.sinks:  # of this rank's rows
                own_share = shard(wholes[-1], case.layout, here, size).sum((0, 2))
                assert_close(result[-1], own_share, f"dsinks of place {here}, {case}")
        if case.problem.bias.startswith("additive"):
            _check_gradient_of_bias(case, [(here, result[5]) for here, result in results], wholes[5], size)


def _check_gradient_of_bias(
    case: MaskedCase, by_place: list[tuple[int, torch.Tensor]], whole: torch.Tensor, size: int
) -> None:
    """Checks each rank's rows of the gradient; for a bias that all rows share, the sum over the ranks."""
    if len(case.layout.batch_groups(case.problem.batch)) > 1:
        return  # it was expanded before it was sharded
    if whole.size(2) == 1 and case.problem.q_len != 1:
        assert_close(torch.stack([grad for _, grad in by_place]).sum(0), whole, f"dbias, {case}")
    else:
        for here, grad in by_place:
            assert_close(grad, shard(whole, case.layout, here, size), f"dbias of place {here}, {case}")
