"""Pictures of the documents: they show the plans of all ranks."""

from __future__ import annotations

import csv
import itertools
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.docs_scripts import docs_script
from support.import_rules import FLOORS

from cp_dtensor import Causal, Contiguous, HeadTail, Layout, Striped
from cp_dtensor.comm.collective import AllGather, AllToAll
from cp_dtensor.engine.ring import NestedRingPlan
from cp_dtensor.plan.partition import CallSpec, HeadPartition, LayoutPartition
from cp_dtensor.plan.tiles import FULL_TILE, Tile
from cp_dtensor.spec.layouts import MirroredBatch
from cp_dtensor.spec.masks import Full

assignments, gallery = docs_script("assignments"), docs_script("gallery")
methods = assignments.METHODS

RANKS, SEQ_LEN = 4, 16
CAUSAL = np.tri(SEQ_LEN, dtype=bool)
LAYOUTS: list[Layout] = [Contiguous(), HeadTail(), Striped(1), Striped(2)]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=repr)


def owners(layout: Layout, group: int = 0) -> np.ndarray:
    """The rank of each position."""
    rank_of = np.full(SEQ_LEN, -1)
    for rank in range(RANKS):
        for segment in layout.segments(SEQ_LEN, rank, RANKS, group):
            rank_of[list(segment.positions())] = rank
    return rank_of


@pytest.mark.parametrize(("_title", "layout", "group"), gallery.LAYOUTS, ids=lambda value: repr(value))
@pytest.mark.parametrize("transport", gallery.TRANSPORTS)
def test_schedules_by_rank_and_step(transport: str, _title: str, layout: Layout, group: int) -> None:
    """Every allowed pair, by the rank that owns the query; in step 0 exactly if it owns the key too."""
    drawn = assignments.assignment(
        Causal(), layout, SEQ_LEN, batch_size=2, batch_row=group, transport=gallery.TRANSPORTS[transport]
    )  # fmt: skip
    owner, step = drawn.owner[0], drawn.step[0]
    rank_of = owners(layout, group)
    np.testing.assert_array_equal(owner, np.where(CAUSAL, rank_of[:, None], -1))
    np.testing.assert_array_equal(step >= 0, CAUSAL)
    np.testing.assert_array_equal((step == 0)[CAUSAL], (rank_of[:, None] == rank_of)[CAUSAL])


def test_positions_of_keys_in_a_gathered_buffer() -> None:
    """What the first rank, with 0 1 14 15, gathers: 2 3 12 13, 4 5 10 11 and 6 7 8 9, in the order of positions."""
    spec = CallSpec(LayoutPartition(HeadTail(), SEQ_LEN, SEQ_LEN, 1, RANKS), Full(), 1, 1, 1, 1, 1, "float32")
    plan = AllGather().plan(spec, 0)
    (group,) = spec.partition.groups()
    tile = Tile(None, (0, 1), (0, 4), (0, 4), FULL_TILE)
    assert assignments.key_positions(tile, plan, group).tolist() == list(range(2, 14))


@pytest.mark.parametrize("method", methods)
@each_layout
def test_methods_by_rank_and_head(layout: Layout, method: str) -> None:
    """Every allowed pair of every head is computed once, by a rank that has its head and its query."""
    drawn = assignments.assignment(Causal(), layout, SEQ_LEN, methods[method])
    np.testing.assert_array_equal(drawn.times, np.broadcast_to(CAUSAL, drawn.times.shape))
    np.testing.assert_array_equal(drawn.before, np.broadcast_to(owners(layout), drawn.before.shape))
    np.testing.assert_array_equal(drawn.owner, np.where(CAUSAL, drawn.during[:, :, None], -1))


