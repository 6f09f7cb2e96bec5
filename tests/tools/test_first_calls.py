"""The program that times the first calls of a process: on CPUs."""

from __future__ import annotations

import pytest
from support.docs_scripts import docs_script
from support.ranks import run_ranks

from cp_dtensor.tools.ranks import Device


def test_calls_run_and_those_of_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    program = docs_script("first_calls")
    assert program.seconds_of_packages() >= 0

    def body(rank: int) -> list[str]:
        return [name for name, options in program.calls() if program.seconds_of(Device(False), **options) > 0]

    names = ["causal, first", "causal, second", "documents, first", "documents, second", "other documents"]
    assert run_ranks(2, body) == [names] * 2
    monkeypatch.setattr(program, "GPU", True)
    on_gpus = dict(program.calls())
    assert [*on_gpus][:5] == names
    assert [options["replay"] for options in list(on_gpus.values())[5:]] == [True] * 3
    assert on_gpus["documents, first"]["mask"] != on_gpus["other documents"]["mask"]
