"""Pictures of measured times, from docs/benchmarks/measured.csv.

python docs/scripts/speed.py

Draws docs/images/speed.png, of method="auto" beside what people run today on 4 GPUs, and the three pictures of
docs/benchmarks/README.md: causal calls by method, calls under masks, and training steps. The first has eager calls
only: a CUDA graph of one side beside eager calls of the other would compare two things at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import measured
from gallery import save
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
    "#aab2bd", "#c3c9d1", "#1f6fb4", "#2a9d8f", "#b5d99c", "#e76f51", "#a1887f", "#d187b5",
)  # fmt: skip
IDEAL_LINE: dict[str, Any] = {"color": "#22272e", "linestyle": "--", "linewidth": 1}

Times = dict[str, float]
"""Milliseconds by method."""


class Bar(NamedTuple):
    """One method of a picture."""

    label: str
    colour: str
    names: tuple[str, ...]
    """Methods of the CSV, with the layout where it is not HeadTail; the fastest is shown."""


TODAY = (
    Bar("torch: SDPA ring", LIGHT, ("torch-allgather", "torch-alltoall")),
    Bar("torch: FlexAttention,\nall K/V gathered", LIGHT, ("torch-flex", "torch-kv-allgather-flex")),
    Bar("TorchTitan: Ulysses", LIGHT, ("torch-ulysses-flex", "torch-ulysses-varlen")),
    Bar("FlashAttention-2,\nall K/V gathered", LIGHT, ("llama3-varlen",)),
    Bar("cp_dtensor", BLUE, ("ours-auto",)),
)
"""Of each the fastest row of `TODAY_TABLE` is shown. The fourth is Llama 3's method."""
TODAY_TABLE, TODAY_TOKENS = "4xH200-packages-today", (8192, 32768, 131072)
CAUSAL = (
    Bar("torch, allgather", GREY, ("torch-allgather",)),
    Bar("ring, alltoall", PALE, ("ours-alltoall",)),
    Bar("ring, symm_mem", GREEN, ("ours-symm_mem",)),
    Bar("Ulysses", ORANGE, ("ours-ulysses",)),
    Bar("symm_mem, CUDA graph", GREEN, ("ours-symm_mem graph",)),
    Bar("Ulysses, CUDA graph", ORANGE, ("ours-ulysses graph",)),
)
MASKED = (
    Bar("gather all, FA2\nvarlen (Llama 3)", BROWN, ("llama3-varlen",)),
    Bar("torch's FlexAttention,\nbetter balancer", GREY, ("torch-flex", "torch-flex PTRR")),
    Bar("our FlexAttention,\nBalancedBlocks", PINK, ("ours-flex BalancedBlocks",)),
    Bar("ring, HeadTail", PALE, ("ours-symm_mem",)),
    Bar("ring, Balanced(mask)", GREEN, ("ours-symm_mem Balanced",)),
)
STEPS = (
    ("8xH200-train-32k", 8192, ""),
    ("2xH200-train-32k", 32768, ""),
    ("8xH200-train-32k", 32768, ""),
    ("2xH200-train-131k", 131072, "\n(checkpointing)"),
    ("4xH200-train-131k", 131072, "\n(checkpointing)"),
    ("8xH200-train-131k", 131072, "\n(checkpointing)"),
    ("8xH200-train-524k", 524288, "\n(checkpointing)"),
)
"""Tables of training steps with both methods, by tokens, and what is special about them."""


def table(name: str) -> list[measured.Row]:
    """Return the rows of a table of the CSV."""
    return [row for row in measured.read() if row["table"] == name]


def name_of(row: measured.Row) -> str:
    """Return the method, with the layout where it is not HeadTail or Contiguous."""
    return row["method"] + f" {row['layout']}" * (row["layout"] not in ("HeadTail", "Contiguous"))


def eager_times(rows: Sequence[measured.Row]) -> dict[tuple[int, str, str], float]:
    """Return the times of eager calls by tokens, pass and method.

    Raises:
        ValueError: rows of several shapes, masks or machines, which one picture cannot compare.
    """
    eager = [row for row in rows if not row["method"].endswith("graph")]
    cases = {tuple(row[name] for name in CASE) for row in eager}
    if len(cases) != 1:
        raise ValueError(f"expected rows that differ in length only, got {len(cases)} kinds: {sorted(cases)}")
    return {(int(row["tokens"]), row["pass"], row["method"]): float(row["median_ms"]) for row in eager}


def panel(axis: Axes, bars: Sequence[Bar], times: Times, behind: str) -> None:
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


def _annotate(axis: Axes, value: float, place: float, text: str, fontsize: int = 10) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axis.annotate(text, (value, place), (3, 0), textcoords="offset points", va="center", fontsize=fontsize, bbox=box)


def _bare(axis: Axes) -> None:
    axis.set_yticks([])
    axis.invert_yaxis()
    axis.tick_params(axis="x", labelsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def draw_panels(
    panels: dict[str, dict[str, Times]], bars: Sequence[Bar], row: measured.Row, behind: str, what: str, about: str,
    output: Path,
) -> None:  # fmt: skip
    """Draw a row of panels for each title, a panel for each pass, with names of bars at the left and versions below."""
    height = 1.5 + len(panels) * (0.7 + 0.32 * len(bars))
    figure = Figure(figsize=(8, height), layout="constrained")
    for line, (title, by_pass) in zip(figure.subplots(len(panels), 2, squeeze=False), panels.items(), strict=True):
        for axis, (each, name) in zip(line, PASSES.items(), strict=True):
            panel(axis, bars, by_pass[each], behind)
            axis.set_title(f"{title}\n{name}, ms", fontsize=11)
        line[0].set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=10)
    ranks, gpu = row["machine"].split("x")
    heads = f"{row['q_heads']} query and {row['kv_heads']} kv heads of {row['head_dim']}, bfloat16, batch 1"
    figure.suptitle(f"{what} on {ranks} x {gpu}, {heads}", fontsize=12)
    unlike = ("Triton", "CUDA", "NCCL")  # of which the times say little
    versions = ", ".join(each for each in row["versions"].split(", ") if not each.startswith(unlike))
    line = Line2D([], [], **IDEAL_LINE, label=f"one GPU's time / {ranks}")
    figure.legend(handles=[line], loc="outside lower center", title=f"{about}\n{versions}", frameon=False, fontsize=10)
    save(figure, output)


