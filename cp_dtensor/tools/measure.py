"""Measurement of methods on all ranks: inputs, timings, launch cost, memory, errors and failures."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cp_dtensor import Causal
from cp_dtensor.tools.cases import WHOLE, Attention, Case, Inputs, Method, inputs_of
from cp_dtensor.tools.errors import ERRORS, Outcome, relative_errors
from cp_dtensor.tools.methods import IDEAL, OURS
from cp_dtensor.tools.ranks import REFUSAL, Call, Device, Failed, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row, times_of
from cp_dtensor.tools.torch_methods import sdpa

T = TypeVar("T")
Drawn = tuple[torch.Tensor, Inputs]
"""Positions of a rank's tokens, and their inputs."""
_SECONDS = 3.0
"""Time of all timed calls; slower calls are repeated less often."""
_WARM_MS = 400
"""Time of calls before the timed ones: a GPU that has just begun to work is faster than one with settled clocks."""
_MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST_REPEATS = 3


class Work:
    """One pass of a method over this rank's inputs; keeps the results of the last call."""

    def __init__(self, attention: Attention, inputs: Inputs, pass_name: str) -> None:
        self._attention, self._grad_out, self._backward = attention, inputs.grad_out, pass_name == "fwdbwd"
        self._leaves = [tensor.detach().requires_grad_(self._backward) for tensor in inputs[:3]]
        self._out: torch.Tensor | None = None

    def __call__(self) -> None:
        self.release()
        with torch.set_grad_enabled(self._backward):
            out = self._attention(*self._leaves)
            if self._backward:
                out.backward(self._grad_out)
        self._out = out.detach()

    def release(self) -> None:
        """Free the results."""
        self._out = None
        for leaf in self._leaves:
            leaf.grad = None

    def results(self) -> tuple[torch.Tensor, ...]:
        """Copy out, or (out, dq, dk, dv)."""
        results = [self._out, *(leaf.grad for leaf in self._leaves if self._backward)]
        return tuple(result.clone() for result in results if result is not None)


