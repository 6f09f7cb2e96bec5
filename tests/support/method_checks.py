"""Checks of all methods on ranks that are threads, over one mesh axis or two, against one device."""

from __future__ import annotations

from typing import Any

from cp_dtensor import Full, Layout
from support.masked_checks import MaskedCase, check_masked, place
from support.masked_problems import MaskedProblem
from support.problems import Problem

__all__ = ["RING_ULYSSES", "ULYSSES_RING", "check", "place"]
RING_ULYSSES, ULYSSES_RING = ("ring", "ulysses"), ("ulysses", "ring")


def check(
    problem: Problem, layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], seed: int = 0, **options: Any
) -> None:
    masked = MaskedProblem(
        problem.q_len, problem.kv_len, Full(), problem.batch, problem.q_heads, problem.kv_heads, problem.head_dim,
        is_causal=problem.is_causal, softcap=problem.softcap, scale=problem.scale,
    )  # fmt: skip
    check_masked([MaskedCase(masked, layout, tuple(options.items()), seed)], shape, names)
