"""Checks of masked attention on ranks that are threads, by every method, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
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
)
from support.masked_problems import MaskedProblem, any_mask, fits
from support.problems import assert_close, shard
from support.ranks import run_ranks

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
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0


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
    _rank: int, cases: list[MaskedCase], shape: tuple[int, ...], names: tuple[str, ...]
) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Returns this rank's place in the sequence, and results and gradients by name."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    here, results = place(list(mesh.get_coordinate() or []), names, shape), []
    for case in cases:
        problem = case.problem
        given = problem.shard(problem.draw(case.seed), case.layout, here, mesh.size())
        x = dict(zip(problem.names, given, strict=False))
        grad_out, x["sinks"] = x.pop("grad_out"), problem.draw_sinks(case.seed)
        x = {name: each.clone() for name, each in x.items() if each is not None}
        leaves = {name: each.requires_grad_() for name, each in x.items() if each.is_floating_point()}
        out, lse = problem.call(
            x, mesh=mesh, layout=case.layout, mask=problem.mask, is_causal=problem.is_causal,
            attn_mask=x.get("bias"), sinks=x.get("sinks"), softcap=problem.softcap, scale=problem.scale,
            return_lse=True, **{"seq_len": (problem.q_len, problem.kv_len), **dict(case.options)},
        )  # fmt: skip
        out.backward(grad_out)
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        results.append((here, {"out": out.detach(), "lse": lse, **grads}))
    return results


def check_masked(cases: Sequence[MaskedCase], shape: tuple[int, ...], names: tuple[str, ...] = ("cp",)) -> None:
    """Checks several cases on one set of ranks, since starting ranks takes longer than a case."""
    size = torch.Size(shape).numel()
    by_rank = run_ranks(size, _attend_all, cases, shape, names)
    for case, *results in zip(cases, *by_rank, strict=True):
        problem = case.problem
        wholes = problem.expected(problem.draw(case.seed), problem.draw_sinks(case.seed))
        for name, whole in wholes.items():
            what = f"{name} of {case}"
            if name == "bias" and len(case.layout.batch_groups(problem.batch)) > 1:
                continue  # it was expanded before it was sharded
            if name == "up" or (name == "bias" and whole.size(2) == 1 and problem.q_len != 1):  # all rows share it
                assert_close(torch.stack([each[name] for _, each in results]).sum(0), whole, what)
                continue
            dim = 1 if whole.dim() == 3 and name != "lse" and name != "sinks" else 2
            for here, each in results:
                mine = shard(whole, case.layout, here, size, dim)
                assert_close(each[name], mine.sum((0, 2)) if name == "sinks" else mine, f"place {here}, {what}")
