"""The program that compares two versions of the package: on two CPU ranks, and the results of both."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.docs_scripts import FOLDER, ROOT, docs_script
from support.forked_programs import launch
from support.ranks import run_ranks

import cp_dtensor
from cp_dtensor.tools.cases import Heads


def test_a_row_for_each_call_and_version(tmp_path: Path) -> None:
    arguments = ["--before", str(ROOT), "--seq-lens", "32", "64", "--json", "out.json"]
    text = launch(2, FOLDER / "versions.py", *arguments, folder=tmp_path)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    expected = itertools.product((32, 64), ("ring", "ulysses"), ("forward", "both"), ("before", "now"))
    assert [(row["tokens"], row["method"], row["passes"], row["version"]) for row in rows] == [*expected]
    assert all(row["eager, ms"] > 0 for row in rows)
    assert "| 64 | ulysses | both | before |" in text


def test_another_version_is_imported_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("versions")
    package = tmp_path / "checkout" / "cp_dtensor"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from cp_dtensor.inner import context_parallel_attention\n")
    (package / "inner.py").write_text("def context_parallel_attention():\n    return 'cp_dtensor', __name__\n")
    monkeypatch.setattr("sys.path", [*sys.path])
    with mock.patch.dict(sys.modules):
        assert program.imported(tmp_path / "checkout", tmp_path)() == ("cp_before", "cp_before.inner")


def test_calls_return_what_their_version_computes() -> None:
    program = docs_script("versions")

    def doubled(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        out = cp_dtensor.context_parallel_attention(*inputs, **options)
        assert isinstance(out, torch.Tensor)
        return 2 * out

    def results(rank: int) -> dict[tuple[str, str, str], list[torch.Tensor]]:
        versions = {"before": doubled, "now": cp_dtensor.context_parallel_attention}
        calls = program.calls_of(versions, Heads.parse("4:2:16"), 64, torch.device("cpu"))
        return {key: [x.detach().double() for x in call()] for key, call in calls.items()}

    for found in run_ranks(2, results):
        wanted = found["ring", "both", "now"]
        for (method, passes, version), tensors in found.items():
            assert len(tensors) == (4 if passes == "both" else 1)
            for got, want in zip(tensors, wanted, strict=False):
                expected = 2 * want if version == "before" else want
                assert float((got - expected).norm() / expected.norm()) < 2e-2, (method, passes, version)


def test_the_checkout_must_have_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        docs_script("versions").main(["--before", str(tmp_path)])
    assert f"expected a checkout with the folder cp_dtensor, got {tmp_path}" in capsys.readouterr().err
