"""Pictures of measured times, from the JSON files of `python -m cp_dtensor bench`.

python docs/scripts/speed.py

Draws docs/images/speed.png, of method="auto" beside torch's context parallel on 8 GPUs, and the picture of every folder
of docs/benchmarks. The first has eager calls only: a CUDA graph of one side beside eager calls of the other would
compare two things at once.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import picture
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cp_dtensor.tools.cases import PASSES
from cp_dtensor.tools.report import IDEAL, MEASURED, Results, significant

DOCS = Path(__file__).resolve().parents[1]
TORCH = ("torch-allgather", "torch-alltoall")
METHODS = {
    "torch": ("torch's context parallel, its faster rotate_method", picture.METHODS["torch-allgather"][1]),
    "ours-auto": picture.METHODS["ours-auto"],
}
"""Label and colour of what the first picture shows."""

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


def bars(axis: Axes, times: Times, length: int, each: str) -> None:
    """One bar for each method, with milliseconds and the speedup over torch; a line at one GPU's share."""
    found = [times[length, each, name] for name in METHODS]
    axis.barh(range(len(METHODS)), found, height=0.8, color=[colour for _, colour in METHODS.values()])
    axis.axvline(times[length, each, IDEAL], **picture.IDEAL_LINE)
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


def draw(results: Results, output: Path) -> None:
    """Draws a row of panels for each pass, a panel for each length."""
    times = eager_times(results)
    lengths = sorted({length for length, _, _ in times})
    figure, axes = plt.subplots(2, len(lengths), figsize=(12, 3.34), squeeze=False)
    for row, (each, title) in enumerate(PASSES.items()):
        for axis, length in zip(axes[row], lengths, strict=True):
            bars(axis, times, length, each)
            axis.set_title(f"{length:,} tokens" if row == 0 else "", fontsize=10)
        axes[row][0].set_ylabel(f"{title.replace(' + ', ' +' + chr(10))},\nms")
    case, ranks = results.rows[0].case, results.world_size
    versions, *_, hardware = results.environment.splitlines()
    hardware = hardware.split(" x ")[-1].removesuffix(" visible")
    heads = f"{case.heads.q} query and {case.heads.kv} kv heads of {case.head_dim}"
    title = f"Attention on {ranks} x {hardware}: {case.mask}, {heads}, {case.dtype}, batch {case.batch}"
    figure.suptitle(title, y=0.96, va="top", fontsize=12)
    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in METHODS.values()]
    handles.append(Line2D([], [], **picture.IDEAL_LINE, label=f"one GPU's cuDNN time / {ranks}"))
    figure.legend(handles=handles, loc="lower center", ncol=3, frameon=False, fontsize=9)
    versions = ", ".join(part for part in versions.split(", ") if "Python" not in part)
    kernels = "Kernels: ours by FlashAttention-4, torch's by cuDNN"
    about = f"Eager calls, median of the slowest rank; x: speedup over torch. {kernels}. {versions}"
    figure.text(0.5, 0.11, about.strip(), ha="center", fontsize=8, color="#5b6470")
    figure.tight_layout(rect=(0, 0.17, 1, 0.97))
    figure.savefig(output, dpi=110, facecolor="white")


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in sorted((DOCS / "benchmarks").glob("*/bench.json")):
        picture.draw(Results.from_json(path.read_text()), path.with_suffix(".png"))
    results = Results.from_json((DOCS / "benchmarks" / "8xH200-packages" / "bench.json").read_text())
    draw(results, DOCS / "images" / "speed.png")


if __name__ == "__main__":
    main()
