"""Samples of several documents each, packed without padding.

Attention and positions are those of each document alone, and the last token of a document has no label. So training
treats each document as if it were a sample of its own.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from config import Config
from text_data import IGNORE, SEPARATOR, Batch, Data, TextData, as_tokens


def data_of(config: Config, text: bytes) -> Data:
    """The samples of a configuration."""
    training, packing = config.training, config.packing
    if packing.documents == "files":
        return PackedFiles(text, training.seq_len, training.seed)
    if packing.documents == "lognormal":
        return PackedPieces(text, training.seq_len, training.seed, packing.median_length, packing.sigma)
    return TextData(text, training.seq_len, training.seed)


@dataclass(frozen=True)
class PackedData(Data):
    """Samples that consist of documents."""

    @abstractmethod
    def documents(self, sample: int) -> list[bytes]:
        """The documents of a sample, `seq_len` bytes in all, none empty."""

    def samples(self, first: int, count: int) -> Batch:
        """Samples; the label of a token is the next token, or IGNORE at the end of its document."""
        rows = [self.documents(sample) for sample in range(first, first + count)]
        edges = [tuple(accumulate(map(len, documents), initial=0)) for documents in rows]
        tokens = torch.stack([as_tokens(b"".join(documents)) for documents in rows])
        labels, positions = tokens.roll(-1, 1), torch.arange(self.seq_len).repeat(count, 1)
        for row, of_row in enumerate(edges):
            for start, stop in pairwise(of_row):
                labels[row, stop - 1] = IGNORE
                positions[row, start:stop] -= start
        return Batch(tokens, labels, positions, tuple(edges))


@dataclass(frozen=True)
class PackedFiles(PackedData):
    """The windows of `TextData`; a document is the part of a file in a window."""

    def documents(self, sample: int) -> list[bytes]:
        """The documents of a window; each ends with SEPARATOR, except possibly the last."""
        ended = TextData(self.text, self.seq_len, self.seed).window(sample, self.seq_len).split(bytes([SEPARATOR]))
        *files, rest = ended
        return [file + bytes([SEPARATOR]) for file in files] + [rest] * bool(rest)


@dataclass(frozen=True)
class PackedPieces(PackedData):
    """Random pieces of the text, of lengths exp(N(log(median), sigma)); the last is cut at the end of the sample."""

    median: int
    sigma: float

    def documents(self, sample: int) -> list[bytes]:
        """The documents of a sample; they depend on sample, seed and text only."""
        drawn = random.Random(f"{self.seed} {sample}")
        documents, missing = [], self.seq_len
        while missing:
            length = min(max(round(drawn.lognormvariate(math.log(self.median), self.sigma)), 1), missing)
            start = drawn.randrange(len(self.text) - length + 1)
            documents.append(self.text[start : start + length])
            missing -= length
        return documents
