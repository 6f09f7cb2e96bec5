"""Picture of a benchmark: bars of milliseconds with speedups, a panel for each length."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cp_dtensor.tools.report import MEASURED, Results, Row, panels, significant

METHODS = {
    "torch-allgather": ('torch, "allgather"', "#8d96a3"),
    "torch-alltoall": ('torch, "alltoall"', "#c3c9d1"),
    "torch-flex": ("torch, FlexAttention", "#5b6470"),
    "llama3-varlen": ("Llama 3's method", "#a1887f"),
    "ours-auto": ('method="auto"', "#1f6fb4"),
    "ours-symm_mem": ('ring, "symm_mem"', "#2a9d8f"),
    "ours-allgather": ('ring, "allgather"', "#7cc4a4"),
    "ours-alltoall": ('ring, "alltoall"', "#b5d99c"),
    "ours-ulysses": ("Ulysses", "#e76f51"),
    "ours-hybrid": ("hybrid", "#f2b134"),
    "ours-nested": ("nested ring", "#9b72b0"),
    "ours-flex": ("our FlexAttention", "#d187b5"),
}
"""Label and colour of each method in every picture."""
IDEAL_LINE: dict[str, Any] = {"color": "#22272e", "linestyle": "--", "linewidth": 1}
_UNKNOWN = "#b0b0b0"
_SUFFIXES = {"graph": "CUDA graph", "compiled": "compiled", "replay": "replay=True"}


def label_and_colour(method: str, ranks: int) -> tuple[str, str]:
    """The label and colour of a method of the benchmark on so many ranks.

    >>> label_and_colour("ours-hybrid-4 Balanced graph", ranks=8)
    ('hybrid 2 x 4, Balanced, CUDA graph', '#f2b134')
    """
    name, *suffixes = method.split()
    base, inner = re.fullmatch(r"(.*?)(?:-(\d+))?", name).groups()  # type: ignore[union-attr]
    label, colour = METHODS.get(base, (base, _UNKNOWN))
    if inner:
        label += f" {ranks // int(inner)} x {inner}"
    return ", ".join([label, *(_SUFFIXES.get(suffix, suffix) for suffix in suffixes)]), colour


def draw(results: Results, path: Path) -> None:
    """Writes a picture with a row of panels for each table that has measurements, a panel for each length."""
    measured = {
        title: [row for row in rows if row.status == MEASURED and not row.is_ideal]
        for title, rows in panels(results).items()
    }
    tables = {title: (rows, [*dict.fromkeys(row.method for row in rows)]) for title, rows in measured.items() if rows}
    if not tables:
        return
    lengths = sorted({row.case.seq_len for rows, _ in tables.values() for row in rows})
    heights = [0.9 + 0.2 * len(names) for _, names in tables.values()]
    figure = Figure(figsize=(2.4 + max(6.4, 2.3 * len(lengths)), 0.7 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(tables), len(lengths), squeeze=False, height_ratios=heights)
    for line, (title, (rows, names)) in zip(axes, tables.items(), strict=True):
        labels, colours = zip(*(label_and_colour(name, results.world_size) for name in names), strict=True)
        for axis, length in zip(line, lengths, strict=True):
            by_name = {row.method: row for row in rows if row.case.seq_len == length}
            _bars(axis, results, [by_name.get(name) for name in names], colours)
            axis.set_yticks(range(len(names)), labels if axis is line[0] else [""] * len(names), fontsize=8)
            axis.set_xlabel(f"{length:,} tokens, ms", fontsize=8)
        line[0].set_title(title, fontsize=9, loc="left")
    place = results.environment.splitlines()[-1].removesuffix(" visible")
    about = "median of the slowest rank; x: speedup of an eager call over the fastest method that is not ours; dashed: "
    where = f"Context-parallel attention on {results.world_size} ranks ({place})"
    figure.suptitle(f"{where}\n{about}one GPU's time / {results.world_size}", fontsize=9)
    figure.savefig(path, dpi=100, facecolor="white")


def _bars(axis: Axes, results: Results, rows: list[Row | None], colours: tuple[str, ...]) -> None:
    """One bar for each method, the first at the top, with milliseconds and the speedup; a line at one GPU's share."""
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    measured = [(place, row) for place, row in enumerate(rows) if row is not None]
    for place, row in measured:
        axis.barh(place, row.median_ms, height=0.8, color=colours[place])
        text = significant(row.median_ms)
        # A graph of ours beside eager calls of others would compare two things at once.
        if row.method.startswith("ours") and not row.method.endswith(" graph") and (times := results.times_others(row)):
            text += f"  {times:.2f}x"
        axis.annotate(
            text, (row.median_ms, place), (3, 0), textcoords="offset points", va="center", fontsize=7, bbox=behind
        )
    if measured:
        ideal = results.ideal_of(measured[0][1])
        if ideal is not None:
            axis.axvline(ideal.median_ms, **IDEAL_LINE)
        axis.set_xlim(0, 1.5 * max(row.median_ms for _, row in measured))
    else:
        axis.set_visible(False)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.tick_params(axis="x", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
