"""Flags that ranks raise for each other, on buffers of one process: the kernel, and who does what on which stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import GPUS

kernel = pytest.importorskip("cp_dtensor.kernels.flags")

no_gpu = pytest.mark.skipif(GPUS > 0, reason="the kernel is compiled for the GPU of this machine")
all_devices = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=no_gpu, id="interpreter"), pytest.param("cuda", marks=pytest.mark.gpu, id="triton")],
)


def addresses(words: torch.Tensor, places: list[int], count: int) -> torch.Tensor:
    """Of some of the words."""
    found = [words[place].data_ptr() for place in places]
    return torch.tensor(found + [0] * (count - len(found)), device=words.device)


@all_devices
@pytest.mark.parametrize(("told", "awaited"), [([0, 2, 5], [1, 3]), ([], [1]), ([4], []), ([], []), ([1], [1])])
def test_the_kernel_raises_flags_and_takes_down_what_it_waited_for(
    device: str, told: list[int], awaited: list[int]
) -> None:
    words = torch.zeros(6, dtype=torch.int32, device=device)
    words[awaited] = 1
    count = kernel.padded_count(3)
    kernel.launch_flags(addresses(words, told, count), addresses(words, awaited, count))
    expected = [int(place in told and place not in awaited) for place in range(6)]
    assert words.tolist() == expected


@pytest.mark.gpu
def test_the_kernel_waits() -> None:
    """For a flag that another stream raises later, and not before all are up."""
    words = torch.zeros(2, dtype=torch.int32, device="cuda")
    after = torch.zeros(1, dtype=torch.int32, device="cuda")
    none = addresses(words, [], 2)
    for _ in range(2):  # while a kernel waits, CUDA may be unable to load another
        kernel.launch_flags(none, none)
        after.add_(0)
        after.clone()
        torch.cuda._sleep(10)
    torch.cuda.synchronize()
    waiting, raising = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(waiting):
        kernel.launch_flags(none, addresses(words, [0, 1], 2))
        after.add_(1)
    with torch.cuda.stream(raising):
        kernel.launch_flags(addresses(words, [0], 2), none)
        torch.cuda._sleep(10_000_000)
        seen_before = after.clone()
        kernel.launch_flags(addresses(words, [1], 2), none)
    torch.cuda.synchronize()
    assert (seen_before.item(), after.item(), words.tolist()) == (0, 1, [0, 0])


class _Stream:
    cuda_stream = 0


@pytest.mark.parametrize("is_current", [True, False])
def test_only_the_current_stream_runs_the_kernel(is_current: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others run beside attention."""
    from cp_dtensor.rotation import device_streams, flags

    done: list[str] = []

    class Driver:
        def cuStreamBatchMemOp_v2(self, *_: Any) -> int:
            done.append("front end")
            return 0

    streams = [_Stream(), _Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[0])
    monkeypatch.setattr(device_streams, "_driver", Driver)
    monkeypatch.setattr(flags, "launch_flags", lambda *_: done.append("kernel"))
    of_one = flags.Flags(0, (0x1000, 0x2000, 0x3000), torch.device("cpu"))
    both: dict[str, Any] = {"tell": flags.Flag.KV_READY, "wait": flags.Flag.KV_TAKEN}
    of_one.submit(streams[0 if is_current else 1], **both)
    assert done == (["kernel"] if is_current else ["front end", "front end"])