@dataclass(frozen=True)
class Suite:
    """The runner of all problems on this rank."""

    ranks: Ranks
    device: Device
    repeats: int
    """Timed calls, if there is time for them. One call is for its results, without calls before it."""
    check_up_to: int = 0
    """Errors are computed of cases with no more work than a causal sequence of this length."""
    tells: bool = True
    """True if rank 0 prints a line for each row that was tried."""

    def attempt(self, title: str, row: Row, measure: Callable[[], Row]) -> None:
        """Complete a row: measured, refused by NotImplementedError, or ended in another error.

        Raises:
            Failed: ranks failed differently, so that no more can be measured.
        """
        row |= {"status": ERROR, "message": None}
        lost: Failed | None = None
        try:
            row |= {"status": MEASURED, **measure()}
        except Failed as failure:
            refusal = str(failure).removeprefix(REFUSAL)
            row |= {"status": ERROR if refusal == str(failure) else REFUSED, "message": refusal}
            lost = None if failure.alike else failure
        if self.tells and self.ranks.rank == 0:
            outcome = f"{row['status']}: {row['message']}" if row["message"] else f"{row['median_ms']:.4g} ms"
            print(f"{title}, {row['pass']}, {row['method']}: {outcome}", file=sys.stderr, flush=True)
        if lost is not None:
            raise lost

    def run(self, case: Case, passes: Sequence[str], methods: Sequence[Method], rows: list[Row]) -> None:
        """Add the rows of a case.

        Raises:
            Failed: ranks failed differently, so that no more can be measured. The rows so far are there.
        """
        first, outcomes = len(rows), dict[int, Outcome]()
        checks = case.pairs <= Causal().pairs(self.check_up_to, self.check_up_to)
        # Rank 0 frees the whole sequence before it draws shards, and shards before those of another layout.
        layouts = sorted(dict.fromkeys(each.layout for each in methods), key=WHOLE.__ne__)
        drawn: dict[str, Drawn | None] = {}
        for method, name in product(sorted(methods, key=lambda each: layouts.index(each.layout)), passes):
            rows.append({**case.columns(), "layout": method.layout_column, "pass": name, "method": method.name})
            keep = partial(outcomes.__setitem__, len(rows) - 1) if checks else None
            self.attempt(case.title, rows[-1], partial(self._row, case, name, method, drawn, keep))
        drawn.clear()
        if checks:
            try:
                errors = relative_errors(case, outcomes, self.ranks, self.device.torch_device)
                for number, by_name in errors.items():
                    rows[number] |= {f"error_{name}": by_name.get(name) for name in ERRORS}
            except Failed as failure:
                for row in rows[first:]:
                    row["message"] = row["message"] or f"not checked: {failure}"
        compare(rows[first:])

    def _row(
        self, case: Case, name: str, method: Method, drawn: dict[str, Drawn | None],
        keep: Callable[[Outcome], None] | None,
    ) -> Row:  # fmt: skip
        """Return the numbers of a row. `drawn` has the inputs of one layout, `keep` takes the results of this rank."""
        device, takes_part = self.device.torch_device, method.layout != WHOLE or self.ranks.rank == 0

        def draw() -> Drawn:
            positions = method.positions(case, method.layout, device)
            return positions, inputs_of(case, positions)

        def prepare() -> Work:
            _, inputs = drawn[method.layout] or draw()  # never the latter: this rank takes part
            stack.enter_context(method.context(case, device))
            attention = method.attention(case, device) if method.attention else sdpa(case, device)
            if method.attention is None and method.shards is not None:
                # Torch's context refuses to work without a buffer; its length tells whether the load can be balanced.
                stack.enter_context(method.shards(case, device, [torch.zeros(1, case.seq_len, device=device)]))
            if method.compiled:
                # From the second length on they would have dynamic shapes, which a training step of one length does not
                # have.
                attention = torch.compile(attention, fullgraph=True, dynamic=False)
            if method.contiguous:
                inputs = Inputs(*(x.contiguous() for x in inputs))
            return Work(attention, inputs, name)

        if method.layout not in drawn:
            drawn.clear()
            drawn[method.layout] = self.ranks.on_each(draw, takes_part)
        with ExitStack() as stack:
            self.begin(method)
            work: Any = self.ranks.on_each(prepare, takes_part)
            # Launch and wait are separate, so that all ranks learn of a failed launch before any waits for that rank.
            for step in (lambda: work(), self.device.synchronize, lambda: work.release()):
                self.ranks.together(step, takes_part)
            numbers = self.measure(work, takes_part, captured=method.captured)
            of_rank = drawn[method.layout]
            if keep is not None and of_rank is not None:
                keep(Outcome(work.results(), of_rank[0]))
        tflops = case.flops(name) / self.ranks.world_size / numbers["median_ms"] / 1e9
        # `compare` computes the last two.
        return {**numbers, "tflops": tflops, "percent_of_ideal": None, "times_others": None}

    def begin(self, method: Method) -> int:
        """Free what former methods have left, on all ranks; return the bytes that are still allocated."""
        gc.collect()  # modules refer to themselves
        self.ranks.together(self.device.synchronize)
        self.device.free_unused()  # on all ranks: symmetric memory is mapped by all together
        if method.compiled:
            torch.compiler.reset()  # all methods share the code of one closure, and Dynamo's limit of recompilations
        return self.device.allocated()

    def measure(
        self, call: Call, takes_part: bool = True, *, captured: bool = False, before: int | None = None
    ) -> Row:  # fmt: skip
        """Measure repeated calls that were made once before, as a CUDA graph if `captured`.

        If only rank 0 takes part, its time is divided by the number of ranks. Memory is that above `before`, or above
        what is allocated now.
        """
        device, alone = self.device, not all(self.ranks.gather(takes_part))

        def together(function: Callable[[], T]) -> list[T]:
            return self.ranks.together(function, takes_part)

        def timed() -> float:
            device.synchronize()
            if not alone:
                dist.barrier()
            return device.time_ms(call)

        replay: list[Call] = []
        # A replay allocates nothing: the graph's own pool is filled at the capture.
        allocates = (lambda: replay.append(device.captured(call))) if captured else call
        extra = together(lambda: device.extra_bytes(allocates, before))
        call = replay[0] if replay else call
        first_ms = max(max(together(timed)), 1e-3)
        repeats = min(self.repeats, max(int(_SECONDS * 1e3 / first_ms), _FEWEST_REPEATS))
        warm_calls = min(_MOST_WARM_CALLS, int(_WARM_MS / first_ms)) if device.is_gpu and repeats > 1 else 0
        samples = [each[warm_calls:] for each in together(lambda: [timed() for _ in range(warm_calls + repeats)])]
        host_us = together(lambda: device.launch_us(call, min(_LAUNCH_CALLS, repeats)))
        kernels = dict.fromkeys(each for of_rank in together(lambda: device.kernels_of(call)) for each in of_rank)
        memory = [peak / 2**20 for peak in extra if peak is not None]
        return {
            **times_of(samples, self.ranks.world_size if alone else 1),
            "host_us": max((each for each in host_us if each is not None), default=None),
            "mib": max(memory, default=None), "kernels": ", ".join(kernels) or None,
        }  # fmt: skip


def compare(rows: Sequence[Row]) -> None:
    """Add to the rows of a case what they are beside the fastest ideal and the fastest method of others."""
    measured = [row for row in rows if row["status"] == MEASURED]
    for row in measured:
        beside = [each for each in measured if each["pass"] == row["pass"]]
        ideals = [each for each in beside if each["method"].startswith(IDEAL)]
        others = [each for each in beside if not each["method"].startswith((IDEAL, OURS))]
        ideal = min(ideals, key=lambda each: each["median_ms"], default=Row())
        pairs = [(row.get(f"error_{name}"), ideal.get(f"error_{name}")) for name in ERRORS]
        row["error_ratio"] = max((ours / best for ours, best in pairs if ours is not None and best), default=None)
        row["percent_of_ideal"] = 100 * ideal["median_ms"] / row["median_ms"] if ideal else None
        fastest = min((each["median_ms"] for each in others), default=None)
        row["times_others"] = None if fastest is None else fastest / row["median_ms"]
