"""Rows of the training benchmark, the numbers that follow from them, and their reports: JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import Any

from cp_dtensor.tools.report import (
    MEASURED,
    NOTHING,
    OURS_PREFIX,
    formatted,
    markdown_table,
    significant,
    slowest,
    spread,
)
from cp_dtensor.tools.train import Job, Turn

TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}
"""Relative differences of losses and gradient norms up to which methods agree, by dtype."""


@dataclass(frozen=True)
class TrainRow:
    """One method at one job."""

    job: Job
    method: str
    status: str
    """`MEASURED`, `REFUSED` or `ERROR`, as of attention's rows."""
    message: str = ""
    """Reason why there is no measurement."""
    turns: tuple[Turn, ...] = ()

    @property
    def slowest_ms(self) -> tuple[float, ...]:
        """The steps of all turns, of the rank with the largest median."""
        ranks = len(self.turns[0].samples_ms)
        return slowest([sum((turn.samples_ms[rank] for turn in self.turns), ()) for rank in range(ranks)])

    @property
    def median_ms(self) -> float:
        """The slowest rank's median time of a step."""
        return statistics.median(self.slowest_ms)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.job.case.batch * self.job.case.seq_len / (self.median_ms * 1e-3)

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of all ranks together."""
        case = self.job.case
        return self.job.size.step_flops(case.batch * case.seq_len, case.batch * case.pairs) / self.median_ms / 1e9

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory on the rank that needs most; None on CPUs."""
        return max((turn.peak_bytes for turn in self.turns if turn.peak_bytes is not None), default=None)


@dataclass(frozen=True)
class TrainResults:
    """All rows of a run, with hardware and command."""

    environment: str
    """Hardware and versions, Markdown."""
    command: str
    """Command line."""
    world_size: int
    peak_tflops: float | None
    """Peak of a GPU, of which MFU is a part; None if it is not known."""
    rows: tuple[TrainRow, ...]

    def mfu_percent(self, row: TrainRow) -> float | None:
        """Model FLOPs utilisation: model FLOPs per second as a percentage of the peak of all GPUs."""
        return None if self.peak_tflops is None else 100 * row.tflops / self.world_size / self.peak_tflops

    def times_others(self, row: TrainRow) -> float | None:
        """The speedup over the fastest measured method that is not this library's, of those compiled like it."""
        others = [
            each.median_ms
            for each in self._beside(row)
            if not each.method.startswith(OURS_PREFIX)
            and each.method.endswith(" compiled") == row.method.endswith(" compiled")
        ]
        return min(others) / row.median_ms if others else None

    def difference(self, row: TrainRow) -> float:
        """The largest relative difference of losses and gradient norms from the first turn of the job's first row."""
        first = self._beside(row)[0].turns[0]
        pairs = [(turn.gradient_norm, first.gradient_norm) for turn in row.turns]
        pairs += [pair for turn in row.turns for pair in zip(turn.losses, first.losses, strict=True)]
        differences = [abs(value - expected) / abs(expected) for value, expected in pairs]
        return max(differences, key=lambda each: each if each == each else float("inf"))  # NaN is the largest

    def disagreeing(self) -> list[TrainRow]:
        """The rows whose losses or gradient norms differ by more than their dtype explains."""
        measured = [row for row in self.rows if row.status == MEASURED]
        return [row for row in measured if not self.difference(row) <= TOLERANCES[row.job.case.dtype]]

    def to_json(self) -> str:
        """All rows as JSON, with the derived numbers."""
        rows = [{**dataclasses.asdict(row), **self._derived(row)} for row in self.rows]
        return json.dumps({**vars(self), "rows": rows}, indent=1)

    def _derived(self, row: TrainRow) -> dict[str, Any]:
        if row.status != MEASURED:
            return {}
        return {
            "median_ms": row.median_ms,
            "spread_ms": spread(row.slowest_ms),
            "tokens_per_second": row.tokens_per_second,
            "mfu_percent": self.mfu_percent(row),
            "times_others": self.times_others(row),
            "peak_bytes": row.peak_bytes,
            "difference": self.difference(row),
        }

    def _beside(self, row: TrainRow) -> list[TrainRow]:
        return [each for each in self.rows if each.job == row.job and each.status == MEASURED]