@each_layout
def test_methods_by_hand(layout: Layout) -> None:
    """The rank that holds each row during attention, and the step of each pair: rank - hop, over one axis or two."""
    ring, ulysses, hybrid, rings = (
        assignments.assignment(Causal(), layout, SEQ_LEN, method) for method in methods.values()
    )
    rank_of = owners(layout)
    for head, token in product(range(4), range(SEQ_LEN)):
        rank = rank_of[token]
        assert ring.during[head, token] == rings.during[head, token] == rank
        assert ulysses.during[head, token] == head
        assert hybrid.during[head, token] == rank // 2 * 2 + head // 2
    for head, (query, key) in product(range(4), np.argwhere(CAUSAL)):
        reader, source = rank_of[query], rank_of[key]
        place = (head, query, key)
        assert ring.step[place] == (reader - source) % 4
        assert ulysses.step[place] == 0
        assert hybrid.step[place] == rings.step[place] == (reader // 2 - source // 2) % 2
        assert rings.inner_step[place] == (reader - source) % 2


TILES = {  # docs/choosing.md: of ring, Ulysses, hybrid and nested ring; by alltoall, then by allgather
    Contiguous(): ([(1, 4), (1, 1), (1, 2), (1, 4)], [(1, 2), (1, 1), (1, 2), (1, 4)]),
    HeadTail(): ([(4, 4), (1, 1), (2, 2), (4, 4)], [(2, 3), (1, 1), (2, 2), (4, 4)]),
    Striped(1): ([(4, 4), (16, 16), (8, 8), (4, 4)], [(4, 4), (16, 16), (8, 8), (4, 4)]),
    Striped(2): ([(4, 4), (4, 4), (4, 4), (4, 4)], [(4, 4), (4, 4), (4, 4), (4, 4)]),
    MirroredBatch(): ([(5, 5), (8, 8), (5, 5), (5, 5)], [(3, 4), (8, 8), (5, 5), (5, 5)]),
}


@pytest.mark.parametrize("layout", TILES, ids=repr)
def test_tiles_that_the_documents_tell_of(layout: Layout) -> None:
    """The least and the most of a forward on any rank."""
    partition = LayoutPartition(layout, 64, 64, 2, RANKS)
    for transport, expected in zip((AllToAll(), AllGather()), TILES[layout], strict=True):
        found = []
        for method in methods.values():
            counts = []
            for _, plan in assignments.plans(method, partition, Causal(), transport):
                inner = plan.inner.values() if isinstance(plan, NestedRingPlan) else getattr(plan, "inner", [plan])
                rings = [ring for ring in inner if ring]
                counts.append(sum(len(step.tiles) for ring in rings for step in ring.tile_plan.forward))
            found.append((min(counts), max(counts)))
        assert found == expected


def test_pictures_follow_the_partition_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn from what is decided: other groups of heads, another picture."""
    reversed_groups = lambda self, rank, stage=None: (3 - rank, 4 - rank)  # noqa: E731
    monkeypatch.setattr(HeadPartition, "kv_groups", reversed_groups)
    drawn = assignments.assignment(Causal(), HeadTail(), SEQ_LEN, methods["Ulysses"])
    assert drawn.during[:, 0].tolist() == [3, 2, 1, 0]
    assert drawn.owner[:, 0, 0].tolist() == [3, 2, 1, 0]


def test_the_picture_of_methods_shows_heads_that_differ() -> None:
    titles = [axis.get_title() for axis in gallery.draw_methods().get_axes()]
    assert titles == [
        "ranks own", "ring, all heads", "nested ring, all heads",
        "Ulysses: ranks hold", "Ulysses, head 0", "Ulysses, head 3",
        "hybrid: ranks hold", "hybrid, heads 0, 1", "hybrid, heads 2, 3",
    ]  # fmt: skip


def test_buffers_and_states_by_hand() -> None:
    """HeadTail gives rank 0 the first and the last tokens; the state goes down the ranks and up again."""
    before, inside, after = gallery.draw_buffers().get_axes()
    texts = [[text.get_text() for text in axis.texts] for axis in (before, inside, after)]
    assert texts[0] == texts[2] == [str(token) for token in range(16)] * 4
    assert texts[1] == [str(token) for token in (0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9)]
    arrows = [[(int(text.xyann[1]), int(text.xy[1])) for text in axis.texts] for axis in gallery.draw_states().axes]
    assert arrows == [[(0, 1), (1, 2), (2, 3)], *[[(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)]] * 2]


def test_pictures_are_small_and_each_is_in_the_gallery(tmp_path: Path) -> None:
    page = (gallery.FOLDER.parent / "gallery.md").read_text()
    shown = {path.stem for path in gallery.FOLDER.glob("*.png")}
    assert {*gallery.PICTURES} <= shown == {name for name in shown if f"(images/{name}.png)" in page}
    assert all(path.stat().st_size < 80_000 for path in gallery.FOLDER.glob("*.png"))
    gallery.save(gallery.PICTURES["transports"](), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_rooms_are_those_of_the_rules_and_imports_are_counted(tmp_path: Path) -> None:
    rooms = docs_script("rooms")
    assert {*rooms.ROOMS} == {*FLOORS, rooms.PUBLIC}
    assert [FLOORS[room] for room in rooms.ROOMS if room] == sorted(FLOORS.values(), reverse=True)
    files = {
        "api/context.py": "from cp_dtensor.spec import masks\nfrom ..spec.masks import Full, Mask\nimport torch\n",
        "api/other.py": "def late():\n    import cp_dtensor.spec.masks\n    from cp_dtensor.spec import Layout\n",
        "spec/__init__.py": "from cp_dtensor.spec.masks import Mask\n",
        "spec/masks.py": "",
        "__init__.py": "from cp_dtensor.api.context import context_parallel\n",
        "__main__.py": "from cp_dtensor.tools import draw\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert rooms.imports(tmp_path) == {("api", "spec"): 3, ("", "api"): 1}


def test_the_picture_of_the_rooms(tmp_path: Path) -> None:
    """All imports are above the diagonal, and each is drawn."""
    rooms = docs_script("rooms")
    order = [*rooms.ROOMS]
    counts = rooms.imports(rooms.PACKAGE)
    assert all(order.index(source) < order.index(target) for source, target in counts)
    figure = rooms.draw(rooms.PACKAGE)
    places = [text.get_position() for text in figure.axes[0].texts if text.get_gid() == "import"]
    assert {(order[int(row)], order[int(column)]) for column, row in places} == {*counts}


def test_runs_become_tables_of_measured(tmp_path: Path) -> None:
    """Rows of the table are replaced, those of others stay. Refused rows and columns that follow from others go."""
    measured = docs_script("measured")
    run = {
        "machine": "2xH100", "versions": "torch 2", "tokens": 64, "mask": "window 9", "q_heads": 4, "kv_heads": 2,
        "head_dim": "8/16", "dtype": "bfloat16", "layout": "Balanced", "pass": "fwd", "status": "measured",
        "method": "ours-symm_mem Balanced graph", "median_ms": 4.99999, "low_ms": 4.25, "high_ms": 6, "host_us": 7.4,
        "tflops": 1.234, "percent_of_ideal": 90.5, "mib": 3.0, "kernels": "cuDNN, ours", "note": "", "error_out": 2e-3,
    }  # fmt: skip
    with (tmp_path / "run.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(run))
        writer.writeheader()
        writer.writerows([run, run | {"status": "refused", "median_ms": None}])
    old = [dict.fromkeys(measured.COLUMNS, "") | {"table": name} for name in ("new", "other")]
    measured.write(old, tmp_path / "measured.csv")
    arguments = ["new", tmp_path / "run.csv", "--commit", "1a2b3c4", "--csv", tmp_path / "measured.csv"]
    measured.main([*map(str, arguments)])
    row, other = measured.read(tmp_path / "measured.csv")
    assert other["table"] == "other"
    assert row == {
        "table": "new", "machine": "2xH100", "versions": "torch 2", "commit": "1a2b3c4", "tokens": "64",
        "mask": "window 9", "layout": "Balanced", "q_heads": "4", "kv_heads": "2", "head_dim": "8/16",
        "method": "ours-symm_mem graph", "pass": "fwd", "median_ms": "5.0000", "low_ms": "4.2500", "high_ms": "6.0000",
        "tflops": "1.2", "host_us": "7", "mib": "3", "kernels": "cuDNN, ours", "note": "error_out 0.002",
    }  # fmt: skip


def test_pictures_of_measured_times(tmp_path: Path) -> None:
    """All four are drawn, with a bar and its milliseconds for each method; a graph has no speedup.

    The README's shows the fastest row of each method, of which torch's ring takes no masks.
    """
    speed = docs_script("speed")
    figure = speed.Figure()
    axis = figure.subplots()
    times = {"torch-allgather": 6.0, "ours-symm_mem": 3.0, "ours-symm_mem graph": 1.5, "ideal": 1.0, "ideal-other": 2.0}
    bars = [bar for bar in speed.CAUSAL if times.keys() & {*bar.names}]
    speed.panel(axis, bars, times, "torch-allgather")
    assert [text.get_text() for text in axis.texts] == ["6.00", "3.00  2.00x", "1.50"]
    assert [bar.get_width() for bar in axis.patches] == [6.0, 3.0, 1.5]
    assert axis.lines[0].get_xdata()[0] == 1.0
    speed.draw_masks(speed.table("8xH200-masks-flex"), tmp_path / "masks.png")
    speed.draw_lengths(speed.table("8xH200-packages-graphs"), speed.CAUSAL, "", tmp_path / "causal.png")
    speed.draw_steps(tmp_path / "steps.png")
    speed.draw_today(tmp_path / "speed.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_steps_are_read_from_the_log_of_torchtitan() -> None:
    """TorchTitan colours its lines; other lines with numbers are no steps."""
    log = (
        "[rank0]:[titan] - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.24534  \x1b[38;2;180;60;0mgrad_norm:  "
        "0.9749  \x1b[38;2;54;234;195mmemory: 65.30GiB(46.71%)  "
        "\x1b[34mtps: 1,726  \x1b[36mtflops: 70.14  mfu: 7.09%\x1b[39m\n"
        "[rank0]:[titan] - root - INFO - Training starts at step 1, loss: none\n"
    )
    assert docs_script("torchtitan_steps").steps_of(log) == [(1, 12.24534, 0.9749, 65.3, 1726)]


def test_rows_of_transformers_steps_are_the_same_in_all_programs() -> None:
    """The loop shifts labels itself, and TRL makes them of documents, whose first tokens are not predicted."""
    script = docs_script("transformers_steps")
    options = SimpleNamespace(seq_len=2 * script.DOCUMENT, packed=True)
    row = script.row_of(3, options)
    assert row["position_ids"].tolist() == [*range(script.DOCUMENT)] * 2
    assert (row["labels"] != row["input_ids"]).nonzero().flatten().tolist() == [0, script.DOCUMENT]
    assert script.row_of(3, options)["input_ids"].equal(row["input_ids"])
    assert not script.row_of(4, options)["input_ids"].equal(row["input_ids"])
    assert {method for _, method, packed in script.RUNS if packed} == {"ours", "alone"}  # torch has no such mask


def test_the_tables_of_scaling_are_those_of_the_script() -> None:
    """The first rows; the others take minutes."""
    scaling = docs_script("scaling")
    rows = [" | ".join(row) for row in itertools.islice(scaling.small(), 2)]
    text = scaling.PAGE.read_text()
    assert all(f"\n| {row} |\n" in text for row in rows)
    head = next(scaling.large())
    assert f"\n| {' | '.join(head)} |\n" in text
    assert text.count("<!-- table -->\n") == len(scaling.TABLES)
