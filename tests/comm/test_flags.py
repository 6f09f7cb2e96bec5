"""Flags in the memory of one process: the kernel, and the choice between kernel and front end of the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import GPUS
from support.compiled_subprocess import run_uninterpreted

kernel = pytest.importorskip("cp_dtensor.comm.triton_kernels")

no_gpu = pytest.mark.skipif(GPUS > 0, reason="the kernel is compiled for the GPU of this machine")
all_devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=no_gpu, id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu, id="triton")],
)


def addresses(words: torch.Tensor, places: Sequence[int], count: int) -> torch.Tensor:
    """Returns the addresses of some of the words, padded with 0."""
    found = [words[place].data_ptr() for place in places]
    return torch.tensor(found + [0] * (count - len(found)), device=words.device)


def host(status: torch.Tensor, device: str) -> torch.Tensor:
    """Returns the addresses of the two words of a status."""
    return addresses(status, [0, 1], 2).to(device)


def nowhere(device: str) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


@all_devices
@pytest.mark.parametrize(("signalled", "awaited"), [([0, 2, 5], [1, 3]), ([], [1]), ([4], []), ([], []), ([1], [1])])
def test_the_kernel_sets_flags_and_resets_those_it_waits_for(
    device: str, signalled: list[int], awaited: list[int]
) -> None:
    words = torch.zeros(6, dtype=torch.int32, device=device)
    words[awaited] = 1
    count = kernel.padded_count(3)
    status = torch.zeros(2, dtype=torch.int32, pin_memory=device == "cuda")
    kernel.flag_launch(*(addresses(words, which, count) for which in (signalled, awaited)), host(status, device))()
    if device == "cuda":
        torch.cuda.synchronize()
    assert (status[0], bool(status[1])) == (0, True), "nothing waits any more, and something has waited"
    expected = [int(place in signalled and place not in awaited) for place in range(6)]
    assert words.tolist() == expected


@all_devices
def test_a_launch_may_be_repeated(device: str) -> None:
    """The first launch compiles the kernel."""
    words = torch.zeros(2, dtype=torch.int32, device=device)
    count = kernel.padded_count(2)
    launch = kernel.flag_launch(*(addresses(words, [place], count) for place in (0, 1)), nowhere(device))
    for _ in range(5):
        words[:] = torch.tensor([0, 1])
        launch()
        assert words.tolist() == [1, 0]


@pytest.mark.gpu
def test_the_kernel_waits() -> None:
    """It waits until another stream has set all flags."""
    words = torch.zeros(2, dtype=torch.int32, device="cuda")
    after = torch.zeros(1, dtype=torch.int32, device="cuda")
    count = kernel.padded_count(2)
    places = {which: addresses(words, which, count) for which in ((), (0,), (1,), (0, 1))}
    wait_for_both, raise_first, raise_second = (
        kernel.flag_launch(places[signalled], places[awaited], nowhere("cuda"))
        for signalled, awaited in (((), (0, 1)), ((0,), ()), ((1,), ()))
    )
    for _ in range(3):  # while a kernel waits, CUDA may be unable to load another
        for launch in (raise_first, raise_second, wait_for_both):
            launch()
        after.add_(0)
        after.clone()
        torch.cuda._sleep(10)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        wait_for_both()
        after.add_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        raise_first()
        torch.cuda._sleep(10_000_000)
        seen_before = after.clone()
        raise_second()
    torch.cuda.synchronize()
    assert (seen_before.item(), after.item(), words.tolist()) == (0, 1, [0, 0])


_COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from cp_dtensor.comm.triton_kernels import padded_count, pass_flags_kernel
pointers, constants = ("signalled_ptr", "awaited_ptr", "status_ptr"), ("PLACES", "INTERPRETED")
signature = {**dict.fromkeys(pointers, "*i64"), **dict.fromkeys(constants, "constexpr")}
source = ASTSource(pass_flags_kernel, signature, {"PLACES": padded_count(8), "INTERPRETED": False})
print(compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])
"""


def test_the_compiled_kernel_orders_memory_for_all_gpus() -> None:
    """Flags of peers are set by stores with release, awaited flags are read with acquire, both in system scope."""
    lines = run_uninterpreted("-c", _COMPILE).splitlines()
    raising = [line for line in lines if "st.release.sys.global.b32" in line]
    awaiting = [line for line in lines if "atom" in line]
    assert len(raising) == 1
    assert awaiting
    assert all("sys" in line and "acquire" in line for line in awaiting)


class _Stream:
    cuda_stream = 0


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("overlaps", [True, False])
def test_flags_beside_attention_need_no_kernel(
    overlaps: bool, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cp_dtensor._torch import cuda_driver
    from cp_dtensor.comm import flags

    done: list[str] = []

    class Driver:
        def cuStreamBatchMemOp_v2(self, *_: Any) -> int:
            done.append("front end")
            return 0

    monkeypatch.setattr(cuda_driver, "_driver", Driver)
    monkeypatch.setattr(flags, "TRITON_AVAILABLE", has_triton)
    monkeypatch.setattr(flags, "flag_launch", lambda *_: lambda: done.append("kernel"))
    cpu = torch.device("cpu")
    of_one = flags.Flags(0, (0x1000, 0x2000, 0x3000), cpu, flags.WaitStatus(cpu))
    of_one.submit(_Stream(), signal=flags.Flag.KV_READY, wait=flags.Flag.KV_TAKEN, overlaps=overlaps)  # type: ignore[arg-type]
    assert done == (["kernel"] if has_triton and not overlaps else ["front end", "front end"])
