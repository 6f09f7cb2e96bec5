"""What is measured: problems, passes, and the arithmetic they take. Integers and names only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cp_dtensor.plan.partition import BACKWARD_FLOPS
from cp_dtensor.spec.balanced_layouts import Balanced, PerDocument
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.layouts import Contiguous, HeadTail, Layout, Striped
from cp_dtensor.spec.masks import Causal, Full, Mask, SlidingWindow, is_plain
from cp_dtensor.tools.balance import lognormal_documents

PASSES = ("fwd", "fwdbwd")
"""Forward alone (without autograd), and forward with backward."""

PASS_TITLES = {"fwd": "forward", "fwdbwd": "forward + backward"}
DOCUMENTS_SIGMA = 1.0
"""Of the lengths that `cp_dtensor.tools.balance.lognormal_documents` draws."""

_PLAIN_MASKS: dict[str, Mask] = {"causal": Causal(), "full": Full()}


@lru_cache
def mask_by_name(name: str, seq_len: int) -> Mask:
    """The mask of this name over a sequence.

    >>> mask_by_name("window 4096", 8192)
    SlidingWindow(left=4095, right=0, alignment='top_left')

    Raises:
        ValueError: there is none.
    """
    kind, _, text = name.partition(" ")
    number = int(text) if text.isdecimal() else 0
    if kind == "window" and number:
        return SlidingWindow(number - 1, 0)
    if kind == "documents" and number:
        return lognormal_documents(seq_len, number, DOCUMENTS_SIGMA)
    if name not in _PLAIN_MASKS:
        examples = "causal, full, 'documents 2048' (of that median length) or 'window 4096'"
        raise ValueError(f"expected a mask such as {examples}, got {name!r}")
    return _PLAIN_MASKS[name]


def _per_document(mask: Mask, seq_len: int) -> Layout:
    if not isinstance(mask, Documents):
        raise ValueError("PerDocument is a layout of documents")
    return PerDocument(mask.cu_seqlens, seq_len=seq_len)


LAYOUTS: dict[str, Callable[[Mask, int], Layout]] = {
    "HeadTail": lambda mask, seq_len: HeadTail(),
    "Contiguous": lambda mask, seq_len: Contiguous(),
    "Striped": lambda mask, seq_len: Striped(),
    "Balanced": Balanced,
    "PerDocument": _per_document,
}


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
    mask: str
    """Of `mask_by_name`."""
    layout: str
    """Key of `LAYOUTS`; baselines may have one of their own."""
    backend: str
    """Name of a `torch.nn.attention.SDPBackend`, or "auto"."""

    @property
    def enable_gqa(self) -> bool:
        """Whether query heads share kv heads."""
        return self.heads.q != self.heads.kv

    @property
    def mask_value(self) -> Mask:
        """The mask."""
        return mask_by_name(self.mask, self.seq_len)

    @property
    def is_plain(self) -> bool:
        """Whether the mask is one that every attention kernel knows."""
        return is_plain(self.mask_value, self.seq_len, self.seq_len)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, of one head and batch row."""
        return self.mask_value.pairs(self.seq_len, self.seq_len)

    def layout_value(self, name: str | None = None) -> Layout:
        """The layout, or another one by name.

        Raises:
            ValueError: it does not fit the mask.
        """
        return _layout(name or self.layout, self.mask, self.seq_len)

    def flops(self, pass_name: str) -> float:
        """Floating point operations of a pass over the whole sequence; what is masked is not counted.

        >>> Case(1024, Heads(32, 8), 128, 1, "bfloat16", "full", "HeadTail", "auto").flops("fwd")
        17179869184.0
        """
        forward = 4.0 * self.batch * self.heads.q * self.pairs * self.head_dim
        return {"fwd": forward, "fwdbwd": (1 + BACKWARD_FLOPS) * forward}[pass_name]


@lru_cache
def _layout(name: str, mask: str, seq_len: int) -> Layout:
    return LAYOUTS[name](mask_by_name(mask, seq_len), seq_len)


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
    """All combinations, those with few keys first: what has been allocated is then never more than a case needs."""
    cases = [
        Case(seq_len, each, head_dim, batch, dtype, mask, layout, backend)
        for each, mask, backend, seq_len in itertools.product(heads, masks, backends, seq_lens)
    ]
    return tuple(sorted(cases, key=lambda case: case.seq_len * case.heads.kv))
