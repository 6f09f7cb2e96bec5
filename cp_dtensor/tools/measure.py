"""Measurement of methods on all ranks: inputs, timings, launch cost, memory, errors, failures and traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from cp_dtensor import Causal
from cp_dtensor.tools.cases import AllTokens, Attention, ByLayout, Case, Inputs, Method, Select, Source, all_tokens
from cp_dtensor.tools.errors import Outcome, relative_errors
from cp_dtensor.tools.ranks import Call, Device, Failed, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row

T = TypeVar("T")
N = TypeVar("N", int, float)
MOST_WARM_CALLS = 30
_LAUNCH_CALLS = 5
"""Few enough for all their launches to fit into the device's queue; a full queue makes the host wait."""
_FEWEST_REPEATS = 3
_TRACED_CALLS = 3


class Work:
    """One pass of a method over this rank's inputs; keeps the results of the last call.

    `kv_heads` are those of the case; `inputs` may have more, repeated for methods that cannot share them.
    """

    def __init__(self, attention: Attention, inputs: Inputs, pass_name: str, kv_heads: int) -> None:
        self._attention, self._grad_out, self._kv_heads = attention, inputs.grad_out, kv_heads
        self._backward = pass_name == "fwdbwd"
        self._leaves = [tensor.detach().requires_grad_(self._backward) for tensor in (inputs.q, inputs.k, inputs.v)]
        self._out: torch.Tensor | None = None

    def __call__(self) -> None:
        self.release()
        with torch.set_grad_enabled(self._backward):
            out = self._attention(*self._leaves)
            if self._backward:
                out.backward(self._grad_out)
        self._out = out.detach()

    def release(self) -> None:
        """Frees the results."""
        self._out = None
        for leaf in self._leaves:
            leaf.grad = None

    def results(self) -> tuple[torch.Tensor, ...]:
        """Copies out, or (out, dq, dk, dv); dK and dV of repeated heads are summed in float64."""
        assert self._out is not None, "no call has run yet"
        results = [self._out]
        for leaf, heads in zip(self._leaves, (self._leaves[0].size(1), self._kv_heads, self._kv_heads), strict=True):
            if self._backward:
                grad = leaf.grad
                assert grad is not None
                results.append(grad if grad.size(1) == heads else grad.unflatten(1, (heads, -1)).double().sum(2))
        return tuple(result.clone() for result in results)


@dataclass(frozen=True)
class Effort:
    """Time that a row may take."""

    repeats: int
    """Timed calls, if there is time for them."""
    seconds: float
    """Time of all timed calls; slower calls are repeated less often, but at least three times."""
    warm_ms: float = 400.0
    """Time of calls before the timed ones: a GPU that has just begun to work is faster than one with settled clocks."""

    def repeats_of(self, call_ms: float) -> int:
        """Return the number of times that a call is timed.

        >>> effort = Effort(repeats=20, seconds=3.0)
        >>> [effort.repeats_of(call_ms) for call_ms in (1.0, 300.0, 4000.0)]
        [20, 10, 3]
        """
        affordable = int(self.seconds * 1e3 / max(call_ms, 1e-3))
        return max(min(self.repeats, affordable), min(self.repeats, _FEWEST_REPEATS))


