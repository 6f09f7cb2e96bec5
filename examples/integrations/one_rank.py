"""Shared parts of the examples of trainers: a small Llama, its training on one rank, and the comparison with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import ParallelismConfig
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, BATCH, STEPS = 61, 2, 3
ARGUMENTS: dict[str, Any] = {
    "max_steps": STEPS, "per_device_train_batch_size": BATCH, "optim": "sgd", "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0, "logging_steps": 1, "train_sampling_strategy": "sequential", "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True,
}  # fmt: skip
"""Arguments of a trainer whose steps are those of `train_alone`."""


def fresh_model() -> Any:
    """A model with equal random weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def on_cpus(trainer: Any) -> Any:
    """A class of trainers with context parallelism on CPUs, which accelerate refuses in its arguments only."""

    class CpuTrainer(trainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            state = self.accelerator.state
            state.parallelism_config = ParallelismConfig(cp_size=2)
            state.device_mesh = state.parallelism_config.get_device_mesh("cpu")

    return CpuTrainer


def tokenizer() -> Any:
    """A tokenizer of the words "0", "1", ..., without which TRL does not begin."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, "0"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


def lengths_of(module: Any) -> set[int]:
    """The lengths of what a module will get: those of shards, and not of whole rows."""
    lengths = set[int]()
    module.register_forward_pre_hook(lambda _, inputs: lengths.add(inputs[0].size(1)))
    return lengths


def train_alone(
    data: Any, loss_of: Callable[[Any, Any], torch.Tensor], learning_rate: float, device: str = "cpu"
) -> tuple[list[float], Any]:
    """The loss of each step on one rank, and the trained model; `loss_of` gets the model and `BATCH` rows."""
    model = fresh_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, [data[row] for row in range(BATCH * step, BATCH * (step + 1))])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def compare(what: str, trainer: Any, losses: list[float], alone: Any) -> None:
    """Prints the losses of a trainer that has trained.

    Raises:
        AssertionError: a loss or a weight differs from that of one rank.
    """
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for weight, expected in zip(trainer.model.parameters(), alone.parameters(), strict=True):
        found = weight.full_tensor() if isinstance(weight, DTensor) else weight
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    trainer.accelerator.print(f"{what}losses {logged} and weights are those of one rank")
