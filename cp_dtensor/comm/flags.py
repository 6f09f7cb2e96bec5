"""Flags in symmetric memory, by which the ranks of a group order their use of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from cp_dtensor._torch.cuda_driver import FlagOperations, await_flags, raise_flags
from cp_dtensor._torch.tensors import TRITON_AVAILABLE

if TRITON_AVAILABLE:
    from cp_dtensor.comm.triton_kernels import flag_addresses, flag_launch


class Flag(IntEnum):
    """Flags that one rank, the setter, sets for another.

    A flag is a 32-bit word, 0 if it is not set, in the memory of the rank that waits for it; each setter has a word of
    its own. The waiting rank resets the word, so there is no counter, and a captured CUDA graph can be replayed.

    The word of `KV_READY` and `GRAD_READY` is the number of the pass (`comm.calls`), equal on ranks that make the same
    pass. A rank at another pass waits for another number, until the deadline of its wait.
    """

    KV_READY = 0
    """The setter's rows of K/V are written."""
    KV_TAKEN = 1
    """The setter has read this rank's rows of K/V, so they may be overwritten."""
    GRAD_READY = 2
    """The setter's gradients are written."""
    GRAD_TAKEN = 3
    """The setter has read this rank's gradients."""


_OF_PASSES = Flag.KV_READY, Flag.GRAD_READY
_FEW_RANKS = 4


class WaitStatus:
    """Words of host memory that tell whether a stream waits for flags, without a CUDA call."""

    def __init__(self, device: torch.device) -> None:
        # A word for each flag, which a stream that waits for it sets to the awaited value, and one that changes when a
        # kernel has waited.
        self._words = torch.zeros(len(Flag) + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.submitted = 0
        """Waits that the host has submitted."""

    def addresses(self, flag: Flag | None) -> list[int]:
        """Return addresses of the word of a flag, and of the word that changes; 0 for no flag."""
        return [0, 0] if flag is None else [self._words[flag].data_ptr(), self._words[-1].data_ptr()]

    def waiting(self) -> dict[Flag, int]:
        """Return flags that a stream waits for, and the values."""
        return {flag: value for flag in Flag if (value := int(self._words[flag]))}

    def progress(self) -> tuple[int, ...]:
        """Return a value that changes when a wait ends."""
        return (self.submitted, *self._words.tolist())


@dataclass(eq=False)
class Flags:
    """The flags of a group."""

    rank: int
    addresses: tuple[int, ...]
    """Address of the first flag in each rank's memory, as mapped on this device."""
    device: torch.device
    status: WaitStatus
    number: int = 1
    """Number of the present pass."""

    def submit(
        self, stream: torch.cuda.Stream, *, signal: Flag | None = None, wait: Flag | None = None, overlaps: bool = False
    ) -> None:
        """Set a flag on all ranks; then wait until all ranks have set one here, and reset it.

        Args:
            stream: the current stream, or any stream with `overlaps`.
            signal: the flag to set.
            wait: the flag to wait for; with a signal, another flag of that kind.
            overlaps: True if attention runs at the same time on another stream. Attention leaves a kernel no
                multiprocessor, so the front end of the GPU handles the flags. Otherwise a Triton kernel does, if there
                is Triton: with many ranks it is several times as fast. The front end sets flags of a few ranks, since
                that takes the host less time than a launch.
        """
        self.status.submitted += wait is not None
        value = self.number if signal in _OF_PASSES or wait in _OF_PASSES else 1
        if TRITON_AVAILABLE and not overlaps and (wait is not None or len(self.addresses) > _FEW_RANKS):
            self._launches[signal, wait](value)
            return
        if signal is not None:
            self._sets[signal].submit(stream.cuda_stream, value)
        if wait is not None:
            self._waits[wait].submit(stream.cuda_stream, value)

    def prepare(self) -> None:
        """Upload the addresses of flags and load the kernel, which a CUDA graph cannot capture."""
        if TRITON_AVAILABLE:
            self._launches[None, None](1)

    @cached_property
    def _sets(self) -> list[FlagOperations]:
        return [raise_flags(addresses) for addresses in self._signalled]

    @cached_property
    def _waits(self) -> list[FlagOperations]:
        return [await_flags(self._awaited[flag], self.status.addresses(flag)[0]) for flag in Flag]

    @cached_property
    def _launches(self) -> dict[tuple[Flag | None, Flag | None], Callable[[int], None]]:
        """By the flag to set and the flag to wait for; None is no flag."""
        flags = [*Flag, None]
        signalled, awaited = (dict(zip(flags, [*each, []], strict=True)) for each in (self._signalled, self._awaited))
        rows = {
            (signal, wait): flag_addresses(
                signalled[signal], awaited[wait], self.status.addresses(wait), len(self.addresses)
            )
            for signal in flags
            for wait in flags
        }
        uploaded = torch.tensor([*rows.values()], device=self.device).unbind()
        return dict(zip(rows, map(flag_launch, uploaded), strict=True))

    def releases(self) -> list[FlagOperations]:
        """Return, by flag, the operations that set it in this rank's memory, for all setters."""
        return [raise_flags(addresses) for addresses in self._awaited]

    def setters_missing(self, words: Sequence[int], flag: Flag, value: int) -> list[int]:
        """Return ranks that have not set a flag to a value, given the flags in this rank's memory as integers."""
        count = len(self.addresses)
        return [rank for rank, word in enumerate(words[flag * count : (flag + 1) * count]) if word != value]

    @property
    def _signalled(self) -> list[list[int]]:
        """By flag: addresses of the words that this rank sets, its own too: it reads and writes on several streams."""
        return [[self._address(holder, flag, self.rank) for holder in range(len(self.addresses))] for flag in Flag]

    @property
    def _awaited(self) -> list[list[int]]:
        """By flag: addresses of the words that this rank waits for."""
        return [[self._address(self.rank, flag, setter) for setter in range(len(self.addresses))] for flag in Flag]

    def _address(self, holder: int, flag: Flag, setter: int) -> int:
        return self.addresses[holder] + 4 * (flag * len(self.addresses) + setter)
