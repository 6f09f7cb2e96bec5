"""Logs of the rooms: what is chosen and why, once for each kind of call, and warnings where kernels fall back."""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.gathered_kv import kv_gather
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_dtensor
from cp_dtensor import Documents, context_parallel, context_parallel_attention
from cp_dtensor.attention.backends import select
from cp_dtensor.attention.backends.select import allowed_backends, choose_backend
from cp_dtensor.comm.symm_mem import SymmetricMemory
from cp_dtensor.engine import gather_kv
from cp_dtensor.plan.partition import CallSpec, LayoutPartition
from cp_dtensor.plan.tiling import Masking
from cp_dtensor.spec import logs
from cp_dtensor.spec.layouts import Contiguous
from cp_dtensor.spec.masks import Causal

ON_GPU = CallSpec(
    LayoutPartition(Contiguous(), 8, 8, 1, 1), Causal(), 1, 4, 4, 64, 64, "bfloat16", device="cuda:0", capability=(8, 0)
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing was logged before, and no choice of a backend is cached."""
    monkeypatch.delenv("CP_DTENSOR_LOGS", raising=False)
    logs._log.cache_clear()
    select._choose.cache_clear()  # type: ignore[attr-defined]
    yield
    logs._log.cache_clear()


def lines(caplog: pytest.LogCaptureFixture, room: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == f"cp_dtensor.{room}"]


def attend(rank: int, calls: int, **options: object) -> None:
    torch.manual_seed(0)
    for _ in range(calls):
        q = torch.randn(1, 4, 9, 8, requires_grad=True)
        out = context_parallel_attention(q, q, q, mesh=dist.group.WORLD, seq_len=18, **options)  # type: ignore[arg-type]
        out.sum().backward()  # type: ignore[union-attr]


def test_a_kind_of_call_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing by default."""
    with caplog.at_level(logging.INFO, "cp_dtensor"):
        run_ranks(2, attend, 3)
        run_ranks(2, partial(attend, calls=3, method="ulysses", mask=Documents([0, 5, 18])))
    auto, ring, ulysses = lines(caplog, "engine")
    assert auto == '"auto" takes ring, as always on CPUs'
    assert ring == (
        "attention of 18 queries to 18 keys, batch 1, 4:4 heads of 8, float32, method 'auto', HeadTail(), Full(), on 2 "
        "ranks: ring of 2, K/V by allgather, tiles by FLASH_ATTENTION (rotate_method 'auto')"
    )
    assert "Documents" in ulysses
    assert "heads exchanged by collectives in 1 stages, then one rank's rows, tiles by INTERVALS" in ulysses
    plans = lines(caplog, "plan")
    assert len(plans) == len(set(plans)) >= 2
    pattern = (
        r"rank \d of 2: forward \d tiles in \d steps, backward \d tiles in \d steps, receives 9 rows of K/V, allgather"
    )
    assert len([line for line in plans if re.fullmatch(pattern, line)]) == 2
    assert len(lines(caplog, "comm")) == 2
    assert any(
        "FLASH_ATTENTION computes full and causal tiles of float32" in line for line in lines(caplog, "attention")
    )
    logs._log.cache_clear()
    caplog.clear()
    run_ranks(2, attend, 1)
    assert not caplog.records


def test_nested_rings_and_hybrids_are_described(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        q = torch.randn(1, 4, 4, 8)
        for method in ("ring", "hybrid"):
            context_parallel_attention(q, q, q, mesh=mesh, method=method, seq_len=16)

    with caplog.at_level(logging.INFO, "cp_dtensor.engine"):
        run_ranks(4, body)
    nested, hybrid = (line.partition(": ")[2] for line in lines(caplog, "engine"))
    assert nested.startswith("nested ring of ring of 2, K/V by allgather")
    assert hybrid.startswith("heads exchanged by collectives in 1 stages, then ring of 2")


def test_a_kind_of_context_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int) -> None:
        for _ in range(2):
            x = torch.zeros(1, 1, 16, 4)
            with context_parallel(dist.group.WORLD, buffers=[x], buffer_seq_dims=[2]):
                F.scaled_dot_product_attention(x, x, x)

    with caplog.at_level(logging.INFO, "cp_dtensor.api"):
        run_ranks(2, body)
    assert lines(caplog, "api") == [
        "context_parallel over 2 ranks, method 'auto', HeadTail(), mask None, buffers (1, 1, 16, 4) along dim 2"
    ]


def test_flex_attention_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(rank: int) -> None:
        gather = kv_gather(Contiguous(), 35, SymmetricMemory())
        k = torch.randn(1, 2, 18 - rank, 16)
        for _ in range(2):
            gather.gather(k, k)

    gather_kv._cache.clear()
    gather_kv._rows_of_every_rank.cache_clear()  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO, "cp_dtensor.engine"):
        run_ranks(2, body)
    may, does = lines(caplog, "engine")
    assert may.startswith("FlexAttention of 35 keys on 2 ranks, Contiguous(): K/V of all ranks are read from shared")
    assert does == (
        "FlexAttention of 35 keys on 2 ranks, Contiguous(): K/V of all ranks are all-gathered, and torch's kernel "
        "computes this rank's queries"
    )


