"""The example of a captured training step on two GPUs: replays have the losses of eager steps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu(2, nccl=True)
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cuda_graph.py"


def test_replays_train_as_eager_steps() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, str(EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses of 20 steps differ by at most" in done.stdout
    assert "ms as a graph" in done.stdout
