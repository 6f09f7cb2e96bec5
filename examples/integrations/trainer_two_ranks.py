"""Training of a Llama with `transformers.Trainer` and context parallelism of cp_dtensor, on packed and padded batches.

    pip install -c constraints.txt -e '.[integrations]'
    torchrun --nproc-per-node 2 examples/integrations/trainer_two_ranks.py

Every rank also trains the same model alone on whole sequences, and compares losses and weights. With `--compile`
Trainer compiles the model, which takes longer. On GPUs, one for each rank, `TrainingArguments` have a
`parallelism_config` and `fsdp`, as transformers documents; `enable()` is the only line that is added. On CPUs over gloo
accelerate averages gradients by DDP.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate.utils import ParallelismConfig
from one_rank import ARGUMENTS, BATCH, STEPS, VOCABULARY, compare, fresh_model, on_cpus, train_alone
from transformers import Trainer, TrainingArguments

from cp_dtensor.integrations import accelerate as cp_accelerate

LENGTH, LEARNING_RATE = 45, 0.5
COMPILED: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": "aot_eager"}  # needs no C++ compiler
ON_GPUS = torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", 2))


def samples(kind: str) -> list[dict[str, torch.Tensor]]:
    """Sequences of tokens: each two packed documents, or one with padding to the left."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(BATCH * STEPS):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=generator)
        labels, positions = tokens.clone(), torch.arange(LENGTH)
        cut = 7 + 5 * index
        if kind == "packed":
            positions = torch.cat([torch.arange(cut), torch.arange(LENGTH - cut)])
            labels[cut] = -100  # the first token of a document is not predicted
            made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
        else:
            seen = (positions >= index).long()
            labels[: index + 1] = -100
            made.append({"input_ids": tokens, "labels": labels, "attention_mask": seen})
    return made


def loss_alone(model: Any, rows: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The loss of rows on one rank."""
    return model(**{name: torch.stack([row[name] for row in rows]).to(model.device) for name in rows[0]}).loss


def train(kind: str) -> None:
    """Trains on packed or padded batches, and compares.

    Raises:
        AssertionError: a loss or a weight differs from that of one rank.
    """
    of_device: dict[str, Any] = {"use_cpu": True}
    if ON_GPUS:
        of_device = {
            "parallelism_config": ParallelismConfig(cp_size=2), "fsdp": True, "fsdp_config": {"version": 2},
        }  # fmt: skip
    if "--compile" in sys.argv:
        of_device |= COMPILED
    arguments = TrainingArguments(
        output_dir="trainer_output", learning_rate=LEARNING_RATE, **ARGUMENTS, **of_device
    )  # fmt: skip
    of_ranks = Trainer if ON_GPUS else on_cpus(Trainer)
    trainer = of_ranks(fresh_model(), arguments, train_dataset=samples(kind))
    trainer.train()
    alone = train_alone(samples(kind), loss_alone, LEARNING_RATE, "cuda" if ON_GPUS else "cpu")
    compare(f"{kind}: ", trainer, *alone)


def main() -> None:
    """Trains on both kinds of batches."""
    with cp_accelerate.enable():
        train("packed")
        train("padded")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    main()
