"""Runs baselines through a case: inputs, measurements, errors, and what happens when one fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from cp_dtensor.spec.masks import Causal
from cp_dtensor.tools.bench.accuracy import Outcome, relative_errors
from cp_dtensor.tools.bench.baseline import Baseline
from cp_dtensor.tools.bench.cases import Case
from cp_dtensor.tools.bench.devices import Device
from cp_dtensor.tools.bench.inputs import Everything, Inputs, Select, Shards, Source, everything
from cp_dtensor.tools.bench.measure import Effort, Measurement, measure
from cp_dtensor.tools.bench.ranks import Failed, Ranks
from cp_dtensor.tools.bench.rows import ERROR, MEASURED, REFUSED, Row
from cp_dtensor.tools.bench.trace import write_trace
from cp_dtensor.tools.bench.work import Work

Results = tuple[torch.Tensor, ...]
"""out, or out, dq, dk and dv."""


@dataclass(frozen=True)
class Trial:
    """What becomes a row."""

    case: Case
    pass_name: str
    baseline: Baseline

    def row(self, measurement: Measurement, ranks: int, note: str, predicted_ms: float | None) -> Row:
        """The row of a measurement."""
        return Row(
            case=self.case,
            pass_name=self.pass_name,
            baseline=self.baseline.name,
            status=MEASURED,
            note=note,
            samples_ms=measurement.samples_ms,
            ranks=ranks,
            cpu_us=measurement.cpu_us,
            extra_bytes=measurement.extra_bytes,
            predicted_ms=predicted_ms,
        )

    def empty_row(self, status: str, message: str) -> Row:
        """The row of what was not measured."""
        return Row(self.case, self.pass_name, self.baseline.name, status, message)

    def failed_row(self, failure: Failed) -> Row:
        """The row of a baseline that raised; NotImplementedError is its way to say no."""
        return self.empty_row(REFUSED if str(failure).startswith("NotImplementedError") else ERROR, str(failure))


class GroupLost(Exception):
    """Some ranks wait for others that have failed: nothing more can be measured."""


class Suite:
    """Everything that stays the same from case to case.

    Args:
        ranks: all ranks.
        device: of this rank.
        effort: for each row.
        source: of inputs.
        check_up_to: errors are computed of cases with no more work than a causal sequence of this length.
        report: told of each row as soon as it is measured, before its errors are known.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: Device,
        effort: Effort,
        source: Source,
        check_up_to: int,
        report: Callable[[Row], None],
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._effort = effort
        self._source = source
        self._check_up_to = check_up_to
        self._report = report

    def run(self, case: Case, passes: tuple[str, ...], baselines: tuple[Baseline, ...]) -> list[Row]:
        """The rows of a case, of those baselines that it suits.

        Raises:
            GroupLost: no further case can be run. The rows so far have been reported.
        """
        rows: list[Row] = []
        outcomes: dict[int, Outcome] = {}  # by index of the row
        # The whole sequence leaves rank 0 before the shards come, and shards before others.
        chosen = sorted((each for each in baselines if each.suits(case)), key=lambda each: not each.alone)
        for shards in dict.fromkeys(each.shards for each in chosen):
            trials: list[Trial] = []
            for baseline in chosen:
                if baseline.shards != shards:
                    continue
                refusal = baseline.refusal(case, self._ranks.world_size)
                for trial in (Trial(case, name, baseline) for name in passes):
                    if refusal is None:
                        trials.append(trial)
                    else:
                        self._add(rows, trial.empty_row(REFUSED, refusal))
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

    def trace(self, case: Case, baseline: Baseline, folder: Path) -> None:
        """Writes a trace of forward and backward on every rank.

        Raises:
            Failed: on every rank.
        """
        inputs, _ = self._inputs(case, baseline.shards)
        name = f"{baseline.name}-{case.seq_len}-{case.heads.q}x{case.heads.kv}".replace(" ", "-")
        path = folder / f"{name}-rank{self._ranks.rank}.json.gz"
        with ExitStack() as stack:
            work = self._prepared(Trial(case, "fwdbwd", baseline), inputs, False, stack)
            assert work is not None
            self._ranks.together(work)

            def write() -> None:
                call = self._device.captured(work) if baseline.captured else work
                write_trace(call, self._device, dist.barrier, path)

            self._ranks.together(write)

    def _add(self, rows: list[Row], row: Row) -> None:
        rows.append(row)
        self._report(row)

    def _checks(self, case: Case) -> bool:
        return case.pairs <= Causal().pairs(self._check_up_to, self._check_up_to)

    def _inputs(self, case: Case, shards: Shards) -> tuple[Inputs | None, Select]:
        """What this rank computes with (None: it does not take part), and which tokens these are."""
        ranks = self._ranks
        drawn: list[tuple[Inputs, Select]] = []

        def draw() -> None:
            select = shards.select(case, ranks.rank, ranks.world_size, self._device.torch_device)
            drawn.append((self._source.inputs(case, select), select))

        ranks.together(draw, ranks.rank == 0 or not isinstance(shards, Everything))
        return drawn[0] if drawn else (None, everything)

    def _row(self, trial: Trial, inputs: Inputs | None) -> tuple[Row, Results | None]:
        """The row, and this rank's results if they will be checked."""
        case, baseline = trial.case, trial.baseline
        failures: list[Failed] = []
        for expand_kv in (False, True) if case.enable_gqa and baseline.may_expand_kv else (False,):
            try:
                measurement, results = self._measured(trial, inputs, expand_kv)
            except Failed as failure:
                failures.append(failure)
                if not failure.alike:
                    self._report(trial.failed_row(failure))
                    raise GroupLost(str(failure)) from failure
            else:
                note = f"K/V repeated to {case.heads.q} heads; with shared ones {failures[0]}" if expand_kv else ""
                predicted = baseline.predicted_ms(case, trial.pass_name, self._device.torch_device)
                return trial.row(measurement, self._ranks.world_size, note, predicted), results
        return trial.failed_row(failures[0]), None

    def _measured(self, trial: Trial, inputs: Inputs | None, expand_kv: bool) -> tuple[Measurement, Results | None]:
        results: list[Results] = []
        with ExitStack() as stack:
            work = self._prepared(trial, inputs, expand_kv, stack)
            measurement = measure(
                work,
                self._device,
                self._ranks,
                self._effort,
                lambda: trial.baseline.workspace_bytes(self._device.torch_device),
                captured=trial.baseline.captured,
            )
            if work is not None and self._checks(trial.case):
                results.append(work.results())
        return measurement, results[0] if results else None

    def _prepared(self, trial: Trial, inputs: Inputs | None, expand_kv: bool, stack: ExitStack) -> Work | None:
        """The work, usable while the stack is open; None where this rank does not take part."""
        prepared: list[Work] = []

        def prepare() -> None:
            assert inputs is not None
            self._device.free_unused()
            given = inputs.with_expanded_kv() if expand_kv else inputs
            given = given.contiguous() if trial.baseline.contiguous else given
            attention = stack.enter_context(trial.baseline.attention(trial.case, self._device.torch_device))
            prepared.append(Work(attention, given, trial.pass_name, trial.case.heads.kv))

        self._ranks.together(prepare, inputs is not None)
        return prepared[0] if prepared else None

    def _with_errors(self, case: Case, rows: list[Row], outcomes: dict[int, Outcome]) -> list[Row]:
        try:
            errors = relative_errors(case, self._source, outcomes, self._ranks)
        except Failed as failure:
            return [dataclasses.replace(row, note=f"{row.note} not checked: {failure}".strip()) for row in rows]
        return [dataclasses.replace(row, errors=errors.get(index, {})) for index, row in enumerate(rows)]