def test_slow_kernels_on_gpus_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Torch's math where the faster ones refuse, unless it is the only one allowed; masks without Triton."""
    wide = replace(ON_GPU, dtype="float64")
    with sdpa_kernel(SDPBackend.MATH):
        choose_backend(wide)
    masked = replace(ON_GPU, masking=Masking.INTERVALS_UNBROKEN)
    choose_backend(masked)
    assert not caplog.records
    choose_backend(wide, allowed_backends())
    with mock.patch.object(select, "TRITON_AVAILABLE", False):
        choose_backend(masked)
        choose_backend(masked)
    math, masks = lines(caplog, "attention")
    assert math.startswith("MATH computes full and causal tiles of float64, head dim 64, on cuda (FLASH_ATTENTION: ")
    assert masks.startswith("masks, bias and dropout of bfloat16, head dim 64, run as torch operations")


@pytest.mark.parametrize(
    ("names", "shown", "warned"),
    [("engine, api", {"engine", "api"}, False), ("all", set(logs.ROOMS), False), ("engines", set(), True)],
)
def test_the_environment_shows_rooms(names: str, shown: set[str], warned: bool) -> None:
    program = f"""
import logging, os, sys
os.environ.update(CP_DTENSOR_LOGS={names!r}, RANK="3")
import cp_dtensor.spec.logs as logs
logs.show_logs(os.environ["CP_DTENSOR_LOGS"])
logging.basicConfig(level=logging.DEBUG, format="root %(message)s")
for room in logs.ROOMS:
    logging.getLogger("cp_dtensor." + room).info("hello")
"""
    blocked = "import sys; sys.modules['torch'] = None\nimport types; p = types.ModuleType('cp_dtensor')\n"
    blocked += "import importlib.util; p.__path__ = importlib.util.find_spec('cp_dtensor').submodule_search_locations\n"
    blocked += "sys.modules['cp_dtensor'] = p\n"
    done = subprocess.run([sys.executable, "-c", blocked + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for room in logs.ROOMS:
        assert (f"[rank 3 cp_dtensor.{room}] hello" in done.stderr) == (room in shown)
    assert done.stderr.count("root hello") == len(logs.ROOMS) - len(shown)
    assert ("expected names among plan, comm, engine, attention, api and all, got engines" in done.stderr) == warned


def test_the_package_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.object(logs, "show_logs") as shown:
        importlib.reload(cp_dtensor)
        shown.assert_not_called()
        monkeypatch.setenv("CP_DTENSOR_LOGS", "comm")
        importlib.reload(cp_dtensor)
        shown.assert_called_once_with("comm")
    monkeypatch.undo()
    importlib.reload(cp_dtensor)
