"""accelerate's context parallel with redirected imports: training on 2 ranks equals one rank."""

from pathlib import Path

import pytest
from support.forked_programs import launch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra: pip install -c constraints.txt -e '.[integrations]'")
    program = ROOT / "examples" / "integrations" / "accelerate_two_ranks.py"
    assert "losses and gradients are those of one rank" in launch(2, program, folder=tmp_path, timeout=240)
