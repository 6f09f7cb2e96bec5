"""The program that times kernels on tiles, with small tiles on CPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from support.docs_scripts import docs_script

from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.attention.backends.flash4 import Flash4Attention
from cp_dtensor.plan.tiles import FULL_TILE
from cp_dtensor.tools.cases import Heads
from cp_dtensor.tools.ranks import Device

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes on a GPU")


def test_every_kernel_that_computes_a_tile_has_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, file = docs_script("tile_speed"), tmp_path / "tiles.json"
    monkeypatch.setattr(sys, "argv", ["tile_speed.py", "--json", str(file)])
    program.main()
    found = json.loads(file.read_text())
    assert [row["torch's flash"] == "-" for row in found["shaped"]] == [False, True], "it has one head dim"
    assert all(row["ours"] != "-" for row in found["shaped"])
    assert [row["mask"] for row in found["masked"]] == [mask for *_, mask in program.MASKED]
    assert all(float(us) > 0 for row in found["masked"] for us in row["ours, eager us"].split(" / "))


def test_passes_that_step_back_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("tile_speed")
    inputs = program.drawn(Heads.parse("2:1:16"), 8, 8, torch.device("cpu"))
    monkeypatch.setattr(Flash4Attention, "_serves", lambda self, direction, *tile: direction == "forward")
    monkeypatch.setattr("cp_dtensor.attention.backends.flash4._forward", MathAttention().forward)
    assert set(program.passes_of(inputs, Flash4Attention(MathAttention()), FULL_TILE)) == {"forward"}
    assert set(program.passes_of(inputs, MathAttention(), FULL_TILE)) == {"forward", "backward"}


def test_times_are_of_the_kernel_and_pass_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("tile_speed")
    calls: list[str] = []
    names = "forward", "backward"
    passes = {name: {of: lambda text=f"{name} {of}": calls.append(text) for of in names} for name in ("a", "b")}
    del passes["b"]["backward"]
    milliseconds = {"a forward": 1.0, "a backward": 2.0, "b forward": 4.0}
    monkeypatch.setattr(Device, "time_ms", lambda self, call: (call(), milliseconds[calls[-1]])[1])
    speeds = program.speeds(passes, 0.02, Device(False))
    assert speeds == {"a": "20 / 25", "b": "5 / -"}
    assert calls == 2 * list(milliseconds), "in turns"
    assert program.teraflop(Heads.parse("4:2:16/8"), 1e9) == pytest.approx(2 * 4 * 24 / 1e3)
