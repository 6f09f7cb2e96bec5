"""Real text that every machine has: the sources of Python's own standard library, one token per byte.

Which samples a step trains on depends on the step alone, so a resumed run and a run on another number of ranks go
through the same samples in the same order.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

VOCAB_SIZE = 256
SEPARATOR = 0  # ends a file; no source file may contain it
IGNORE = -100  # label of a token after which there is nothing to learn

# Written when Python is built or set up, so they differ between machines with the same Python.
MACHINE_SPECIFIC = ("_sysconfigdata", "sitecustomize", "usercustomize")

Batch = tuple[torch.Tensor, torch.Tensor]
"""tokens, labels: both (local_batch_size, seq_len) int64."""


def standard_library_text() -> bytes:
    """The top-level modules in alphabetical order, each followed by SEPARATOR."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.glob("*.py")) if not path.stem.startswith(MACHINE_SPECIFIC)]
    if not files:
        raise FileNotFoundError(f"expected the sources of Python's standard library in {folder}, found no *.py there")
    return b"".join(path.read_bytes().replace(b"\0", b"") + bytes([SEPARATOR]) for path in files)


@dataclass(frozen=True)
class TextData:
    """Samples of a text: its windows of `seq_len` tokens, in an order that is shuffled anew in every epoch."""

    text: bytes
    seq_len: int
    seed: int

    def __post_init__(self) -> None:
        if len(self.text) <= self.seq_len:
            raise ValueError(f"training.seq_len: expected less than {len(self.text)} bytes of text, got {self.seq_len}")

    @property
    def fingerprint(self) -> int:
        """The same on two machines exactly if they have the same text (but for one chance in 2^32)."""
        return zlib.crc32(self.text)

    @property
    def _windows(self) -> int:
        return (len(self.text) - 1) // self.seq_len

    def samples(self, first: int, count: int) -> Batch:
        """Samples `first, ..., first + count - 1` of the endless order: tokens and labels, (count, seq_len) each.

        The label of a token is the token behind it, or IGNORE at the end of a file: the first byte of the next file
        cannot be foreseen.
        """
        starts = [self._window(n) * self.seq_len for n in range(first, first + count)]
        rows = [bytearray(self.text[start : start + self.seq_len + 1]) for start in starts]
        text = torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows]).long()
        tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        return tokens, labels.masked_fill(tokens == SEPARATOR, IGNORE)

    def _window(self, sample: int) -> int:
        epoch, index = divmod(sample, self._windows)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return int(torch.randperm(self._windows, generator=generator)[index])

    def batches(self, step: int, global_batch_size: int, local_batch_size: int, rank: int, ranks: int) -> list[Batch]:
        """What data-parallel rank `rank` of `ranks` sees in step `step` (counted from 1), one batch per forward pass.

        Ranks of the same data-parallel rank (context and tensor parallel) get the same samples.
        """
        one_pass = local_batch_size * ranks
        first = (step - 1) * global_batch_size + rank * local_batch_size
        return [self.samples(first + done, local_batch_size) for done in range(0, global_batch_size, one_pass)]
