"""Run of several methods through a case: inputs, measurements, errors and failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cp_dtensor import Causal
from cp_dtensor.tools.cases import AllTokens, Case, Inputs, Method, Select, Shards, Source, all_tokens
from cp_dtensor.tools.errors import Outcome, relative_errors
from cp_dtensor.tools.measure import Effort, Work, measure, write_trace
from cp_dtensor.tools.ranks import Device, Failed, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row

Tensors = tuple[torch.Tensor, ...]
"""out, or out, dq, dk and dv."""


@dataclass(frozen=True)
class Trial:
    """One method at one case and pass."""

    case: Case
    pass_name: str
    method: Method

    def row(self, status: str, message: str = "", **measured: Any) -> Row:
        """The row of the trial; `measured` are numbers of a measurement."""
        return Row(self.case, self.pass_name, self.method.name, status, message, **measured)

    def failed_row(self, failure: Failed) -> Row:
        """The row of a method that raised."""
        return self.row(status_of(failure), str(failure))


def status_of(failure: Failed) -> str:
    """`REFUSED` for NotImplementedError, by which a method says that it does not support a case, otherwise `ERROR`."""
    return REFUSED if str(failure).startswith("NotImplementedError") else ERROR


class GroupLost(Exception):
    """Some ranks wait for others that have failed, so that no more can be measured."""


@dataclass(frozen=True)
class Suite:
    """The runner of all cases."""

    ranks: Ranks
    device: Device
    """Device of this rank."""
    effort: Effort
    source: Source
    check_up_to: int
    """Errors are computed of cases with no more work than a causal sequence of this length."""
    report: Callable[[Row], None]
    """Called with each row as soon as it is measured, before its errors are known."""

    def run(self, case: Case, passes: tuple[str, ...], methods: tuple[Method, ...]) -> list[Row]:
        """The rows of a case, of the methods that have one.

        Raises:
            GroupLost: no further case can run. The rows so far have been reported.
        """
        rows: list[Row] = []
        outcomes: dict[int, Outcome] = {}  # by index of the row
        # Rank 0 frees the whole sequence before it draws shards, and shards before those of another layout.
        chosen = sorted((each for each in methods if each.has_row(case)), key=lambda each: not each.alone)
        for shards in dict.fromkeys(each.shards for each in chosen):
            trials: list[Trial] = []
            for method in chosen:
                if method.shards != shards:
                    continue
                refusal = method.refusal(case, self.ranks.world_size)
                for trial in (Trial(case, name, method) for name in passes):
                    if refusal is None:
                        trials.append(trial)
                    else:
                        self._add(rows, trial.row(REFUSED, refusal))
            if not trials:
                continue
            try:
                inputs, select = self._inputs(case, shards)
            except Failed as failure:
                for trial in trials:
                    self._add(rows, trial.failed_row(failure))
                continue
            for trial in trials:
                row, tensors = self._row(trial, inputs)
                if tensors is not None:
                    outcomes[len(rows)] = Outcome(tensors, select)
                self._add(rows, row)
            del inputs
        return self._with_errors(case, rows, outcomes) if self._checks(case) else rows

    def trace(self, case: Case, method: Method, folder: Path) -> None:
        """Writes a trace of forward and backward on every rank.

        Raises:
            Failed: on every rank.
        """
        inputs, _ = self._inputs(case, method.shards)
        name = f"{method.name}-{case.seq_len}-{case.heads.q}x{case.heads.kv}".replace(" ", "-")
        path = folder / f"{name}-rank{self.ranks.rank}.json.gz"
        with ExitStack() as stack:
            work = self._prepared(Trial(case, "fwdbwd", method), inputs, False, stack)
            assert work is not None
            self.ranks.together(work)

            def write() -> None:
                call = self.device.captured(work) if method.captured else work
                write_trace(call, self.device, path)

            self.ranks.together(write)

    def _add(self, rows: list[Row], row: Row) -> None:
        rows.append(row)
        self.report(row)

    def _checks(self, case: Case) -> bool:
        return not case.dropout and case.pairs <= Causal().pairs(self.check_up_to, self.check_up_to)

    def _inputs(self, case: Case, shards: Shards) -> tuple[Inputs | None, Select]:
        """This rank's inputs (None if it does not take part) and the function that selects its tokens."""

        def draw() -> tuple[Inputs, Select]:
            select = shards.select(case, self.ranks.rank, self.ranks.world_size, self.device.torch_device)
            return self.source.inputs(case, select), select

        takes_part = self.ranks.rank == 0 or not isinstance(shards, AllTokens)
        return self.ranks.on_each(draw, takes_part) or (None, all_tokens)

    def _row(self, trial: Trial, inputs: Inputs | None) -> tuple[Row, Tensors | None]:
        """The row, and this rank's results if they are to be checked."""
        case, method = trial.case, trial.method
        failures: list[Failed] = []
        for expand_kv in (False, True) if case.enable_gqa and method.may_expand_kv else (False,):
            try:
                with ExitStack() as stack:
                    work = self._prepared(trial, inputs, expand_kv, stack)
                    numbers = measure(work, self.device, self.ranks, self.effort, captured=method.captured)
                    results = work.results() if work is not None and self._checks(case) else None
            except Failed as failure:
                failures.append(failure)
                if not failure.alike:
                    self.report(trial.failed_row(failure))
                    raise GroupLost(str(failure)) from failure
            else:
                note = f"K/V repeated to {case.heads.q} heads; with shared ones {failures[0]}" if expand_kv else ""
                predicted = method.predicted_ms(case, trial.pass_name, self.device.torch_device)
                ranks = self.ranks.world_size
                return trial.row(MEASURED, note=note, ranks=ranks, predicted_ms=predicted, **numbers), results
        return trial.failed_row(failures[0]), None

    def _prepared(self, trial: Trial, inputs: Inputs | None, expand_kv: bool, stack: ExitStack) -> Work | None:
        """The work, usable while the stack is open; None if this rank does not take part."""

        def prepare() -> Work:
            assert inputs is not None
            used = inputs.with_expanded_kv() if expand_kv else inputs
            used = used.contiguous() if trial.method.contiguous else used
            stack.enter_context(trial.method.context(trial.case, self.device.torch_device))
            attention = trial.method.attention(trial.case, self.device.torch_device)
            return Work(attention, used, trial.pass_name, trial.case.heads.kv)

        self.ranks.together(self.device.synchronize)
        self.device.free_unused()  # on all ranks: symmetric memory is mapped by all together
        return self.ranks.on_each(prepare, inputs is not None)

    def _with_errors(self, case: Case, rows: list[Row], outcomes: dict[int, Outcome]) -> list[Row]:
        try:
            errors = relative_errors(case, self.source, outcomes, self.ranks)
        except Failed as failure:
            return [dataclasses.replace(row, note=f"{row.note} not checked: {failure}".strip()) for row in rows]
        return [dataclasses.replace(row, errors=errors.get(index, {})) for index, row in enumerate(rows)]
