"""Attention problems of the benchmark, their random inputs, and methods that compute them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from cp_dtensor import Layout, Mask
from cp_dtensor.plan.partition import BACKWARD_FLOPS
from cp_dtensor.tools.parsing import layout_by_name, mask_by_name

PASSES = {"fwd": "forward", "fwdbwd": "forward + backward"}
"""Titles by name: forward alone (without autograd), and forward with backward."""
Select = Callable[[torch.Tensor], torch.Tensor]
"""From all tokens of a head, (B, S, D), to the tokens of a rank."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q (B, H, S, D), k and v (B, Hkv or H, S, D) to out (B, H, S, D)."""


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and K/V heads, and their dims: None for those of the command line, and for v as of k."""

    q: int
    kv: int
    dim: int | None = None
    v_dim: int | None = None

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Reads "query:kv", "query:kv:dim" or "query:kv:dim/v_dim".

        >>> Heads.parse("16:16:192/128")
        Heads(q=16, kv=16, dim=192, v_dim=128)

        Raises:
            ValueError: the text is none of them, or the query heads are no multiple of the kv heads.
        """
        found = re.fullmatch(r"(\d+):(\d+)(?::(\d+)(?:/(\d+))?)?", text)
        if found is None:
            raise ValueError(f"expected heads as query:kv, such as 32:8, or with dims, 16:16:192/128, got {text!r}")
        q, kv, dim, v_dim = (None if number is None else int(number) for number in found.groups())
        if not q or not kv or 0 in (dim, v_dim) or q % kv:
            raise ValueError(f"expected the number of query heads to be a multiple of the kv heads, got {text!r}")
        return cls(q, kv, dim, v_dim)

    def dims(self, otherwise: int) -> tuple[int, int]:
        """Return head dims of q and k, and of v; `otherwise` where these heads have none.

        >>> Heads(16, 16, 192, 128).dims(64), Heads(32, 8, 256).dims(64), Heads(32, 8).dims(64)
        ((192, 128), (256, 256), (64, 64))
        """
        dim = self.dim or otherwise
        return dim, self.v_dim or dim


@dataclass(frozen=True)
class Case:
    """One attention problem of all ranks together."""

    seq_len: int
    """Global number of tokens."""
    heads: Heads
    head_dim: int
    """Head dim of heads that have none of their own."""
    batch: int
    dtype: str
    """Name of a torch dtype."""
    mask: str
    """Name of a mask, as of `mask_by_name`."""
    layout: str
    """Name of a layout, as of `layout_by_name`; methods may have one of their own."""
    backend: str
    """Name of a `torch.nn.attention.SDPBackend`, or "auto"."""
    dropout: float = 0.0
    """Probability to drop a softmax weight. Results are random then, and have no errors."""

    @property
    def enable_gqa(self) -> bool:
        """True if query heads share K/V heads."""
        return self.heads.q != self.heads.kv

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of q and k, and of v."""
        return self.heads.dims(self.head_dim)

    @property
    def mask_value(self) -> Mask:
        """The mask of the name."""
        return mask_by_name(self.mask, self.seq_len)

    @property
    def is_plain(self) -> bool:
        """True if the mask is named full or causal: the methods of torch go by the name."""
        return self.mask in ("full", "causal")

    @property
    def pairs(self) -> int:
        """(query, key) pairs that the mask allows, of one head and batch row.

        Raises:
            ValueError: the mask does not fit the length.
        """
        return self.mask_value.pairs(self.seq_len, self.seq_len)

    def layout_value(self, name: str | None = None) -> Layout:
        """Return the layout of a name, by default that of the case.

        Raises:
            ValueError: the layout does not fit the mask.
        """
        return layout_by_name(name or self.layout, self.mask_value, self.seq_len)

    def layout_refusal(self, name: str | None = None) -> str | None:
        """Return the reason why there is no such layout; None if there is."""
        try:
            self.layout_value(name)
        except ValueError as error:
            return str(error)
        return None

    def flops(self, pass_name: str) -> float:
        """Return the floating point operations of a pass over the whole sequence; masked pairs do not count.

        >>> Case(1024, Heads(32, 8), 128, 1, "bfloat16", "full", "HeadTail", "auto").flops("fwd")
        17179869184.0
        """
        forward = 2.0 * self.batch * self.heads.q * self.pairs * sum(self.dims)
        return forward * (1 + BACKWARD_FLOPS if pass_name == "fwdbwd" else 1)


def grid(
    seq_lens: Sequence[int], heads: Sequence[Heads], masks: Sequence[str], backends: Sequence[str],
    dropouts: Sequence[float] = (0.0,), **fixed: Any,
) -> tuple[Case, ...]:  # fmt: skip
    """Return all combinations, those with few keys first, so that buffers never exceed the needs of a case.

    `fixed` are the other fields of all cases.
    """
    cases = [
        Case(seq_len, each, mask=mask, backend=backend, dropout=dropout, **fixed)
        for each, mask, backend, dropout, seq_len in itertools.product(heads, masks, backends, dropouts, seq_lens)
    ]
    return tuple(sorted(dict.fromkeys(cases), key=lambda case: case.seq_len * case.heads.kv))


# Inputs that each rank draws by itself, head by head, so that no rank holds the whole sequence


@dataclass(frozen=True)
class Inputs:
    """(B, heads, S, D or Dv) each, views of (B, S, heads, D) memory as in models."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    def contiguous(self) -> Inputs:
        """Return these numbers in (B, heads, S, D) memory."""
        return Inputs(*(tensor.contiguous() for tensor in (self.q, self.k, self.v, self.grad_out)))

    def with_expanded_kv(self) -> Inputs:
        """Return this problem without GQA: each K/V head repeated for the query heads that read it."""
        group = self.q.size(1) // self.k.size(1)
        k, v = (x.transpose(1, 2).repeat_interleave(group, 2).transpose(1, 2) for x in (self.k, self.v))
        return Inputs(self.q, k, v, self.grad_out)


