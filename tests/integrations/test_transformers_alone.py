"""Models and Trainer of transformers outside of contexts, after `register()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers", reason="needs the extra [transformers]")

from cp_dtensor.integrations.transformers import register  # noqa: E402


def tiny_model(implementation: str) -> Any:
    register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, attn_implementation=implementation,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def test_trainer_divides_the_loss_by_the_labels_that_have_a_token_before_them(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs the extra [integrations]")
    model, rows = tiny_model("sdpa"), torch.randint(32, (2, 8))
    expected = model(input_ids=rows, labels=rows).loss.item()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, per_device_train_batch_size=2, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4)
