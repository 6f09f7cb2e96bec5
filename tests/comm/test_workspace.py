"""Workspaces on a machine without GPUs."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.shared_memory import shared_memory

from cp_dtensor.comm import flags
from cp_dtensor.comm import symm_mem_workspace as workspaces
from cp_dtensor.tools.ranks import Device

CPU = torch.device("cpu")


def map_memory(kv_bytes: int = 1024) -> workspaces.Workspace:
    return workspaces.workspace(dist.group.WORLD, CPU, kv_bytes, 512)


@pytest.mark.parametrize("maps_in_inference", [True, False])
def test_training_after_inference(maps_in_inference: bool) -> None:
    """Tensors made in inference mode cannot be written to outside of it."""

    def body(_rank: int) -> None:
        with torch.inference_mode(maps_in_inference):
            workspace = map_memory()
        with torch.inference_mode():
            workspace.kv(torch.bfloat16).fill_(1.0)
        with torch.no_grad():  # as in an autograd function
            for rows in (workspace.kv(torch.bfloat16), workspace.kv(torch.float32), workspace.grads(torch.uint8)):
                assert not rows.is_inference()
                rows.narrow(0, 0, 8).copy_(torch.zeros(8))
        assert workspace.kv(torch.bfloat16)[:17].tolist() == [0.0] * 16 + [1.0]
        assert workspace.kv(torch.float16) is workspace.kv(torch.float16), "views are cached"
        assert workspace.kv(torch.float16).numel() == workspace.kv_bytes // 2
        assert workspace.kv(torch.uint8).data_ptr() == workspace.kv(torch.float32).data_ptr()
        assert workspace.grads(torch.uint8).numel() == workspace.grad_bytes

    with shared_memory():
        run_ranks(1, body)


def test_the_flag_kernel_is_loaded_when_memory_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph could not capture that."""
    launched: list[list[int]] = []
    with shared_memory():
        monkeypatch.setattr(flags, "flag_launch", lambda addresses: lambda value: launched.append(addresses.tolist()))
        run_ranks(1, lambda _: map_memory())
        monkeypatch.undo()
    (addresses,) = launched
    assert not any(addresses), "no flag is passed yet"


def test_memory_is_unmapped_when_a_larger_one_is_mapped() -> None:
    """At once, and not by a garbage collection."""

    def body(rank: int) -> bool:
        first = weakref.ref(map_memory())
        map_memory(64 << 20)
        return first() is None

    gc.collect()
    gc.disable()
    try:
        with shared_memory():
            assert all(run_ranks(2, body))
    finally:
        gc.enable()


def test_released_memory_is_unmapped_and_mapped_again() -> None:
    """Also that of captured graphs. Memory that was mapped since counts for what is measured."""

    def body(rank: int) -> None:
        group, device = dist.group.WORLD, Device(use_gpu=False)
        held = [
            weakref.ref(workspaces.workspace(each, device.torch_device, 8 << 20, 512))
            for each in (group, dist.new_group([0]))
        ]
        workspaces.memory_of(group).pinned.append(held[0]())
        device.free_unused()
        assert [each() for each in held] == [None, None]
        assert device.mapped_bytes() == 0
        second = map_memory()
        assert device.mapped_bytes() == second.buffer.bytes_of[rank].numel() < 8 << 20

    with shared_memory():
        run_ranks(1, body)


@pytest.mark.parametrize("is_captured", [False, True])
def test_calls_that_raise_keep_no_memory_beyond_the_next_call(is_captured: bool) -> None:
    """Such as those of a search for the largest batch. Replays of a captured graph use its memory for ever."""

    def body(rank: int) -> list[bool]:
        first = map_memory()
        if is_captured:
            workspaces.memory_of(dist.group.WORLD).pinned.append(first)
        raised = [weakref.ref(first)]
        del first
        for _ in range(2):
            workspaces.abandon(dist.group.WORLD)
            assert raised[-1]() is not None, "peers may be reading it"
            raised.append(weakref.ref(map_memory()))
        return [each() is not None for each in raised]

    gc.collect()
    with shared_memory():
        assert run_ranks(2, body) == [[is_captured, False, True]] * 2


