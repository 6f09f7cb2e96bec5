"""Picture of measured times, from docs/benchmarks/measured.csv.

python docs/scripts/speed.py

Draws docs/images/speed.png, of method="auto" beside torch's context parallel on 8 GPUs. It has eager calls only: a CUDA
graph of one side beside eager calls of the other would compare two things at once.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cp_dtensor.tools.report import significant

DOCS = Path(__file__).resolve().parents[1]
TABLE = "8xH200-packages"
TORCH = ("torch-allgather", "torch-alltoall")
METHODS = {
    "torch": ("torch's context parallel, its faster rotate_method", "#8d96a3"),
    "ours-auto": ('method="auto"', "#1f6fb4"),
}
"""Label and colour of what the picture shows."""
PASSES = {"fwd": "forward", "fwdbwd": "forward +\nbackward"}
IDEAL_LINE: dict[str, Any] = {"color": "#22272e", "linestyle": "--", "linewidth": 1}

Times = dict[tuple[int, str, str], float]
"""Milliseconds by tokens, pass and method."""


def eager_times(table: str = TABLE) -> Times:
    """Return the medians of a table; "torch" is the faster rotation of torch's context parallel.

    Raises:
        ValueError: rows of several shapes or masks, which one picture cannot compare.
    """
    with (DOCS / "benchmarks" / "measured.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == table and not row["method"].endswith("graph")]
    cases = {tuple(row[name] for name in ("mask", "layout", "q_heads", "kv_heads", "head_dim")) for row in rows}
    if len(cases) != 1:
        raise ValueError(f"expected rows that differ in length only, got {len(cases)} kinds: {cases}")
    times = {(int(row["tokens"]), row["pass"], row["method"]): float(row["median_ms"]) for row in rows}
    for length, each in {(length, each) for length, each, _ in times}:
        found = [times[length, each, name] for name in TORCH if (length, each, name) in times]
        if found:
            times[length, each, "torch"] = min(found)
    return times


def bars(axis: Axes, times: Times, length: int, each: str) -> None:
    """Draw one bar for each method, with milliseconds and the speedup over torch; a line at one GPU's share."""
    found = [times[length, each, name] for name in METHODS]
    axis.barh(range(len(METHODS)), found, height=0.8, color=[colour for _, colour in METHODS.values()])
    axis.axvline(times[length, each, "ideal"], **IDEAL_LINE)
    behind = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    for place, (name, value) in enumerate(zip(METHODS, found, strict=True)):
        text = significant(value)
        if name != "torch":
            text += f"  {times[length, each, 'torch'] / value:.2f}x"
        axis.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8, bbox=behind)
    axis.set_xlim(0, 1.5 * max(found))
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def draw(times: Times, output: Path) -> None:
    """Draw a row of panels for each pass, a panel for each length."""
    lengths = sorted({length for length, _, _ in times})
    figure, axes = plt.subplots(2, len(lengths), figsize=(12, 3.34), squeeze=False)
    for row, (each, title) in enumerate(PASSES.items()):
        for axis, length in zip(axes[row], lengths, strict=True):
            bars(axis, times, length, each)
            axis.set_title(f"{length:,} tokens" if row == 0 else "", fontsize=10)
        axes[row][0].set_ylabel(f"{title},\nms")
    title = "Attention on 8 x NVIDIA H200: causal, 32 query and 8 kv heads of 128, bfloat16, batch 1"
    figure.suptitle(title, y=0.96, va="top", fontsize=12)
    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in METHODS.values()]
    handles.append(Line2D([], [], **IDEAL_LINE, label="one GPU's cuDNN time / 8"))
    figure.legend(handles=handles, loc="lower center", ncol=3, frameon=False, fontsize=9)
    kernels = "Kernels: ours by FlashAttention-4, torch's by cuDNN"
    about = f"Eager calls, median of the slowest rank; x: speedup over torch. {kernels}. torch 2.11, CUDA 13.0"
    figure.text(0.5, 0.11, about, ha="center", fontsize=8, color="#5b6470")
    figure.tight_layout(rect=(0, 0.17, 1, 0.97))
    figure.savefig(output, dpi=110, facecolor="white")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    draw(eager_times(), DOCS / "images" / "speed.png")


if __name__ == "__main__":
    main()
