"""Results as a picture: percent of ideal against length."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from cp_dtensor.tools.bench.report import panels
from cp_dtensor.tools.bench.rows import MEASURED, Results, Row

_COLUMNS = 2
_MARKERS = "osv^DPX<>*"


def draw(results: Results, path: Path) -> None:
    """Writes a picture with one panel per table that has anything to show."""
    shown = [(title, rows) for title, rows in panels(results) if any(_percent(results, row) for row in rows)]
    if not shown:
        return
    contestants = list(dict.fromkeys(row.contestant for row in results.rows if _percent(results, row)))
    columns = min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(8 * columns, 5 * lines + 1), squeeze=False)
    for axis, (title, rows) in zip(axes.flat, shown, strict=False):
        _panel(axis, results, title, rows, contestants)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles, loc="lower center", ncol=5, frameon=False)
    place = results.environment.splitlines()[-1].removesuffix(" visible")
    figure.suptitle(f"Context-parallel attention on {results.world_size} ranks ({place})")
    figure.tight_layout(rect=(0, 0.5 / (5 * lines + 1), 1, 1))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _panel(axis: Axes, results: Results, title: str, rows: list[Row], contestants: list[str]) -> None:
    for number, contestant in enumerate(contestants):
        points = [
            (row.case.seq_len, percent)
            for row in rows
            if row.contestant == contestant and (percent := _percent(results, row)) is not None
        ]
        if points:
            lengths, percents = zip(*points, strict=True)
            marker = _MARKERS[number % len(_MARKERS)]
            axis.plot(lengths, percents, marker=marker, color=f"C{number % 10}", label=contestant)
    axis.axhline(100, color="black", linestyle="--", linewidth=1, label="ideal")
    axis.set_xscale("log", base=2)
    ticks = sorted({row.case.seq_len for row in rows})
    axis.set_xticks(ticks, [f"{tick // 1024}k" if tick % 1024 == 0 else str(tick) for tick in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("global length (tokens)")
    axis.set_ylabel("% of ideal (one GPU's time / ranks)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)


def _percent(results: Results, row: Row) -> float | None:
    return None if row.is_ideal or row.status != MEASURED else results.percent_of_ideal(row)
