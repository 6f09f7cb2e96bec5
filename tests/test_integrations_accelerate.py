"""accelerate with its imports redirected: its own context parallel API, on 2 ranks, trains as one rank does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_rank() -> None:
    pytest.importorskip("accelerate", reason="needs the extra: pip install -c constraints.txt -e '.[integrations]'")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "integrations" / "accelerate_two_ranks.py")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "losses and gradients are those of one rank" in done.stdout