def measure(work: Work | None, device: Device, ranks: Ranks, effort: Effort, *, captured: bool) -> dict[str, Any]:
    """Measure repeated calls; returns fields of a `Row`. Afterwards `work` has the results of the last call.

    Args:
        work: work of this rank on `device`; None if only rank 0 works.
        captured: True to run the work as a CUDA graph.

    Raises:
        Failed: on every rank, if the work raised on any rank.
    """
    call: Any = work  # called on ranks that have work only
    alone = not all(ranks.gather(work is not None))

    def together(function: Callable[[], T]) -> list[T]:
        return ranks.together(function, work is not None)

    def timed() -> float:
        device.synchronize()
        if not alone:
            dist.barrier()
        return device.time_ms(call)

    # Launch and wait are separate, so that all ranks learn of a failed launch before any rank waits for that rank.
    together(call)
    together(device.synchronize)
    together(lambda: call.release())
    if captured:
        replay: list[Call] = []
        # A replay allocates nothing: the graph's own pool is filled at the capture.
        extra = together(lambda: device.extra_bytes(lambda: replay.append(device.captured(call))))
        call = replay[0] if replay else None
    else:
        extra = together(lambda: device.extra_bytes(call))
    first_ms = max(together(timed))
    repeats = effort.repeats_of(first_ms)
    warm_calls = min(MOST_WARM_CALLS, int(effort.warm_ms / max(first_ms, 1e-3)))
    together(lambda: [timed() for _ in range(warm_calls)])
    samples = together(lambda: tuple(timed() for _ in range(repeats)))
    cpu_us = together(lambda: device.launch_us(call, min(_LAUNCH_CALLS, repeats)))
    workspaces = together(device.mapped_bytes)
    kernels = dict.fromkeys(kernel for of_rank in together(lambda: device.kernels_of(call)) for kernel in of_rank)
    needed = [None if peak is None else peak + more for peak, more in zip(extra, workspaces, strict=True)]
    cpu_and_memory = {"cpu_us": _largest(cpu_us), "extra_bytes": _largest(needed)}
    return {"samples_ms": tuple(samples), "kernels": tuple(kernels), **cpu_and_memory}


