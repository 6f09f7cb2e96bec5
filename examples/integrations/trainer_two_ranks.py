"""Training of a Llama with `transformers.Trainer` and context parallelism of cp_dtensor, on packed and padded batches.

    pip install -c constraints.txt -e '.[integrations]'
    torchrun --nproc-per-node 2 examples/integrations/trainer_two_ranks.py

Every rank also trains the same model alone on whole sequences, and compares losses and weights. On GPUs, one for
each rank, `TrainingArguments` have a `parallelism_config` and `fsdp`, as transformers documents; `enable()` is the only
line that is added. On CPUs over gloo accelerate averages gradients by DDP.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from accelerate.utils import ParallelismConfig
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from cp_dtensor.integrations import accelerate as cp_accelerate

VOCABULARY, LENGTH, BATCH, STEPS, LEARNING_RATE = 61, 45, 2, 3, 0.5
ON_GPUS = torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", 2))


def fresh_model() -> LlamaForCausalLM:
    """A model with equal random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


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


def one_rank(kind: str) -> tuple[list[float], LlamaForCausalLM]:
    """The loss of each step, on whole sequences, and the trained model."""
    model: Any = fresh_model()
    model.to("cuda" if ON_GPUS else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = samples(kind)
    losses = []
    for step in range(STEPS):
        rows = data[BATCH * step : BATCH * (step + 1)]
        loss = model(**{name: torch.stack([row[name] for row in rows]).to(model.device) for name in rows[0]}).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


class CpuTrainer(Trainer):
    """A Trainer with context parallelism on CPUs, which accelerate refuses in its arguments although the rest works."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.parallelism_config = ParallelismConfig(cp_size=2)
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")


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
    arguments = TrainingArguments(
        output_dir="trainer_output", max_steps=STEPS, per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
        train_sampling_strategy="sequential", save_strategy="no", report_to="none", disable_tqdm=True, **of_device,
    )  # fmt: skip
    model = fresh_model()
    trainer = (Trainer if ON_GPUS else CpuTrainer)(model, arguments, train_dataset=samples(kind))
    trainer.train()
    losses, alone = one_rank(kind)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for weight, expected in zip(model.parameters(), alone.parameters(), strict=True):
        found = weight.full_tensor() if isinstance(weight, DTensor) else weight
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    trainer.accelerator.print(f"{kind}: losses {logged} and weights are those of one rank")


def main() -> None:
    """Trains on both kinds of batches."""
    with cp_accelerate.enable():
        train("packed")
        train("padded")


if __name__ == "__main__":
    if "RANK" not in os.environ:
        raise SystemExit(f"start with torchrun: torchrun --nproc-per-node 2 {sys.argv[0]}")
    main()
