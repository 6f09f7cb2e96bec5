"""What is measured: problems, passes, and the arithmetic they take. Integers and names only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cp_dtensor.division import BACKWARD_FLOPS
from cp_dtensor.layouts import Contiguous, HeadTail, Layout, Striped

PASSES = ("fwd", "fwdbwd")
"""Forward alone (without autograd), and forward with backward."""

PASS_TITLES = {"fwd": "forward", "fwdbwd": "forward + backward"}
LAYOUTS: dict[str, Layout] = {"HeadTail": HeadTail(), "Contiguous": Contiguous(), "Striped": Striped()}


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and of key/value heads.

    >>> Heads.parse("32:8")
    Heads(q=32, kv=8)
    """

    q: int
    kv: int

    @classmethod
    def parse(cls, text: str) -> Heads:
        """From "query:kv".

        Raises:
            ValueError: not two positive integers, the first a multiple of the second.
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
    """One attention problem, over all ranks together."""

    seq_len: int
    """Global number of tokens."""
    heads: Heads
    head_dim: int
    batch: int
    dtype: str
    """Name of a torch dtype."""
    causal: bool
    layout: str
    """Key of `LAYOUTS`."""
    backend: str
    """Name of a `torch.nn.attention.SDPBackend`, or "auto"."""

    @property
    def enable_gqa(self) -> bool:
        """Whether query heads share kv heads."""
        return self.heads.q != self.heads.kv

    def flops(self, pass_name: str) -> float:
        """Floating point operations of a pass over the whole sequence; a masked half is not counted.

        >>> Case(1024, Heads(32, 8), 128, 1, "bfloat16", True, "HeadTail", "auto").flops("fwd")
        8589934592.0
        """
        forward = 4.0 * self.batch * self.heads.q * self.seq_len**2 * self.head_dim
        if self.causal:
            forward /= 2
        return {"fwd": forward, "fwdbwd": (1 + BACKWARD_FLOPS) * forward}[pass_name]


def grid(
    seq_lens: Sequence[int],
    heads: Sequence[Heads],
    backends: Sequence[str],
    *,
    head_dim: int,
    batch: int,
    dtype: str,
    causal: bool,
    layout: str,
) -> tuple[Case, ...]:
    """All combinations, those with few keys first: what has been allocated is then never more than a case needs."""
    cases = [
        Case(seq_len, each, head_dim, batch, dtype, causal, layout, backend)
        for each, backend, seq_len in itertools.product(heads, backends, seq_lens)
    ]
    return tuple(sorted(cases, key=lambda case: case.seq_len * case.heads.kv))
