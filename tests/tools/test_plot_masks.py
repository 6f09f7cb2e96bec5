"""Pictures of masks show what masks mean, and what the plans of all ranks say of them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.masked_problems import shown

from cp_dtensor import Balanced, Batched, Causal, Contiguous, Documents, Full, HeadTail, Layout, Mask, SlidingWindow
from cp_dtensor.tools import draw_mask
from cp_dtensor.tools.draw_mask import drawn, mask_of_text

plot_masks = pytest.importorskip("cp_dtensor.tools.plot_masks", reason="needs the extra [tools]")

RANKS, SEQ_LEN = plot_masks.RANKS, plot_masks.SEQ_LEN
MASKS = [mask_of_text(text) for text in plot_masks.PANELS]
ROWS = [(mask, row) for mask in MASKS for row in range(mask.batch_size or 1)]


def layouts(mask: Mask) -> list[Layout]:
    return [HeadTail(), Balanced(mask, SEQ_LEN), Contiguous()]


@pytest.mark.parametrize(("mask", "row"), ROWS, ids=str)
def test_every_pair_is_computed_once_by_the_rank_of_its_query(mask: Mask, row: int) -> None:
    seen = shown(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[row, 0].numpy()
    for layout in layouts(mask):
        picture = plot_masks.picture(mask, layout, SEQ_LEN, RANKS, row)
        np.testing.assert_array_equal(picture.times, seen)
        np.testing.assert_array_equal(picture.owner, np.where(seen, picture.key_owner[:, None], -1))
        of_own_keys = picture.key_owner[:, None] == picture.key_owner
        np.testing.assert_array_equal(picture.step, np.where(seen, np.where(of_own_keys, 0, 1), -1))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_keys_that_travel_are_those_that_are_seen(mask: Mask) -> None:
    """By any batch row. They lie in the order of their positions, without gaps if the mask is by row."""
    seen = shown(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[:, 0].numpy().any(0)
    for layout in layouts(mask):
        picture = plot_masks.picture(mask, layout, SEQ_LEN, RANKS)
        for rank, rows in enumerate(picture.buffer_row):
            wanted = seen[picture.key_owner == rank].any(0) & (picture.key_owner != rank)
            if mask not in (Full(), Causal()):
                np.testing.assert_array_equal(rows[wanted], np.arange(np.count_nonzero(wanted)))
            np.testing.assert_array_equal(rows >= 0, wanted)
            assert (np.diff(rows[wanted]) > 0).all()


def test_the_picture_has_a_line_for_each_batch_row() -> None:
    figure = plot_masks.draw(plot_masks.PANELS[-2:])
    titles = [axis.get_title() for axis in figure.get_axes()]
    assert sum(title.startswith("Balanced: pairs by rank") for title in titles) == 3
    plot_masks.plt.close(figure)


@pytest.mark.parametrize(("mask", "row"), ROWS, ids=str)
def test_text_shows_every_pair(mask: Mask, row: int) -> None:
    lines = [line for line in drawn(mask, SEQ_LEN).splitlines() if line[0] in "·█"]
    seen = shown(mask, SEQ_LEN, SEQ_LEN, mask.batch_size or 1)[row, 0].tolist()
    expected = ["".join("██" if pair else "··" for pair in query) for query in seen]
    assert lines[row * SEQ_LEN : (row + 1) * SEQ_LEN] == expected


def test_long_sequences_are_drawn_by_cells() -> None:
    """Of 64 queries and keys, cells of 2 x 2: on the diagonal three of four pairs."""
    title, *lines = drawn(Causal(), 64).splitlines()
    assert title == "a cell: 2 x 2 pairs"
    assert lines == ["██" * row + "▓▓" + "··" * (31 - row) for row in range(32)]
    assert drawn(SlidingWindow(0, 0), 64).splitlines()[1] == "▒▒" + "··" * 31
    assert drawn(Documents([0, 1]), 64).splitlines()[1] == "░░" + "··" * 31


def test_batch_rows_are_drawn_one_after_the_other() -> None:
    text = drawn(Batched([Causal(), Full()]), 2)
    assert text == "batch row 0:\n██··\n████\nbatch row 1:\n████\n████"


def test_the_command_line_draws_an_expression(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_mask", "Documents([0, 1, 2]) | Causal()", "2", "3"])
    draw_mask.main()
    assert capsys.readouterr().out == "██····\n████··\n"
    with pytest.raises(TypeError, match="expected an expression for a mask, got 3"):
        draw_mask.mask_of_text("3")
