"""The program that times training steps with and without graphs: its eager step, on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
from support.docs_scripts import docs_script
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

SIZES = {"DIM": 16, "HEADS": 4, "KV_HEADS": 2, "LAYERS": 2, "VOCABULARY": 20}


def test_rows_have_times_and_differences_of_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("graph_steps")
    monkeypatch.setattr(program, "SIZES", SIZES)
    monkeypatch.setattr(program, "STEPS", 2)
    for name in (*SIZES, "SEQ_LEN"):  # the program sets them: restored after the test
        monkeypatch.setattr(program.cuda_graph, name, getattr(program.cuda_graph, name))
    step_of = program._step_of

    def with_another_loss(way: str, *arguments: Any) -> Any:
        step = step_of("eager", *arguments)
        return step if way == "eager" else lambda: step() + 0.25

    monkeypatch.setattr(program, "_step_of", with_another_loss)

    def body(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        return program.rows_of(24, mesh, ("eager", "graph"))

    [[eager, other]] = run_ranks(1, body)
    assert (eager["tokens"], eager["step"], eager["losses differ by"]) == (24, "eager", 0)
    assert eager["ms"] > 0
    assert other["losses differ by"] == pytest.approx(0.25, abs=0.05)
    assert other["losses differ by"] > program.LARGEST_DIFFERENCE


def test_it_refuses_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("graph_steps")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["graph_steps.py"])
    with pytest.raises(SystemExit, match="expected torchrun"):
        program.main()
