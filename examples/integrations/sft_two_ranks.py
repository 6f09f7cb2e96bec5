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
from accelerate.utils import ParallelismConfig
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from cp_dtensor.integrations import accelerate as cp_accelerate

VOCABULARY, LENGTH, BATCH, STEPS, LEARNING_RATE = 61, 45, 2, 3, 0.5


def fresh_model() -> LlamaForCausalLM:
    """A model with equal random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def documents() -> Dataset:
    """Documents whose first three tokens are a prompt without a loss."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(24):
        size = int(torch.randint(5, 20, (), generator=generator))
        tokens = torch.randint(VOCABULARY, (size,), generator=generator).tolist()
        made.append({"input_ids": tokens, "labels": [-100] * 3 + tokens[3:]})
    return Dataset.from_list(made)


def alone(model: LlamaForCausalLM, rows: Any) -> torch.Tensor:
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


def one_rank(data: Dataset) -> tuple[list[float], float, LlamaForCausalLM]:
    """The loss of each step, the mean of those of all rows afterwards, and the trained model."""
    model = fresh_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        loss = alone(model, data.select(range(BATCH * step, BATCH * (step + 1))))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return losses, torch.stack([alone(model, [row]) for row in data]).mean().item(), model


class CpuTrainer(SFTTrainer):
    """An SFTTrainer with context parallelism on CPUs, which accelerate refuses in its arguments."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.parallelism_config = ParallelismConfig(cp_size=2)
        state.device_mesh = state.parallelism_config.get_device_mesh("cpu")


def main() -> None:
    """Trains and evaluates, and compares.

    Raises:
        AssertionError: a loss or a weight differs from that of one rank.
    """
    data, model = documents(), fresh_model()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0")), pad_token="0",
        eos_token="1",
    )  # fmt: skip
    arguments = SFTConfig(
        output_dir="sft_output", packing=True, max_length=LENGTH, use_cpu=True, bf16=False, max_steps=STEPS,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=1,
        learning_rate=LEARNING_RATE, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
        train_sampling_strategy="sequential", save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    lengths = set[int]()

    def note_length(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        lengths.add(inputs[0].size(1))

    model.get_input_embeddings().register_forward_pre_hook(note_length)
    with cp_accelerate.enable():
        trainer = CpuTrainer(model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer)
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
    packed = trainer.train_dataset  # rows of at most LENGTH tokens, with the column seq_lengths
    losses, last, expected_model = one_rank(packed)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == STEPS
    torch.testing.assert_close(torch.tensor([*logged, evaluated]), torch.tensor([*losses, last]), rtol=1e-5, atol=1e-5)
    for weight, expected in zip(model.parameters(), expected_model.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-5)
    assert max(lengths) <= -(-sum(map(len, packed["input_ids"])) // 2) + 1  # of shards, also in the evaluation
    trainer.accelerator.print(f"losses {logged}, evaluated {evaluated} and weights are those of one rank")


if __name__ == "__main__":
    main()
