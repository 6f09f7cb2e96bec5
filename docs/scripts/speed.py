"""Pictures of measured times, from docs/benchmarks/measured.csv.

python docs/scripts/speed.py

Draws docs/images/speed.png, of method="auto" beside what people run today on 8 GPUs, and the three pictures of
docs/benchmarks/README.md: causal calls by method, calls under masks, and training steps. The first has eager calls
only: a CUDA graph of one side beside eager calls of the other would compare two things at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import measured
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cp_dtensor.tools.report import significant

DOCS = Path(__file__).resolve().parents[1]
PASSES = {"fwd": "forward", "fwdbwd": "forward + backward"}
CASE = ("machine", "mask", "layout", "q_heads", "kv_heads", "head_dim")
"""Columns in which rows of one picture are equal."""
GREY, LIGHT, BLUE, GREEN, PALE, ORANGE, BROWN, PINK = (
    "#8d96a3", "#c3c9d1", "#1f6fb4", "#2a9d8f", "#b5d99c", "#e76f51", "#a1887f", "#d187b5",
)  # fmt: skip
IDEAL_LINE: dict[str, Any] = {"color": "#22272e", "linestyle": "--", "linewidth": 1}

Times = dict[tuple[int, str, str], float]
"""Milliseconds by tokens, pass and method."""


class Bar(NamedTuple):
    """One method of a picture."""

    label: str
    colour: str
    names: tuple[str, ...]
    """Methods of the CSV, with the layout where it is not HeadTail; the fastest is shown."""


TODAY = (
    Bar("torch: SDPA ring", LIGHT, ("torch-allgather", "torch-alltoall")),
    Bar("torch: FlexAttention, all K/V gathered", LIGHT, ("torch-flex", "torch-flex PTRR")),
    Bar("FlashAttention-2, all K/V gathered", LIGHT, ("llama3-varlen",)),
    Bar("cp_dtensor", BLUE, ("ours-auto", "ours-auto Balanced")),
)
"""Of each the fastest row of `TODAY_TABLES` is shown. The third is Llama 3's method."""
TODAY_TABLES = ("8xH200-packages", "8xH200-packages-masks-flex", "8xH200-masks-flex")
TODAY_CASES = (("causal", 8192), ("causal", 32768), ("causal", 131072), ("documents 2048", 65536))
CAUSAL = (
    Bar("torch, allgather", GREY, ("torch-allgather",)),
    Bar("ring, alltoall", PALE, ("ours-alltoall",)),
    Bar("ring, symm_mem", GREEN, ("ours-symm_mem",)),
    Bar("Ulysses", ORANGE, ("ours-ulysses",)),
    Bar("ring, symm_mem, CUDA graph", GREEN, ("ours-symm_mem graph",)),
    Bar("Ulysses, CUDA graph", ORANGE, ("ours-ulysses graph",)),
)
MASKED = (
    Bar("gather all, FlashAttention-2 varlen (Llama 3)", BROWN, ("llama3-varlen",)),
    Bar("torch's FlexAttention, the better balancer", GREY, ("torch-flex", "torch-flex PTRR")),
    Bar("our FlexAttention, BalancedBlocks", PINK, ("ours-flex BalancedBlocks",)),
    Bar("ring, HeadTail", PALE, ("ours-symm_mem",)),
    Bar("ring, Balanced(mask)", GREEN, ("ours-symm_mem Balanced",)),
)
STEPS = (
    ("8xH200-train-32k", 8192, ""),
    ("2xH200-train-32k", 32768, ""),
    ("8xH200-train-32k", 32768, ""),
    ("2xH200-train-131k", 131072, ", checkpointing"),
    ("4xH200-train-131k", 131072, ", checkpointing"),
    ("8xH200-train-131k", 131072, ", checkpointing"),
    ("8xH200-train-524k", 524288, ", checkpointing"),
)
"""Tables of training steps with both methods, by tokens, and what is special about them."""


def table(name: str) -> list[measured.Row]:
    """Return the rows of a table of the CSV."""
    return [row for row in measured.read() if row["table"] == name]


def name_of(row: measured.Row) -> str:
    """Return the method, with the layout where it is not HeadTail or Contiguous."""
    return row["method"] + f" {row['layout']}" * (row["layout"] not in ("HeadTail", "Contiguous"))


def eager_times(rows: Sequence[measured.Row]) -> Times:
    """Return the times of eager calls.

    Raises:
        ValueError: rows of several shapes, masks or machines, which one picture cannot compare.
    """
    eager = [row for row in rows if not row["method"].endswith("graph")]
    cases = {tuple(row[name] for name in CASE) for row in eager}
    if len(cases) != 1:
        raise ValueError(f"expected rows that differ in length only, got {len(cases)} kinds: {sorted(cases)}")
    return {(int(row["tokens"]), row["pass"], row["method"]): float(row["median_ms"]) for row in eager}


