"""Examples in examples/ways: each runs on four processes and equals one device."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from support.forked_programs import launch
from support.processes import Processes

ROOT = Path(__file__).resolve().parents[2]
WAYS = ROOT / "examples" / "ways"
NAMES = ["ring", "ulysses", "hybrid", "nested_ring", "dtensor", "module", "explain", "dropins", "flex", "varlen"]


def ran(rank: int, name: str) -> str:
    """What an example prints, as `run` does it, but that the process group stays."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if str(WAYS) not in sys.path:
        sys.path.insert(0, str(WAYS))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        importlib.import_module("check").report(name, *importlib.import_module(name).main())
    return printed.getvalue()


def exit_code(rank: int, error: float) -> object:
    """Of every rank, if the last one has found an error of this size."""
    sys.path.insert(0, str(WAYS))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("check").report("an example", error if rank == 3 else 0.0, "cpu")
    except SystemExit as done:
        return done.code
    return 0


def test_all_examples_are_here() -> None:
    assert sorted(path.stem for path in WAYS.glob("*.py")) == sorted([*NAMES, "check"])


@pytest.mark.parametrize("name", NAMES)
def test_example_finds_what_one_device_finds(four_processes: Processes, name: str) -> None:
    of_first, *of_others = four_processes.run(ran, name)
    assert of_first.splitlines()[-1].startswith(f"{name}: largest error of out and gradients ")
    assert float(of_first.split()[-1]) < 1e-10
    assert of_others == [""] * 3
    if name == "explain":
        assert "131,072 tokens on 2 x 2 ranks, 32:8 heads" in of_first
        assert [line.split()[0] for line in of_first.splitlines()[3:5]] == ["hybrid", "ring"]


def test_a_large_error_on_one_rank_ends_every_rank_with_an_error(four_processes: Processes) -> None:
    assert four_processes.run(exit_code, 1e-9) == [1] * 4
    assert four_processes.run(exit_code, float("inf")) == [1] * 4
    assert four_processes.run(exit_code, 1e-11) == [0] * 4


def test_no_number_and_no_gradient_are_infinite_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WAYS))
    error = importlib.import_module("check").error
    right = torch.arange(4.0)
    wrong = torch.tensor([0.0, 1.0, 2.5, 3.0])
    assert error([right, wrong], [right, right]) == error([wrong, right], [right, right]) == 0.5
    assert error([right, torch.tensor([0.0, math.nan])], [right, right[:2]]) == math.inf
    assert error([None, right], [right, right]) == math.inf


def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(WAYS))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="expected 4 ranks, got 2"):
        importlib.import_module("check").make_mesh((4,), ("cp",))


def test_the_command_that_an_example_names(tmp_path: Path) -> None:
    """As torchrun starts it."""
    printed = launch(4, WAYS / "ring.py", folder=tmp_path)
    assert printed.startswith("ring: largest error of out and gradients ")
