"""`python -m cp_dtensor doctor`: its findings, on machines that are sound and on others."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.forked_programs import launch
from support.processes import way_to_start
from support.ranks import run_ranks

from cp_dtensor import Cluster, HeadTail
from cp_dtensor.comm.transports import ROTATE_METHODS
from cp_dtensor.engine.choose import estimates, fastest
from cp_dtensor.tools import doctor, methods
from cp_dtensor.tools.cases import Case, Heads
from cp_dtensor.tools.doctor import NOTE, OK, PROBLEM, Finding, check, report, results
from cp_dtensor.tools.plan import spec_of
from cp_dtensor.tools.ranks import Device, Ranks, stand_for_nodes


@pytest.fixture
def meshes_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command keeps its meshes; ranks that are threads would share them."""
    monkeypatch.setattr(methods, "mesh_of_ranks", methods.mesh_of_ranks.__wrapped__)


def of_threads() -> Ranks:
    """Return the ranks of `run_ranks`."""
    assert dist.group.WORLD is not None
    return Ranks(dist.group.WORLD)


def by_check(findings: Iterator[Finding]) -> dict[str, Finding]:
    return {each.check: each for each in findings}


def test_a_sound_machine_ends_in_ok(tmp_path: Path) -> None:
    """Two gloo ranks: every method is compared with one device, and the shape of the options is explained."""
    text = launch(2, "cp_dtensor", "doctor", "--json", "--seq-len", "65536", "--heads", "16:4", folder=tmp_path)
    found = json.loads(text[text.index("{") :])
    assert found["ok"] is True
    findings = {each["check"]: each for each in found["findings"]}
    assert {each["status"] for each in findings.values()} <= {OK, NOTE}
    assert torch.__version__ in findings["versions"]["text"]
    for name in ("allgather", "alltoall", "ulysses"):
        assert name in findings["correctness"]["text"]
    assert findings["gloo"]["text"] == "works over 2 ranks"
    assert "65,536 tokens on 2 ranks, 16:4 heads of 128" in findings["auto"]["text"]


@pytest.mark.sweep
def test_four_ranks_have_hybrids_and_nested_rings(meshes_of_threads: None) -> None:
    ((finding,), *_) = run_ranks(4, lambda rank: list(results(of_threads(), Device(use_gpu=False))))
    assert finding.status == OK
    assert finding.text.startswith("allgather, alltoall, ulysses, hybrid-2, nested-2: forward and")


