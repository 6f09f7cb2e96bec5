"""The training benchmark: losses beside those of one device, the command on two ranks, and its report."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
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
from cp_dtensor.tools.cases import Case, Heads, Method
from cp_dtensor.tools.llama import PRESETS, Llama, Size, initialise
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.ranks import Device, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row
from cp_dtensor.tools.torch_methods import mesh_of_ranks, torch_context_parallel
from cp_dtensor.tools.train_bench import Job, Turn, main, optimizer_of, parse_options, rows_of, take_turn, tokens_of

CPU = torch.device("cpu")
SIZE = Size(layers=2, dim=16, heads=4, kv_heads=2, ffn=24, vocabulary=40)
CAUSAL = Job(SIZE, Case(24, Heads(4, 2, 4), batch=2, dtype="float64"))
DOCUMENTS = replace(CAUSAL, case=replace(CAUSAL.case, mask="documents 5"), checkpointed=True)
WARM, STEPS = 2, 1

sdpa = F.scaled_dot_product_attention


@contextmanager
def torch_shards(case: Case, device: torch.device, buffers: list[torch.Tensor]) -> Iterator[None]:
    """Torch's context, whose attention CPUs do not have, with ours in its place."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        assert all(each.is_contiguous() for each in (q, k, v))
        out = context_parallel_attention(
            q, k, v, mesh=mesh_of_ranks("cpu"), layout=HeadTail(), seq_len=case.seq_len, **options
        )
        assert isinstance(out, torch.Tensor)
        out.register_hook(lambda grad: pytest.fail("strided gradient") if not grad.is_contiguous() else None)
        return out

    with torch_context_parallel(case, device, buffers), mock.patch.object(F, "scaled_dot_product_attention", attention):
        yield


def turns_on(rank: int, job: Job, names: Sequence[str]) -> list[Turn]:
    ranks = Ranks(dist.group.WORLD)  # type: ignore[arg-type]
    with_torch = Method("torch's shards", shards=torch_shards, contiguous=True)
    methods = [*methods_by_name(names), *([with_torch] if job.case.is_plain else [])]
    return [take_turn(job, method, ranks, Device(use_gpu=False), warm=WARM, steps=STEPS) for method in methods]


