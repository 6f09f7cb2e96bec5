"""`explain(..., model=)`: memory and time of a training step, against counted bytes and measured steps."""

from __future__ import annotations

import csv
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.explained import explained
from support.measured import MEASURED
from support.ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import ATTENTION_OPS, context_parallel
from cp_dtensor.api.explain_model import Model
from cp_dtensor.engine import run
from cp_dtensor.plan.cluster import PACKAGE_KERNELS, Hardware

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 50, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "vocab_size": 151_936,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def of_model(*sizes: int, model: Any = SMALL, **options: Any) -> Any:
    return explained(*sizes, names=("ring", "ulysses")[: len(sizes)], **{"model": model, "q_heads": None, **options})


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["Qwen3", "Llama", "Mistral"])
def test_sizes_are_those_of_the_model(name: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SMALL, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    found = Model.of(config)
    assert found == Model.of({**SMALL, "tie_word_embeddings": tied})
    matrices = sum(each.numel() for each in model.parameters() if each.dim() == 2)
    assert found.layers * found.layer + found.head * (1 if tied else 2) == matrices
    heads = {"num_key_value_heads": None, "head_dim": None}
    assert Model.of({**SMALL, **heads}) == Model.of({**SMALL, "num_key_value_heads": 4, "head_dim": 16})


def test_parts_of_a_step() -> None:
    """2 ranks of 128 tokens in bfloat16: 12,288 numbers of attention and 18,432 of the MLP in each of 3 layers."""
    layer, words = 64 * (12 * 8 + 3 * 96), 50 * 64
    explanation = of_model(2, seq_len=256, offload=True, keep_attention=True, tile=16)
    found, attention = explanation.step, explanation.methods[explanation.chosen].memory
    assert found.memory == {
        "parameters": 2 * ((3 * layer + 2 * words) / 2 + 3 * layer + 2 * words),
        "gradients": 2 * (3 * layer / 2 + 2 * layer + words),
        "optimizer": 4 * (3 * layer + 2 * words) / 2,
        "saved inputs": 2 * 128 * 64 * 2 + 3 * 128 * (2 * 32 + 4 * 4),
        "attention": 2 * 128 * (3 * 64 + 4 * 32 + 5 * 16) + attention,
        "MLP": 2 * 16 * (6 * 96 + 2 * 64),
        "logits": 2 * 128 * 64 + 4 * words + 2 * 128 * 64,
    }
    plain = of_model(2, seq_len=256, optimizer_bytes=8).step
    assert plain.memory["attention"] == found.memory["attention"] + 2 * 128 * 32
    assert plain.memory["saved inputs"] == 3 * 2 * 128 * 64
    assert plain.memory["optimizer"] == 2 * found.memory["optimizer"]
    assert plain.memory["MLP"] == 8 * found.memory["MLP"]
    assert plain.memory["logits"] == 2 * 128 * 64 + 4 * words + 2 * 128 * 50
    assert plain.times["attention"] > found.times["attention"]
    assert plain.times["products"] < found.times["products"]
    assert plain.times["rest"] < found.times["rest"]


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")  # torch 2.15: `pack` is the test's
def test_saved_inputs_are_what_checkpoints_keep() -> None:
    hidden, tokens, layers = 64, 32, 3
    inputs, results, keep = list[int](), list[int](), partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS))
    forward = run._forward_in_checkpoint

    def pack(x: torch.Tensor) -> torch.Tensor:
        inputs.extend([x.nbytes] if x.size(-1) == hidden else [])
        return x

    def counted(*arguments: Any) -> Any:
        out, lse, saved = forward(*arguments)
        results.append(out.nbytes + lse.nbytes)
        return out, lse, saved

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(2, (8, 8)).transpose(1, 2).split((4, 2, 2), 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2).repeat(1, 1, 2)

    def body(rank: int) -> None:
        with context_parallel(init_device_mesh("cpu", (2,)), seq_len=tokens), saved_tensors_hooks(pack, lambda x: x):
            x = torch.randn(1, tokens // 2, hidden, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(layers):
                x = checkpoint(layer, x, use_reentrant=False, context_fn=keep)

    with mock.patch.object(run, "_forward_in_checkpoint", counted):
        run_ranks(2, body)
    plain, kept = (of_model(2, seq_len=tokens, keep_attention=each).step.memory for each in (False, True))
    assert sum(inputs) == 2 * plain["saved inputs"]
    assert sum(results) == 2 * (kept["saved inputs"] - plain["saved inputs"])


def test_measured_steps() -> None:
    """Of Qwen3-8B on GPUs: the peak to 5%, the time to 10% but of steps that waited for the host."""
    with MEASURED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "long-context" in row["table"] and row["method"] != "torch"]
    assert rows
    for row in rows:
        ranks, gpu = row["machine"].split("x")
        assert "flash-attn-4" in row["versions"]
        hardware = Hardware.of(gpu).with_kernels(PACKAGE_KERNELS)
        step = of_model(
            int(ranks), model=QWEN3_8B, seq_len=int(row["tokens"]), hardware=hardware, tile=8192, offload=True,
            keep_attention=row["method"] == "ours",
        ).step  # fmt: skip
        if row["mib"]:
            assert step.peak / 2**20 == pytest.approx(float(row["mib"]), rel=0.05), row
        if "pinned" not in row["note"] and row["tokens"] != "4096":
            assert step.seconds * 1e3 == pytest.approx(float(row["median_ms"]), rel=0.1), row


def test_the_text() -> None:
    text = str(of_model(2, seq_len=1 << 20, model=QWEN3_8B, tile=8192, offload=True))
    *_, memory, times = text.splitlines()
    parts = ("parameters", "gradients", "optimizer", "saved inputs", "attention", "MLP", "logits", "at the peak")
    assert all(f"{name} " in memory for name in parts)
    assert times.startswith("a training step of the model, s: attention ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": {}}, "expected model to have the integers hidden_size, .*; got none for hidden_size"),
        ({"model": {**SMALL, "num_experts": 8}}, "expected model to be dense, got num_experts=8"),
        ({"q_heads": 4}, "expected the heads of model=, and none given; got q_heads too"),
        ({"head_dim": 8}, "expected the heads of model=, and none given; got head_dim too"),
        ({"optimizer_bytes": -1}, "expected optimizer_bytes of at least 0; got -1"),
        ({"latent_dims": (4, 4)}, "expected the heads of model=, and none given; got latent_dims too"),
        ({"model": None}, "expects q_heads= or model=, got neither"),
        ({"model": None, "q_heads": 4, "tile": 8}, r"expected tile, .* with model= only; got Training\(tile=8, "),
        ({"model": None, "q_heads": 4, "offload": True}, "expected tile, .* with model= only; got .* offload=True, "),
        ({"tile": 0}, "expected tile to be an integer >= 1, got 0"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        of_model(2, seq_len=256, **options)
