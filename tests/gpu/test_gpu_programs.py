"""Models of transformers on GPUs, with NCCL alone and with gloo beside it; example programs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.gpu_checks import WORLD_SIZE
from support.processes import Processes, started

pytestmark = pytest.mark.gpu(WORLD_SIZE, nccl=True)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
COLUMNS = ("plain", "plain packed", "plain padded", "provider", "packed", "padded", "checkpointed")


@pytest.fixture(scope="module")
def both_backends() -> Iterator[Processes]:
    """Processes whose group has gloo for CPU tensors beside NCCL."""
    yield from started(WORLD_SIZE, 250, "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("family", ["Qwen3", "Gemma 3", "Llama 4", "BART"])
@pytest.mark.parametrize("group", ["slow_gpus", "both_backends"])
def test_models_have_the_loss_and_gradients_of_one_gpu(
    group: str, family: str, column: str, request: pytest.FixtureRequest
) -> None:
    """In float64, as on CPUs."""
    pytest.importorskip("transformers", reason="needs the extra: pip install '.[transformers]'")
    from support.model_cells import run_cell

    processes: Processes = request.getfixturevalue(group)
    assert {*processes.run(run_cell, family, column, None, "cuda")} == {"right"}


@pytest.mark.parametrize("column", ["shard_images", "padded"])
@pytest.mark.parametrize("name", ["Qwen3-VL", "Gemma 3 VLM"])
@pytest.mark.parametrize("group", ["slow_gpus", "both_backends"])
def test_models_with_towers_have_the_loss_and_gradients_of_one_gpu(
    group: str, name: str, column: str, request: pytest.FixtureRequest
) -> None:
    """Gathers of features of unequal lengths over NCCL."""
    pytest.importorskip("transformers", reason="needs the extra: pip install '.[transformers]'")
    from support.model_cells import run_multimodal_cell

    processes: Processes = request.getfixturevalue(group)
    assert {*processes.run(run_multimodal_cell, name, column, None, "cuda")} == {"right"}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cuda_graph", r"losses of 20 steps differ by at most"),
        *(
            pytest.param(f"integrations/{name}_two_ranks", "those of one", marks=pytest.mark.slow)
            for name in ("transformers", "accelerate", "trainer")
        ),
    ],
)
def test_examples(name: str, said: str, tmp_path: Path) -> None:
    """They start a group of NCCL alone, and compare with eager steps, or losses or weights with those of one rank."""
    if "/" in name:
        pytest.importorskip("accelerate", reason="needs the extra: pip install '.[integrations]'")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(EXAMPLES / f"{name}.py")], cwd=tmp_path, timeout=290, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert said in done.stdout