@pytest.mark.parametrize("allowed", [False, True])
def test_ranks_share_a_device_and_its_memory_if_torch_allows_it(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if allowed:
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    else:
        monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.setattr(workspaces.cuda_driver, "is_available", lambda: True)
    monkeypatch.setattr(workspaces, "symmetric_buffer", lambda *_: None)
    monkeypatch.setattr(workspaces, "uses_nccl", lambda *_: not allowed)
    monkeypatch.setattr(workspaces.SequenceRanks, "have_cpu_backend", True)  # CUDA is not there
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="the only one"))
    obstacle = run_ranks(2, lambda rank: workspaces.probe_p2p(dist.group.WORLD, torch.device("cuda", 0)))
    assert obstacle == [None if allowed else "some ranks share a device"] * 2


class _Domains:
    """Stand-in for the driver calls of memory that other hosts can map; a handle is the NVLink domain of its rank."""

    def __init__(self, of_ranks: list[str]) -> None:
        self._of_ranks, self.allocations = of_ranks, list[int]()

    def cuMemCreate(self, *_: Any) -> int:
        if not self._of_ranks[dist.get_rank()]:
            return 801  # not supported
        self.allocations.append(1)
        return 0

    def cuMemExportToShareableHandle(self, handle: Any, *_: Any) -> int:
        handle.raw = self._of_ranks[dist.get_rank()].encode().ljust(64)
        return 0

    def cuMemImportFromShareableHandle(self, _memory: Any, handle: bytes, _type: int) -> int:
        if handle.decode().strip() != self._of_ranks[dist.get_rank()]:
            return 101  # invalid device
        self.allocations.append(1)
        return 0

    def cuMemRelease(self, _memory: Any) -> int:
        self.allocations.append(-1)
        return 0


@pytest.mark.parametrize(
    ("domains", "mapped", "refusal"),
    [
        (["rack 1", "rack 1"], "", None),
        (["rack 1", "rack 2"], "", "over NVLink: cuMemImportFromShareableHandle failed with CUDA error 101"),
        (["rack 1", ""], "", "over NVLink: cuMemCreate failed with CUDA error 801"),
        (["rack 1", "rack 1"], "no rendezvous", "mapping memory failed: no rendezvous"),
    ],
)  # fmt: skip
def test_ranks_on_two_hosts_share_memory_if_a_trial_succeeds_on_both(
    domains: list[str], mapped: str, refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an NVLink domain over several hosts."""
    driver, tried = _Domains(domains), []

    def symmetric_buffer(*_: Any) -> None:
        tried.append(dist.get_rank())
        if mapped and dist.get_rank() == 1:
            raise RuntimeError(mapped)

    monkeypatch.setattr(workspaces.cuda_driver, "_driver", lambda: driver)
    monkeypatch.setattr(workspaces, "symmetric_buffer", symmetric_buffer)
    monkeypatch.setattr(workspaces, "uses_nccl", lambda *_: True)
    monkeypatch.setattr(workspaces.socket, "gethostname", lambda: f"host {dist.get_rank()}")
    monkeypatch.setattr(workspaces.SequenceRanks, "have_cpu_backend", True)  # CUDA is not there
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    uuids = (SimpleNamespace(uuid=rank) for rank in itertools.count())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: next(uuids))
    obstacles = run_ranks(2, lambda rank: workspaces.probe_p2p(dist.group.WORLD, torch.device("cuda", 0)))
    assert obstacles[0] == obstacles[1], "alike on every rank"
    assert (obstacles[0] or "").endswith(refusal or "")
    assert (obstacles[0] is None) == (refusal is None)
    assert sorted(tried) == ([0, 1] if len({*domains}) == 1 else []), "torch's rendezvous waits for ranks that failed"
    assert driver.allocations
    assert sum(driver.allocations) == 0, "all that was allocated or imported is released"