def test_ranks_of_several_nodes_are_told_their_links_and_a_mesh(
    meshes_of_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(doctor, "mesh_of_ranks", methods.mesh_of_ranks)
    monkeypatch.setattr(doctor, "results", lambda *_: ())

    def body(rank: int) -> dict[str, Finding]:
        return by_check(check(of_threads(), Device(use_gpu=False), 131072, Heads(32, 8)))

    found = run_ranks(4, body)[0]
    assert re.match(r"2 nodes of 2 \(.*: ranks 0 to 1; .*: ranks 2 to 3\)\n\S+ GB/s into each", found["nodes"].text)
    cluster, spec = Cluster("H200", gpus_per_node=2, nodes=2), spec_of(Case(131072, Heads(32, 8)), HeadTail(), 4)
    auto = fastest(estimates(spec, cluster, ROTATE_METHODS["auto"], one_axis=True), cluster.tolerance)
    assert auto == "split ring"  # that is, rings over two axes
    text = found["mesh"].text
    assert text.startswith("chosen: nested ring, K/V by symm_mem, HeadTail: the first within 30% of the fastest")
    assert 'init_device_mesh("cuda", (2, 2), mesh_dim_names=("ring", "ulysses"))["ring", "ulysses"]' in text
    assert 'context_parallel(mesh, method="ring"' in text


def test_ranks_of_a_host_stand_for_those_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in range(4):
        monkeypatch.setattr(os, "environ", {"RANK": str(rank), "WORLD_SIZE": "4"})
        stand_for_nodes(2)
        found.append((os.environ["NCCL_HOSTID"], os.environ["LOCAL_WORLD_SIZE"]))
    assert found == [("node 0", "2")] * 2 + [("node 1", "2")] * 2
    with pytest.raises(SystemExit, match="--nodes: expected a divisor of the number of ranks, 4, got 3"):
        stand_for_nodes(3)


@pytest.mark.sweep
def test_a_check_of_one_rank_that_raises_is_a_problem_and_others_run(
    meshes_of_threads: None,
) -> None:
    def body(rank: int) -> list[Finding]:
        return list(check(of_threads(), Device(use_gpu=False), 4096, Heads(4, 2)))

    hangs = subprocess.TimeoutExpired(["nvidia-smi"], 30)
    with (
        mock.patch.object(doctor, "environment", side_effect=hangs),
        mock.patch.object(doctor, "exchange", return_value=()),
    ):
        ((*findings, last, _),) = run_ranks(1, body)
    problem = next(each for each in findings if each.status == PROBLEM)
    assert problem.check == "environment"
    assert "timed out after 30 seconds" in problem.text
    assert last.check == "auto"


def test_wrong_results_of_one_rank_are_a_problem(meshes_of_threads: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The gradient of one rank is off by 1e-6 in one method."""
    right = methods.context_parallel_attention

    def attention(*tensors: torch.Tensor, **options: object) -> object:
        out = right(*tensors, **options)  # type: ignore[arg-type]
        if options["method"] == "ulysses" and dist.get_rank() == 1:
            tensors[1].register_hook(lambda grad: grad * (1 + 1e-6))
        return out

    def body(rank: int) -> int:
        return report(results(of_threads(), Device(use_gpu=False)), as_json=False, visible=rank == 0)

    with mock.patch.object(methods, "context_parallel_attention", attention):
        assert run_ranks(2, body) == [3, 0], "the first rank ends the command"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith(PROBLEM)] == [
        [PROBLEM, "ulysses,", "causal"],
        [PROBLEM, "ulysses,", "documents"],
        [PROBLEM, "correctness", "allgather,"],
    ]
    assert "choose another method or rotate_method" in lines[1]
    assert lines[-1].startswith("3 problems: ulysses, causal, ulysses, documents 64, correctness")


def crash(rank: int, *_: object) -> None:
    if rank == 1:
        os._exit(1)  # as an uncaught exception
    time.sleep(60)


def fail(rank: int, *_: object) -> None:
    raise ValueError("no such device")


def hang(rank: int, *_: object) -> None:
    time.sleep(0 if rank == 0 else 60)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (crash, "rank 1 ended: process 1 terminated with exit code 1"),
        (fail, " ended: ValueError: no such device"),
        (hang, "1] did not end within 1 s"),
    ],
)
def test_ranks_that_crash_or_hang_are_a_problem(
    body: Any, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    start = partial(doctor.mp.start_processes, start_method=way_to_start("gloo").get_start_method())
    monkeypatch.setattr(doctor.mp, "spawn", start)  # saves seconds
    monkeypatch.setattr(doctor, "_run_rank", body)
    monkeypatch.setattr(doctor, "_SECONDS", 1 if body is hang else 60)
    with pytest.raises(SystemExit) as ended:
        doctor.main(["--device", "cpu", "--json"])
    assert ended.value.code == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["status"] == PROBLEM
    assert text in finding["text"]
    assert "troubleshooting.md" in finding["remedy"]


@pytest.mark.parametrize(("rank", "status"), [(0, 3), (1, 0)])
def test_ranks_that_would_share_a_gpu_are_a_problem(
    rank: int, status: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As found under torchrun with two ranks on a host of one GPU, before anything is started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        doctor.main([])
    assert ended.value.code == status
    printed = capsys.readouterr().out
    assert ("2 ranks on this host for 1 GPU: " in printed) == (rank == 0)
    assert ("1 problem: devices" in printed) == (rank == 0)


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", PROBLEM), ("2.11.0+cu130", None), ("2.15.0a0", None), ("2.16.0", NOTE)]
)
def test_versions_of_torch(version: str, status: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = by_check(doctor.packages())
    assert (found["torch"].status if "torch" in found else None) == status


def test_another_cudnn_is_a_problem() -> None:
    message = "cuDNN version incompatibility: PyTorch was compiled against (9, 19, 0)\nmore"
    with mock.patch.object(doctor, "versions", side_effect=RuntimeError(message)):
        found = by_check(doctor.packages())
    assert found["cuDNN"].status == PROBLEM
    assert found["cuDNN"].text == message.splitlines()[0]


def test_other_packages_than_torch_was_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = ["filelock", "triton==3.6.0; platform_system == 'Linux'", "nvidia-nccl-cu12==2.28.9", "jinja2==3"]
    installed = {"triton": "3.5.1", "nvidia-nccl-cu12": "2.28.9", "jinja2": "4"}
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    _, finding = doctor.packages()
    assert finding.text == "triton 3.5.1 is installed, this torch was built with 3.6.0"
    assert (finding.status, finding.remedy) == (NOTE, "if kernels fail: pip install triton==3.6.0")


def test_a_hopper_without_triton_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(doctor, "versions", lambda: [("torch", "2")])
    monkeypatch.setattr(doctor, "installed_version", lambda name: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    found = by_check(doctor.packages())
    assert (found["Triton"].status, found["packages"].status) == (PROBLEM, NOTE)
    (setting,) = doctor.environment()
    assert (setting.status, setting.remedy) == (PROBLEM, "unset CUDA_LAUNCH_BLOCKING")
    monkeypatch.setattr(doctor, "installed_version", lambda name: "1.0")
    assert set(by_check(doctor.packages())) == {"versions"}


@pytest.mark.parametrize(
    ("flops", "launch", "expected"),
    [
        ((700e12, 690e12), 5e-6, (OK, OK)),
        ((700e12, 300e12), 5e-6, (PROBLEM, OK)),  # below half of 989e12
        ((800e12, 600e12), 30e-6, (PROBLEM, NOTE)),  # rank 1 is slower than 85% of rank 0
    ],
)
def test_slow_gpus_and_slow_hosts(
    flops: tuple[float, float], launch: float, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpu_name", lambda: "H200")
    found = by_check(doctor.speed([(each, launch) for each in flops]))
    assert (found["GPU speed"].status, found["launches"].status) == expected
    assert ("rank 1" in found["GPU speed"].text) == (expected[0] == PROBLEM)


@pytest.mark.parametrize(
    ("name", "gpu"), [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H100 PCIe", None), ("NVIDIA L40S", None)]
)
def test_names_of_gpus(name: str, gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert doctor.gpu_name() == gpu


def test_slow_links_are_a_problem() -> None:
    """Half of 330 GB/s is expected of NVLink at least; nothing is known of the network between hosts."""
    slow = doctor.link("H200", 8, 1, 100e9)
    assert slow.status == PROBLEM
    assert "100 GB/s into a rank; NVLink of H200s gives about 330" in slow.text
    assert "nvidia-smi nvlink --status" in slow.remedy
    assert doctor.link("H200", 8, 1, 300e9).status == OK
    assert doctor.link("H200", 16, 2, 20e9).status == OK
    assert doctor.link(None, 8, 1, 1e9).status == OK


def test_symmetric_memory_is_expected_of_gpus_with_nvlink_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.status for each in doctor.symmetric_memory("no peer access", 2, 1)] == [NOTE]
    monkeypatch.setattr(doctor, "gpu_name", lambda: "H200")
    statuses = [
        next(doctor.symmetric_memory(obstacle, ranks, hosts)).status
        for obstacle, ranks, hosts in ((None, 8, 1), ("no peer access", 8, 1), ("2 hosts", 8, 2), ("alone", 1, 1))
    ]
    assert statuses == [OK, PROBLEM, NOTE, NOTE]
