"""The example programs on CPUs: each finds the results, losses or weights of one rank."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.forked_programs import launch
from support.processes import Processes
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WAYS = EXAMPLES / "ways"


def program(folder: Path, name: str) -> Any:
    """An example as a module."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return importlib.import_module(name)


# Ways: on four ranks

NAMES = ["ring", "ulysses", "hybrid", "nested_ring", "dtensor", "module", "explain", "dropins", "flex", "varlen"]


def ran(rank: int, name: str) -> str:
    """What an example prints, as `run` does it, but that the process group stays."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        program(WAYS, "check").report(name, *program(WAYS, name).main())
    return printed.getvalue()


def exit_code(rank: int, error: float) -> object:
    """Of every rank, if the last one has found an error of this size."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            program(WAYS, "check").report("an example", error if rank == 3 else 0.0, "cpu")
    except SystemExit as done:
        return done.code
    return 0


def test_all_ways_are_here() -> None:
    assert sorted(path.stem for path in WAYS.glob("*.py")) == sorted([*NAMES, "check"])


@pytest.mark.parametrize("name", NAMES)
def test_a_way_finds_what_one_device_finds(four_processes: Processes, name: str) -> None:
    of_first, *of_others = four_processes.run(ran, name)
    assert of_first.splitlines()[-1].startswith(f"{name}: largest error of out and gradients ")
    assert float(of_first.split()[-1]) < 1e-10
    assert of_others == [""] * 3
    if name == "explain":
        assert "131,072 tokens on 2 x 2 ranks, 32:8 heads" in of_first
        assert [line.split()[0] for line in of_first.splitlines()[3:5]] == ["hybrid", "ring"]


def test_a_large_error_on_one_rank_ends_every_rank_with_an_error(four_processes: Processes) -> None:
    for error, status in ((1e-9, 1), (float("inf"), 1), (1e-11, 0)):
        assert four_processes.run(exit_code, error) == [status] * 4


def test_no_number_and_no_gradient_are_infinite_errors() -> None:
    error = program(WAYS, "check").error
    right, wrong = torch.arange(4.0), torch.tensor([0.0, 1.0, 2.5, 3.0])
    assert error([right, wrong], [right, right]) == error([wrong, right], [right, right]) == 0.5
    assert error([right, torch.tensor([0.0, math.nan])], [right, right[:2]]) == math.inf
    assert error([None, right], [right, right]) == math.inf


def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="expected 4 ranks, got 2"):
        program(WAYS, "check").make_mesh((4,), ("cp",))


# Programs of integrations


class Example(NamedTuple):
    """A program: a package that it needs, what is imported before it starts, and how often it prints what."""

    needs: str
    imports: str
    prints: dict[str, int]
    ranks: int = 2


PROGRAMS = {
    "transformers_two_ranks": Example(
        "transformers", "transformers", {"losses and gradients are those of one process": 1}
    ),
    "accelerate_two_ranks": Example("accelerate", "accelerate", {"losses and gradients are those of one rank": 1}),
    "trainer_two_ranks": Example(
        "accelerate", "transformers.trainer",
        {"packed: losses [": 1, "padded: losses [": 1, "are those of one rank": 2},
    ),
    "trainer_two_ranks --compile": Example(
        "accelerate", "transformers.trainer", {"are those of one rank": 2, "recompile_limit": 0}
    ),
    # No extra installs trl, which would bring pandas and pyarrow.
    "sft_two_ranks": Example("trl", "transformers.trainer", {"and weights are those of one rank": 1}),
    "dpo_two_ranks": Example("trl", "transformers.trainer", {"and weights are those of one rank": 1}),
    "long_context_qwen3": Example(
        "transformers", "transformers", {"loss and gradients are those of one process": 2}
    ),
    "diffusers_four_ranks": Example(
        "diffusers", "diffusers.models.transformers", {": largest error of out and gradients ": 5}, ranks=4
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.sweep] * ("--compile" in each)) for each in PROGRAMS]
)
def test_integrations(name: str, tmp_path: Path) -> None:
    needs, imports, prints, ranks = PROGRAMS[name]
    pytest.importorskip(needs, reason=f"needs {needs}: pip install -c constraints.txt -e '.[integrations]'")
    file, *arguments = name.split()
    path = EXAMPLES / "integrations" / f"{file}.py"
    printed = launch(ranks, path, *arguments, folder=tmp_path, timeout=240, imports=[imports])
    assert {text: printed.count(text) for text in prints} == prints


# The script of docs/start.md

STEPS = 3


def losses(rank: int, cp_size: int) -> list[float]:
    found: list[float] = program(EXAMPLES, "fsdp2").train(cp_size, STEPS)
    return found


def alone(data_ranks: int) -> list[float]:
    """Of one device without FSDP2, on the batches of all ranks."""
    fsdp2 = program(EXAMPLES, "fsdp2")
    torch.manual_seed(0)
    model = fsdp2.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    means = []
    for step in range(STEPS):
        batches = [fsdp2.batch(step, data_rank, "cpu") for data_rank in range(data_ranks)]
        tokens, labels, positions = (torch.cat(each) for each in zip(*batches, strict=True))
        loss = model(tokens, positions, labels) / (labels != -100).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item())
    return means


@pytest.mark.parametrize("cp_size", [2, 1])
def test_losses_of_fsdp2(two_processes: Processes, cp_size: int) -> None:
    expected = alone(2 // cp_size)
    for found in two_processes.run(losses, cp_size):
        assert found == pytest.approx(expected, abs=2e-5)
    assert len((EXAMPLES / "fsdp2.py").read_text().splitlines()) < 100


def losses_of_batches(rank: int) -> list[float]:
    found: list[float] = program(EXAMPLES, "batch_plan").train(STEPS)
    return found


def test_losses_of_planned_batches(four_processes: Processes) -> None:
    batch_plan, fsdp2 = program(EXAMPLES, "batch_plan"), program(EXAMPLES, "fsdp2")
    torch.manual_seed(0)
    model = fsdp2.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = []
    for number in range(STEPS):
        documents = list(zip(*batch_plan.batch(number), strict=True))
        sums = [model(text[None], torch.arange(len(text))[None], label[None]) for text, label in documents]
        loss = sum(sums) / sum(int((label != -100).sum()) for _, label in documents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for found in four_processes.run(losses_of_batches):
        assert found == pytest.approx(expected, abs=2e-5)


# A captured training step, as far as CPUs run it


def losses_of_steps(rank: int, ranks: int) -> list[float]:
    cuda_graph = program(EXAMPLES, "cuda_graph")
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(0)
    model = cuda_graph.Model(mesh).double()
    for parameter in model.parameters():  # threads share torch's default generator
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = [cuda_graph.batch_of(step, mesh) for step in range(4)]
    return [cuda_graph.train_step(model, optimizer, batch).item() for batch in batches]


def test_the_step_of_a_graph_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQ_LEN": 22, "DIM": 16, "HEADS": 4, "LAYERS": 2, "VOCABULARY": 20}.items():
        monkeypatch.setattr(program(EXAMPLES, "cuda_graph"), name, value)
    [expected] = run_ranks(1, losses_of_steps, 1)
    assert len(set(expected)) == 4
    for found in run_ranks(3, losses_of_steps, 3):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(None, "start with torchrun"), ("0", "need a GPU for each rank: expected 2, this machine has 1")],
)
def test_a_graph_is_refused_plainly(rank: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=message):
        program(EXAMPLES, "cuda_graph").main()
