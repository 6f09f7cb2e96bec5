"""The training benchmark: losses beside those of one device, the command on two ranks, and its report."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.forked_programs import launch
from support.masked_problems import shown
from support.processes import Processes

from cp_dtensor import HeadTail, context_parallel_attention
from cp_dtensor.tools import llama, train_bench
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.llama import PRESETS, Llama, Size, initialise
from cp_dtensor.tools.methods import mesh_of_ranks
from cp_dtensor.tools.ranks import Device, Ranks
from cp_dtensor.tools.torch_methods import torch_context_parallel
from cp_dtensor.tools.train_bench import (
    OPTIMIZERS,
    Job,
    TrainMethod,
    TrainResults,
    TrainRow,
    Turn,
    main,
    parse_options,
    take_turn,
    tokens_of,
    train_markdown,
    train_methods,
)

CPU = torch.device("cpu")
SIZE = Size(layers=2, dim=16, heads=4, kv_heads=2, ffn=24, vocabulary=40)
CAUSAL = Job(SIZE, Case(24, Heads(4, 2), 4, 2, "float64", "causal", "HeadTail", "auto"), "adamw", checkpointed=False)
OF_DOCUMENTS = dataclasses.replace(CAUSAL.case, mask="documents 5")
DOCUMENTS = dataclasses.replace(CAUSAL, case=OF_DOCUMENTS, optimizer="sgd", checkpointed=True, offloaded=True)
WARM, STEPS = 2, 1

sdpa = F.scaled_dot_product_attention


@contextmanager
def torch_shards(case: Case, device: torch.device, buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """Torch's context, whose attention CPUs do not have, with ours in its place."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        assert all(each.is_contiguous() for each in (q, k, v))
        out = context_parallel_attention(
            q, k, v, mesh=mesh_of_ranks("cpu"), layout=HeadTail(), seq_len=case.seq_len, **options
        )
        assert isinstance(out, torch.Tensor)
        out.register_hook(lambda grad: pytest.fail("strided gradient") if not grad.is_contiguous() else None)
        return out

    with torch_context_parallel(device, buffers), mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def turns_on(rank: int, store: str, job: Job, names: Sequence[str]) -> list[Turn]:
    ranks = Ranks(dist.FileStore(store, 2), rank, 2)
    with_torch = TrainMethod("torch's shards", torch_shards, lambda case, world_size: None, contiguous=True)
    methods = [*train_methods(names, compiled=False), *([with_torch] if job.case.is_plain else [])]
    return [take_turn(job, method, ranks, Device(use_gpu=False), warm=WARM, steps=STEPS) for method in methods]


