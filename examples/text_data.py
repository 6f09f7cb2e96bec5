"""Real text that every machine has: the sources of Python's own standard library, one token per byte.

Which samples a step trains on depends on the step alone, so a resumed run and a run on another number of ranks go
through the same samples in the same order.
"""

from __future__ import annotations

import sysconfig
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

VOCAB_SIZE = 256
SEPARATOR = 0  # ends a file; no source file may contain it
IGNORE = -100  # label of a token after which there is nothing to learn

# Written when Python is built or set up, so they differ between machines with the same Python.
MACHINE_SPECIFIC = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Batch:
    """What one forward pass sees."""

    tokens: torch.Tensor
    """(local_batch_size, seq_len) int64, and so are the others."""
    labels: torch.Tensor
    """The token behind each, or IGNORE."""
    positions: torch.Tensor
    """Of each token in its document, or in the sample if samples are not packed."""
    documents: tuple[tuple[int, ...], ...] = ()
    """Of packed samples: for each, where its documents begin, and where the last one ends."""

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(self.tokens.to(device), self.labels.to(device), self.positions.to(device), self.documents)


def standard_library_text() -> bytes:
    """The top-level modules in alphabetical order, each followed by SEPARATOR."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith(MACHINE_SPECIFIC)]
    if not files:
        raise FileNotFoundError(f"expected the sources of Python's standard library in {folder}, found no *.py there")
    return b"".join(path.read_bytes().replace(b"\0", b"") + bytes([SEPARATOR]) for path in files)


@dataclass(frozen=True)
class Data(ABC):
    """An endless row of samples of a text."""

    text: bytes
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) <= self.seq_len:
            raise ValueError(f"training.seq_len: expected less than {len(self.text)} bytes of text, got {self.seq_len}")

    @abstractmethod
    def samples(self, first: int, count: int) -> Batch:
        """Samples `first, ..., first + count - 1`."""

    @cached_property
    def fingerprint(self) -> int:
        """The same on two machines exactly if they have the same text (but for one chance in 2^32)."""
        return zlib.crc32(self.text)

    def batches(self, step: int, global_batch_size: int, local_batch_size: int, rank: int, ranks: int) -> list[Batch]:
        """What data-parallel rank `rank` of `ranks` sees in step `step` (counted from 1), one batch per forward pass.

        Ranks of the same data-parallel rank (context and tensor parallel) get the same samples.
        """
        one_pass = local_batch_size * ranks
        first = (step - 1) * global_batch_size + rank * local_batch_size
        return [self.samples(first + done, local_batch_size) for done in range(0, global_batch_size, one_pass)]


@dataclass(frozen=True)
class TextData(Data):
    """Windows of `seq_len` tokens, in an order that is shuffled anew in every epoch."""

    @property
    def _windows(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def samples(self, first: int, count: int) -> Batch:
        """The label of a token is the token behind it, or IGNORE at the end of a file: the first byte of the next file
        cannot be foreseen.
        """
        text = torch.stack([as_tokens(self.window(n, self.seq_len + 1)) for n in range(first, first + count)])
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        positions = torch.arange(self.seq_len).repeat(count, 1)
        return Batch(tokens, labels.masked_fill(tokens == SEPARATOR, IGNORE), positions)

    def window(self, sample: int, length: int) -> bytes:
        """The first `length` bytes from where a sample begins."""
        epoch, index = divmod(sample, self._windows)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        start = int(torch.randperm(self._windows, generator=generator)[index]) * self.seq_len
        return self.text[start : start + length]


def as_tokens(text: bytes) -> torch.Tensor:
    """(len(text),) int64."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
