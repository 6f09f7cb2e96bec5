"""Text data from the sources of Python's standard library, one token per byte.

The samples of a step depend on the step alone, so a resumed run, and a run on another number of ranks, use the same
samples in the same order.
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
IGNORE = -100  # label of a token without a next token to predict

# Written when Python is built or set up, so they differ between machines with the same Python.
MACHINE_SPECIFIC = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Batch:
    """Input of one forward pass."""

    tokens: torch.Tensor
    """(local_batch_size, seq_len) int64, like labels and positions."""
    labels: torch.Tensor
    """The next token of each token, or IGNORE."""
    positions: torch.Tensor
    """Position of each token in its document, or in the sample if samples are not packed."""
    documents: tuple[tuple[int, ...], ...] = ()
    """Cumulative document lengths of each sample, such as (0, 3, 8); empty if samples are not packed."""

    def to(self, device: torch.device) -> Batch:
        """A copy on a device."""
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
    """Endless sequence of samples of a text."""

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
        """Checksum of the text, to compare machines."""
        return zlib.crc32(self.text)

    def batches(self, step: int, global_batch_size: int, local_batch_size: int, rank: int, ranks: int) -> list[Batch]:
        """The batches of data-parallel rank `rank` of `ranks` in step `step` (from 1), one per forward pass.

        Context- and tensor-parallel ranks with the same data-parallel rank get the same samples.
        """
        one_pass = local_batch_size * ranks
        first = (step - 1) * global_batch_size + rank * local_batch_size
        return [self.samples(first + done, local_batch_size) for done in range(0, global_batch_size, one_pass)]


@dataclass(frozen=True)
class TextData(Data):
    """Windows of `seq_len` tokens, shuffled in every epoch."""

    @property
    def _windows(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def samples(self, first: int, count: int) -> Batch:
        """Samples; the label of a token is the next token, or IGNORE at the end of a file."""
        text = torch.stack([as_tokens(self.window(n, self.seq_len + 1)) for n in range(first, first + count)])
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        positions = torch.arange(self.seq_len).repeat(count, 1)
        return Batch(tokens, labels.masked_fill(tokens == SEPARATOR, IGNORE), positions)

    def window(self, sample: int, length: int) -> bytes:
        """`length` bytes from the start of a sample."""
        epoch, index = divmod(sample, self._windows)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        start = int(torch.randperm(self._windows, generator=generator)[index]) * self.seq_len
        return self.text[start : start + length]


def as_tokens(text: bytes) -> torch.Tensor:
    """One int64 token per byte, (len(text),)."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
