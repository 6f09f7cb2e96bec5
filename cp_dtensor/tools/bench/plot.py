"""Results as a picture: percent of ideal against length, or as bars where there are too few lengths for lines."""

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
_FEWEST_FOR_LINES = 3


def draw(results: Results, path: Path) -> None:
    """Writes a picture with one panel per table that has anything to show."""
    shown = [(title, rows) for title, rows in panels(results) if any(_percent(results, row) for row in rows)]
    if not shown:
        return
    baselines = list(dict.fromkeys(row.baseline for row in results.rows if _percent(results, row)))
    columns = min(_COLUMNS, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(8 * columns, 5 * lines + 1), squeeze=False)
    for axis, (title, rows) in zip(axes.flat, shown, strict=False):
        if len({row.case.seq_len for row in rows}) < _FEWEST_FOR_LINES:
            _bars(axis, results, title, rows)
        else:
            _lines(axis, results, title, rows, baselines)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles, loc="lower center", ncol=5, frameon=False)
    place = results.environment.splitlines()[-1].removesuffix(" visible")
    figure.suptitle(f"Context-parallel attention on {results.world_size} ranks ({place})")
    inch = 1 / (5 * lines + 1)
    figure.tight_layout(rect=(0, 0.5 * inch if handles else 0, 1, 1 - 0.2 * inch))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _lines(axis: Axes, results: Results, title: str, rows: list[Row], baselines: list[str]) -> None:
    for number, baseline in enumerate(baselines):
        points = [
            (row.case.seq_len, percent)
            for row in rows
            if row.baseline == baseline and (percent := _percent(results, row)) is not None
        ]
        if points:
            lengths, percents = zip(*points, strict=True)
            marker = _MARKERS[number % len(_MARKERS)]
            axis.plot(lengths, percents, marker=marker, color=f"C{number % 10}", label=baseline)
    axis.axhline(100, color="black", linestyle="--", linewidth=1, label="ideal")
    axis.set_xscale("log", base=2)
    ticks = sorted({row.case.seq_len for row in rows})
    axis.set_xticks(ticks, list(map(_thousands, ticks)))
    axis.set_ylim(bottom=0)
    axis.set_xlabel("global length (tokens)")
    axis.set_ylabel("% of ideal (one GPU's time / ranks)")
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)


def _bars(axis: Axes, results: Results, title: str, rows: list[Row]) -> None:
    """A group of bars for each baseline, the first at the top; a bar for each length."""
    percents = {(row.baseline, row.case.seq_len): _percent(results, row) for row in rows}
    names = list(dict.fromkeys(name for (name, _), percent in percents.items() if percent))
    lengths = sorted({length for _, length in percents})
    height = 0.8 / len(lengths)
    for index, length in enumerate(lengths):
        places = [place + (index - (len(lengths) - 1) / 2) * height for place in range(len(names))]
        widths = [percents.get((name, length)) or 0.0 for name in names]
        bars = axis.barh(places, widths, height, color=f"C{index}")
        labels = [f"{_thousands(length)}: {width:.0f}%" if width else "" for width in widths]
        axis.bar_label(bars, labels, label_type="center", color="white", fontsize=7)
    axis.axvline(100, color="black", linestyle="--", linewidth=1)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("% of ideal (one GPU's time / ranks)")
    axis.set_title(title, fontsize=10)


def _thousands(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _percent(results: Results, row: Row) -> float | None:
    return None if row.is_ideal or row.status != MEASURED else results.percent_of_ideal(row)
