"""Examples of accelerate, `transformers.Trainer` and diffusers: losses, gradients and weights of one rank."""

from pathlib import Path

import pytest
from support.forked_programs import launch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "integrations"
REASON = "needs the extra: pip install -c constraints.txt -e '.[integrations]'"


@pytest.mark.slow
def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason=REASON)
    printed = launch(2, EXAMPLES / "accelerate_two_ranks.py", folder=tmp_path, timeout=240, imports=["accelerate"])
    assert "losses and gradients are those of one rank" in printed


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason=REASON)
    pytest.importorskip("transformers", reason=REASON)
    printed = launch(
        2, EXAMPLES / "trainer_two_ranks.py", folder=tmp_path, timeout=240, imports=["transformers.trainer"]
    )
    assert all(f"{kind}: losses [" in printed for kind in ("packed", "padded"))
    assert printed.count("are those of one rank") == 2


@pytest.mark.slow
def test_sft_trainer(tmp_path: Path) -> None:
    """Packed documents in TRL's SFTTrainer, trained and evaluated."""
    pytest.importorskip("trl", reason="needs trl, which no extra installs: pip install trl==1.16.0")
    printed = launch(2, EXAMPLES / "sft_two_ranks.py", folder=tmp_path, timeout=240, imports=["transformers.trainer"])
    assert printed.count("and weights are those of one rank") == 1


@pytest.mark.slow
def test_diffusers(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason=REASON)
    printed = launch(
        4, EXAMPLES / "diffusers_four_ranks.py", folder=tmp_path, timeout=240, imports=["diffusers.models.transformers"]
    )
    assert printed.count(": largest error of out and gradients ") == 5
