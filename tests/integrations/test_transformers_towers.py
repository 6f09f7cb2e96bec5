"""Models of transformers with towers, whose tokens are buffers of 2 ranks: images are refused, text is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import assert_gradients_sum_to, gradients
from support.multimodal import PLACEHOLDER, ROWS, processed, tiny_multimodal
from support.processes import Processes
from torch import nn

from cp_dtensor import context_parallel, context_parallel_shard
from cp_dtensor.integrations.transformers import ModelBatch, causal_lm_loss, check_model, register

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")

NAMES = ("LLaVA", "Qwen2.5-VL", "Qwen3-VL", "Gemma 3 VLM", "PaliGemma", "Idefics", "Qwen2-Audio", "Whisper")


def batch_of(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Token ids, and images or sounds."""
    given = processed(name, "images")
    assert given is not None
    return given.pop("input_ids"), {key: each for key, each in given.items() if key[:5] in ("pixel", "image", "input")}


def positions_and_labels(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(ids.size(1)).expand(ROWS, -1).clone(), F.pad(ids[:, 1:], (0, 1), value=-100)


def assert_equal(model: nn.Module, loss: torch.Tensor, alone: nn.Module, expected: torch.Tensor) -> None:
    """Compares the loss and the sum of all ranks' gradients with those of one process."""
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert_gradients_sum_to(model, gradients(alone))


def with_images(rank: int, name: str, attention: str, compiled: bool = False) -> None:
    register()
    world: Any = dist.group.WORLD
    model, (ids, others) = tiny_multimodal(name, attention), batch_of(name)
    positions, _ = positions_and_labels(ids)
    key = "decoder_" if name == "Whisper" else ""
    called = torch.compile(model, backend="eager") if compiled else model
    with (
        pytest.raises(NotImplementedError, match=f"{type(model).__name__} makes tokens .*has an example"),
        context_parallel(world, buffers=[ids, positions], buffer_seq_dims=[1, 1]),
    ):
        called(**{f"{key}input_ids": ids, f"{key}position_ids": positions}, **others, use_cache=False)


def in_compiled_models(rank: int, name: str, attention: str) -> None:
    with_images(rank, name, attention, compiled=True)


def whole_in_compiled_models(rank: int, name: str, attention: str) -> None:
    register()
    world: Any = dist.group.WORLD
    model, given = torch.compile(tiny_multimodal(name, attention), backend="eager"), processed(name, "images")
    assert given is not None
    batch = ModelBatch.from_processor(given)
    with pytest.raises(NotImplementedError, match="compile its layers"), context_parallel(world, **batch.buffers):
        model(**batch.inputs, use_cache=False)


def text_alone(rank: int, name: str, attention: str) -> None:
    register()
    world: Any = dist.group.WORLD
    ids, _ = batch_of(name)
    ids = ids.masked_fill(ids == PLACEHOLDER, 3)
    positions, labels = positions_and_labels(ids)
    sound = torch.randn(ROWS, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    if name == "Whisper":
        inputs = {"decoder_input_ids": ids, "decoder_position_ids": positions, "encoder_outputs": (sound,)}
    alone, model = tiny_multimodal(name, "sdpa"), tiny_multimodal(name, attention)
    logits = alone(**inputs, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    assert check_model(model) == []
    if name == "Whisper":
        inputs["encoder_outputs"] = tuple(context_parallel_shard(world, [sound], [1]))
    with context_parallel(world, buffers=[ids, positions, labels], buffer_seq_dims=[1, 1, 1]):
        loss = causal_lm_loss(model(**inputs, use_cache=False).logits, labels, gradients="sum")
    loss.backward()
    assert_equal(model, loss, alone, expected)


CASES = [
    *[(with_images, name) for name in NAMES],
    *[(text_alone, name) for name in NAMES if name != "Idefics"],  # which always takes images
    *[pytest.param((in_compiled_models, name), marks=pytest.mark.slow) for name in ("LLaVA", "Qwen2.5-VL")],
    pytest.param((whole_in_compiled_models, "LLaVA"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("attention", ["sdpa", "cp_dtensor"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}")
def test_towers(two_processes: Processes, case: tuple[Any, str], attention: str) -> None:
    two_processes.run(*case, attention)


def test_check_model_names_a_tower() -> None:
    model = tiny_multimodal("LLaVA", "sdpa")
    assert check_model(model) == []
    (line,) = check_model(model.model.vision_tower)
    assert line.startswith("CLIPVisionModel makes tokens of images or sound")