def panel(axis: Axes, bars: Sequence[Bar], times: dict[str, float], behind: str) -> None:
    """Draw a bar for each method, with milliseconds and the speedup over one of them; a line at one GPU's share."""
    found = [min(times[name] for name in bar.names if name in times) for bar in bars]
    for place, (bar, ms) in enumerate(zip(bars, found, strict=True)):
        axis.barh(place, ms, height=0.8, **_style(bar))
    axis.axvline(min(ms for name, ms in times.items() if name.startswith("ideal")), **IDEAL_LINE)
    slowest = next(ms for bar, ms in zip(bars, found, strict=True) if behind in bar.names)
    for place, (bar, ms) in enumerate(zip(bars, found, strict=True)):
        # A graph beside eager calls would compare two things at once.
        shown = behind not in bar.names and "graph" not in bar.label
        _annotate(axis, ms, place, significant(ms) + (f"  {slowest / ms:.2f}x" if shown else ""))
    axis.set_xlim(0, 1.5 * max(found))
    _bare(axis)


def _style(bar: Bar) -> dict[str, Any]:
    """Return the colour of a bar, striped for a CUDA graph."""
    striped = {"hatch": "////", "edgecolor": "white", "linewidth": 0}
    return {"color": bar.colour} if "graph" not in bar.label else {"facecolor": bar.colour, **striped}


def _annotate(axis: Axes, value: float, place: float, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axis.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=8, bbox=box)


