"""The flags by which ranks order their use of shared memory, and the two ways to raise them and to wait for them.

A flag is a 32-bit word in the memory of the rank that waits for it, one for each rank that may raise it, 0 or 1. Who
waits takes it down, so there is no counter, and a captured CUDA graph can be replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.rotation.device_streams import FlagOperations, await_flags, raise_flags
from cp_dtensor.tensors import current_stream

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.flags import launch_flags, padded_count


class Flag(IntEnum):
    """What a flag says of the rank that raised it, to the rank in whose memory it lies."""

    KV_READY = 0
    KV_TAKEN = 1
    GRAD_READY = 2
    GRAD_TAKEN = 3


@dataclass(frozen=True, eq=False)
class Flags:
    """Those of one group, which begin at the same offset in the memory of each of its ranks."""

    rank: int
    addresses: tuple[int, ...]
    """Where those in each rank's memory begin, as this device sees it."""
    device: torch.device

    def submit(self, stream: torch.cuda.Stream, *, tell: Flag | None = None, wait: Flag | None = None) -> None:
        """Raises a flag for all ranks; then waits until all have raised one for this rank, and takes it down.

        On the current stream that is a kernel, if there is Triton: with many ranks it is several times as fast. On
        others the front end of the GPU does it, since they run beside attention, which leaves a kernel no
        multiprocessor.
        """
        if TRITON_AVAILABLE and stream == current_stream(self.device):
            launch_flags(self._places[0][tell], self._places[1][wait])
            return
        if tell is not None:
            self._raises[tell].submit(stream.cuda_stream)
        if wait is not None:
            self._waits[wait].submit(stream.cuda_stream)

    def prepare(self) -> None:
        """Uploads what the kernel has to know and loads it, since a CUDA graph cannot capture that."""
        if TRITON_AVAILABLE:
            launch_flags(self._places[0][None], self._places[1][None])

    @cached_property
    def _raises(self) -> list[FlagOperations]:
        return [raise_flags(self._here_raised(flag)) for flag in Flag]

    @cached_property
    def _waits(self) -> list[FlagOperations]:
        return [await_flags(self._here_awaited(flag)) for flag in Flag]

    @cached_property
    def _places(self) -> list[dict[Flag | None, torch.Tensor]]:
        """Addresses of what this rank raises, and of what it waits for, on the device."""
        count = padded_count(len(self.addresses))

        def rows(of_flag: list[list[int]]) -> dict[Flag | None, torch.Tensor]:
            padded = [addresses + [0] * (count - len(addresses)) for addresses in [*of_flag, []]]
            return dict(zip([*Flag, None], torch.tensor(padded, device=self.device).unbind(), strict=True))

        return [rows([each(flag) for flag in Flag]) for each in (self._here_raised, self._here_awaited)]

    def _here_raised(self, flag: Flag) -> list[int]:
        return [self._address(holder, flag, self.rank) for holder in self._ranks]

    def _here_awaited(self, flag: Flag) -> list[int]:
        return [self._address(self.rank, flag, raised_by) for raised_by in self._ranks]

    @property
    def _ranks(self) -> Sequence[int]:
        # With this rank among them: it publishes and reads on different streams, which nothing else orders.
        return range(len(self.addresses))

    def _address(self, holder: int, flag: Flag, raised_by: int) -> int:
        return self.addresses[holder] + 4 * (flag * len(self.addresses) + raised_by)
