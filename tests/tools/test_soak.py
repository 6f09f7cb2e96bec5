"""The soak command: cases by every way in, what it calls wrong, and the program that it prints."""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.forked_programs import launch
from support.masked_problems import shown
from support.ranks import run_ranks
from support.settings_state import cold_caches
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import cp_dtensor
from cp_dtensor.spec import masks
from cp_dtensor.spec.cache import LRUCache
from cp_dtensor.tools import soak, soak_cases
from cp_dtensor.tools.ranks import Ranks, start
from cp_dtensor.tools.soak_cases import ENTRIES, SURROUNDINGS, Case, draw_case, errors_of

RANKS = 2
DRAWN = [draw_case(number, 0, RANKS) for number in range(300)]


def short(entry: str, around: str, number: int = 0) -> Case:
    """A drawn case of few tokens, but of more than 9."""
    found = [case for case in DRAWN if (case.entry, case.around) == (entry, around) and max(case.lengths) > 9]
    return sorted(found, key=lambda case: max(case.lengths))[number]


def errors(case: Case) -> list[dict[str, float]]:
    return run_ranks(RANKS, lambda rank: errors_of(case, soak._meshes(False)[case.mesh]))


def test_all_ways_in_are_drawn() -> None:
    assert {case.entry for case in DRAWN} == {*ENTRIES}
    assert {case.around for case in DRAWN} == {*SURROUNDINGS}
    assert {type(case.layout).__name__ for case in DRAWN} == {
        "HeadTail", "Contiguous", "Striped", "MirroredBatch", "Balanced", "PerDocument",
    }  # fmt: skip
    assert len({*DRAWN}) == len(DRAWN)
    assert draw_case(7, 0, RANKS) == DRAWN[7] != draw_case(7, 1, RANKS)


def test_masks_mean_what_they_are_defined_to_mean() -> None:
    r = random.Random(0)
    for _ in range(60):
        q_len, kv_len = r.randint(1, 7), r.randint(1, 7)
        mask = soak_cases._draw_mask(r, q_len, kv_len, 1)
        assert torch.equal(soak_cases.pairs(mask, q_len, kv_len), shown(mask, q_len, kv_len, 1)[0, 0]), mask


@pytest.mark.filterwarnings("ignore")  # of torch, as the command does
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_way_in_is_right(entry: str) -> None:
    arounds = {case.around for case in DRAWN if case.entry == entry}
    assert arounds
    for around in sorted(arounds):
        case = short(entry, around)
        for found in errors(case):
            assert "out" in found
            assert entry == "flex" or {"q"} < {*found}
            assert all(error <= 1 for error in found.values()), (case, found)


@pytest.mark.filterwarnings("ignore")  # of torch, as the command does
def test_calls_leave_no_objects_outside_of_caches() -> None:
    def left() -> Counter[str]:
        cold_caches()
        for each in gc.get_objects():
            if type(each) is LRUCache:  # of a group
                each.clear()
        gc.collect()
        kinds = [type(each) for each in gc.get_objects()]
        return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("cp_dtensor"))

    def body(rank: int) -> list[Counter[str]]:
        meshes, counts = soak._meshes(False), []
        for number in range(3):  # the first has what each kind of call makes once
            for entry in ENTRIES:
                # Compiled code may refer to a module's configuration as long as the process lives.
                if entry != "module":
                    case = short(entry, "plain", number)
                    errors_of(case, meshes[case.mesh])
            dist.barrier()
            counts.append(left() if rank == 0 else Counter())
            dist.barrier()
        return counts

    _, second, third = run_ranks(RANKS, body)[0]
    assert second == third


@pytest.mark.parametrize("wrong", ["out", "v"])
def test_wrong_results_are_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = soak_cases._dense

    def other(case: Case, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        out = dense(case, tensors)
        return out * (1 + 1e-6) if wrong == "out" else out + 1e-6 * (tensors["v"] - tensors["v"].detach()).sum()

    monkeypatch.setattr(soak_cases, "_dense", other)
    case = next(case for case in DRAWN if (case.entry, case.around, case.dtype) == ("function", "plain", "float64"))
    assert all(found[wrong] > 1 for found in errors(case))


def test_rounding_of_gradients_that_are_0_is_no_error() -> None:
    """Each query sees its own key, so that gradients of q and k are 0. Errors grow with the number of elements."""
    case = next(case for case in DRAWN if (case.entry, case.around, case.sinks) == ("function", "plain", False))
    own_key = {"mask": masks.SlidingWindow(0, 0), "layout": cp_dtensor.HeadTail(), "bias": "none", "scale": None}
    size: dict[str, Any] = {"lengths": (439, 439), "batch": 2, "heads": (4, 2), "head_dim": 128, "dtype": "float32"}
    for found in errors(replace(case, **own_key, **size)):
        assert 0 < max(found.values()) <= 1


def soaked(ranks: int, *arguments: str) -> list[bool]:
    options, store = soak.parse_options(["--device", "cpu", "--seed", "5", *arguments]), dist.HashStore()
    return run_ranks(ranks, lambda rank: soak.soak(options, Ranks(store, rank, ranks)))


def test_a_wrong_case_is_printed_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "errors_of", lambda case, mesh: {"out": float("nan"), "q": 0.5})
    assert soaked(RANKS, "--cases", "2") == [False] * RANKS
    output = capsys.readouterr().out
    assert "rank 1, case 1: errors in multiples of what is allowed: {'out': nan}" in output
    assert "2 calls, 2 wrong; MiB of ranks: RSS" in output
    assert output.splitlines()[-1].startswith("failed: 2 calls of 2 cases, 2 wrong; while cases were repeated")
    ran = programs_of(output.partition("case 1 is wrong:\n\n")[2].partition("The first wrong case, 0:\n\n"))
    assert ran == [draw_case(1, 5, RANKS), draw_case(0, 5, RANKS)]


