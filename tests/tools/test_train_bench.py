"""The training benchmark: losses beside those of one device, the command on two ranks, and its report."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from cp_dtensor.tools import train_bench
from cp_dtensor.tools.cases import Case, Heads, Method
from cp_dtensor.tools.measure import Suite
from cp_dtensor.tools.methods import methods_by_name
from cp_dtensor.tools.ranks import Device, Ranks
from cp_dtensor.tools.report import ERROR, MEASURED, REFUSED, Row
from cp_dtensor.tools.torch_methods import mesh_of_ranks, torch_context_parallel
from cp_dtensor.tools.train_bench import (
    PRESETS,
    Job,
    Llama,
    Size,
    difference,
    main,
    optimizer_of,
    parse_options,
    tokens_of,
    train,
)

CPU = torch.device("cpu")
SIZE = Size(layers=2, dim=16, heads=4, kv_heads=2, ffn=24, vocabulary=40)
CAUSAL = Job(SIZE, Case(24, Heads(4, 2, 4), batch=2, dtype="float64"))
DOCUMENTS = replace(CAUSAL, case=replace(CAUSAL.case, mask="documents 5"), checkpointed=True)

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


def trained_on(rank: int, job: Job, names: Sequence[str]) -> tuple[list[Row], list[float]]:
    """Rows of methods, and the first gradient norm and losses of the first one, with which the others are compared."""
    suite, reference = Suite(Ranks(dist.group.WORLD), Device(use_gpu=False), repeats=1), list[float]()  # type: ignore[arg-type]
    with_torch = Method("torch's shards", shards=torch_shards, contiguous=True)
    methods = [*methods_by_name(names), *([with_torch] if job.case.is_plain else [])]
    return [train(job, method, suite, reference) for method in methods], reference


def on_one_device(job: Job, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The norm of the first gradient, and the losses; the logits of 7 tokens at once."""
    mask = shown(job.case.mask_value, 24, 24, 1)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, **_: sdpa(q, k, v, attn_mask=mask, enable_gqa=True)
    )
    monkeypatch.setattr(train_bench, "_LOSS_TOKENS", 7)
    model = Llama(SIZE, is_causal=True).double()
    optimizer = optimizer_of(model)
    tokens = tokens_of(job, CPU)
    found: list[float] = []
    for _ in range(steps):
        loss = model(tokens[:, :-1], tokens[:, 1:], torch.arange(24).expand(2, -1)) / 48
        loss.backward()
        if not found:
            found.append(torch.nn.utils.get_total_norm([each.grad for each in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("job", "names"),
    [
        (CAUSAL, ["ours-auto", "ours-ulysses", "ours-alltoall Striped"]),
        (DOCUMENTS, ["ours-allgather", "ours-ulysses Balanced"]),
        pytest.param(
            replace(CAUSAL, case=replace(CAUSAL.case, mask="window:none,0")), ["ours-auto"], marks=pytest.mark.sweep
        ),
    ],
    ids=["causal", "documents", "causal by another name"],
)
def test_losses_and_gradients_are_those_of_one_device(
    job: Job, names: Sequence[str], two_processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, reference in two_processes.run(trained_on, job, names):
        expected = on_one_device(job, len(reference) - 1, monkeypatch)
        assert reference == pytest.approx(expected, rel=1e-10)
        assert expected[-1] < expected[1]
        assert len(rows) == len(names) + job.case.is_plain
        assert max(row["difference"] for row in rows) < 1e-10
        assert all(row["first_loss"] == f"{expected[1]:.4f}" and row["message"] is None for row in rows)


def test_the_command_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--preset", "toy", "--seq-lens", "32", "--device", "cpu", "--dtype", "float32", "--checkpoint"]
    arguments += ["--mask", "causal", "documents 8", "--repeats", "1", "--output", "out/rows.csv"]
    methods = ["torch-allgather", "torch-alltoall FA4", "ours-auto", "ours-ulysses Balanced"]
    text = launch(2, "cp_dtensor", "train-bench", *arguments, "--methods", *methods, folder=tmp_path)
    assert "-m cp_dtensor train-bench --preset toy" in text
    assert text.count("| method | median_ms |") == 2
    assert "times_others" not in text, "nothing of torch was measured"
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
            for_cpus = (
                "cannot run the installed flash-attn-4"
                if method.endswith("FA4")
                else "does not have a sharding strategy"
            )
            assert (for_cpus if mask == "causal" else no_mask) in row["message"]


# Rows


def test_numbers_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two ranks, of which one has a loss of 6 where the other has 4."""
    monkeypatch.setattr(train_bench, "gpu_name", lambda: "H200")
    monkeypatch.setattr(train_bench, "Trainer", lambda *_: SimpleNamespace(step=lambda: None, results=[]))
    half = replace(CAUSAL, case=replace(CAUSAL.case, dtype="bfloat16"))
    method, suite = Method("ours-auto"), SimpleNamespace(device=SimpleNamespace(torch_device=CPU), begin=lambda _: 0)
    suite.measure = lambda *_, **__: {"median_ms": 8.0, "mib": 3.0}
    by_rank = [[1.0, 4.0, 2.0], [1.0, 6.0, 2.0]]
    suite.ranks = SimpleNamespace(world_size=2, on_each=lambda call: call(), together=lambda _: by_rank)
    row = train(half, method, suite, [])  # type: ignore[arg-type]
    assert row["tokens_per_second"] == pytest.approx(48 / 8e-3)
    assert (row["first_loss"], row["last_loss"], row["mib"]) == ("5.0000", "2.0000", 3.0)
    matrices = 2 * (16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24) + 16 * 40
    flops = 6 * 48 * matrices + 12 * 2 * 16 * (2 * 24 * 25 // 2)
    assert row["tflops"] == pytest.approx(flops / 8e-3 / 2 / 1e12)
    assert row["mfu_percent"] == pytest.approx(100 * flops / 8e-3 / 2 / 989e12, rel=1e-3)
    assert (row["difference"], row["message"]) == (0.0, None)
    other = train(half, method, suite, [1.0, 5.0, 2.1])  # type: ignore[arg-type]
    assert (other["difference"], other["message"]) == (pytest.approx(0.1 / 2.1), train_bench._DIFFERS)
    assert PRESETS["8b-layers"].matmul_parameters == 8 * 218_103_808 + 4096 * 128_256


@pytest.mark.parametrize("changed", [[1.0, 4.0, 2.01], [1.01, 4.0, 2.0], [1.0, 4.0, float("nan")], [float("nan"), 4.0]])
def test_methods_that_disagree_with_the_first_differ(changed: list[float]) -> None:
    """Methods may have made different numbers of steps."""
    assert difference([1.0, 4.0], [1.0, 4.0, 2.0]) == 0.0
    assert not difference(changed, [1.0, 4.0, 2.0, 1.5]) < 4e-3


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
    assert names[1::2] == [f"{name} compiled" for name in names[::2]]
    assert [method.compiled for method in options.methods] == [name.endswith(" compiled") for name in names]
