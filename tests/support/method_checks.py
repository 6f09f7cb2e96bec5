"""Checks of all methods on ranks that are threads, over one mesh axis or two, against one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cp_dtensor import Full, Layout
from support.masked_checks import MaskedCase, check_masked, place
from support.masked_problems import MaskedProblem
from support.problems import Problem

__all__ = ["RING_ULYSSES", "ULYSSES_RING", "check", "check_all", "place"]
RING_ULYSSES, ULYSSES_RING = ("ring", "ulysses"), ("ulysses", "ring")


def check_all(
    problems: Sequence[Problem], layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], seed: int = 0,
    **options: Any,
) -> None:  # fmt: skip
    """Checks several problems on one set of ranks."""
    masked = [
        MaskedProblem(
            each.q_len, each.kv_len, Full(), each.batch, each.q_heads, each.kv_heads, each.head_dim,
            is_causal=each.is_causal, softcap=each.softcap, scale=each.scale,
        )
        for each in problems
    ]  # fmt: skip
    check_masked([MaskedCase(each, layout, tuple(options.items()), seed) for each in masked], shape, names)


def check(
    problem: Problem, layout: Layout, names: tuple[str, ...], shape: tuple[int, ...], seed: int = 0, **options: Any
) -> None:
    """Checks one problem."""
    check_all([problem], layout, names, shape, seed, **options)
