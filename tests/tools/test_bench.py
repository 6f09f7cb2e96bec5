"""The benchmark tool: cases, arithmetic, reports, and one run on two ranks."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.forked_programs import launch

from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.tools import bench
from cp_dtensor.tools.bench import announcement, parse_options, progress
from cp_dtensor.tools.cases import Case, Heads, grid
from cp_dtensor.tools.methods import _compiled, methods_by_name
from cp_dtensor.tools.report import REFUSED, Results, Row, markdown, spread

ROOT = Path(__file__).resolve().parents[2]
CASE = Case(32, Heads(4, 2), 8, 2, "float32", "causal", "HeadTail", "auto")


def row(method: str, *samples_ms: tuple[float, ...], **changes: Any) -> Row:
    return Row(CASE, "fwd", method, "measured", samples_ms=samples_ms, ranks=2, **changes)


def results(*rows: Row) -> Results:
    return Results("torch 2.11  \n8 x GPU visible", "torchrun ...", 2, rows)


def test_each_case_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of all methods and cases is one closure, of which Dynamo compiles a limited number."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def eager(case: Case, device: torch.device) -> Any:
        return lambda q: q * case.seq_len

    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (2, 3, 4):
            attention: Any = _compiled(eager, dataclasses.replace(CASE, seq_len=length), torch.device("cpu"))
            assert attention(torch.ones(length)).tolist() == [length] * length


# Cases and options


def test_heads() -> None:
    assert Heads.parse("64:8") == Heads(64, 8)
    assert Heads.parse("64:8:256") == Heads(64, 8, 256)
    assert dataclasses.replace(CASE, heads=Heads(64, 8, 256)).dims == (256, 256)
    for text in ("8", "8:3", "0:0", "a:b", "8:4:2:1", "8:4:0", "8:4:64/", "8:4:/64"):
        with pytest.raises(ValueError, match=r"expected .*heads"):
            Heads.parse(text)


def test_flops_count_what_is_not_masked() -> None:
    latent = dataclasses.replace(CASE, mask="full", heads=Heads(4, 4, 6, 2))
    assert latent.flops("fwd") == 2 * (2 * 4 * 32 * 32) * (6 + 2)
    full, window = (dataclasses.replace(CASE, mask=mask) for mask in ("full", "window 2"))
    assert full.flops("fwd") == 2 * 2 * (2 * 4 * 32 * 32 * 8)  # two products of a multiply and an add
    assert CASE.flops("fwd") == full.flops("fwd") * (32 * 33 / 2) / 32**2
    assert window.flops("fwd") == full.flops("fwd") * (32 + 31) / 32**2
    assert CASE.flops("fwdbwd") == 3.5 * CASE.flops("fwd")


def test_the_grid_has_all_combinations_and_needs_ever_more_memory() -> None:
    heads, fixed = [Heads(32, 8), Heads(32, 32)], {"head_dim": 8, "batch": 1, "dtype": "float32", "layout": "HeadTail"}
    cases = grid([256, 64, 64], heads, ["causal"], ["auto", "MATH"], **fixed)
    expected = {*product((64, 256), heads, ("auto", "MATH"))}
    assert {(case.seq_len, case.heads, case.backend) for case in cases} == expected
    keys = [case.seq_len * case.heads.kv for case in cases]
    assert len(cases) == 8
    assert keys == sorted(keys)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = parse_options([])
    assert sorted({case.seq_len for case in options.cases}) == [8192, 32768, 65536, 131072, 262144]
    assert {case.heads for case in options.cases} == {Heads(32, 8), Heads(32, 32), Heads(64, 8)}
    assert {(case.mask, case.dtype, case.head_dim) for case in options.cases} == {("causal", "bfloat16", 128)}
    names = [method.name for method in options.methods]
    assert {
        "ideal",
        "torch-allgather",
        "torch-alltoall",
        *(f"ours-{name}" for name in ROTATE_METHODS if name != "auto"),
    } <= set(names)

    chosen = parse_options(["--quick", "--seq-lens", "96", "--mask", "full", "--methods", "ideal", "ours-alltoall"])
    assert [case.seq_len for case in chosen.cases] == [96]
    assert chosen.cases[0].mask == "full"
    assert [method.name for method in chosen.methods] == ["ideal", "ours-alltoall"]
    assert len(chosen.cases) == 1 < len(options.cases)  # --quick has fewer heads


def test_runs_without_gpus_are_small_and_announced() -> None:
    small = parse_options(["--device", "cpu"])
    assert [case.seq_len for case in small.cases] == [1024, 2048]
    text = announcement(small, 4)
    rows = 2 * 2 * 11  # not 2 x 2 ranks; torch's are tried
    assert text.startswith(f"bench: {rows} rows of 11 methods on 4 CPU ranks, 1,024 to 2,048 tokens, about ")
    assert "small by default without GPUs" in text
    long = parse_options(["--device", "cpu", "--seq-lens", "65536", "--repeats", "20"])
    assert "minutes" in announcement(long, 4)


def test_progress_has_no_lines_of_refused_rows(capsys: pytest.CaptureFixture[str]) -> None:
    show = progress(2, visible=True)
    for each in (row("ideal", (4.0,)), Row(CASE, "fwd", "torch-ring", REFUSED, "no"), row("ours-auto", (2.0,))):
        show(each)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[1/2, \d+ s left\] 4:2 heads, 32, fwd, ideal: 2 ms", first)
    assert second.startswith("[2/2, 0 s left] ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--methods", "ours-magic"],
            "unknown method 'ours-magic': expected some of ideal, ideal-installed, ideal-kernels, ideal-varlen, ours-a",
        ),
        (["--mask", "windows"], "expected a mask such as causal, full, 'documents 2048'"),
        (["--heads", "8:3"], "multiple of the kv heads, got '8:3'"),
        (["--seq-lens", "0"], "expected a positive integer, got 0"),
        (["--trace", "x", "--trace-method", "ideal"], "--trace-method: expected one of ours-allgather"),
        (["--trace-method", "ours-auto"], "--trace-method and --trace-seq-len need --trace"),
        (["--trace", "x", "--seq-lens", "64", "96", "--trace-seq-len", "32"], "expected one of 64, 96, got 32"),
        (["--seq-lens", "64", "--mask", "documents:0,96"], "the documents of a mask end at 96"),
        (["--timeout", "0"], "expected a positive number, got 0"),
        (["--row-seconds", "nan"], "expected a positive number, got nan"),
        (
            ["--mask", "full", "--methods", "ideal", "torch-flex HeadTail"],
            "--methods: torch-flex HeadTail cannot compute",
        ),
        (["--dropout", "0.1", "--methods", "torch-allgather"], "--methods: torch-allgather cannot compute any"),
        (["--dropout", "0", "1"], "expected a probability from 0 to less than 1, got 1"),
    ],
)
def test_command_lines_that_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(arguments)
    assert message in capsys.readouterr().err


def test_graphs_are_methods_of_their_own() -> None:
    names = [method.name for method in methods_by_name(["ideal", "ours-allgather"], graph=True)]
    assert names == ["ideal", "ours-allgather", "ours-allgather graph"]
    both = [each.name for each in methods_by_name(["ideal", "ours-auto"], graph=True, compiled=True, replay=True)]
    assert both == ["ideal", "ours-auto", "ours-auto replay", "ours-auto compiled", "ours-auto graph"]


# Numbers


def test_the_slowest_rank_counts_and_ideal_is_shared_among_the_ranks() -> None:
    slow = row("ours-allgather", (1.0, 9.0, 1.0), (2.0, 2.5, 3.0))
    ideal = row("ideal", (4.0, 4.0, 4.0))
    torchs = row("torch-alltoall", (10.0,), (7.0,))
    found = results(ideal, slow, torchs, row("torch-allgather", (20.0,)))
    assert slow.median_ms == 2.5
    assert spread(slow.slowest_ms) == pytest.approx((2.2, 2.8))
    assert slow.tflops == pytest.approx(CASE.flops("fwd") / 2 / 2.5e-3 / 1e12)
    assert ideal.median_ms == 2.0
    assert found.percent_of_ideal(slow) == pytest.approx(80)
    assert found.percent_of_ideal(ideal) == 100
    assert found.times_others(slow) == 4
    assert results(slow).percent_of_ideal(slow) is None
    assert results(slow).times_others(slow) is None
    slower_ideal = row("ideal-kernels", (8.0, 8.0))
    assert results(slower_ideal, ideal, slow).percent_of_ideal(slow) == pytest.approx(80)
    assert results(slower_ideal, ideal, slow).percent_of_ideal(slower_ideal) == 50


def test_json_comes_back() -> None:
    found = results(
        row("ideal", (4.0, 5.0), errors={"out": 1e-3}),
        row("ours-allgather", (1.0,), (2.0,), note="n", cpu_us=3.5, extra_bytes=7, errors={"out": 2e-3}),
        Row(CASE, "fwdbwd", "torch-allgather", "refused", "because"),
    )
    text = found.to_json()
    assert Results.from_json(text) == found
    derived = json.loads(text)["rows"][1]
    assert (derived["median_ms"], derived["percent_of_ideal"], derived["error_ratios"]) == (2.0, 112.5, {"out": 2.0})


def test_the_report_shows_every_row() -> None:
    text = markdown(
        results(
            row("ideal", (4.0, 4.0), errors={"out": 1e-3}, kernels=("cuDNN",)),
            row(
                "ours-allgather",
                (2.5,),
                (2.0,),
                cpu_us=31.2,
                predicted_ms=2.1,
                extra_bytes=3 << 20,
                errors={"out": 1.5e-3},
            ),
            Row(CASE, "fwd", "torch-allgather", "error", "a|b\nc"),
            Row(CASE, "fwd", "torch-alltoall", REFUSED, "none."),
            Row(CASE, "fwd", "torch-flex", REFUSED, "none."),
            Row(dataclasses.replace(CASE, seq_len=64), "fwd", "ours-allgather", REFUSED, "too long"),
            dataclasses.replace(row("ours-alltoall", (1234.0,)), pass_name="fwdbwd"),
        )
    )
    lines = text.splitlines()
    assert "`torchrun ...`" in lines
    assert "## 4 query and 2 kv heads of 8, causal, forward, batch 2, float32, HeadTail" in lines
    assert "## 4 query and 2 kv heads of 8, causal, forward + backward, batch 2, float32, HeadTail" in lines
    flops = CASE.flops("fwd") / 2 / 1e12
    assert f"| 32 | ideal | cuDNN | 2.00 | 2.00-2.00 | {flops / 2e-3:#.3g} | 100.0 | - | - | - | 1.0e-03 |" in lines
    expected = (
        f"| 32 | ours-allgather | - | 2.50 | 2.50-2.50 | {flops / 2.5e-3:#.3g} | 80.0 | 2.10 | 31 | 3 "
        "| 1.5e-03 (1.50x) |"
    )
    assert expected in lines
    assert r"| 32 | torch-allgather | - | error: a\|b c | - | - | - | - | - | - | - |" in lines
    assert "Not run: torch-alltoall, torch-flex: none; ours-allgather of 64 tokens: too long." in lines
    assert text.count("torch-flex") == 1
    widths = {line.replace(r"\|", "").count("|") for line in lines if line.startswith("|")}
    assert widths == {6, 12}  # without empty columns: "x others", and in the second table all but times


# The command


@pytest.mark.parametrize(
    ("status", "traced", "code"),
    [("measured", True, 0), ("refused", True, 0), ("error", True, 1), ("measured", False, 1)],
)
def test_a_run_with_errors_ends_with_status_1(
    status: str, traced: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dataclasses.replace(row("ideal", (4.0,)), status=each) for each in ("measured", status)]
    monkeypatch.setattr(bench, "start", lambda *_: (SimpleNamespace(rank=0, world_size=2), None, "torchrun ..."))
    monkeypatch.setattr(bench, "_measure", lambda *_: (rows, None, traced))
    monkeypatch.setattr(bench, "end", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        bench.main(["--device", "cpu"])
    assert int(ended.value.code or 0) == code
    assert "# Benchmark, 2 ranks" in capsys.readouterr().out


def test_a_run_on_two_ranks(tmp_path: Path) -> None:
    arguments = ["--seq-lens", "64", "--heads", "4:2", "--head-dim", "16", "--dtype", "float32", "--repeats", "3"]
    arguments += ["--warm-ms", "5"]
    arguments += ["--device", "cpu", "--graph", "--output", str(tmp_path / "out"), "--trace", str(tmp_path / "trace")]
    printed = launch(2, "cp_dtensor", "bench", *arguments, folder=tmp_path)
    report = (tmp_path / "out" / "bench.md").read_text()
    assert report in printed
    assert "-m cp_dtensor bench --seq-lens 64 --heads 4:2" in report
    assert len(list((tmp_path / "trace").glob("ours-allgather-64-4x2-rank[01].json.gz"))) == 2

    found = Results.from_json((tmp_path / "out" / "bench.json").read_text())
    expected = [each for each in methods_by_name(None, graph=True) if each.has_row(CASE)]
    assert {(each.method, each.pass_name) for each in found.rows} == {
        (each.name, pass_name) for each in expected for pass_name in ("fwd", "fwdbwd")
    }
    assert "rows of 12 methods on 2 CPU ranks, 64 tokens, about" in printed
    assert not re.search(r"^\[.*refused", printed, re.MULTILINE)  # no line of progress
    assert f"[{sum(each.status == 'measured' for each in found.rows)}/" in printed
    for each in found.rows:
        assert each.method in report
        if each.method.startswith("torch-"):  # which has nothing for CPUs
            assert each.status == "refused"
            assert "NotImplementedError" in each.message
        elif each.method.startswith(("ours-hybrid", "ours-nested")):
            assert each.status == "refused"
            assert "it needs several times" in each.message
        elif each.method.startswith("ours-symm_mem"):
            assert (each.status, each.message) == ("refused", "ranks on CPUs share no memory")
        elif each.method.endswith(" graph"):
            assert each.message == "NotImplementedError: CUDA graphs need a GPU"
        else:
            assert each.status == "measured", each
            assert list(each.errors) == (["out"] if each.pass_name == "fwd" else ["out", "dq", "dk", "dv"])
            assert all(error < 1e-6 for error in each.errors.values())
            assert found.percent_of_ideal(each) is not None


@pytest.mark.parametrize(("limit", "code"), [("1.9", 1), ("2.1", 0)])
def test_errors_beyond_the_limit_end_with_status_1(limit: str, code: int) -> None:
    options = parse_options(["--device", "cpu", "--errors", limit])
    assert {(case.backend, case.mask) for case in options.cases} == {
        (backend, mask) for backend in ("FLASH_ATTENTION", "MATH") for mask in ("causal", "full")
    }
    errors = dict.fromkeys(("out", "dq", "dk", "dv"), 1e-3)
    rows = [row("ideal", (1.0,), errors=errors), row("ours-alltoall", (1.0,), errors={**errors, "dk": 2e-3})]
    assert bench.too_large(rows, options.errors) == code
    assert not bench.too_large(rows, None)
    assert bench.too_large([*rows, row("ours-allgather", (1.0,))], 9.0), "it has no errors"
