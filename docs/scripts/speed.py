"""Pictures of measured times, from the JSON files of `python -m cp_dtensor bench`.

python docs/scripts/speed.py --results docs/benchmarks/8xH200/bench.json --output docs/images/speed.png
python docs/scripts/speed.py --results docs/benchmarks/8xH200/bench.json --output docs/images/speed_methods.png --all

Only eager calls are drawn: a CUDA graph of one side beside eager calls of the other would compare two things at once.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cp_dtensor.tools.bench.report import IDEAL, MEASURED, Results

PASSES = {"fwd": "forward", "fwdbwd": "forward + backward"}
COLUMNS = 3
"""Of the legend."""
TORCH = ("torch-allgather", "torch-alltoall")


@dataclass(frozen=True)
class Method:
    """Name and colour of a method in every picture."""

    label: str
    colour: str


METHODS = {
    "torch": Method("torch's context parallel, its faster rotate_method", "#8d96a3"),
    "torch-allgather": Method('torch\'s context parallel, "allgather"', "#8d96a3"),
    "torch-alltoall": Method('torch\'s context parallel, "alltoall"', "#c3c9d1"),
    "ours-auto": Method('method="auto"', "#1f6fb4"),
    "ours-symm_mem": Method('method="ring", rotate_method="symm_mem"', "#2a9d8f"),
    "ours-allgather": Method('method="ring", rotate_method="allgather"', "#7cc4a4"),
    "ours-alltoall": Method('method="ring", rotate_method="alltoall"', "#b5d99c"),
    "ours-ulysses": Method('method="ulysses"', "#e76f51"),
    "ours-hybrid-4": Method('method="hybrid", 2 x 4', "#f2b134"),
    "ours-nested-4": Method("nested ring, 2 x 4", "#9b72b0"),
}

Times = dict[tuple[int, str, str], float]
"""Milliseconds by tokens, pass and method."""


def eager_times(results: Results) -> Times:
    """The median of the slowest rank; "torch" is the faster rotation of torch's context parallel.

    Raises:
        ValueError: rows of several shapes, masks or kernels, which one picture cannot compare.
    """
    times: Times = {}
    rows = [row for row in results.rows if row.status == MEASURED and not row.method.endswith("graph")]
    cases = {replace(row.case, seq_len=0) for row in rows}
    if len(cases) != 1:
        raise ValueError(f"expected rows that differ in length only, got {len(cases)} kinds: {cases}")
    for row in rows:
        times[row.case.seq_len, row.pass_name, row.method] = row.median_ms
    for length, each in {(length, each) for length, each, _ in times}:
        found = [times[length, each, name] for name in TORCH if (length, each, name) in times]
        if found:
            times[length, each, "torch"] = min(found)
    return times


def milliseconds(value: float) -> str:
    """Three digits: 0.487, 30.5, 466."""
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def bars(axis: Axes, times: Times, length: int, each: str, names: list[str]) -> None:
    """One bar for each method, with milliseconds and the speedup over torch; a line at one GPU's share."""
    found = [times[length, each, name] for name in names]
    axis.barh(range(len(names)), found, height=0.8, color=[METHODS[name].colour for name in names])
    axis.axvline(times[length, each, IDEAL], color="#22272e", linestyle="--", linewidth=1)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for place, (name, value) in enumerate(zip(names, found, strict=True)):
        text = milliseconds(value)
        if not name.startswith("torch"):
            text += f"  {times[length, each, 'torch'] / value:.2f}x"
        axis.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8, bbox=behind)
    axis.set_xlim(0, 1.5 * max(found))
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def draw(results: Results, output: Path, every_method: bool) -> None:
    """Draws a row of panels for each pass, a panel for each length."""
    times = eager_times(results)
    lengths = sorted({length for length, _, _ in times})
    known = {name for _, _, name in times}
    several = [name for name in METHODS if name in known and name != "torch"]
    names = several if every_method else ["torch", "ours-auto"]
    legend_lines = -(-(len(names) + 1) // COLUMNS)
    below = 0.45 + 0.22 * legend_lines  # inches
    height = 0.7 + below + 2 * (0.55 + 0.22 * len(names))
    figure, axes = plt.subplots(2, len(lengths), figsize=(12, height), squeeze=False)
    for row, (each, title) in enumerate(PASSES.items()):
        for axis, length in zip(axes[row], lengths, strict=True):
            bars(axis, times, length, each, names)
            axis.set_title(f"{length:,} tokens" if row == 0 else "", fontsize=10)
        axes[row][0].set_ylabel(f"{title},\nms" if every_method else f"{title.replace(' + ', ' +' + chr(10))},\nms")
    case, ranks = results.rows[0].case, results.world_size
    versions, *_, hardware = results.environment.splitlines()
    hardware = hardware.split(" x ")[-1].removesuffix(" visible")
    heads = f"{case.heads.q} query and {case.heads.kv} kv heads of {case.head_dim}"
    figure.suptitle(
        f"Attention on {ranks} x {hardware}: {case.mask}, {heads}, {case.dtype}, batch {case.batch}",
        y=1 - 0.12 / height, va="top", fontsize=12,
    )  # fmt: skip
    handles: list[Any] = [Patch(color=METHODS[name].colour, label=METHODS[name].label) for name in names]
    handles.append(Line2D([], [], color="#22272e", linestyle="--", linewidth=1, label=f"one GPU's time / {ranks}"))
    figure.legend(handles=handles, loc="lower center", ncol=COLUMNS, frameon=False, fontsize=9)
    versions = ", ".join(part for part in versions.split(", ") if "Python" not in part)
    about = f"Eager calls, median of the slowest rank; x: speedup over torch. cuDNN's kernels on both sides. {versions}"
    figure.text(0.5, (below - 0.3) / height, about.strip(), ha="center", fontsize=8, color="#5b6470")
    figure.tight_layout(rect=(0, (below - 0.1) / height, 1, 1 - 0.1 / height))
    figure.savefig(output, dpi=110, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--all", action="store_true", help="every method, not only auto and torch")
    parsed = parser.parse_args()
    draw(Results.from_json(parsed.results.read_text()), parsed.output, parsed.all)


if __name__ == "__main__":
    main()
