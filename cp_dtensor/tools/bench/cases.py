"""Attention problems of the benchmark, and their floating point operations. Integers and names only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cp_dtensor import Layout, Mask
from cp_dtensor.plan.partition import BACKWARD_FLOPS
from cp_dtensor.spec.masks import is_plain
from cp_dtensor.tools.parsing import layout_by_name, mask_by_name

PASSES = ("fwd", "fwdbwd")
"""Forward alone (without autograd), and forward with backward."""

PASS_TITLES = {"fwd": "forward", "fwdbwd": "forward + backward"}


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and K/V heads.

    >>> Heads.parse("32:8")
    Heads(q=32, kv=8)
    """

    q: int
    kv: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Reads "query:kv".

        Raises:
            ValueError: the text is not two positive integers, the first a multiple of the second.
        """
        try:
            q, kv = map(int, text.split(":"))
        except ValueError:
            raise ValueError(f"expected heads as query:kv, such as 32:8, got {text!r}") from None
        if q < 1 or kv < 1 or q % kv:
            raise ValueError(f"expected the number of query heads to be a multiple of the kv heads, got {text!r}")
        return cls(q, kv)


@dataclass(frozen=True)
class Case:
    """One attention problem of all ranks together."""

    seq_len: int
    """Global number of tokens."""
    heads: Heads
    head_dim: int
    batch: int
    dtype: str
    """Name of a torch dtype."""
    mask: str
    """Name of a mask, as of `mask_by_name`."""
    layout: str
    """Name of a layout, as of `layout_by_name`; methods may have one of their own."""
    backend: str
    """Name of a `torch.nn.attention.SDPBackend`, or "auto"."""

    @property
    def enable_gqa(self) -> bool:
        """True if query heads share K/V heads."""
        return self.heads.q != self.heads.kv

    @property
    def mask_value(self) -> Mask:
        """The mask of the name."""
        return mask_by_name(self.mask, self.seq_len)

    @property
    def is_plain(self) -> bool:
        """True if the mask is full or causal, which every attention kernel supports."""
        return is_plain(self.mask_value, self.seq_len, self.seq_len)

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the mask allows, of one head and batch row."""
        return self.mask_value.pairs(self.seq_len, self.seq_len)

    def layout_value(self, name: str | None = None) -> Layout:
        """Returns the layout of a name, by default that of the case.

        Raises:
            ValueError: the layout does not fit the mask.
        """
        return layout_by_name(name or self.layout, self.mask_value, self.seq_len)

    def flops(self, pass_name: str) -> float:
        """Returns the floating point operations of a pass over the whole sequence; masked pairs do not count.

        >>> Case(1024, Heads(32, 8), 128, 1, "bfloat16", "full", "HeadTail", "auto").flops("fwd")
        17179869184.0
        """
        forward = 4.0 * self.batch * self.heads.q * self.pairs * self.head_dim
        return {"fwd": forward, "fwdbwd": (1 + BACKWARD_FLOPS) * forward}[pass_name]


def grid(
    seq_lens: Sequence[int],
    heads: Sequence[Heads],
    masks: Sequence[str],
    backends: Sequence[str],
    *,
    head_dim: int,
    batch: int,
    dtype: str,
    layout: str,
) -> tuple[Case, ...]:
    """Returns all combinations, those with few keys first, so that buffers never exceed the needs of a case."""
    cases = [
        Case(seq_len, each, head_dim, batch, dtype, mask, layout, backend)
        for each, mask, backend, seq_len in itertools.product(heads, masks, backends, seq_lens)
    ]
    return tuple(sorted(cases, key=lambda case: case.seq_len * case.heads.kv))