_COLUMNS = (
    "method", "ms", "20-80%", "tokens/s", "MFU %", "x torch", "peak GiB", "first loss", "last loss", "difference",
)  # fmt: skip
_EXPLANATION = """\
Times of whole training steps (forward, backward, update): medians of the slowest rank, with their 20th and 80th
percentiles, over the turns of a method. Methods take turns; each turn trains a new model with the same weights and
tokens. Parameters, gradients and optimizer state are sharded by FSDP2 over the ranks that share the sequence. tokens/s:
of all ranks. MFU: model FLOPs (6 for each token and matrix parameter, 12 for each pair that the mask allows, head,
layer and head dim; nothing that is computed again) as a part of the peak of all GPUs{peak}. x torch: speedup over the
fastest of torch's, compiled ones over compiled ones. Peak: memory in the timed steps of the rank that needs most, with
parameters and workspaces. Losses are the means over all tokens of the first step and the last. Difference: the largest
relative one of the losses of all steps, and of the norm of the first gradient, from those of the table's first method.
torch's context parallel gets attention inputs that are contiguous as (B, H, S, D), since its backward fails with
others, and has no mask of documents. `FA4`: after torch's `activate_flash_attention_impl("FA4")`. A name's second word
is the layout, where it is not that of the title."""


def train_markdown(results: TrainResults) -> str:
    """The report of a run."""
    peak = "" if results.peak_tflops is None else f", {results.peak_tflops:.0f} TFLOP/s each"
    sections = [
        f"# Training steps, {results.world_size} {'rank' if results.world_size == 1 else 'ranks'}",
        results.environment,
        f"`{results.command}`",
        _EXPLANATION.format(peak=peak),
    ]
    for job in dict.fromkeys(row.job for row in results.rows):
        rows = [_cells(results, row) for row in results.rows if row.job == job]
        sections += [f"## {title(job)}", markdown_table(_COLUMNS, rows)]
    return "\n\n".join(sections) + "\n"


def title(job: Job) -> str:
    """The job in words."""
    size, case = job.size, job.case
    words = [f"{case.seq_len:,} tokens", f"{size.layers} layers of {size.dim:,}"]
    words += [f"{size.heads} query and {size.kv_heads} kv heads of {size.head_dim}", f"SwiGLU of {size.ffn:,}"]
    words += [f"vocabulary of {size.vocabulary:,}", case.mask, case.layout]
    words += [f"batch {case.batch}"] if case.batch > 1 else []
    words += [case.dtype, job.optimizer, *(["checkpointing"] if job.checkpointed or job.offloaded else [])]
    words += ["layer inputs in host memory"] if job.offloaded else []
    return ", ".join(words)


def _cells(results: TrainResults, row: TrainRow) -> list[str]:
    if row.status != MEASURED:
        return [row.method, f"{row.status}: {row.message}", *[NOTHING] * (len(_COLUMNS) - 2)]
    low, high = spread(row.slowest_ms)
    losses = row.turns[0].losses
    return [
        row.method,
        significant(row.median_ms),
        f"{significant(low)}-{significant(high)}",
        f"{row.tokens_per_second:,.0f}",
        formatted(results.mfu_percent(row), "{:.1f}"),
        formatted(results.times_others(row), "{:.3f}"),
        formatted(None if row.peak_bytes is None else row.peak_bytes / 2**30, "{:.2f}"),
        f"{losses[0]:.4f}",
        f"{losses[-1]:.4f}",
        f"{results.difference(row):.1e}",
    ]
