"""Measurement of methods on all ranks: inputs, timings, launch cost, memory, errors, failures and traces."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor import Causal
from cp_dtensor.tools.cases import WHOLE, Attention, Case, Inputs, Method, inputs_of
from cp_dtensor.tools.errors import ERRORS, Outcome, relative_errors
from cp_dtensor.tools.methods import IDEAL, OURS
from cp_dtensor.tools.ranks import Call, Device, Failed, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row, times_of
from cp_dtensor.tools.torch_methods import sdpa

T = TypeVar("T")
_MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST_REPEATS = 3
_TRACED_CALLS = 3


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
    """The runner of all cases on this rank."""

    ranks: Ranks
    device: Device
    repeats: int
    """Timed calls, if there is time for them."""
    seconds: float
    """Time of all timed calls; slower calls are repeated less often, but at least three times."""
    warm_ms: float
    """Time of calls before the timed ones: a GPU that has just begun to work is faster than one with settled clocks."""
    check_up_to: int
    """Errors are computed of cases with no more work than a causal sequence of this length."""
    traces: Path | None = None
    """Folder of a Chrome trace of each rank, of methods that run on all ranks."""
    report: Callable[[Row], None] = lambda row: None
    """Called with each row that is tried, before its errors are known."""

    def run(self, case: Case, passes: Sequence[str], methods: Sequence[Method], rows: list[Row]) -> None:
        """Add the rows of a case.

        Raises:
            Failed: ranks failed differently, so that no more can be measured. The rows so far are there.
        """
        first, outcomes = len(rows), dict[int, Outcome]()
        checks = not case.dropout and case.pairs <= Causal().pairs(self.check_up_to, self.check_up_to)
        # Rank 0 frees the whole sequence before it draws shards, and shards before those of another layout.
        layouts = sorted(dict.fromkeys(each.layout for each in methods), key=WHOLE.__ne__)
        drawn: dict[str, tuple[torch.Tensor, Inputs] | None] = {}
        for method, name in product(sorted(methods, key=lambda each: layouts.index(each.layout)), passes):
            row: Row = {**case.columns(), "layout": method.layout_column, "pass": name, "method": method.name}
            row |= {"status": ERROR, "message": None}
            rows.append(row)
            if refusal := method.refusal(case, self.ranks.world_size):
                row |= {"status": REFUSED, "message": refusal}
                continue
            try:
                numbers, outcome = self._row(case, name, method, drawn, checks)
                row |= {"status": MEASURED, **numbers}
                if outcome is not None:
                    outcomes[len(rows) - 1] = outcome
            except Failed as failure:
                row |= {"status": REFUSED if failure.is_refusal else ERROR, "message": str(failure)}
                if not failure.alike:
                    raise
            finally:
                self.report(row)
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
        self, case: Case, name: str, method: Method, drawn: dict[str, tuple[torch.Tensor, Inputs] | None], checks: bool
    ) -> tuple[Row, Outcome | None]:
        """Return the numbers of a row, and this rank's results if asked; `drawn` has the inputs of one layout."""
        device, takes_part = self.device.torch_device, method.layout != WHOLE or self.ranks.rank == 0

        def draw() -> tuple[torch.Tensor, Inputs]:
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
                # All methods and cases share the code of one closure. Without a reset they meet Dynamo's limit of
                # recompilations. From the second length on they would have dynamic shapes, which a training step of
                # one length does not have.
                torch.compiler.reset()
                attention = torch.compile(attention, fullgraph=True, dynamic=False)
            return Work(attention, inputs.contiguous() if method.contiguous else inputs, name)

        if method.layout not in drawn:
            drawn.clear()
            drawn[method.layout] = self.ranks.on_each(draw, takes_part)
        with ExitStack() as stack:
            self.ranks.together(self.device.synchronize)
            self.device.free_unused()  # on all ranks: symmetric memory is mapped by all together
            work = self.ranks.on_each(prepare, takes_part)
            trace = None
            if self.traces is not None and method.layout != WHOLE:
                file = f"{method.name}-{name}-{case.seq_len}-{case.heads}-rank{self.ranks.rank}.json.gz"
                trace = self.traces / re.sub(r"[ :/]", "-", file)
            numbers = self._measure(work, method.captured, trace)
            of_rank = drawn[method.layout]
            outcome = Outcome(work.results(), of_rank[0]) if checks and work and of_rank else None
        tflops = case.flops(name) / self.ranks.world_size / numbers["median_ms"] / 1e9
        numbers |= {"tflops": tflops, "percent_of_ideal": None, "times_others": None}  # the others: see `compare`
        numbers["predicted_ms"] = method.predicted_ms(case, name, device)
        return numbers, outcome

    def _measure(self, work: Work | None, captured: bool, trace: Path | None) -> Row:
        """Measure repeated calls, as a CUDA graph if `captured`. Afterwards `work` has the results of the last call.

        `work` is None on ranks that wait for rank 0, whose time is divided by the number of ranks.
        """
        call: Any = work  # called on ranks that have work only
        alone = not all(self.ranks.gather(work is not None))

        def together(function: Callable[[], T]) -> list[T]:
            return self.ranks.together(function, work is not None)

        def timed() -> float:
            self.device.synchronize()
            if not alone:
                dist.barrier()
            return self.device.time_ms(call)

        # Launch and wait are separate, so that all ranks learn of a failed launch before any rank waits for that rank.
        together(call)
        together(self.device.synchronize)
        together(lambda: call.release())
        if captured:
            replay: list[Call] = []
            # A replay allocates nothing: the graph's own pool is filled at the capture.
            extra = together(lambda: self.device.extra_bytes(lambda: replay.append(self.device.captured(call))))
            call = replay[0]
        else:
            extra = together(lambda: self.device.extra_bytes(call))
        first_ms = max(together(timed))
        affordable = max(int(self.seconds * 1e3 / max(first_ms, 1e-3)), _FEWEST_REPEATS)
        repeats = min(self.repeats, affordable)
        warm_calls = min(_MOST_WARM_CALLS, int(self.warm_ms / max(first_ms, 1e-3)))
        together(lambda: [timed() for _ in range(warm_calls)])
        samples = together(lambda: [timed() for _ in range(repeats)])
        host_us = together(lambda: self.device.launch_us(call, min(_LAUNCH_CALLS, repeats)))
        kernels = dict.fromkeys(each for of_rank in together(lambda: self.device.kernels_of(call)) for each in of_rank)
        if trace is not None:
            together(lambda: self._trace(call, trace))
        memory = [peak / 2**20 for peak in extra if peak is not None]
        return {
            **times_of(samples, self.ranks.world_size if alone else 1),
            "host_us": max((each for each in host_us if each is not None), default=None),
            "mib": max(memory, default=None), "kernels": ", ".join(kernels) or None,
        }  # fmt: skip

    def _trace(self, call: Call, path: Path) -> None:
        """Write a Chrome trace of calls from a common start of all ranks.

        chrome://tracing and ui.perfetto.dev show it. The library's tiles, merges and transfers have labels that begin
        with "cp_dtensor:".
        """
        on_gpu = self.device.torch_device.type == "cuda"
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
            for number in range(_TRACED_CALLS):
                dist.barrier()
                with record_function(f"iteration {number}"):
                    call()
                    self.device.synchronize()
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))


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
