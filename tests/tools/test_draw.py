"""Pictures of masks: they show the pairs that the mask allows, as the plans of all ranks compute them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.docs_scripts import docs_script
from support.masked_problems import shown

from cp_dtensor import (
    Balanced,
    Batched,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    MirroredBatch,
    PrefixLM,
    SlidingWindow,
    Striped,
)
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.tools import draw
from cp_dtensor.tools.draw import mask_as_text
from cp_dtensor.tools.parsing import layout_by_name, lognormal_documents, mask_by_name

np = pytest.importorskip("numpy")
gallery, assignments = docs_script("gallery"), docs_script("assignments")
assignment = assignments.assignment

RANKS, SEQ_LEN = gallery.RANKS, gallery.SEQ_LEN
MASKS = [mask for family in gallery.MASKS.values() for mask in family.values()]
ROWS = [(mask, row) for mask in MASKS for row in range(mask.batch_size or 1)]


def layouts(mask: Mask) -> list[Layout]:
    return [HeadTail(), Balanced(mask, SEQ_LEN), Contiguous()]


@pytest.mark.parametrize(("mask", "row"), ROWS, ids=str)
def test_every_pair_is_computed_once_by_the_rank_of_its_query(mask: Mask, row: int) -> None:
    seen = shown(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[row, 0].numpy()
    for layout in layouts(mask):
        picture = assignment(mask, layout, SEQ_LEN, batch_row=row, transport=AllGather())
        key_owner = picture.before[0]
        np.testing.assert_array_equal(picture.owner[0], np.where(seen, key_owner[:, None], -1))
        of_own_keys = key_owner[:, None] == key_owner
        np.testing.assert_array_equal(picture.step[0], np.where(seen, np.where(of_own_keys, 0, 1), -1))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_keys_that_travel_are_those_that_are_seen(mask: Mask) -> None:
    """By any batch row. They lie in the order of their positions, without gaps if the mask is by row."""
    seen = shown(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[:, 0].numpy().any(0)
    for layout in layouts(mask):
        picture = assignment(mask, layout, SEQ_LEN, transport=AllGather())
        key_owner = picture.before[0]
        for rank, rows in enumerate(picture.buffer_row):
            wanted = seen[key_owner == rank].any(0) & (key_owner != rank)
            if mask not in (Full(), Causal()):
                np.testing.assert_array_equal(rows[wanted], np.arange(np.count_nonzero(wanted)))
            np.testing.assert_array_equal(rows >= 0, wanted)
            assert (np.diff(rows[wanted]) > 0).all()


def test_the_picture_has_a_line_for_each_batch_row() -> None:
    figure = gallery.draw_masks({"Full()": Full(), **gallery.MASKS["masks_batched"]})
    titles = [axis.get_title() for axis in figure.get_axes()]
    assert sum(title.startswith("Balanced: ") for title in titles) == 3


@pytest.mark.parametrize(("mask", "row"), ROWS, ids=str)
def test_text_shows_every_pair(mask: Mask, row: int) -> None:
    lines = [line for line in mask_as_text(mask, SEQ_LEN).splitlines() if line[0] in "·█"]
    seen = shown(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[row, 0].tolist()
    expected = ["".join("██" if pair else "··" for pair in query) for query in seen]
    assert lines[row * SEQ_LEN : (row + 1) * SEQ_LEN] == expected


def test_long_sequences_are_drawn_by_cells() -> None:
    """Of 64 queries and keys, cells of 2 x 2: on the diagonal three of four pairs."""
    title, *lines = mask_as_text(Causal(), 64).splitlines()
    assert title == "a cell: 2 x 2 pairs"
    assert lines == ["██" * row + "▓▓" + "··" * (31 - row) for row in range(32)]
    assert mask_as_text(SlidingWindow(0, 0), 64).splitlines()[1] == "▒▒" + "··" * 31
    assert mask_as_text(Documents([0, 1]), 64).splitlines()[1] == "░░" + "··" * 31


def test_batch_rows_are_drawn_one_after_the_other() -> None:
    text = mask_as_text(Batched([Causal(), Full()]), 2)
    assert text == "batch row 0:\n██··\n████\nbatch row 1:\n████\n████"


# The command

NAMES = {
    "causal": Causal(),
    "full": Full(),
    "window:3,0": SlidingWindow(3, 0),
    "window:none,2": SlidingWindow(None, 2),
    "window 4": SlidingWindow(3, 0),
    "prefix:6": PrefixLM(6),
    "documents:0,5,16": Documents([0, 5, 16]),
    "documents 3": lognormal_documents(16, 3, 1.0),
    "documents:0,5,16 & causal": Documents([0, 5, 16]) & Causal(),
}


def test_masks_by_name() -> None:
    assert {name: mask_by_name(name, 16) for name in NAMES} == NAMES
    names = [
        "window",
        "window 0",
        "window x",
        "window:1",
        "windows",
        "documents",
        "documents:5",
        "prefix:none",
        "causal &",
    ]
    for name in ("", *names):
        with pytest.raises(ValueError, match="expected a mask such as"):
            mask_by_name(name, 16)


def test_layouts_by_name() -> None:
    for layout in (Contiguous(), HeadTail(), Striped(1), Striped(4), MirroredBatch(), Balanced(Causal(), 16)):
        name = f"Striped({layout.block})" if isinstance(layout, Striped) else type(layout).__name__
        assert layout_by_name(name, Causal(), 16) == layout
    for name in ("Zigzag", "Striped(x)", "Striped(2", "Striped()", "HeadTail(2)", "HeadTail)"):
        with pytest.raises(ValueError, match="expected a layout, one of HeadTail"):
            layout_by_name(name, Causal(), 16)
    with pytest.raises(ValueError, match="PerDocument is a layout of documents"):
        layout_by_name("PerDocument", Causal(), 16)


@pytest.mark.parametrize("layout", ["HeadTail", "Striped(4)", "MirroredBatch", "Balanced"])
def test_the_picture_shows_the_work_of_every_rank(layout: str) -> None:
    mask = mask_by_name("documents:0,5,16 & causal", 16)
    value = layout_by_name(layout, mask, 16)
    figure = draw.draw_owners(mask, value, 16, 3, "a title")
    rows = range(len(value.batch_groups(2)))
    drawn = [
        assignment(mask, value, 16, assignments.Method("ring", (3,)), batch_size=len(rows), batch_row=row).owner[0]
        for row in rows
    ]
    work = [sum(np.count_nonzero(owner == rank) for owner in drawn) for rank in range(3)]
    assert sum(work) == len(drawn) * mask.pairs(16, 16)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [f"rank {rank}: {pairs} pairs" for rank, pairs in enumerate(work)]
    for owner, axis in zip(drawn, figure.get_axes(), strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array().filled(-1), owner)


def test_the_command_writes_a_picture_or_prints_the_mask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw.main(["--mask", "window:1,0", "--seq-len", "8", "--ranks", "16", "-o", str(tmp_path / "window.png")])
    assert (tmp_path / "window.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'window.png'}\n"
    draw.main(["--mask", "documents:0,1,2 & causal", "--seq-len", "2", "--ranks", "2", "--layout", "Contiguous"])
    expected = "██··\n··██\ndocuments:0,1,2 & causal · Contiguous · 2 tokens on 2 ranks: imbalance 0.0%\n"
    assert capsys.readouterr().out == expected


def test_without_matplotlib_its_installation_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        draw.main(["-o", "x.png"])
    assert "pip install matplotlib" in capsys.readouterr().err
