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
from accelerate.utils import ParallelismConfig
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from cp_dtensor.integrations import accelerate as cp_accelerate

VOCABULARY, BATCH, STEPS, LEARNING_RATE, BETA = 61, 2, 3, 0.05, 0.1


def fresh_model() -> LlamaForCausalLM:
    """A model with equal random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


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


def margin(model: LlamaForCausalLM, row: dict[str, list[int]]) -> torch.Tensor:
    """How much more likely the chosen completion is than the rejected one."""
    found = []
    for name in ("chosen_ids", "rejected_ids"):
        tokens = torch.tensor(row["prompt_ids"] + row[name])
        logits = model(tokens[None]).logits[0, len(row["prompt_ids"]) - 1 : -1]
        found.append(-F.cross_entropy(logits, torch.tensor(row[name]), reduction="sum"))
    return found[0] - found[1]


def one_rank(data: Dataset) -> tuple[list[float], LlamaForCausalLM]:
    """The loss of each step, row by row, and the trained model."""
    model, reference = fresh_model(), fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        rows = data.select(range(BATCH * step, BATCH * (step + 1)))
        margins = torch.stack([margin(model, row) - margin(reference, row).detach() for row in rows])
        loss = -F.logsigmoid(BETA * margins).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


class CpuTrainer(DPOTrainer):
    """A DPOTrainer with context parallelism on CPUs, which accelerate refuses in its arguments."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.parallelism_config = ParallelismConfig(cp_size=2)
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")


def main() -> None:
    """Trains, and compares.

    Raises:
        AssertionError: a loss or a weight differs from that of one rank.
    """
    model, words = fresh_model(), WordLevel({str(token): token for token in range(VOCABULARY)}, "0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="0", eos_token="1")
    tokenizer.backend_tokenizer.pre_tokenizer = Whitespace()
    arguments = DPOConfig(
        output_dir="dpo_output", beta=BETA, use_cpu=True, bf16=False, max_steps=STEPS,
        per_device_train_batch_size=BATCH, learning_rate=LEARNING_RATE, optim="sgd", lr_scheduler_type="constant",
        max_grad_norm=0.0, logging_steps=1, train_sampling_strategy="sequential", save_strategy="no",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    lengths = set[int]()

    def note_length(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        lengths.add(inputs[0].size(1))

    model.model.layers[0].register_forward_pre_hook(note_length)
    with cp_accelerate.enable():
        trainer = CpuTrainer(
            model, fresh_model(), arguments, train_dataset=preferences(), processing_class=tokenizer
        )  # fmt: skip
        trainer.train()
    rows = trainer.train_dataset  # with tokens
    losses, expected_model = one_rank(rows)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for weight, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5)
    longest = max(len(row["prompt_ids"] + row[name]) for row in rows for name in ("chosen_ids", "rejected_ids"))
    assert max(lengths) <= -(-longest // 2) + 1  # of shards
    trainer.accelerator.print(f"losses {logged} and weights are those of one rank")


if __name__ == "__main__":
    main()