def _bare(axis: Axes) -> None:
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _finish(figure: Figure, bars: Sequence[Bar], row: measured.Row, title: str, about: str, output: Path) -> None:
    """Write the picture with its title, legend and versions."""
    ranks, gpu = row["machine"].split("x")
    heads = f"{row['q_heads']} query and {row['kv_heads']} kv heads of {row['head_dim']}, bfloat16, batch 1"
    figure.suptitle(f"{title} on {ranks} x NVIDIA {gpu}, {heads}", y=0.98, va="top", fontsize=12)
    handles: list[Any] = [Patch(label=bar.label, **_style(bar)) for bar in bars]
    handles.append(Line2D([], [], **IDEAL_LINE, label=f"one GPU's time / {ranks}"))
    height, lines = figure.get_figheight(), -(-len(handles) // 4)
    below, columns = (0.5, 0.25 / height), min(4, len(handles))
    figure.legend(
        handles=handles, loc="lower center", bbox_to_anchor=below, ncol=columns, frameon=False, fontsize=9
    )  # fmt: skip
    unlike = ("Triton", "CUDA", "NCCL")  # of which the times say little
    versions = ", ".join(each for each in row["versions"].split(", ") if not each.startswith(unlike))
    figure.text(0.5, 0.1 / height, f"{about} {versions}", ha="center", fontsize=8, color="#5b6470")
    figure.tight_layout(rect=(0, (0.35 + 0.22 * lines) / height, 1, 1 - 0.05 / height))
    figure.savefig(output, dpi=100, facecolor="white")


def today(mask: str, tokens: int) -> tuple[list[float], float]:
    """Return the milliseconds of both passes for each of `TODAY`, nan where there is no row, and one GPU's share."""
    rows = [
        row for name in TODAY_TABLES for row in table(name)
        if (row["mask"], int(row["tokens"]), row["pass"]) == (mask, tokens, "fwdbwd")
    ]  # fmt: skip
    times = [[float(row["median_ms"]) for row in rows if name_of(row) in bar.names] for bar in TODAY]
    ideal = min(float(row["median_ms"]) for row in rows if row["method"].startswith("ideal"))
    return [min(each, default=nan) for each in times], ideal


def draw_today(output: Path) -> None:
    """Draw forward and backward of `TODAY_CASES`, a panel each; others are grey, so that ours is seen without colours.

    The tables are of runs with the extra `kernels` and without it: of these methods it changes ours alone.
    """
    figure = Figure(figsize=(10, 2.9))
    axes = figure.subplots(1, len(TODAY_CASES))
    for axis, (mask, tokens) in zip(axes, TODAY_CASES, strict=True):
        times, ideal = today(mask, tokens)
        for place, (bar, ms) in enumerate(zip(TODAY, times, strict=True)):
            missing = "not measured" if mask == "causal" else "no such mask"
            width, text = (0.0, missing) if isnan(ms) else (ms, f"{significant(ms)} ms")
            axis.barh(place, width, height=0.75, color=bar.colour)
            _annotate(axis, width, place, text)
        axis.axvline(ideal, **IDEAL_LINE)
        axis.set_title(f"{mask.replace('documents 2048', 'packed documents')}\n{tokens:,} tokens", fontsize=10)
        axis.set_xlim(0, 1.35 * max(ms for ms in times if not isnan(ms)))
        _bare(axis)
        axis.set_xticks([])
    axes[0].set_yticks(range(len(TODAY)), [bar.label for bar in TODAY], fontsize=9.5)
    title = "Attention on 8 H200s, forward + backward, 32 query and 8 kv heads of 128, bfloat16"
    figure.suptitle(f"{title} (dashed: one GPU's time / 8)", fontsize=11)
    figure.tight_layout(w_pad=0.6)
    figure.savefig(output, dpi=100, facecolor="white")


def draw_lengths(rows: Sequence[measured.Row], bars: Sequence[Bar], about: str, output: Path) -> None:
    """Draw causal calls: a row of panels for each pass, a panel for each length."""
    times = eager_times(rows)
    times |= {
        (int(row["tokens"]), row["pass"], row["method"]): float(row["median_ms"])
        for row in rows if row["method"].endswith("graph")
    }  # fmt: skip
    lengths = sorted({length for length, *_ in times})
    figure = Figure(figsize=(12, 2.2 + 0.48 * len(bars)))
    axes = figure.subplots(2, len(lengths), squeeze=False)
    for line, (each, title) in zip(axes, PASSES.items(), strict=True):
        for axis, length in zip(line, lengths, strict=True):
            here = {name: ms for (tokens, kind, name), ms in times.items() if (tokens, kind) == (length, each)}
            panel(axis, bars, here, bars[0].names[0])
            axis.set_title(f"{length:,} tokens" if each == "fwd" else "", fontsize=10)
        line[0].set_ylabel(f"{title.replace(' + ', ' +' + chr(10))},\nms")
    _finish(figure, bars, rows[0], "Causal attention", about, output)


def draw_masks(rows: Sequence[measured.Row], output: Path) -> None:
    """Draw calls under masks: a row of panels for each pass, a panel for each mask and length."""
    kinds = list(dict.fromkeys((row["mask"], int(row["tokens"])) for row in rows if row["mask"] != "causal"))
    figure = Figure(figsize=(12, 5.2))
    axes = figure.subplots(2, len(kinds), squeeze=False)
    for line, (each, title) in zip(axes, PASSES.items(), strict=True):
        for axis, (mask, length) in zip(line, kinds, strict=True):
            here = {
                name_of(row): float(row["median_ms"])
                for row in rows if (row["mask"], int(row["tokens"]), row["pass"]) == (mask, length, each)
            }  # fmt: skip
            panel(axis, MASKED, here, "torch-flex")
            axis.set_title(f"{mask}, {length:,} tokens" if each == "fwd" else "", fontsize=10)
        line[0].set_ylabel(f"{title.replace(' + ', ' +' + chr(10))},\nms")
    _finish(figure, MASKED, rows[0], "Masked attention", "x: speedup over torch's FlexAttention.", output)


def draw_steps(output: Path) -> None:
    """Draw whole training steps: the part of the GPUs' peak that the model's operations reach."""
    figure = Figure(figsize=(12, 4.2))
    axis = figure.subplots()
    bars = (Bar("torch's context parallel", GREY, ()), Bar("this library", BLUE, ()))
    for place, (name, tokens, what) in enumerate(STEPS):
        rows = {row["method"]: row for row in table(name) if int(row["tokens"]) == tokens}
        for shift, method, bar in ((-0.2, "torch-allgather", bars[0]), (0.2, "ours-symm_mem", bars[1])):
            share = float(rows[method]["tflops"]) / 9.89  # 989 TFLOP/s of an H200
            axis.barh(place + shift, share, height=0.38, color=bar.colour)
            _annotate(axis, share, place + shift, f"{share:.1f}%, {float(rows[method]['median_ms']):,.0f} ms")
        gpus = name.partition("x")[0]
        axis.annotate(f"{tokens:,} tokens on {gpus}{what}  ", (0, place), ha="right", va="center", fontsize=9)
    _bare(axis)
    axis.set_xlim(0, 52)
    axis.set_xlabel("model FLOPs, % of the GPUs' peak, and ms of a step", fontsize=9)
    title = "Training steps of 8 layers of Llama 3.1 8B by FSDP2 and AdamW on H200s, bfloat16, causal, eager layers"
    figure.suptitle(title, fontsize=12)
    figure.legend(handles=[Patch(color=bar.colour, label=bar.label) for bar in bars], loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=100, facecolor="white")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw_today(DOCS / "images" / "speed.png")
    both = "Median of the slowest rank; x: speedup of eager calls over torch."
    draw_lengths(table("8xH200-packages-graphs"), CAUSAL, both, DOCS / "benchmarks" / "causal.png")
    draw_masks(table("8xH200-masks-flex"), DOCS / "benchmarks" / "masks.png")
    draw_steps(DOCS / "benchmarks" / "steps.png")


if __name__ == "__main__":
    main()
