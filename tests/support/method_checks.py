"""Checks of all methods on ranks that are threads, over one mesh axis or two, against one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cp_dtensor import Layout, context_parallel_attention
from support.problems import Problem, reference, shard
from support.ranks import run_ranks

Tensors = tuple[torch.Tensor, ...]
RING_ULYSSES, ULYSSES_RING = ("ring", "ulysses"), ("ulysses", "ring")


def place(coordinate: list[int], names: tuple[str, ...], shape: tuple[int, ...]) -> int:
    """Returns the rank in the sequence; the inner axis is the one called "ulysses", or the second."""
    if len(shape) == 1:
        return coordinate[0]
    inner = names.index("ulysses") if "ulysses" in names else 1
    return coordinate[1 - inner] * shape[inner] + coordinate[inner]


def attend(
    rank: int,
    tensors: Tensors,
    problem: Problem,
    layout: Layout,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    options: dict[str, Any],
    mesh: DeviceMesh | None = None,
) -> tuple[int, Tensors]:
    """Returns this rank's rank in the sequence, and (out, dq, dk, dv, lse)."""
    mesh = mesh or init_device_mesh("cpu", shape, mesh_dim_names=names)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    here, size = place(list(coordinate), names, shape), mesh.size()
    q, k, v, grad_out = (shard(tensor, layout, here, size) for tensor in tensors)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    out, lse = context_parallel_attention(
        q, k, v, mesh=mesh, layout=layout, is_causal=problem.is_causal, scale=problem.scale,
        enable_gqa=problem.q_heads != problem.kv_heads, return_lse=True,
        **{"seq_len": (problem.q_len, problem.kv_len), **options},
    )  # fmt: skip
    out.backward(grad_out)
    return here, (out.detach(), q.grad, k.grad, v.grad, lse)


def reference_lse(problem: Problem, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    logits = q @ k.repeat_interleave(problem.q_heads // problem.kv_heads, 1).mT * scale
    if problem.is_causal:
        hidden = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, float("-inf"))
    return torch.logsumexp(logits, dim=-1)


def attend_all(
    rank: int,
    drawn: list[tuple[Problem, Tensors]],
    layout: Layout,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    options: dict[str, Any],
) -> list[tuple[int, Tensors]]:
    """Runs `attend` for each of several problems."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return [attend(rank, tensors, problem, layout, names, shape, options, mesh) for problem, tensors in drawn]


def check_all(
    problems: Sequence[Problem], layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], seed: int = 0,
    **options: Any,
) -> None:  # fmt: skip
    """Checks several problems on one set of ranks, since starting ranks takes longer than a problem."""
    drawn = [(problem, problem.draw(seed)) for problem in problems]
    expected = [(*reference(problem, *tensors), reference_lse(problem, *tensors[:2])) for problem, tensors in drawn]
    size = torch.Size(shape).numel()
    for of_rank in run_ranks(size, attend_all, drawn, layout, names, shape, options):
        for problem, (here, result), wholes in zip(problems, of_rank, expected, strict=True):
            for name, got, whole in zip(("out", "dq", "dk", "dv", "lse"), result, wholes, strict=True):
                what = f"{name} of place {here}, {problem}"
                torch.testing.assert_close(
                    got, shard(whole, layout, here, size), rtol=1e-10, atol=1e-10,
                    msg=lambda text, what=what: f"{what}: {text}",
                )  # fmt: skip


def check(
    problem: Problem, layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], seed: int = 0, **options: Any
) -> None:
    """Checks one problem."""
    check_all([problem], layout, names, shape, seed, **options)
