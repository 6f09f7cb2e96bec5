"""Picture of the rooms of the package: sizes of the boxes by lines, widths of the arrows by imports.

python docs/scripts/rooms.py --output docs/images/rooms.png

Imports are read from the source files with `ast`; nothing is imported. An import is a pair of an importing file and an
imported module, inside of functions too.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, PathPatch, Polygon
from matplotlib.path import Path as Curve

PACKAGE = Path(__file__).resolve().parents[2] / "cp_dtensor"
PUBLIC = "cp_dtensor"
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("5", ("integrations", "tools")),
    ("", (PUBLIC,)),
    ("4", ("api",)),
    ("3", ("engine",)),
    ("2", ("attention", "comm")),
    ("1", ("plan",)),
    ("0", ("spec", "_torch")),
)
"""Floor numbers and rooms, from the top; `__init__.py` with the public names is drawn like a room."""
ABOUT = {
    "integrations": "providers and drop-ins",
    "tools": "bench, draw, accuracy, info",
    PUBLIC: "the public names",
    "api": "contexts, functions, DTensor, FlexAttention",
    "engine": "planner, autograd, rings, Ulysses",
    "attention": "kernels of one device",
    "comm": "transport between ranks",
    "plan": "tiles and steps",
    "spec": "layouts, masks",
    "_torch": "private torch, driver",
}
COLOURS = {
    "integrations": "#b98bc9",
    "tools": "#9a9fb0",
    PUBLIC: "#6d7a8c",
    "api": "#e2777a",
    "engine": "#ee9d50",
    "attention": "#d9b83b",
    "comm": "#7fb95f",
    "plan": "#45aa9f",
    "spec": "#4f93cf",
    "_torch": "#a98467",
}
# Inches.
WIDTH, MARGIN = 15.0, 0.75
BOX_HEIGHT, PUBLIC_HEIGHT, FLOOR_GAP = 0.86, 0.42, 1.0
WIDEST_ROW, MIN_BOX_WIDTH, BOX_GAP = 9.0, 1.85, 1.6


@dataclass
class Box:
    """A room as a rectangle; `y` is its lower edge."""

    name: str
    files: int
    lines: int
    floor: int
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = BOX_HEIGHT

    @property
    def centre(self) -> float:
        """Center of the rectangle."""
        return self.x + self.width / 2


@dataclass
class Arrow:
    """The imports of one room from another, and the gaps between boxes through which the arrow passes."""

    source: Box
    target: Box
    imports: int
    gaps: list[tuple[int, int]] = field(default_factory=list)
    """Floor and index of each gap."""
    xs: list[float] = field(default_factory=list)
    """x at which the arrow starts, passes each gap, and ends."""

    @property
    def width(self) -> float:
        """Width in inches."""
        return 0.014 + 0.0042 * self.imports


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/rooms.png"))
    parser.add_argument("--package", type=Path, default=PACKAGE)
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    draw(arguments.package, arguments.output)


def room_of(module: str) -> str:
    """Returns the room of a dotted name below the package; "" is the package itself."""
    return module.split(".")[0] or PUBLIC


def modules(package: Path) -> dict[str, Path]:
    """Returns dotted names below the package and their files, without `__main__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found.pop("__main__", None)
    return found


def imports(files: dict[str, Path]) -> Counter[tuple[str, str]]:
    """Counts the (importing file, imported module) pairs of each pair of different rooms."""
    counts: Counter[tuple[str, str]] = Counter()
    for module, path in files.items():
        targets = {_module_of(name, files) for name in _imported_names(path, module)}
        counts.update((room_of(module), room_of(target)) for target in targets if room_of(target) != room_of(module))
    return counts


def _imported_names(path: Path, module: str) -> Iterator[str]:
    """Yields the dotted names below the package of everything that a file imports from it."""
    package = [PUBLIC, *module.split(".")] if module else [PUBLIC]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        yield from (name.partition(".")[2] for name in names if name.split(".")[0] == PUBLIC)


def _module_of(name: str, files: dict[str, Path]) -> str:
    """Returns the module of an imported name: the longest prefix that is a file."""
    parts = name.split(".")
    return next(m for n in range(len(parts), -1, -1) if (m := ".".join(parts[:n])) in files)


# Layout


def placed_boxes(files: dict[str, Path]) -> dict[str, Box]:
    """Returns the boxes of all rooms at their places."""
    boxes = {}
    for number, (_, rooms) in enumerate(FLOORS):
        for name in rooms:
            paths = [path for module, path in files.items() if room_of(module) == name]
            lines = sum(len(path.read_text().splitlines()) for path in paths)
            boxes[name] = Box(name, len(paths), lines, number)
    y = sum((PUBLIC_HEIGHT if PUBLIC in rooms else BOX_HEIGHT) + FLOOR_GAP for _, rooms in FLOORS) - FLOOR_GAP
    inches_per_line = WIDEST_ROW / max(sum(boxes[name].lines for name in rooms) for _, rooms in FLOORS)
    for _, rooms in FLOORS:
        row = [boxes[name] for name in rooms]
        for box in row:
            box.width = max(box.lines * inches_per_line, MIN_BOX_WIDTH)
            box.height = BOX_HEIGHT
            if box.name == PUBLIC:
                box.width, box.height = 0.55 * (WIDTH - 2 * MARGIN), PUBLIC_HEIGHT
        x = (WIDTH - sum(box.width for box in row) - BOX_GAP * (len(row) - 1)) / 2
        if rooms == ("spec", "_torch"):
            x -= 1.0
        y -= row[0].height
        for box in row:
            box.x, box.y = x, y
            x += box.width + (BOX_GAP if rooms != ("spec", "_torch") else BOX_GAP + 2.0)
        y -= FLOOR_GAP
    return boxes


def gaps_of(boxes: dict[str, Box], floor: int) -> list[tuple[float, float]]:
    """Returns the free ranges of x of a floor, from left to right."""
    row = sorted((box for box in boxes.values() if box.floor == floor), key=lambda box: box.x)
    edges = [MARGIN, *itertools.chain.from_iterable((box.x, box.x + box.width) for box in row), WIDTH - MARGIN]
    return [(edges[n], edges[n + 1]) for n in range(0, len(edges), 2)]


def routed(boxes: dict[str, Box], counts: Counter[tuple[str, str]]) -> list[Arrow]:
    """Returns the arrows, each through the gaps that take it the shortest way."""
    arrows = [Arrow(boxes[source], boxes[target], count) for (source, target), count in counts.items()]
    if upward := [arrow for arrow in arrows if arrow.source.floor >= arrow.target.floor]:
        raise SystemExit(f"an import points upward: {upward[0].source.name} imports {upward[0].target.name}")
    gaps = {floor: gaps_of(boxes, floor) for floor in range(len(FLOORS))}
    for arrow in arrows:
        ways: list[tuple[float, float, list[float], list[tuple[int, int]]]] = [(0.0, arrow.source.centre, [], [])]
        for floor in range(arrow.source.floor + 1, arrow.target.floor):
            nearer = []
            for index, (left, right) in enumerate(gaps[floor]):
                best = min(
                    (
                        (cost + abs(x - at), at, [*xs, at], [*passed, (floor, index)])
                        for cost, x, xs, passed in ways
                        for at in [min(max((x + arrow.target.centre) / 2, left + 0.35), right - 0.35)]
                    ),
                    key=lambda way: way[0],
                )
                nearer.append(best)
            ways = nearer
        _, _, xs, arrow.gaps = min(ways, key=lambda way: way[0] + abs(way[1] - arrow.target.centre))
        arrow.xs = [arrow.source.centre, *xs, arrow.target.centre]
    for _ in range(8):  # the order at one end depends on the order at the other
        for box in boxes.values():
            _spread(
                [(arrow, 0) for arrow in arrows if arrow.source is box], box.x + 0.12, box.x + box.width - 0.12, True
            )
            _spread(
                [(arrow, len(arrow.xs) - 1) for arrow in arrows if arrow.target is box],
                box.x + 0.12, box.x + box.width - 0.12, True,
            )  # fmt: skip
        for floor, row in gaps.items():
            for index, (left, right) in enumerate(row):
                inside = [
                    (arrow, arrow.gaps.index((floor, index)) + 1) for arrow in arrows if (floor, index) in arrow.gaps
                ]
                _spread(inside, left + 0.15, right - 0.15, False)
    return arrows


def _spread(places: list[tuple[Arrow, int]], left: float, right: float, evenly: bool) -> None:
    """Puts arrows side by side in the order of their neighbouring places; evenly, or near these places."""
    if not places:
        return

    def aim(place: tuple[Arrow, int]) -> float:
        arrow, index = place
        near = [arrow.xs[other] for other in (index - 1, index + 1) if 0 <= other < len(arrow.xs)]
        return sum(near) / len(near)

    places = sorted(places, key=aim)
    widths = [arrow.width for arrow, _ in places]
    lane = 0.3 if evenly else 0.16
    room = right - left - sum(widths)
    between = min(room / max(len(places), 1), lane)
    total = sum(widths) + between * (len(places) - 1)
    middle = (left + right) / 2 if evenly else sum(map(aim, places)) / len(places)
    x = min(max(middle - total / 2, left), right - total)
    for (arrow, index), width in zip(places, widths, strict=True):
        arrow.xs[index] = x + width / 2
        x += width + between


# Drawing


def draw(package: Path, output: Path) -> None:
    """Writes the picture."""
    files = modules(package)
    boxes, counts = placed_boxes(files), imports(files)
    height = max(box.y + box.height for box in boxes.values())
    figure = plt.figure(figsize=(WIDTH, height + 1.8))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_xlim(0, WIDTH)
    axis.set_ylim(-0.4, height + 1.4)
    axis.set_aspect("equal")
    axis.axis("off")
    for number, rooms in FLOORS:
        box = boxes[rooms[0]]
        if number:
            band = FancyBboxPatch(
                (0.3, box.y - 0.12), WIDTH - 0.6, box.height + 0.24, boxstyle="round,pad=0,rounding_size=0.12"
            )
            band.set(facecolor="#f3f4f6", edgecolor="none", zorder=0)
            axis.add_patch(band)
            axis.text(
                0.58, box.y + box.height / 2, number, fontsize=20, color="#9aa1ab", ha="center", va="center", zorder=4
            )
    for arrow in sorted(routed(boxes, counts), key=lambda arrow: -arrow.imports):
        _draw_arrow(axis, arrow, boxes)
    for box in boxes.values():
        _draw_box(axis, box)
    lines, count = sum(box.lines for box in boxes.values()), sum(box.files for box in boxes.values())
    axis.text(0.35, height + 0.93, "The rooms of cp_dtensor", fontsize=21, fontweight="bold", color="#22272e")
    about = (
        f"{lines:,} lines in {count} files. Boxes: the wider, the more lines. Arrows: imports, all of them downward; "
        "numbers count pairs of an importing file and an imported module."
    )
    axis.text(0.35, height + 0.55, about, fontsize=11.5, color="#5b6470")
    figure.savefig(output, dpi=110, facecolor="white")


def _draw_box(axis: Axes, box: Box) -> None:
    shape = FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle="round,pad=0,rounding_size=0.1")
    shape.set(facecolor=COLOURS[box.name], edgecolor="white", linewidth=2, zorder=3)
    axis.add_patch(shape)
    middle = box.y + box.height / 2
    if box.name == PUBLIC:
        axis.text(
            box.centre,
            middle,
            "import cp_dtensor: the public names",
            fontsize=12.5,
            color="white",
            fontweight="bold",
            ha="center",
            va="center",
            zorder=4,
        )
        return
    for offset, text, size, weight in (
        (0.23, box.name, 14.5, "bold"),
        (-0.03, ABOUT[box.name], 9.5, "normal"),
        (-0.24, f"{box.files} files · {box.lines:,} lines", 9.5, "normal"),
    ):
        axis.text(
            box.centre,
            middle + offset,
            text,
            fontsize=size,
            fontweight=weight,
            color="white",
            ha="center",
            va="center",
            zorder=4,
        )


def _draw_arrow(axis: Axes, arrow: Arrow, boxes: dict[str, Box]) -> None:
    """Draws a line that is vertical at its ends and inside of gaps, with a head and the number of imports."""
    rows = {box.floor: box for box in boxes.values()}
    head = 0.1 + 0.5 * arrow.width
    ends = [(arrow.xs[0], arrow.source.y)]
    for (floor, _), x in zip(arrow.gaps, arrow.xs[1:-1], strict=True):
        ends += [(x, rows[floor].y + rows[floor].height), (x, rows[floor].y)]
    top = arrow.target.y + arrow.target.height
    ends.append((arrow.xs[-1], top + head))
    vertices = [ends[0]]
    for (x, y), (next_x, next_y) in itertools.pairwise(ends):
        bend = (y + next_y) / 2
        vertices += [(x, bend), (next_x, bend), (next_x, next_y)]
    line = Curve(vertices, [Curve.MOVETO, *[Curve.CURVE4] * (len(vertices) - 1)])
    colour = COLOURS[arrow.source.name]
    for edge, paint, alpha in ((0.025, "white", 0.9), (0.0, colour, 0.72)):  # a white edge where arrows cross
        stroke = PathPatch(line, facecolor="none", edgecolor=paint, linewidth=72 * (arrow.width + edge), alpha=alpha)
        stroke.set(capstyle="butt", zorder=1)
        axis.add_patch(stroke)
    x, spread = arrow.xs[-1], arrow.width / 2 + 0.055
    tip = Polygon([(x - spread, top + head), (x + spread, top + head), (x, top + 0.01)])
    tip.set(facecolor=colour, edgecolor="none", zorder=2)
    axis.add_patch(tip)
    label = {"boxstyle": "round,pad=0.12,rounding_size=0.3", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
    axis.text(
        arrow.xs[0], arrow.source.y - 0.16, str(arrow.imports), fontsize=8, color="#30363d", ha="center", va="center",
        bbox=label, zorder=5,
    )  # fmt: skip


if __name__ == "__main__":
    main()
