"""Picture of the rooms of the package: a table that shows which room imports from which.

python docs/scripts/rooms.py --output docs/images/rooms.png

Imports are read from the source files with `ast`. An import is a pair of an importing file and an
imported module, inside of functions too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from gallery import save
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/rooms.png"))
    arguments = parser.parse_args()
    save(draw(PACKAGE), arguments.output)


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
    figure = Figure(figsize=(8, 6.4))
    axis = figure.subplots()
    for row, (name, (about, colour)) in enumerate(ROOMS.items()):
        floor = f"{FLOORS[name]}   " if name in FLOORS else ""
        axis.text(-0.25, row + 0.42, f"{floor}{name or 'cp_dtensor'}", fontsize=13, fontweight="bold", ha="right")
        axis.text(-0.25, row + 0.8, about, fontsize=11, color="#404854", ha="right")
        axis.add_patch(Rectangle((row, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=3))
        for column, other in enumerate(rooms):
            if counts[name, other]:
                axis.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, alpha=0.3, edgecolor="white"))
                axis.text(column + 0.5, row + 0.5, "●", fontsize=13, ha="center", va="center", gid="import")
    axis.set(xlim=(0, size), ylim=(size, 0), aspect="auto")
    names = [name or "cp_dtensor" for name in rooms]
    axis.set_xticks([place + 0.5 for place in range(size)], names, fontsize=12, rotation=50, ha="left")
    axis.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, left=False, labelleft=False, length=0)
    axis.spines[:].set_visible(False)
    figure.suptitle(
        "● the room of the row imports from the room of the column", fontsize=14, x=0.02, y=0.985, ha="left"
    )
    figure.subplots_adjust(left=0.45, right=0.95, top=0.8, bottom=0.01)
    return figure


if __name__ == "__main__":
    main()