def _largest(values: Sequence[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def status_of(failure: Failed) -> str:
    """`REFUSED` for NotImplementedError, by which a method says that it does not support a case, otherwise `ERROR`."""
    return REFUSED if str(failure).startswith("NotImplementedError") else ERROR


class GroupLost(Exception):
    """Some ranks wait for others that have failed, so that no more can be measured."""


@dataclass(frozen=True)
class Suite:
    """The runner of all cases on this rank."""

    ranks: Ranks
    device: Device
    effort: Effort
    source: Source
    check_up_to: int
    """Errors are computed of cases with no more work than a causal sequence of this length."""
    report: Callable[[Row], None]
    """Called with each row as soon as it is measured, before its errors are known."""

    def run(self, case: Case, passes: tuple[str, ...], methods: tuple[Method, ...]) -> list[Row]:
        """Return the rows of a case, of the methods that have one.

        Raises:
            GroupLost: no further case can run. The rows so far have been reported.
        """
        rows: list[Row] = []
        outcomes: dict[int, Outcome] = {}  # by index of the row
        checks = not case.dropout and case.pairs <= Causal().pairs(self.check_up_to, self.check_up_to)

        def add(row: Row) -> None:
            rows.append(row)
            self.report(row)

        # Rank 0 frees the whole sequence before it draws shards, and shards before those of another layout.
        chosen = sorted((each for each in methods if each.has_row(case)), key=lambda each: not each.alone)
        for shards in dict.fromkeys(each.shards for each in chosen):
            trials: list[tuple[Method, str]] = []
            for method in (each for each in chosen if each.shards == shards):
                refusal = method.refusal(case, self.ranks.world_size)
                if refusal is None:
                    trials += [(method, name) for name in passes]
                else:
                    for name in passes:
                        add(Row(case, name, method.name, REFUSED, refusal))
            if not trials:
                continue
            try:
                inputs, select = self._inputs(case, shards)
            except Failed as failure:
                for method, name in trials:
                    add(Row(case, name, method.name, status_of(failure), str(failure)))
                continue
            for method, name in trials:
                row, tensors = self._row(case, name, method, inputs, checks)
                if tensors is not None:
                    outcomes[len(rows)] = Outcome(tensors, select)
                add(row)
            del inputs
        if not checks:
            return rows
        try:
            errors = relative_errors(case, self.source, outcomes, self.ranks)
        except Failed as failure:
            return [replace(row, note=f"{row.note} not checked: {failure}".strip()) for row in rows]
        return [replace(row, errors=errors.get(index, {})) for index, row in enumerate(rows)]

    def trace(self, case: Case, method: Method, folder: Path) -> None:
        """Writes a Chrome trace of forward and backward on every rank, of calls from a common start of all ranks.

        chrome://tracing and ui.perfetto.dev show it. The library's tiles, merges and transfers have labels that begin
        with "cp_dtensor:".

        Raises:
            Failed: on every rank.
        """
        inputs, _ = self._inputs(case, method.shards)
        name = f"{method.name}-{case.seq_len}-{case.heads.q}x{case.heads.kv}".replace(" ", "-")
        path = folder / f"{name}-rank{self.ranks.rank}.json.gz"

        def write(work: Work) -> None:
            call = self.device.captured(work) if method.captured else work
            for _ in range(_TRACED_CALLS):  # a warm-up
                call()
            self.device.synchronize()
            on_gpu = self.device.torch_device.type == "cuda"
            with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_gpu]) as profiler:
                for number in range(_TRACED_CALLS):
                    dist.barrier()
                    with record_function(f"iteration {number}"):
                        call()
                        self.device.synchronize()
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))

        with ExitStack() as stack:
            work = self._prepared(case, "fwdbwd", method, inputs, False, stack)
            assert work is not None
            self.ranks.together(work)
            self.ranks.together(partial(write, work))

    def _inputs(self, case: Case, shards: ByLayout) -> tuple[Inputs | None, Select]:
        """Draw this rank's inputs (None if it does not take part); also returns what selects its tokens."""

        def draw() -> tuple[Inputs, Select]:
            select = shards.select(case, self.ranks.rank, self.ranks.world_size, self.device.torch_device)
            return self.source.inputs(case, select), select

        takes_part = self.ranks.rank == 0 or not isinstance(shards, AllTokens)
        return self.ranks.on_each(draw, takes_part) or (None, all_tokens)

    def _row(
        self, case: Case, name: str, method: Method, inputs: Inputs | None, checks: bool
    ) -> tuple[Row, tuple[torch.Tensor, ...] | None]:
        """Measure a row; also returns this rank's results if they are to be checked."""
        row, failures = partial(Row, case, name, method.name), list[Failed]()
        for expand_kv in (False, True) if case.enable_gqa and method.may_expand_kv else (False,):
            try:
                with ExitStack() as stack:
                    work = self._prepared(case, name, method, inputs, expand_kv, stack)
                    numbers = measure(work, self.device, self.ranks, self.effort, captured=method.captured)
                    results = work.results() if work is not None and checks else None
            except Failed as failure:
                failures.append(failure)
                if not failure.alike:
                    self.report(row(status_of(failure), str(failure)))
                    raise GroupLost(str(failure)) from failure
            else:
                note = f"K/V repeated to {case.heads.q} heads; with shared ones {failures[0]}" if expand_kv else ""
                numbers["predicted_ms"] = method.predicted_ms(case, name, self.device.torch_device)
                return row(MEASURED, note=note, ranks=self.ranks.world_size, **numbers), results
        return row(status_of(failures[0]), str(failures[0])), None

    def _prepared(
        self, case: Case, name: str, method: Method, inputs: Inputs | None, expand_kv: bool, stack: ExitStack
    ) -> Work | None:
        """Return the work, usable while the stack is open; None if this rank does not take part."""

        def prepare() -> Work:
            assert inputs is not None
            used = inputs.with_expanded_kv() if expand_kv else inputs
            stack.enter_context(method.context(case, self.device.torch_device))
            attention = method.attention(case, self.device.torch_device)
            return Work(attention, used.contiguous() if method.contiguous else used, name, case.heads.kv)

        self.ranks.together(self.device.synchronize)
        self.device.free_unused()  # on all ranks: symmetric memory is mapped by all together
        return self.ranks.on_each(prepare, inputs is not None)
