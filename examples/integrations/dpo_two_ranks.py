"""Preferences: a Llama trained with TRL's `DPOTrainer` and context parallelism of cp_dtensor.

    pip install -c constraints.txt -e '.[integrations]' && pip install trl==1.16.0
    torchrun --nproc-per-node 2 examples/integrations/dpo_two_ranks.py

The loss of DPO is of whole rows, so the backbones of the model and of the reference see shards, and the heads whole
rows. Every rank also trains the same model alone, and compares losses and weights. The example runs on CPUs over gloo,
where accelerate averages gradients by DDP. On GPUs give `DPOConfig` a `parallelism_config` and `fsdp`, as transformers
documents; `enable()` is the only line to add.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from one_rank import (
    ARGUMENTS,
    BATCH,
    STEPS,
    VOCABULARY,
    compare,
    fresh_model,
    lengths_of,
    on_cpus,
    tokenizer,
    train_alone,
)
from torch.nn import functional as F
from trl import DPOConfig, DPOTrainer

from cp_dtensor.integrations import accelerate as cp_accelerate

LEARNING_RATE, BETA = 0.05, 0.1


def preferences() -> Dataset:
    """Prompts, each with a completion that is chosen and one that is rejected."""
    generator = torch.Generator().manual_seed(1)

    def words(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most, (), generator=generator))
        return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()

    rows = [{"prompt": words(3, 9), "chosen": words(3, 14), "rejected": words(3, 14)} for _ in range(BATCH * STEPS)]
    return Dataset.from_list(
        [{name: "".join(f"{word} " for word in each) for name, each in row.items()} for row in rows]
    )


def margin(model: Any, row: dict[str, list[int]]) -> torch.Tensor:
    """How much more likely the chosen completion is than the rejected one."""
    found = []
    for name in ("chosen_ids", "rejected_ids"):
        tokens = torch.tensor(row["prompt_ids"] + row[name])
        logits = model(tokens[None]).logits[0, len(row["prompt_ids"]) - 1 : -1]
        found.append(-F.cross_entropy(logits, torch.tensor(row[name]), reduction="sum"))
    return found[0] - found[1]


def loss_alone(model: Any, rows: list[dict[str, list[int]]]) -> torch.Tensor:
    """The loss on one rank, row by row."""
    reference = fresh_model()
    margins = torch.stack([margin(model, row) - margin(reference, row).detach() for row in rows])
    return -F.logsigmoid(BETA * margins).mean()


def main() -> None:
    """Trains, and compares.

    Raises:
        AssertionError: a loss or a weight differs from that of one rank.
    """
    model = fresh_model()
    lengths = lengths_of(model.model.layers[0])
    arguments = DPOConfig(
        output_dir="dpo_output", beta=BETA, use_cpu=True, bf16=False, learning_rate=LEARNING_RATE, **ARGUMENTS
    )  # fmt: skip
    with cp_accelerate.enable():
        trainer = on_cpus(DPOTrainer)(
            model, fresh_model(), arguments, train_dataset=preferences(), processing_class=tokenizer()
        )  # fmt: skip
        trainer.train()
    rows = trainer.train_dataset  # with tokens
    compare("", trainer, *train_alone(rows, loss_alone, LEARNING_RATE))
    longest = max(len(row["prompt_ids"] + row[name]) for row in rows for name in ("chosen_ids", "rejected_ids"))
    assert max(lengths) <= -(-longest // 2) + 1  # of shards


if __name__ == "__main__":
    main()
