"""Examples of transformers, accelerate, Trainer and diffusers: losses, gradients and weights of one rank."""

from pathlib import Path
from typing import NamedTuple

import pytest
from support.forked_programs import launch

ROOT = Path(__file__).resolve().parents[2]


class Example(NamedTuple):
    """A program: a package that it needs, what is imported before it starts, and how often it prints what."""

    needs: str
    imports: str
    prints: dict[str, int]
    ranks: int = 2


EXAMPLES = {
    "transformers_two_ranks.py": Example(
        "transformers", "transformers", {"losses and gradients are those of one process": 1}
    ),
    "accelerate_two_ranks.py": Example("accelerate", "accelerate", {"losses and gradients are those of one rank": 1}),
    "trainer_two_ranks.py": Example(
        "accelerate", "transformers.trainer",
        {"packed: losses [": 1, "padded: losses [": 1, "are those of one rank": 2},
    ),
    # Packed documents in TRL's SFTTrainer, trained and evaluated; no extra installs trl.
    "sft_two_ranks.py": Example("trl", "transformers.trainer", {"and weights are those of one rank": 1}),
    "diffusers_four_ranks.py": Example(
        "diffusers", "diffusers.models.transformers", {": largest error of out and gradients ": 5}, ranks=4
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    needs, imports, prints, ranks = EXAMPLES[name]
    pytest.importorskip(needs, reason=f"needs {needs}: pip install -c constraints.txt -e '.[integrations]'")
    program = ROOT / "examples" / "integrations" / name
    printed = launch(ranks, program, folder=tmp_path, timeout=240, imports=[imports])
    assert {text: printed.count(text) for text in prints} == prints