@dataclass(frozen=True)
class Source:
    """Random numbers, equal on all ranks with the same kind of device."""

    seed: int
    device: torch.device

    def head(self, case: Case, name: str, head: int) -> torch.Tensor:
        """Draw all tokens of one head of "q", "k", "v" or "grad_out": (B, S, D or Dv), normal, in the case's dtype."""
        stream = ("q", "k", "v", "grad_out").index(name)
        generator = torch.Generator(self.device).manual_seed((self.seed * 4 + stream) * 100_003 + head)
        shape = (case.batch, case.seq_len, case.dims[name in ("v", "grad_out")])
        return torch.randn(shape, device=self.device, generator=generator).to(getattr(torch, case.dtype))

    def inputs(self, case: Case, select: Select) -> Inputs:
        """Draw the selected tokens of all heads."""
        tensors = []
        for name, heads in {
            "q": case.heads.q,
            "k": case.heads.kv,
            "v": case.heads.kv,
            "grad_out": case.heads.q,
        }.items():
            first = select(self.head(case, name, 0))
            tensor = first.new_empty(case.batch, first.size(1), heads, first.size(2))
            for head in range(heads):
                tensor[:, :, head] = select(self.head(case, name, head)) if head else first
            tensors.append(tensor.transpose(1, 2))
        return Inputs(*tensors)


@dataclass(frozen=True)
class ByLayout:
    """The tokens of each rank, in local order, by a layout: that of the name, or of the case.

    A value: methods with equal shards share their inputs.
    """

    name: str | None = None

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        """Return the function that selects a rank's tokens."""
        return shard_of(case.layout_value(self.name), case, rank, world_size, device)


class AllTokens(ByLayout):
    """The whole sequence, of rank 0 alone."""

    def select(self, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
        return all_tokens


def all_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Selects all tokens."""
    return tokens


def shard_of(layout: Layout, case: Case, rank: int, world_size: int, device: torch.device) -> Select:
    """Return the function that selects the tokens that a layout assigns to a rank."""
    indices = []  # (batch rows, positions) of each group of rows that is divided alike
    for group, rows in enumerate(layout.batch_groups(case.batch)):
        segments = layout.segments(case.seq_len, rank, world_size, group)
        positions = [position for segment in segments for position in segment.positions()]
        indices.append((slice(*rows), torch.tensor(positions, dtype=torch.int64, device=device)))
    return lambda tokens: torch.cat([tokens[rows].index_select(1, positions) for rows, positions in indices])


@dataclass(frozen=True)
class Method:
    """One way of computing attention: this library's, torch's, or one GPU's."""

    name: str
    attention: Callable[[Case, torch.device], Attention]
    """The attention of a case."""
    refusal: Callable[[Case, int], str | None] = lambda case, world_size: None
    """The reason why a case on so many ranks is not measured; None if it is."""
    context: Callable[[Case, torch.device], AbstractContextManager[object]] = lambda case, device: nullcontext()
    """The context in which the attention is made and runs, forward and backward."""
    shards: ByLayout = field(default_factory=ByLayout)
    """Tokens of each rank. With `AllTokens`, rank 0 works alone."""
    suits: Callable[[Case], bool] = lambda case: True
    """False for cases that get no row, besides those with dropout if the method has none."""
    has_dropout: bool = False
    by_default: bool = True
    """True if the method is measured when no methods are named."""
    captured: bool = False
    """True if the method is measured as a CUDA graph."""
    contiguous: bool = False
    """True if the inputs are contiguous as (B, H, S, D)."""
    may_expand_kv: bool = False
    """True if the method is retried with repeated K/V heads where it fails with shared ones."""
    predicted_ms: Callable[[Case, str, torch.device], float | None] = lambda case, pass_name, device: None
    """The time of a case and pass that the library's cost model predicts, on the slowest rank."""

    def has_row(self, case: Case) -> bool:
        """True if a case gets a row."""
        return self.suits(case) and (self.has_dropout or not case.dropout)

    @property
    def alone(self) -> bool:
        """True if rank 0 computes the whole while the others wait."""
        return isinstance(self.shards, AllTokens)
