"""Ranks that make different calls, and the table of docs/troubleshooting.md that says when they find out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from cp_dtensor import HeadTail, PeerError, SlidingWindow, context_parallel, context_parallel_attention
from support.problems import Problem, shard

PROBLEM = Problem(96, 96, 1, 2, 2, 16)
WRONG_STEP, STEPS, FAULTY = 3, 40, 1
LAYERS, SKIPPED = 3, 1
PAUSE = 0.02
"""Seconds between two steps: ranks look for at most 1% of the time."""


class Found(NamedTuple):
    """The end of a rank's steps."""

    step: int
    error: PeerError | ValueError
    outs: list[tuple[int, torch.Tensor]]
    """The results of the last step, as far as it got, each divided by the factor of its values; and their windows."""


class Step(NamedTuple):
    """The calls of a step."""

    layers: Callable[[int, bool], Iterator[tuple[int, int, int]]]
    """Layer, number of heads and window of each call, given the rank, and True if this is the step with the fault."""
    has_backward: bool
    has_context: bool = True


def _skips(rank: int, is_wrong: bool) -> Iterator[tuple[int, int, int]]:
    for layer in range(LAYERS):
        # The last one: results of later equal calls would be wrong, since nothing tells these calls apart.
        if not (is_wrong and rank == FAULTY and layer == LAYERS - 1):
            yield layer, 2, 10


def _skips_before_more(rank: int, is_wrong: bool) -> Iterator[tuple[int, int, int]]:
    for layer in range(LAYERS):
        if not (is_wrong and rank == FAULTY and layer == SKIPPED):
            yield layer, 2 if layer == 2 else 1, 10


def _another_mask(rank: int, is_wrong: bool) -> Iterator[tuple[int, int, int]]:
    for layer in range(LAYERS):
        is_other = layer == SKIPPED and not (is_wrong and rank == FAULTY)
        yield layer, 2, 40 if is_other else 10


FAULTS = {
    "skips one of equal calls, then leaves the context": Step(_skips, has_backward=False),
    "skips one of equal calls, then runs backward": Step(_skips, has_backward=True),
    "skips a call before one that sends more": Step(_skips_before_more, has_backward=True),
    "passes another mask": Step(_another_mask, has_backward=False),
    "skips one of equal calls outside of contexts, then runs backward": Step(_skips, True, has_context=False),
}
"""By the first column of the table."""
COLUMNS = ("gloo", "shared memory", "NCCL", "`debug=True`")


def table() -> dict[tuple[str, str], str]:
    """The cells of the table, by row and column."""
    text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    lines = text.partition("## Different calls")[2].partition("\n- ")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    assert header[1:] == list(COLUMNS)
    assert [row[0] for row in rows] == list(FAULTS)
    return {(row[0], column): cell for row in rows for column, cell in zip(COLUMNS, row[1:], strict=True)}


def steps_until_found(
    rank: int, group: Any, fault: str, device: str = "cpu", debug: bool = False, **options: Any
) -> Found:
    """Makes equal steps but for one, until an error is raised."""
    step_of, size = FAULTS[fault], group.size()
    *whole, _ = PROBLEM.draw(seed=0, device=device)
    if device == "cuda":  # for which kernels of masks are made
        whole = [x.float() for x in whole]
    shards = [shard(x, HeadTail(), rank, size) for x in whole]  # not in a step: it waits for the GPU
    for step in range(STEPS):
        outs: list[tuple[int, torch.Tensor]] = []
        leaves = [x.clone().requires_grad_(step_of.has_backward) for x in shards]
        context: AbstractContextManager[Any] = nullcontext()
        if step_of.has_context:
            context = context_parallel(group, seq_len=PROBLEM.q_len, debug=debug)
        try:
            with context:
                for layer, heads, window in step_of.layers(rank, step == WRONG_STEP):
                    q, k, v = (x[:, :heads] for x in leaves)
                    out = context_parallel_attention(
                        q, k, v * (layer + 1), mesh=group, mask=SlidingWindow(window, 0),
                        seq_len=PROBLEM.q_len, debug=debug, **options,
                    )  # fmt: skip
                    assert isinstance(out, torch.Tensor)
                    outs.append((window, out / (layer + 1)))
                if step_of.has_backward:
                    torch.stack([out.sum() for _, out in outs]).sum().backward()
        except (PeerError, ValueError) as error:
            return Found(step, error, [(window, out.detach()) for window, out in outs])
        time.sleep(PAUSE)
    raise AssertionError(f"rank {rank} has made {STEPS} steps without an error")


def check_right_or_nan(rank: int, size: int, found: Found) -> None:
    """Results of a step with a fault are right or have NaN: no rank has taken rows of another pass."""
    back = torch.arange(PROBLEM.q_len)[:, None] - torch.arange(PROBLEM.kv_len)
    q, k, v, _ = PROBLEM.draw(seed=0)
    for window, out in found.outs:
        if not out.isnan().any():
            whole = F.scaled_dot_product_attention(q, k, v, attn_mask=(back >= 0) & (back <= window))
            expected = shard(whole, HeadTail(), rank, size)[:, : out.size(1)]
            tolerance = 1e-10 if out.dtype == torch.float64 else 1e-2
            torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=tolerance)


def check_named(fault: str, found: Found) -> None:
    """The error names the first pass that differs and the ranks."""
    text = str(found.error)
    if isinstance(found.error, ValueError):  # with `debug=True`, ranks have compared all arguments
        assert f"rank {FAULTY} says" in text, text
        return
    before = 1 if fault in ("passes another mask", "skips a call before one that sends more") else 2
    assert "make different calls" in text, text
    assert f"After {before} forward passes since the end of a context" in text or not FAULTS[fault].has_context, text
    assert f"rank {FAULTY}: " in text or f"{FAULTY}, " in text, text
    assert text.count("attention of") + text.count("end of a context") + text.count("compare first") > 1, text