def programs_of(texts: Sequence[str]) -> list[Case]:
    """The cases that printed programs run."""
    ran: list[Case] = []
    for text in texts:
        code = "\n".join(line for line in text.splitlines() if line.startswith(("#", "from ", "run(")))
        names: dict[str, Any] = {"Case": Case, "run": ran.append}
        exec(code.replace("from cp_dtensor.tools.soak import Case, run", ""), names)
        assert not code or code.startswith("# torchrun --nproc-per-node 2 case.py\n")
        assert not code or (names["Documents"], names["Intersection"]) == (cp_dtensor.Documents, masks.Intersection)
    return ran


def test_the_first_error_is_printed_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(case: Case, mesh: object) -> dict[str, float]:
        if dist.get_rank() == 0:
            time.sleep(0.2)  # it notices that the other rank has failed
        raise ValueError(f"planted on {dist.get_rank()}\nmore")

    monkeypatch.setattr(soak, "errors_of", failing)
    original = soak.soak

    def ending(*arguments: Any) -> bool:
        with pytest.raises(SystemExit, match="1"):
            original(*arguments)
        return False

    monkeypatch.setattr(soak, "soak", ending)
    soaked(RANKS)
    in_full, _, in_short = capsys.readouterr().out.partition("failed: rank 1 in case 0, above\n")
    assert programs_of([in_full]) == [draw_case(0, 5, RANKS)]
    assert in_full.endswith("ValueError: planted on 1\nmore\n\n")
    assert in_short.endswith("rank 0 failed after it: planted on 0\n")


def test_memory_that_grows_while_cases_are_repeated_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(soak, "errors_of", lambda case, mesh: seeds.append(case.seed) or {"out": 0.5})
    for most in ("19", "20"):
        seeds.clear()
        memory = iter([0, 500, 600, 700, 800, 1000, 1010, 1020])
        monkeypatch.setattr(soak, "_memory", lambda use_gpu, memory=memory: {"RSS": next(memory)})
        assert soaked(1, "--cases", "8", "--growth", most) == [most == "20"]
        assert seeds[6:] == seeds[:2]
        assert len({*seeds}) == 6
    assert "memory grew by 20 MiB, 20 are allowed (ranks: RSS 20)" in capsys.readouterr().out


def test_the_command(tmp_path: Path) -> None:
    output = launch(RANKS, "cp_dtensor", "soak", "--cases", "2", "--seed", "3", "--verbose", folder=tmp_path)
    assert "2 ranks, seed 3" in output
    assert f"case 1: {draw_case(1, 3, RANKS)}" in output
    assert output.splitlines()[-1].startswith("passed: 2 calls of 2 cases, 0 wrong")


@pytest.mark.parametrize(("exitcode", "printed"), [(1, ""), (-11, "failed: rank 1 was ended by SIGSEGV\n")])
def test_torchruns_report_is_left_out(
    exitcode: int, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: argparse.Namespace) -> None:
        assert options.nproc_per_node == "3"
        assert options.training_script_args == ["soak", "--ranks", "3"]
        failures = {0: ProcessFailure(0, 4, -signal.SIGTERM, ""), 1: ProcessFailure(1, 5, exitcode, "")}
        raise ChildFailedError("soak", failures)

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(soak.torchrun, "run", run)
    with pytest.raises(SystemExit) as ended:
        soak.main(["--ranks", "3"])
    assert ended.value.code == 1
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(("gpus", "device", "backend"), [(1, 0, "gloo"), (2, 1, "nccl")])
def test_more_ranks_than_gpus_share_these(
    gpus: int, device: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: dict[str, Any] = {}
    monkeypatch.setattr(os, "environ", {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    monkeypatch.setattr(dist, "rendezvous", lambda _: iter([(dist.HashStore(), 1, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: joined.update(backend=backend, **rest))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: joined.update(device=device))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: joined["device"])
    start("-m cp_dtensor soak", (), True, 120, may_share_gpus=True)
    assert (joined["device"], joined["backend"]) == (device, backend)
    assert (joined["device_id"] is None) == (gpus == 1)
    assert ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES" in os.environ) == (gpus == 1)
