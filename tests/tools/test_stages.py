"""The program that times numbers of stages of backward: on two CPU ranks, and the plans that it asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.docs_scripts import FOLDER, docs_script
from support.forked_programs import launch

from cp_dtensor import Causal, HeadTail
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.plan import Stages


def test_a_row_for_each_number_of_stages(tmp_path: Path) -> None:
    arguments = ["--heads", "4:4:8", "8:4:8/16", "--seq-lens", "32", "--stages", "1,1", "2,2"]
    arguments += ["--mask", "causal", "window 8", "--ulysses", "1", "2", "--json", "out.json"]
    text = launch(2, FOLDER / "stages.py", *arguments, folder=tmp_path)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["stages"] for row in rows] == ["now", "1,1", "2,2", "ulysses now", "ulysses 1", "ulysses 2"] * 4
    assert [row["heads"] for row in rows] == ["4:4 of 8"] * 12 + ["8:4 of 8/16"] * 12
    assert [row["mask"] for row in rows] == (["causal"] * 6 + ["window 8"] * 6) * 2
    assert all(row["eager, ms"] > 0 for row in rows)
    assert "| 8:4 of 8/16 | window 8 | 32 | 2,2 |" in text


def test_a_mask_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        docs_script("stages").main(["--mask", "causal", "stripes"])
    assert "stripes" in capsys.readouterr().err


@pytest.mark.parametrize("stages", ["2,3", "1", "a,b", "0,0", "1,8"])
def test_stages_that_cannot_be_are_refused(stages: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        docs_script("stages").main(["--heads", "8:4:16", "--stages", stages])
    said = capsys.readouterr().err
    expected = "at most as many stages as kv heads, got 8 stages and 4" if stages == "1,8" else f"got {stages!r}"
    assert expected in said


def test_a_rank_of_ulysses_has_a_kv_head_in_each_stage(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="as a rank has kv heads, got 2 stages, 2 kv heads and 2 ranks"):
        launch(2, FOLDER / "stages.py", "--heads", "4:2:8", "--ulysses", "2", folder=tmp_path)


def test_backward_has_the_stages_that_are_given() -> None:
    staging = docs_script("stages").GivenStages(backward=Stages(2, 4))
    spec = CallSpec(LayoutPartition(HeadTail(), 64, 64, 1, 2), Causal(), 1, 8, 4, 16, 16, "bfloat16")
    steps = AllGather(staging).plan(spec, rank=0).backward
    assert [step.transfer is None for step in steps].count(True) == 2
    assert [step.transfer is None for step in steps].count(False) == 4
    assert len(AllGather(staging).plan(spec, rank=0).forward) == len(AllGather().plan(spec, rank=0).forward)
