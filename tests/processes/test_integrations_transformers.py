"""The example of transformers: training on 2 ranks equals one process."""

from pathlib import Path

import pytest
from support.forked_programs import launch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_loss_and_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")
    program = ROOT / "examples" / "integrations" / "transformers_two_ranks.py"
    assert "losses and gradients are those of one process" in launch(2, program, folder=tmp_path, timeout=240)
