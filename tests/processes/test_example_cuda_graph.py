"""The example of a captured training step, as far as CPUs run it: its step beside one rank, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import cuda_graph


def losses_on(rank: int, ranks: int) -> list[float]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    generator = torch.Generator().manual_seed(0)
    model = cuda_graph.Model(mesh).double()
    for parameter in model.parameters():  # threads share torch's default generator
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    batches = [cuda_graph.batch_of(step, mesh) for step in range(4)]
    return [cuda_graph.train_step(model, optimizer, batch).item() for batch in batches]


def test_its_training_step_is_that_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SEQ_LEN": 22, "DIM": 16, "HEADS": 4, "LAYERS": 2, "VOCABULARY": 20}.items():
        monkeypatch.setattr(cuda_graph, name, value)
    [expected] = run_ranks(1, losses_on, 1)
    assert len(set(expected)) == 4
    for losses in run_ranks(3, losses_on, 3):
        assert losses == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("rank", "message"),
    [(None, "start with torchrun"), ("0", "need a GPU for each rank: expected 2, this machine has 1")],
)
def test_it_refuses_plainly(rank: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=message):
        cuda_graph.main()
