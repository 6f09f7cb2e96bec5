"""The training example: configuration, data, and equality with training on one rank."""

import copy
import dataclasses
import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.forked_programs import launch
from support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train  # noqa: E402
from checkpoint import origin_of  # noqa: E402
from config import Config, ConfigError, Model, Parallelism, load_config  # noqa: E402
from gated_delta_net import GatedDeltaNet, Hybrid  # noqa: E402
from llama import Llama  # noqa: E402
from packed_data import PackedData, PackedFiles, PackedPieces, data_of  # noqa: E402
from parallelize import MeshRanks, OneRank, Ranks, over_ranks  # noqa: E402
from sparse_attention import Sparse  # noqa: E402
from text_data import IGNORE, SEPARATOR, VOCAB_SIZE, Batch, TextData  # noqa: E402
from validate import resolved  # noqa: E402

PROGRAM = ROOT / "examples" / "train.py"
CONFIGS = ROOT / "examples" / "configs"
DEBUG = CONFIGS / "debug.toml"
TINY = ("--model.dim=32", "--model.n_layers=2", "--model.n_heads=4", "--model.n_kv_heads=2", "--model.hidden_dim=64")
SHORT = (
    "--training.seq_len=50", "--training.local_batch_size=2", "--training.steps=4", "--lr_scheduler.warmup_steps=2",
)  # fmt: skip


def test_values_come_from_the_file_and_then_from_the_command_line() -> None:
    assert load_config(DEBUG).training.seq_len == 512
    config = load_config(DEBUG, ["--training.seq_len", "256", "--optimizer.lr=1e-2", "--checkpoint.enable"])
    assert (config.training.seq_len, config.optimizer.lr, config.checkpoint.enable) == (256, 1e-2, True)
    assert not load_config(DEBUG, ["--checkpoint.enable", "false"]).checkpoint.enable
    assert load_config(None) == Config()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[training]\nseq_length = 8", r"unknown key 'training.seq_length'; the closest .* is 'training.seq_len'"),
        ("[trainning]\nsteps = 8", r"unknown key 'trainning.steps'; the closest valid key is 'training.steps'"),
        ("steps = 8", r"unknown key 'steps'; the closest valid key is 'training.steps'"),
        ("[training]\nsteps = 8.5", r"training.steps: expected int, got 8.5"),
        ("[training]\nsteps = true", r"training.steps: expected int, got True"),
        ("[training", r"expected a TOML file at "),
        ("--parallelism.context_parallel_degre 2", "closest valid key is 'parallelism.context_parallel_degree'"),
        ("--training.steps many", "training.steps: expected int, got 'many'"),
        ("--training.steps", "training.steps: expected a value of type int behind it, got none"),
        ("--checkpoint.enable=maybe", "checkpoint.enable: expected bool, got 'maybe'"),
        ("training.steps 8", "expected --section.field value, got 'training.steps'"),
    ],
)  # fmt: skip
def test_files_and_command_lines_that_are_refused(tmp_path: Path, given: str, message: str) -> None:
    is_file = "=" in given.partition(" ")[2] or given.startswith("[")
    (tmp_path / "config.toml").write_text(given * is_file)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "config.toml", [] if is_file else given.split())


