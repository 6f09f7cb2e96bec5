"""The training example with gated delta nets: equality with one device, token by token."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from test_train_example import ROOT, trained

sys.path.insert(0, str(ROOT / "examples"))

from config import ConfigError, Model, Parallelism, load_config
from gated_delta_net import GatedDeltaNet, Hybrid, over_ranks
from packed_data import PackedPieces
from parallelize import MeshRanks, OneRank, Ranks
from text_data import VOCAB_SIZE, Batch
from train import sum_of_token_losses
from validate import resolved

HYBRID = ROOT / "examples" / "configs" / "hybrid.toml"
TEXT = bytes(range(1, 252)) * 4


@pytest.fixture(scope="module")
def model() -> Hybrid:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return Hybrid(Model(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=64), VOCAB_SIZE, seq_len=61)
    finally:
        torch.set_default_dtype(torch.float32)


def loss_and_gradients(model: Hybrid, ranks: Ranks, batch: Batch) -> list[torch.Tensor]:
    model = copy.deepcopy(model)
    if isinstance(ranks, MeshRanks):
        over_ranks(model, ranks.mesh["cp"])
    with ranks.shard_sequence(batch) as attn_mask:
        loss = sum_of_token_losses(model(batch.tokens, batch.positions, attn_mask), batch.labels)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_three_of_four_layers_have_a_state(model: Hybrid) -> None:
    assert [isinstance(block.attention, GatedDeltaNet) for block in model.layers.values()] == [True, True, True, False]


@pytest.mark.parametrize("layout", ["headtail", "none", "balanced", "per_document"])
def test_ranks_together_have_the_loss_and_gradients_of_one(model: Hybrid, layout: str) -> None:
    data = PackedPieces(TEXT, 61, seed=0, median=12, sigma=1.0)
    expected = loss_and_gradients(model, OneRank(), data.samples(0, 1))
    parallelism = Parallelism(
        data_parallel_shard_degree=1, context_parallel_degree=3, context_parallel_load_balancer=layout
    )

    def body(rank: int) -> list[torch.Tensor]:
        return loss_and_gradients(model, MeshRanks(parallelism, "cpu"), data.samples(0, 1))

    for got, wanted in zip(zip(*run_ranks(3, body), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(got).sum(0), wanted, rtol=1e-10, atol=1e-10)


def test_training_equals_one_rank(tmp_path: Path) -> None:
    """The first losses differ by 1e-6 at most in float32."""
    arguments = ["--training.seq_len=50", "--packing.median_length=8", "--training.steps=2"]
    arguments += [
        "--training.local_batch_size=1",
        "--model.dim=32",
        "--model.n_heads=4",
        "--model.n_kv_heads=2",
        "--model.hidden_dim=64",
    ]
    arguments += ["--training.mixed_precision_param=float32", "--training.global_batch_size=2"]
    printed = trained(tmp_path, f"--config={HYBRID}", *arguments)
    assert "parity holds: over steps 1 to 2" in printed
    difference = float(printed.partition("differs from that of one rank by at most ")[2].split()[0])
    assert difference <= 2e-6


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--training.local_batch_size=2", "training.local_batch_size: expected 1 with model.name"),
        ("--compile.enable", "compile.enable: expected False with model.name"),
        ("--model.attention_every=0", "model.attention_every: expected at least 1, got 0"),
    ],
)
def test_configurations_that_cannot_run(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(load_config(HYBRID, [argument]), world_size=2)
