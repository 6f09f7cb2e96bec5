"""The flags by which ranks order their use of shared memory, and the two ways to raise them and to wait for them.

A flag is a 32-bit word in the memory of the rank that waits for it, one for each rank that may raise it, 0 or 1. Who
waits takes it down, so there is no counter, and a captured CUDA graph can be replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from cp_dtensor.kernels import TRITON_AVAILABLE
from cp_dtensor.rotation.device_streams import FlagOperations, await_flags, raise_flags
from cp_dtensor.tensors import current_stream

if TRITON_AVAILABLE:
    from cp_dtensor.kernels.flags import flag_launch, padded_count
    from cp_dtensor.kernels.launching import BoundLaunch


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

    def submit(
        self,
        stream: torch.cuda.Stream,
        *,
        tell: Flag | None = None,
        wait: Flag | None = None,
        beside: bool = False,
    ) -> None:
        """Raises a flag for all ranks; then waits until all have raised one for this rank, and takes it down.

        Args:
            stream: the current one, unless it is beside.
            tell: what to raise.
            wait: what to wait for.
            beside: whether attention runs meanwhile, on another stream. It leaves a kernel no multiprocessor, so the
                front end of the GPU does it. Otherwise, if there is Triton, a kernel does: with many ranks it is
                several times as fast.
        """
        if TRITON_AVAILABLE and not beside:
            self._launches[tell, wait](stream.cuda_stream)
            return
        if tell is not None:
            self._raises[tell].submit(stream.cuda_stream)
        if wait is not None:
            self._waits[wait].submit(stream.cuda_stream)

    def prepare(self) -> None:
        """Uploads what the kernel has to know and loads it, since a CUDA graph cannot capture that."""
        if TRITON_AVAILABLE:
            self._launches[None, None](current_stream(self.device).cuda_stream)

    @cached_property
    def _raises(self) -> list[FlagOperations]:
        return [raise_flags(self._here_raised(flag)) for flag in Flag]

    @cached_property
    def _waits(self) -> list[FlagOperations]:
        return [await_flags(self._here_awaited(flag)) for flag in Flag]

    @cached_property
    def _launches(self) -> dict[tuple[Flag | None, Flag | None], BoundLaunch]:
        """By what is raised and what is waited for; None is no flag."""
        count, flags = padded_count(len(self.addresses)), [*Flag, None]

        def uploaded(of_flags: list[list[int]]) -> Iterable[torch.Tensor]:
            padded = [addresses + [0] * (count - len(addresses)) for addresses in [*of_flags, []]]
            return torch.tensor(padded, device=self.device).unbind()

        told = dict(zip(flags, uploaded([self._here_raised(flag) for flag in Flag]), strict=True))
        awaited = dict(zip(flags, uploaded([self._here_awaited(flag) for flag in Flag]), strict=True))
        return {(tell, wait): flag_launch(told[tell], awaited[wait]) for tell in flags for wait in flags}

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
