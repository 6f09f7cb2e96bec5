"""Picture of the rooms of the package: a table that shows which room imports from which.

python docs/scripts/rooms.py --output docs/images/rooms.png

Imports are read from the source files with `ast`; nothing is imported. An import is a pair of an importing file and an
imported module, inside of functions too.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from common import parser, save
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from support.import_rules import FLOORS, PACKAGE, modules_of, our_imports, room

PUBLIC = ""
ROOMS = {
    "integrations": ("providers and drop-ins of other programs", "#b98bc9"),
    "tools": ("doctor, bench, train-bench, plan, draw", "#9a9fb0"),
    PUBLIC: ("import cp_dtensor: the public names", "#6d7a8c"),
    "layers": ("recurrent, convolution, scans, shifts", "#c77f9a"),
    "api": ("contexts, functions, DTensor, FlexAttention", "#e2777a"),
    "engine": ("one call: Call, run, plans", "#ee9d50"),
    "attention": ("kernels of one device", "#d9b83b"),
    "comm": ("transport between ranks", "#7fb95f"),
    "plan": ("tiles, plans, cost", "#45aa9f"),
    "spec": ("masks, layouts, caches", "#4f93cf"),
    "_torch": ("private torch, driver", "#a98467"),
}
"""Contents and colour of each room, the highest floor first."""


def main() -> None:
    """Draws the picture."""
    command = parser(__doc__, picture="rooms.png")
    save(draw(PACKAGE), command.parse_args().output, facecolor="white")


def imports(package: Path) -> Counter[tuple[str, str]]:
    """Counts the (importing file, imported module) pairs of each pair of different rooms."""
    counts: Counter[tuple[str, str]] = Counter()
    files = modules_of(package)
    for module in files.keys() - {"__main__"}:
        targets = {target for _, target in our_imports(module, files)}
        counts.update((room(module), room(target)) for target in targets if room(target) != room(module))
    return counts


def draw(package: Path) -> Figure:
    """Draws a row for each room that imports, a column for each that is imported from."""
    counts, rooms, size = imports(package), [*ROOMS], len(ROOMS)
    figure, axis = plt.subplots(figsize=(13, 7.6))
    for row, (name, (about, colour)) in enumerate(ROOMS.items()):
        floor = f"{FLOORS[name]}   " if name in FLOORS else ""
        axis.text(-0.25, row + 0.42, f"{floor}{name or 'cp_dtensor'}", fontsize=13, fontweight="bold", ha="right")
        axis.text(-0.25, row + 0.74, about, fontsize=10.5, color="#404854", ha="right")
        axis.add_patch(Rectangle((row, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=3))
        for column, other in enumerate(rooms):
            if counts[name, other]:
                axis.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=0.3, edgecolor="white"))
                axis.text(column + 0.5, row + 0.5, "imports", fontsize=10, ha="center", va="center", gid="import")
    axis.set(xlim=(0, size), ylim=(size, 0), aspect="auto")
    axis.set_xticks([place + 0.5 for place in range(size)], [name or "cp_dtensor" for name in rooms], fontsize=11)
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, left=False, labelleft=False, length=0)
    axis.spines[:].set_visible(False)
    figure.suptitle(
        "The rooms of cp_dtensor by floor: the room of a row imports from the rooms of the marked columns.\n"
        "Nothing is marked below the diagonal: all imports point downward.",
        fontsize=12, x=0.02, y=0.985, ha="left",
    )  # fmt: skip
    figure.subplots_adjust(left=0.27, right=0.99, top=0.85, bottom=0.01)
    return figure


if __name__ == "__main__":
    main()
