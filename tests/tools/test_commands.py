"""The command line `python -m cp_dtensor`: its subcommands, their help, and `doctor --info`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.pretended_packages import FlashModule, FlexModule, fresh_process, install

from cp_dtensor.__main__ import COMMANDS, main
from cp_dtensor.attention.backends.aten import CudnnAttention
from cp_dtensor.tools.doctor import facts, kernels
from cp_dtensor.tools.report import versions

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name, (_, about) in COMMANDS.items():
        assert f"  {name:<11} {about}" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"usage: python -m cp_dtensor {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("benchmark", "'benchmark'"),
        ("bench --methods ours-magic", "unknown method 'ours-magic': expected some of ideal, ideal-installed, ideal-"),
        ("bench --mask windows", "expected a mask such as causal, full, 'documents 2048'"),
        ("bench --heads 8:3", "multiple of the kv heads, got '8:3'"),
        ("bench --seq-lens 0", "expected a positive integer, got 0"),
        ("bench --seq-lens 64 --mask documents:0,96", "the documents of a mask end at 96"),
        ("bench --errors nan", "expected a positive number, got nan"),
        ("train-bench --methods ours-fastest", "unknown method 'ours-fastest': expected some of ideal"),
        ("train-bench --methods ours-auto ideal", "--methods: ideal is attention alone, without a context for models"),
        ("train-bench --mask documents:0,96 --seq-lens 64", "the documents of a mask end at 96"),
        ("draw --mask documents:0,90", "the documents of a mask end at 90"),
        ("draw --layout Zigzag", "expected a layout, one of HeadTail"),
        ("draw --ranks 17", "--ranks: expected at most 16"),
        ("draw --seq-len 4096", "--seq-len: expected at most 2048"),
        ("draw -o /no/such/folder/x.png", "--output /no/such/folder/x.png"),
        ("draw -o x.word", "--output x.word"),
    ],
)
def test_command_lines_that_are_refused(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["bench", "train-bench"])
def test_commands_of_several_ranks_name_torchrun(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(
        SystemExit, match=f"^start with torchrun: torchrun --nproc-per-node 2 -m cp_dtensor {command} --device cpu$"
    ):
        main([command, "--device", "cpu"])


def test_info_is_one_aligned_table_without_triton_and_gpus() -> None:
    program = """
import sys
import importlib.metadata
sys.modules["triton"] = None  # its import fails from here on
version = importlib.metadata.version
importlib.metadata.version = lambda name: version("no-such-package" if name == "triton" else name)
from cp_dtensor.__main__ import main
assert not any(name.startswith("cp_dtensor.tools") for name in sys.modules)
main(["doctor", "--info"])
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "-c", program]
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    names = [name for name, _ in facts() if name != "triton"]
    width = max(map(len, names))
    by_name = {line[:width].rstrip(): line[width:].strip() for line in printed.splitlines()}
    assert [*by_name] == names
    assert by_name["devices"].startswith("CPU, ")
    operations = "masks: torch operations; bias, dropout: torch operations"
    assert by_name["kernels, bfloat16, 128"] == f"causal, full: torch's flash; {operations}"
    assert by_name["kernels, bfloat16, 192/128"].startswith("causal, full: torch's math; ")


def test_info_says_what_the_packages_compute() -> None:
    with fresh_process() as patch:
        install(patch, FlashModule(), FlexModule())
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(CudnnAttention, "refusal", lambda *arguments: None)
        patch.setattr(torch.backends.cudnn, "version", lambda: 91900)
        patch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 28, 9)), raising=False)
        rows, installed = dict(kernels()), dict(versions())
    assert installed.items() >= {"flash-attn-4": "4.0.0b36", "nvidia-cudnn-frontend": "1.32.0"}.items()
    assert rows["kernels, bfloat16, 192/128"].split("; ") == [
        "causal, full: FlashAttention-4", "masks: cuDNN's FlexAttention", "bias, dropout: ours in Triton",
        "deterministic: FlashAttention-4",
    ]  # fmt: skip
    grouped = rows["kernels, bfloat16, 192/128, grouped"]
    assert grouped.startswith("causal, full: FlashAttention-4; masks: ours in Triton;")
    assert rows["kernels, bfloat16, 256"].startswith(
        "causal, full: FlashAttention-4 (full backward: cuDNN, causal backward: cuDNN); masks:"
    )
    assert rows["kernels, bfloat16, 512"].startswith("causal, full: cuDNN; masks: torch operations;")
    assert rows["kernels, float32, 128"].startswith("causal, full: cuDNN; masks: ours in Triton;")