def on_one_device(job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], float]:
    """Losses, and the norm of the first gradient; the logits of 7 tokens at once."""
    mask = shown(job.case.mask_value, 24, 24, 1)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
    )
    monkeypatch.setattr(llama, "_LOSS_TOKENS", 7)
    model = Llama(SIZE, is_causal=True).double()
    initialise(model)
    optimizer = optimizer_of(model)
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
        (replace(CAUSAL, case=replace(CAUSAL.case, mask="window:none,0")), ["ours-auto"]),
    ],
    ids=["causal", "documents", "causal by another name"],
)
def test_losses_and_gradients_are_those_of_one_device(
    job: Job, names: Sequence[str], two_processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = two_processes.run(turns_on, job, names)
    losses, norm = on_one_device(job, monkeypatch)
    assert losses[-1] < losses[0]
    for turns in found:
        assert len(turns) == len(names) + job.case.is_plain
        for turn in turns:
            assert turn.losses == pytest.approx(losses, rel=1e-10)
            assert turn.gradient_norm == pytest.approx(norm, rel=1e-10)
            assert [len(samples) for samples in turn.samples_ms] == [STEPS] * 2


def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--preset", "toy", "--seq-lens", "32", "--device", "cpu", "--dtype", "float32", "--checkpoint"]
    arguments += ["--mask", "causal", "documents 8", "--steps", "1", "--warm-steps", "1", "--output", "out/rows.csv"]
    methods = ["torch-allgather", "torch-alltoall FA4", "ours-auto", "ours-ulysses Balanced"]
    text = launch(2, "cp_dtensor", "train-bench", *arguments, "--methods", *methods, folder=tmp_path)
    assert "-m cp_dtensor train-bench --preset toy" in text
    assert text.count("| method | median_ms |") == 2
    with (tmp_path / "out" / "rows.csv").open(newline="") as file:
        rows = {(row["mask"], row["method"]): row for row in csv.DictReader(file)}
    assert len(rows) == 8
    no_mask = "torch's context parallel of SDPA has no mask such as documents 8"
    for (mask, method), row in rows.items():
        assert (row["pass"], row["note"]) == ("step", "2 layers of 64 and 128; checkpointing")
        if method.startswith("ours"):
            assert row["status"] == MEASURED, row
            assert float(row["difference"]) < 1e-5
        else:
            assert row["status"] == REFUSED
            for_cpus = "cannot run the installed flash-attn-4" if method.endswith("FA4") else "NotImplementedError"
            assert (for_cpus if mask == "causal" else no_mask) in row["message"]


# Rows


def turns_of(*milliseconds: float, losses: Sequence[float] = (4.0, 2.0), norm: float = 1.0) -> list[Turn]:
    """Return turns of two ranks, of which the second takes twice the time."""
    return [Turn([[each], [2 * each]], [*losses], norm, 3 << 20) for each in milliseconds]


def found(**changes: Any) -> list[Row]:
    turns = {"ours-auto": turns_of(2.0), "ours-ulysses": [*turns_of(3.0), *turns_of(3.0, **changes)]}
    return rows_of(CAUSAL, turns, 2)


def test_numbers_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = {"torch-allgather": turns_of(3.0, 4.0, 8.0), "torch-alltoall": turns_of(6.0)}
    turns |= {"ours-auto": turns_of(2.0), "ours-auto compiled": turns_of(1.0)}
    monkeypatch.setattr(train_bench, "gpu_name", lambda: "H200")
    half = replace(CAUSAL, case=replace(CAUSAL.case, dtype="bfloat16"))
    torchs, _, ours, compiled = rows_of(half, turns, 2)
    assert torchs["median_ms"] == 8.0
    assert torchs["tokens_per_second"] == pytest.approx(48 / 8e-3)
    assert (ours["times_torch"], compiled["times_torch"], ours["mib"]) == (2.0, None, 3.0)
    assert (ours["first_loss"], ours["last_loss"]) == ("4.0000", "2.0000")
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 16 * 40
    flops = 6 * 48 * matrices + 12 * 2 * 16 * (2 * 24 * 25 // 2)
    assert torchs["tflops"] == pytest.approx(flops / 8e-3 / 2 / 1e12)
    assert torchs["mfu_percent"] == pytest.approx(100 * flops / 8e-3 / 2 / 989e12, rel=1e-3)
    assert PRESETS["8b-layers"].matmul_parameters == 8 * 218_103_808 + 4096 * 128_256


@pytest.mark.parametrize(
    "changed", [{"losses": (4.0, 2.01)}, {"norm": 1.01}, {"losses": (4.0, float("nan"))}, {"norm": float("nan")}]
)
def test_turns_that_disagree_with_the_first_differ(changed: dict[str, Any]) -> None:
    assert [(row["difference"], row["message"]) for row in found()] == [(0.0, None)] * 2
    first, other = found(**changed)
    assert (first["difference"], first["message"]) == (0.0, None)
    assert not other["difference"] < 4e-3
    assert other["message"] == train_bench._DIFFERS


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([(MEASURED, None), (REFUSED, "no")], 0),
        ([(MEASURED, None), (ERROR, "no")], 1),
        ([(REFUSED, "no")], 1),
        ([(MEASURED, None), (MEASURED, train_bench._DIFFERS)], 1),
    ],
)
def test_a_run_with_errors_or_differences_or_without_measurements_ends_with_status_1(
    rows: list[tuple[str, str | None]], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [{"method": "m", "status": status, "message": message} for status, message in rows]
    monkeypatch.setattr(train_bench, "measure_all", lambda *_: made)
    with pytest.raises(SystemExit) as ended:
        main(["--device", "cpu"])
    assert int(ended.value.code or 0) == code


def test_options_change_a_preset_and_methods_are_measured_compiled_too() -> None:
    options = parse_options(["--preset", "8b-layers", "--layers", "4", "--seq-lens", "64", "128", "64", "--compile"])
    assert [job.size for job in options.jobs] == [replace(PRESETS["8b-layers"], layers=4)] * 2
    names = [method.name for method in options.methods]
    assert names[len(names) // 2 :] == [f"{name} compiled" for name in names[: len(names) // 2]]
    assert [method.compiled for method in options.methods] == [name.endswith(" compiled") for name in names]