def draw_today(output: Path) -> None:
    """Draw forward and backward, a panel for each length; others are grey, so that ours is seen without colours."""
    rows = [row for row in table(TODAY_TABLE) if (row["mask"], row["pass"]) == ("causal", "fwdbwd")]
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, len(TODAY_TOKENS))
    for axis, tokens in zip(axes, TODAY_TOKENS, strict=True):
        times = {row["method"]: float(row["median_ms"]) for row in rows if int(row["tokens"]) == tokens}
        shown = [min(times[name] for name in bar.names if name in times) for bar in TODAY]
        for place, (bar, ms) in enumerate(zip(TODAY, shown, strict=True)):
            axis.barh(place, ms, height=0.75, color=bar.colour)
            _annotate(axis, ms, place, f"{significant(ms)} ms", 12)
        axis.axvline(min(ms for name, ms in times.items() if name.startswith("ideal")), **IDEAL_LINE)
        axis.set_title(f"{tokens:,} tokens", fontsize=12)
        axis.set_xlim(0, 1.6 * max(shown))
        _bare(axis)
        axis.set_xticks([])
    axes[0].set_yticks(range(len(TODAY)), [bar.label for bar in TODAY], fontsize=12)
    title = "Causal attention on 4 H200s, forward + backward, bfloat16,"
    figure.suptitle(f"{title}\n32 query and 8 kv heads of 128; dashed: one GPU's time / 4", fontsize=13)
    save(figure, output)


def draw_lengths(rows: Sequence[measured.Row], bars: Sequence[Bar], about: str, output: Path) -> None:
    """Draw causal calls: a row of panels for each length."""
    times = eager_times(rows)
    times |= {
        (int(row["tokens"]), row["pass"], row["method"]): float(row["median_ms"])
        for row in rows if row["method"].endswith("graph")
    }  # fmt: skip
    panels = {
        f"{length:,} tokens": {
            each: {name: ms for (tokens, kind, name), ms in times.items() if (tokens, kind) == (length, each)}
            for each in PASSES
        }
        for length in sorted({length for length, *_ in times})
    }
    draw_panels(panels, bars, rows[0], bars[0].names[0], "Causal attention", about, output)


def draw_masks(rows: Sequence[measured.Row], output: Path) -> None:
    """Draw calls under masks: a row of panels for each mask and length."""
    panels: dict[str, dict[str, Times]] = {}
    for row in rows:
        if row["mask"] != "causal":
            of_mask = panels.setdefault(f"{row['mask']}, {int(row['tokens']):,} tokens", {each: {} for each in PASSES})
            of_mask[row["pass"]][name_of(row)] = float(row["median_ms"])
    about = "x: speedup over torch's FlexAttention."
    draw_panels(panels, MASKED, rows[0], "torch-flex", "Masked attention", about, output)


def draw_steps(output: Path) -> None:
    """Draw whole training steps: the part of the GPUs' peak that the model's operations reach."""
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axis = figure.subplots()
    names: list[str] = []
    bars = (Bar("torch's context parallel", GREY, ()), Bar("this library", BLUE, ()))
    for place, (name, tokens, what) in enumerate(STEPS):
        rows = {row["method"]: row for row in table(name) if int(row["tokens"]) == tokens}
        for shift, method, bar in ((-0.2, "torch-allgather", bars[0]), (0.2, "ours-symm_mem", bars[1])):
            share = float(rows[method]["tflops"]) / 9.89  # 989 TFLOP/s of an H200
            axis.barh(place + shift, share, height=0.38, color=bar.colour, edgecolor="white")
            _annotate(axis, share, place + shift, f"{share:.1f}%, {float(rows[method]['median_ms']):,.0f} ms")
        gpus = name.partition("x")[0]
        names.append(f"{tokens:,} on {gpus}{what}")
    _bare(axis)
    axis.set_yticks(range(len(names)), names, fontsize=10)
    axis.set_xlim(0, 60)
    axis.set_xlabel("model FLOPs, % of the GPUs' peak, and ms of a step; by tokens and GPUs", fontsize=11)
    figure.suptitle(
        "Training steps of 8 layers of Llama 3.1 8B by FSDP2 and AdamW on H200s,\nbfloat16, causal, eager layers"
    )
    handles = [Patch(facecolor=bar.colour, label=bar.label) for bar in bars]
    figure.legend(handles=handles, loc="outside lower center", ncol=2, frameon=False)
    save(figure, output)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw_today(DOCS / "images" / "speed.png")
    both = "Median of the slowest rank; x: speedup of eager calls over torch."
    draw_lengths(table("8xH200-packages-graphs"), CAUSAL, both, DOCS / "benchmarks" / "causal.png")
    draw_masks(table("8xH200-masks-flex"), DOCS / "benchmarks" / "masks.png")
    draw_steps(DOCS / "benchmarks" / "steps.png")


if __name__ == "__main__":
    main()
