"""Fine-tuning of a Llama on packed documents with TRL's `SFTTrainer` and context parallelism of cp_dtensor.

    pip install -c constraints.txt -e '.[integrations]' && pip install trl==1.16.0
    torchrun --nproc-per-node 2 examples/integrations/sft_two_ranks.py

`SFTTrainer` by itself refuses `packing=True` with context parallelism, which would let documents see each other. Every
rank also trains the same model alone, document by document, and compares losses and weights. The example runs on CPUs
over gloo, where accelerate averages gradients by DDP. On GPUs give `SFTConfig` a `parallelism_config` and `fsdp`, as
transformers documents; `enable()` is the only line to add.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from one_rank import ARGUMENTS, VOCABULARY, compare, fresh_model, lengths_of, on_cpus, tokenizer, train_alone
from trl import SFTConfig, SFTTrainer

from cp_dtensor.integrations import accelerate as cp_accelerate

LENGTH, LEARNING_RATE = 45, 0.5


def documents() -> Dataset:
    """Documents whose first three tokens are a prompt without a loss."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(24):
        size = int(torch.randint(5, 20, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (size,), generator=generator).tolist()
        made.append({"input_ids": tokens, "labels": [-100] * 3 + tokens[3:]})
    return Dataset.from_list(made)


def loss_alone(model: Any, rows: Any) -> torch.Tensor:
    """The loss of rows on one rank, document by document."""
    losses, count = torch.zeros(()), 0
    for row in rows:
        for tokens, labels in zip(
            *(torch.tensor(row[name]).split(row["seq_lengths"]) for name in ("input_ids", "labels")), strict=True
        ):
            logits = model(tokens[None]).logits[0, :-1]
            losses = losses + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
            count += int((labels[1:] != -100).sum())
    return losses / count


def main() -> None:
    """Trains and evaluates, and compares.

    Raises:
        AssertionError: a loss or a weight differs from that of one rank.
    """
    data, model = documents(), fresh_model()
    lengths = lengths_of(model.get_input_embeddings())
    arguments = SFTConfig(
        output_dir="sft_output", packing=True, max_length=LENGTH, use_cpu=True, bf16=False,
        per_device_eval_batch_size=1, learning_rate=LEARNING_RATE, **ARGUMENTS,
    )  # fmt: skip
    with cp_accelerate.enable():
        trainer = on_cpus(SFTTrainer)(
            model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer()
        )  # fmt: skip
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    packed = trainer.train_dataset  # rows of at most LENGTH tokens, with the column seq_lengths
    losses, alone = train_alone(packed, loss_alone, LEARNING_RATE)
    with torch.no_grad():
        last = torch.stack([loss_alone(alone, [row]) for row in packed]).mean()
    torch.testing.assert_close(evaluated, last.item(), rtol=1e-5, atol=1e-5)
    assert max(lengths) <= -(-sum(map(len, packed["input_ids"])) // 2) + 1  # of shards, also in the evaluation
    compare("", trainer, losses, alone)


if __name__ == "__main__":
    main()
