"""Flags in the memory of one process: the kernel, and the choice between kernel and front end of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.compiled_subprocess import run_uninterpreted
from support.devices import all_devices

kernel = pytest.importorskip("cp_dtensor.comm.triton_kernels")


def launch_of(
    words: torch.Tensor, signalled: Sequence[int], awaited: Sequence[int], status: torch.Tensor | None = None
) -> Callable[..., None]:
    """Returns the launch that sets some of the words and waits for others, to a value or 1."""

    def addresses(words: torch.Tensor, places: Sequence[int]) -> list[int]:
        return [words[place].data_ptr() for place in places]

    of_status = [0, 0] if status is None else addresses(status, [0, 1])
    found = kernel.flag_addresses(addresses(words, signalled), addresses(words, awaited), of_status, len(words))
    launch = kernel.flag_launch(torch.tensor(found, device=words.device))
    return lambda value=1: launch(value)


@all_devices
@pytest.mark.parametrize("value", [1, 2**30 + 1])
@pytest.mark.parametrize(("signalled", "awaited"), [([0, 2, 5], [1, 3]), ([], [1]), ([4], []), ([], []), ([1], [1])])
def test_the_kernel_sets_flags_and_resets_those_it_waits_for(
    device: str, signalled: list[int], awaited: list[int], value: int
) -> None:
    words = torch.zeros(6, dtype=torch.int32, device=device)
    words[awaited] = value
    status = torch.zeros(2, dtype=torch.int32, pin_memory=device == "cuda")
    launch_of(words, signalled, awaited, status)(value)
    if device == "cuda":
        torch.cuda.synchronize()
    assert (status[0], bool(status[1])) == (0, True), "nothing waits any more, and something has waited"
    expected = [value * (place in signalled and place not in awaited) for place in range(6)]
    assert words.tolist() == expected


@all_devices
def test_a_launch_may_be_repeated(device: str) -> None:
    """The first launch compiles the kernel."""
    words = torch.zeros(2, dtype=torch.int32, device=device)
    launch = launch_of(words, [0], [1])
    for _ in range(5):
        words[:] = torch.tensor([0, 1])
        launch()
        assert words.tolist() == [1, 0]


@pytest.mark.gpu
def test_the_kernel_waits() -> None:
    """It waits until another stream has set all flags to its value."""
    words = torch.zeros(2, dtype=torch.int32, device="cuda")
    after = torch.zeros(1, dtype=torch.int32, device="cuda")
    wait_for_both, raise_first, raise_second = (
        launch_of(words, signalled, awaited) for signalled, awaited in (((), (0, 1)), ((0,), ()), ((1,), ()))
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
        raise_second(7)  # another value than it waits for
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
signature = {"addresses_ptr": "*i64", "value": "i32", **dict.fromkeys(("PLACES", "INTERPRETED"), "constexpr")}
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
    monkeypatch.setattr(flags, "flag_launch", lambda *_: lambda value: done.append("kernel"))
    cpu = torch.device("cpu")
    of_one = flags.Flags(0, (0x1000, 0x2000, 0x3000), cpu, flags.WaitStatus(cpu))
    of_one.submit(_Stream(), signal=flags.Flag.KV_READY, wait=flags.Flag.KV_TAKEN, overlaps=overlaps)  # type: ignore[arg-type]
    assert done == (["kernel"] if has_triton and not overlaps else ["front end", "front end"])