PACKED_ONLY = "--parallelism.context_parallel_load_balancer=per_document"


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ("debug", "--compile.backend=eager", 'compile.backend: expected "inductor" or "aot_eager", got "eager"'),
        ("debug", "--parallelism.context_parallel_load_balancer=ptrr", '"headtail" or "none" or .*, got "ptrr"'),
        ("debug", "--parallelism.context_parallel_rotate_method=ring", 'expected "auto" or .* "alltoall", got "ring"'),
        ("debug", "--parallelism.data_parallel_replicate_degree=2", "replicate_degree: expected 1 .*, got 2"),
        ("debug", "--parallelism.tensor_parallel_degree=3", "ranks, 4, got .* = 6: start with torchrun .*node 6"),
        ("debug", "--parallelism.data_parallel_shard_degree=1", "number of ranks, 4, got .* = 2"),
        ("debug", "--activation_checkpoint.mode=all", 'expected "none" or "selective" or "full", got "all"'),
        ("debug", "--activation_checkpoint.selective_ac_option=op", 'a positive integer in quotes, .* got "op"'),
        ("debug", "--model.n_kv_heads=3", "model.n_heads: expected a multiple of model.n_kv_heads = 3, got 8"),
        ("debug", "--training.global_batch_size=8", "local_batch_size x data_parallel_shard_degree = 16, got 8"),
        ("debug", "--training.steps=0", "training.steps: expected at least 1, got 0"),
        (
            "debug", "--parallelism.tensor_parallel_degree=2 --training.seq_len=509",
            "training.seq_len: expected a multiple of .* = 8 .*, got 509",
        ),
        (
            "debug", "--parallelism.tensor_parallel_degree=2 --compile.enable",
            "compile.enable: expected false with tensor parallelism, got true",
        ),
        ("packed", "--packing.documents=words", '"none" or "files" or "lognormal", got "words"'),
        ("packed", "--packing.sigma=-1.0", "packing.sigma: expected a number >= 0, got -1.0"),
        ("packed", "--packing.median_length=0", "packing.median_length: expected at least 1, got 0"),
        ("packed", PACKED_ONLY, '"per_document" divides .* one packed sample, got training.local_batch_size 2'),
        (
            "packed", f"{PACKED_ONLY} --training.local_batch_size=1 --packing.documents=none",
            'got training.local_batch_size 1 and packing.documents "none"',
        ),
        ("hybrid", "--training.local_batch_size=2", "training.local_batch_size: expected 1 with model.name"),
        ("hybrid", "--compile.enable", "compile.enable: expected False with model.name"),
        ("sparse", "--parallelism.tensor_parallel_degree=2", "degree: expected 1 with model.name \"sparse\", got 2"),
        ("sparse", "--model.index_topk=0", "model.index_topk: expected at least 1, got 0"),
        ("hybrid", "--model.attention_every=0", "model.attention_every: expected at least 1, got 0"),
    ],
)  # fmt: skip
def test_configurations_that_cannot_run(config: str, arguments: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(load_config(CONFIGS / f"{config}.toml", arguments.split()), world_size=4)


def test_minus_one_is_filled_in() -> None:
    config = resolved(load_config(DEBUG), world_size=6)
    assert (config.parallelism.data_parallel_shard_degree, config.training.global_batch_size) == (3, 24)


def test_labels_are_the_next_tokens() -> None:
    data = TextData(b"abc\0def\0ghi", seq_len=10, seed=0)  # one window, so every sample is that
    batch = data.samples(0, 1)
    assert bytes(batch.tokens[0].tolist()) == b"abc\0def\0gh"
    assert batch.labels[0].tolist() == [*b"bc\0", IGNORE, *b"ef\0", IGNORE, *b"hi"]
    assert batch.positions[0].tolist() == list(range(10))


def test_samples_of_a_step_do_not_depend_on_the_ranks() -> None:
    data = TextData(bytes(range(1, 242)), seq_len=5, seed=0)
    alone = torch.cat([batch.tokens for batch in data.batches(3, 8, 2, rank=0, ranks=1)])
    of_ranks = [data.batches(3, 8, 2, rank, ranks=2) for rank in range(2)]
    together = torch.cat([batch.tokens for batches in zip(*of_ranks, strict=True) for batch in batches])
    assert alone.shape == (8, 5)
    assert torch.equal(alone, together)
    assert len({tuple(row) for row in alone.tolist()}) == 8


def test_parity_fails_where_losses_differ() -> None:
    config = resolved(load_config(DEBUG, [*TINY, *SHORT, "--parallelism.context_parallel_degree=1"]), world_size=1)
    data = TextData(b"To be, or not to be, that is the question." * 9, config.training.seq_len, seed=0)
    origin = origin_of(config, data.fingerprint)
    device = torch.device("cpu")
    learner = train.make_learner(config, OneRank(), device)
    right = train.train_step(learner, data, config, step=1)
    wrong = dataclasses.replace(right, loss=right.loss + 1e-3)
    assert train.compare_with_one_rank(config, device, data, origin, 0, [right])
    assert not train.compare_with_one_rank(config, device, data, origin, 0, [wrong])


def test_two_ranks_train_and_resume_as_one_rank_does(tmp_path: Path) -> None:
    whole = trained(tmp_path, "--checkpoint.enable", "--checkpoint.interval=2")
    assert "parity holds: over steps 1 to 4" in whole
    steps = reports(tmp_path)
    assert [report["step"] for report in steps] == [1, 2, 3, 4]

    resumed = trained(tmp_path, "--checkpoint.enable", "--checkpoint.load_step=2")
    assert "going on from step 2" in resumed
    assert "parity holds: over steps 3 to 4" in resumed
    again = reports(tmp_path)
    assert [report["step"] for report in again] == [1, 2, 3, 4]
    for key in ("loss", "grad_norm", "lr"):
        assert [report[key] for report in again] == pytest.approx([report[key] for report in steps], rel=1e-6)


def trained(folder: Path, *arguments: str) -> str:
    """Output of two CPU ranks that train the tiny model, context parallel."""
    tiny = [f"--config={DEBUG}", "--check-parity", *TINY, *SHORT, *arguments]
    files = [f"--job.dump_folder={folder}", "--metrics.jsonl_file=metrics.jsonl"]
    return launch(2, PROGRAM, *tiny, *files, folder=folder)


def reports(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Packed documents: samples, and equality with one rank for every layout and model

PACKED, HYBRID, SPARSE = (CONFIGS / f"{name}.toml" for name in ("packed", "hybrid", "sparse"))
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
    sizes = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 64, "index_topk": 7, "latent_dim": 12}
    try:
        made = {
            name: kind(Model(n_layers=layers, **sizes), VOCAB_SIZE, seq_len=61)
            for name, kind, layers in (("llama", Llama, 2), ("hybrid", Hybrid, 4), ("sparse", Sparse, 2))
        }
    finally:
        torch.set_default_dtype(torch.float32)
    kinds = [isinstance(block.attention, GatedDeltaNet) for block in made["hybrid"].layers.values()]
    assert kinds == [True, True, True, False]
    return made


def loss_and_gradients(model: Llama | Hybrid, ranks: Ranks, batch: Batch) -> list[torch.Tensor]:
    """Of this rank's tokens."""
    model = copy.deepcopy(model)
    if isinstance(ranks, MeshRanks):
        over_ranks(model, ranks.mesh["cp"])
    with ranks.shard_sequence(batch) as attn_mask:
        loss = train.sum_of_token_losses(model(batch.tokens, batch.positions, attn_mask), batch.labels)
        loss = loss + model.index_loss
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


@pytest.mark.parametrize("case", ["llama files", "llama lognormal", "hybrid lognormal", "sparse lognormal"])
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


def test_sparse_attention_trains_as_one_rank_does(tmp_path: Path) -> None:
    """The indexer learns too, in layers that are checkpointed and compiled."""
    arguments = ["--model.index_topk=9", "--model.latent_dim=16", "--activation_checkpoint.mode=full"]
    arguments += ["--training.steps=2", "--model.n_layers=1"]
    arguments += ["--compile.enable", "--compile.backend=aot_eager", "--training.mixed_precision_param=float64"]
    assert "parity holds: over steps 1 to 2" in trained(tmp_path, f"--config={SPARSE}", *arguments)