def on_one_device(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], float]:
    """Losses, and the norm of the first gradient; the logits of 7 tokens at once."""
    mask = shown(job.case.mask_value, 24, 24, 1)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
    )
    monkeypatch.setattr(llama, "_LOSS_TOKENS", 7)
    model = Llama(SIZE, is_causal=True, contiguous=False, checkpointed=False, offloaded=False).double()
    initialise(model, job.seed)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    tokens = tokens_of(job, CPU)
    losses, norms = [], []
    for _ in range(WARM + STEPS):
        loss = model(tokens[:, :-1], tokens[:, 1:], torch.arange(24).expand(2, -1)) / 48
        loss.backward()
        norms.append(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms[0]


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (CAUSAL, ["ours-auto", "ours-ulysses", "ours-alltoall Striped"]),
        (DOCUMENTS, ["ours-allgather", "ours-ulysses Balanced"]),
        (dataclasses.replace(CAUSAL, case=dataclasses.replace(CAUSAL.case, mask="window:none,0")), ["ours-auto"]),
    ],
    ids=["causal", "documents", "causal by another name"],
)
def test_losses_and_gradients_are_those_of_one_device(
    job: Job, names: Sequence[str], two_processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = two_processes.run(turns_on, str(tmp_path / "store"), job, names)
    losses, norm = on_one_device(job, monkeypatch)
    assert losses[-1] < losses[0]
    for turns in found:
        assert len(turns) == len(names) + job.case.is_plain
        for turn in turns:
            assert turn.losses == pytest.approx(losses, rel=1e-10)
            assert turn.gradient_norm == pytest.approx(norm, rel=1e-10)
            assert [len(samples) for samples in turn.samples_ms] == [STEPS] * 2


def test_offloaded_layers_keep_their_inputs_in_host_memory_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[int, ...]] = []

    class Noted(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda x: (kept.append(tuple(x.shape)), pack(x))[1]

    monkeypatch.setattr(llama, "save_on_cpu", Noted)
    model = Llama(SIZE, is_causal=True, contiguous=False, checkpointed=False, offloaded=True)
    initialise(model, 0)
    tokens = tokens_of(CAUSAL, CPU)
    model(tokens[:, :-1], tokens[:, 1:], torch.arange(24).expand(2, -1)).backward()
    inputs = [shape for shape in kept if shape != (0,)]  # checkpoints save an empty tensor, too
    assert inputs == [(2, 24, SIZE.dim), (2, 24)] * SIZE.layers


def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--preset", "toy", "--seq-lens", "32", "--device", "cpu", "--dtype", "float32", "--checkpoint"]
    arguments += ["--offload"]
    arguments += ["--mask", "causal", "documents 8", "--steps", "1", "--warm-steps", "1", "--peak-tflops", "0.01"]
    methods = ["torch-allgather", "torch-alltoall FA4", "ours-auto", "ours-ulysses Balanced"]
    text = launch(2, "cp_dtensor", "train-bench", *arguments, "--methods", *methods, "--output", "out", folder=tmp_path)
    report = (tmp_path / "out" / "train.md").read_text()
    assert report in text
    assert "-m cp_dtensor train-bench --preset toy" in report
    assert report.count("| method | ms |") == 2
    rows = {(row["job"]["case"]["mask"], row["method"]): row for row in found(tmp_path / "out" / "train.json")}
    assert len(rows) == 8
    no_mask = "torch's context parallel of SDPA has no mask such as documents 8"
    for (mask, method), row in rows.items():
        if method.startswith("ours"):
            assert row["status"] == "measured", row
            assert len(row["turns"]) == 2
            assert row["difference"] < 1e-5
            assert row["mfu_percent"] > 0
        else:
            assert row["status"] == "refused"
            for_cpus = "cannot run the installed flash-attn-4" if method.endswith("FA4") else "NotImplementedError"
            assert (for_cpus if mask == "causal" else no_mask) in row["message"]


def found(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


# The report


def row(method: str, *milliseconds: float, losses: tuple[float, ...] = (4.0, 2.0), norm: float = 1.0) -> TrainRow:
    """A row whose second rank takes twice the time in each of its turns."""
    turns = tuple(Turn(((each,), (2 * each,)), losses, norm, 3 << 30) for each in milliseconds)
    return TrainRow(CAUSAL, method, "measured", turns=turns)


def results(*rows: TrainRow) -> TrainResults:
    return TrainResults("two ranks", "torchrun ...", 2, 1e-6, rows)


def test_numbers_of_a_row() -> None:
    torchs, ours, compiled = (
        row("torch-allgather", 3.0, 4.0, 8.0),
        row("ours-auto", 2.0),
        row("ours-auto compiled", 1.0),
    )
    report = results(torchs, row("torch-alltoall", 6.0), ours, compiled)
    assert torchs.median_ms == 8.0
    assert torchs.tokens_per_second == pytest.approx(48 / 8e-3)
    assert (report.times_others(ours), report.times_others(compiled)) == (2.0, None)
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 16 * 40
    flops = 6 * 48 * matrices + 12 * 2 * 16 * (2 * 24 * 25 // 2)
    assert report.mfu_percent(torchs) == pytest.approx(100 * flops / 8e-3 / 2 / 1e6)
    assert PRESETS["8b-layers"].matmul_parameters == 8 * 218_103_808 + 4096 * 128_256


@pytest.mark.parametrize(
    "changed", [{"losses": (4.0, 2.0001)}, {"norm": 1.001}, {"losses": (4.0, float("nan"))}, {"norm": float("nan")}]
)
def test_methods_that_disagree_are_named(changed: dict[str, Any]) -> None:
    first, other = row("ours-auto", 1.0), row("ours-ulysses", 1.0, **changed)
    refused = TrainRow(CAUSAL, "torch-allgather", "refused", "no")
    assert results(refused, first, row("ours-symm_mem", 1.0)).disagreeing() == []
    assert results(refused, first, other).disagreeing() == [other]
    later = dataclasses.replace(first, turns=(*first.turns, *other.turns))
    assert results(later).disagreeing() == [later]


def test_the_report_shows_every_row() -> None:
    refused = TrainRow(CAUSAL, "torch-alltoall", "refused", "a|b\nc")
    lines = train_markdown(results(row("torch-allgather", 3.0), row("ours-auto", 2.0), refused)).splitlines()
    assert "# Training steps, 2 ranks" in lines
    title = "24 tokens, 2 layers of 16, 4 query and 2 kv heads of 4, SwiGLU of 24, vocabulary of 40, causal, HeadTail"
    assert f"## {title}, batch 2, float64, adamw" in lines
    [ours] = [line for line in lines if line.startswith("| ours-auto ")]
    numbers = r"4\.00 \| 4\.00-4\.00 \| 12,000 \| [\d.]+ \| 1\.500 \| 3\.00 \| 4\.0000 \| 2\.0000 \| 0\.0e\+00"
    assert re.fullmatch(rf"\| ours-auto \| {numbers} \|", ours)
    assert r"| torch-alltoall | refused: a\|b c | - | - | - | - | - | - | - | - |" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "ours-fastest"], "unknown method 'ours-fastest': expected some of ours-allgather"),
        (["--dim", "100"], "expected dim to be a multiple of 2 * heads, and heads of kv heads, got dim 100, 32 heads"),
        (["--kv-heads", "5"], "got dim 2048, 32 heads and 5 kv heads"),
        (["--mask", "some"], "expected a mask such as causal"),
        (["--mask", "documents:0,96", "--seq-lens", "64"], "the documents of a mask end at 96"),
        (["--peak-tflops", "0"], "expected a positive number, got 0"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statuses", "code"), [(("measured", "refused"), 0), (("measured", "error"), 1), (("refused",), 1), ((), 1)]
)
def test_a_run_with_errors_or_without_measurements_ends_with_status_1(
    statuses: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [dataclasses.replace(row(name, 1.0), status=name) for name in statuses]
    monkeypatch.setattr(train_bench, "start", lambda *_: (SimpleNamespace(rank=0, world_size=2), None, "torchrun ..."))
    monkeypatch.setattr(train_bench, "_rows", lambda *_: iter(rows))
    monkeypatch.setattr(train_bench, "end", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu"])
    assert int(ended.value.code or 0) == code


def test_options_change_a_preset_and_methods_are_measured_compiled_too() -> None:
    options = parse_options(["--preset", "8b-layers", "--layers", "4", "--seq-lens", "64", "128", "64", "--compile"])
    assert [job.size for job in options.jobs] == [dataclasses.replace(PRESETS["8b-layers"], layers=4)] * 2
    names = [method.name for method in options.methods]
    assert names[len(names) // 2 :] == [f"{name} compiled" for name in names[: len(names) // 2]]
    assert [method.compiled for method in options.methods] == [name.endswith(" compiled") for name in names]
