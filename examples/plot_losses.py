"""Plot of the losses of the training example on one rank and with three kinds of parallelism.

    python examples/plot_losses.py

Writes into docs/: images/loss_curves.png, loss_curves.md, and the numbers in loss_curves.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from config import load_config

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
PRECISIONS = ("float32", "float64")  # float64 separates rounding from errors
Losses = dict[str, list[float]]
"""Losses of all steps, by run."""


@dataclass(frozen=True)
class Way:
    """Parallelism of a run, and the color of its line."""

    name: str
    context: int
    tensor: int
    color: str

    @property
    def ranks(self) -> int:
        return self.context * self.tensor


ONE_RANK = Way("1 rank", 1, 1, "#b8b8b8")
PARALLEL = (Way("cp=2", 2, 1, "#0072b2"), Way("cp=4", 4, 1, "#d55e00"), Way("cp=2 x tp=2", 2, 2, "#009e73"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=ROOT / "examples" / "configs" / "debug.toml")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder to write into")
    parser.add_argument("--redraw", action="store_true", help="use the numbers of the last time, train nothing")
    arguments = parser.parse_args()

    numbers = arguments.docs / "loss_curves.json"
    if not arguments.redraw:
        losses = {
            precision: {way.name: train(way, precision, arguments.config) for way in (ONE_RANK, *PARALLEL)}
            for precision in PRECISIONS
        }
        numbers.write_text(json.dumps(losses, indent=1) + "\n")
    losses = json.loads(numbers.read_text())
    (arguments.docs / "images").mkdir(parents=True, exist_ok=True)
    draw(losses, arguments.docs / "images" / "loss_curves.png")
    (arguments.docs / "loss_curves.md").write_text(page(losses, arguments.config))
    for precision in PRECISIONS:
        print(f"{precision}: largest difference from {ONE_RANK.name} {largest_difference(losses[precision]):.1e}")


def train(way: Way, precision: str, config: Path) -> list[float]:
    """Runs train.py and returns the losses of all steps from its metrics."""
    print(f"{way.name}, {precision}: training on {way.ranks} ranks", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={way.ranks}"]
        command += [str(ROOT / "examples" / "train.py"), f"--config={config}", f"--job.dump_folder={folder}"]
        command += ["--checkpoint.enable=false", "--metrics.jsonl_file=metrics.jsonl", "--metrics.log_freq=1"]
        command += [f"--training.mixed_precision_param={precision}", "--parallelism.data_parallel_shard_degree=1"]
        command += [f"--parallelism.context_parallel_degree={way.context}"]
        command += [f"--parallelism.tensor_parallel_degree={way.tensor}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def differences(losses: Losses, way: Way) -> list[float]:
    """The absolute difference from the loss of one rank, for each step."""
    return [abs(ours - theirs) for ours, theirs in zip(losses[way.name], losses[ONE_RANK.name], strict=True)]


def largest_difference(losses: Losses) -> float:
    """The largest difference over all runs and steps."""
    return max(max(differences(losses, way)) for way in PARALLEL)


def draw(losses: dict[str, Losses], path: Path) -> None:
    """Draws all curves in one plot, and below it their distances from the curve of one rank."""
    figure, (curves, gaps) = plt.subplots(
        2, 1, figsize=(8, 7.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    shown = losses[PRECISIONS[0]]
    steps = range(1, len(shown[ONE_RANK.name]) + 1)
    curves.plot(steps, shown[ONE_RANK.name], color=ONE_RANK.color, linewidth=6, label=ONE_RANK.name)
    for place, way in enumerate(PARALLEL):
        # The lines coincide: each is drawn where the others have gaps.
        dashes = (5 * place, (5, 5 * (len(PARALLEL) - 1)))
        curves.plot(steps, shown[way.name], color=way.color, linewidth=2.5, linestyle=dashes)
        points = {"color": way.color, "marker": "ox^"[place], "markersize": 6}
        curves.plot(steps, shown[way.name], **points, linestyle="", markevery=(place, 3), label=way.name)
        for precision in PRECISIONS:
            gaps.semilogy(steps, differences(losses[precision], way), **points, linestyle="", fillstyle="none")
    curves.set(ylabel=f"loss per token (nats), {PRECISIONS[0]}", title="The same training on one rank and in parallel")
    curves.legend()
    stated = ", ".join(f"{largest_difference(losses[precision]):.1e} in {precision}" for precision in PRECISIONS)
    gaps.set(
        xlabel="step",
        ylabel="|loss - loss of 1 rank|",
        title=f"largest difference {stated} (points at 0 are not shown)",
    )
    for precision in PRECISIONS:
        top = largest_difference(losses[precision])
        gaps.text(0.99, top, precision, ha="right", va="bottom", transform=gaps.get_yaxis_transform())
    gaps.margins(y=0.15)
    for axes in (curves, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=75)
    plt.close(figure)


def page(losses: dict[str, Losses], config_path: Path) -> str:
    """docs/loss_curves.md: the picture and its numbers."""
    config = load_config(config_path)
    training = config.training
    transport = config.parallelism.context_parallel_rotate_method
    layout = config.parallelism.context_parallel_load_balancer
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo"
    return f"""# Losses with different parallelism

After this page you know how far training in parallel is from training on one rank, and can repeat the comparison:

```sh
python examples/plot_losses.py
```

The model of [examples/train.py](../examples/train.py) sees the same samples in the same order: on one rank, and with
the sequence (cp) and the heads (tp) sharded over ranks.
{training.steps} steps of {training.local_batch_size} samples of {training.seq_len} tokens;
KV transport `{transport}`, layout `{layout}`.

![Loss curves of one rank, cp=2, cp=4 and cp=2 x tp=2, and their differences](images/loss_curves.png)

| run | ranks | {" | ".join(f"last loss, {precision} | largest difference" for precision in PRECISIONS)} |
|---|---|{"---|---|" * len(PRECISIONS)}
{table(losses)}

**Largest difference from one rank, over all runs and steps: \
{", ".join(f"{largest_difference(losses[precision]):.1e} in {precision}" for precision in PRECISIONS)}.**
The runs differ in the order of additions. That changes the loss of the first step by a unit in its last place; then
the weights drift apart and the difference grows. The float64 runs show that this is rounding: their difference starts
nine digits lower and stays there. (Initial random weights differ between float32 and float64, so the losses do too.)

Written with torch {torch.__version__}, Python {platform.python_version()}, {device}.
The text is the standard library of this Python, so other versions give other losses.
[loss_curves.json](loss_curves.json) has the numbers of every step.
"""


def table(losses: dict[str, Losses]) -> str:
    """One row of Markdown per run."""
    rows = []
    for way in (ONE_RANK, *PARALLEL):
        cells = [way.name, str(way.ranks)]
        for precision in PRECISIONS:
            gap = f"{max(differences(losses[precision], way)):.1e}" if way in PARALLEL else "-"
            cells += [f"{losses[precision][way.name][-1]:.6f}", gap]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
