"""The training example on packed documents: samples, and equality with one rank for every layout and model."""

import copy
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from test_train_example import CONFIGS, ROOT, trained

sys.path.insert(0, str(ROOT / "examples"))

from config import Config, Model, Parallelism, load_config
from gated_delta_net import GatedDeltaNet, Hybrid, over_ranks
from llama import Llama
from packed_data import PackedData, PackedFiles, PackedPieces, data_of
from parallelize import MeshRanks, OneRank, Ranks
from text_data import IGNORE, SEPARATOR, VOCAB_SIZE, Batch
from train import sum_of_token_losses

PACKED, HYBRID = CONFIGS / "packed.toml", CONFIGS / "hybrid.toml"
TEXT = bytes(range(1, 252)) * 4


def test_files_of_a_stretch_are_its_documents() -> None:
    data = PackedFiles(b"abc\0def\0ghi", seq_len=10, seed=0)  # one window, so every sample is that
    batch = data.samples(0, 1)
    assert bytes(batch.tokens[0].tolist()) == b"abc\0def\0gh"
    assert batch.documents == ((0, 4, 8, 10),)
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert batch.labels[0].tolist() == [*b"bc\0", IGNORE, *b"ef\0", IGNORE, *b"h", IGNORE]
    assert PackedFiles(b"abc\0defg\0h", seq_len=9, seed=0).samples(0, 1).documents == ((0, 4, 9),)


@pytest.mark.parametrize(("documents", "kind"), [("files", PackedFiles), ("lognormal", PackedPieces)])
def test_the_configuration_chooses(documents: str, kind: type[PackedData]) -> None:
    config = load_config(PACKED, [f"--packing.documents={documents}"])
    assert type(data_of(config, TEXT * 4)) is kind


@pytest.fixture(scope="module")
def models() -> dict[str, Llama | Hybrid]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # of RoPE's table too
    try:
        made = {
            name: kind(Model(dim=32, n_layers=layers, n_heads=4, n_kv_heads=2, hidden_dim=64), VOCAB_SIZE, seq_len=61)
            for name, kind, layers in (("llama", Llama, 2), ("hybrid", Hybrid, 4))
        }
    finally:
        torch.set_default_dtype(torch.float32)
    kinds = [isinstance(block.attention, GatedDeltaNet) for block in made["hybrid"].layers.values()]
    assert kinds == [True, True, True, False]
    return made


def loss_and_gradients(model: Llama | Hybrid, ranks: Ranks, batch: Batch) -> list[torch.Tensor]:
    """Of this rank's tokens."""
    model = copy.deepcopy(model)
    if isinstance(model, Hybrid) and isinstance(ranks, MeshRanks):
        over_ranks(model, ranks.mesh["cp"])
    with ranks.shard_sequence(batch) as attn_mask:
        loss = sum_of_token_losses(model(batch.tokens, batch.positions, attn_mask), batch.labels)
        loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def test_a_document_does_not_see_what_it_is_packed_with(models: dict[str, Llama]) -> None:
    packed = PackedPieces(TEXT, seq_len=61, seed=0, median=12, sigma=1.0).samples(0, 2)
    together = loss_and_gradients(models["llama"], OneRank(), packed)
    apart = []
    for tokens, labels, edges in zip(packed.tokens, packed.labels, packed.documents, strict=True):
        for start, stop in pairwise(edges):
            here = (each[None, start:stop] for each in (tokens, labels))
            batch = Batch(*here, torch.arange(stop - start)[None])
            apart.append(loss_and_gradients(models["llama"], OneRank(), batch))
    for got, *expected in zip(together, *apart, strict=True):
        torch.testing.assert_close(got, torch.stack(expected).sum(0))


@pytest.mark.parametrize("case", ["llama files", "llama lognormal", "hybrid lognormal"])
@pytest.mark.parametrize("layout", ["headtail", "none", "balanced", "per_document"])
def test_ranks_together_have_the_loss_and_gradients_of_one(models: dict[str, Llama], layout: str, case: str) -> None:
    name, _, documents = case.partition(" ")
    rows = 1 if layout == "per_document" or name == "hybrid" else 3
    text = TEXT.replace(bytes([17]), bytes([SEPARATOR]))
    data: PackedData = PackedFiles(text, 61, 0)
    if documents == "lognormal":
        data = PackedPieces(text, 61, seed=0, median=12, sigma=1.0)
    expected = loss_and_gradients(models[name], OneRank(), data.samples(0, rows))
    parallelism = Parallelism(
        data_parallel_shard_degree=1, context_parallel_degree=3, context_parallel_load_balancer=layout
    )

    def body(rank: int) -> list[torch.Tensor]:
        return loss_and_gradients(models[name], MeshRanks(parallelism, "cpu"), data.samples(0, rows))

    for got, wanted in zip(zip(*run_ranks(3, body), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(got).sum(0), wanted, rtol=1e-10, atol=1e-10)


def test_compiled_layers_train_on_other_documents_in_every_step(tmp_path: Path) -> None:
    """More steps than Dynamo would compile layers for."""
    arguments = ["--training.seq_len=50", "--packing.median_length=8", "--training.steps=10"]
    arguments += ["--training.mixed_precision_param=float64", "--activation_checkpoint.mode=selective"]
    compiled = ["--compile.enable", "--compile.backend=aot_eager"]
    assert "parity holds: over steps 1 to 10" in trained(tmp_path, f"--config={PACKED}", *arguments, *compiled)
    assert load_config(PACKED).parallelism.context_parallel_load_balancer == "balanced"
    assert load_config(PACKED).packing != Config().packing


def test_a_hybrid_trains_as_one_rank_does(tmp_path: Path) -> None:
    """The first losses differ by 1e-6 at most in float32."""
    arguments = ["--training.seq_len=50", "--packing.median_length=8", "--training.steps=2"]
    arguments += ["--model.n_layers=4", "--training.local_batch_size=1", "--training.global_batch_size=2"]
    arguments += ["--training.mixed_precision_param=float32"]
    printed = trained(tmp_path, f"--config={HYBRID}", *arguments)
    assert "parity holds: over steps 1 to 2" in printed
    assert float(printed.partition("differs from that of one rank by at most ")[2].split()[0]) <= 2e-6
