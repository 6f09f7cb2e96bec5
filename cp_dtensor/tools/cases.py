"""Attention problems of the benchmarks, their random inputs, and methods that compute them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from cp_dtensor import BalancedBlocks, Layout, Mask, local_positions
from cp_dtensor.plan.partition import BACKWARD_FLOPS
from cp_dtensor.spec.masks import clipped_interval_sets
from cp_dtensor.tools.parsing import layout_by_name, mask_by_name

PASSES = ("fwd", "fwdbwd")
"""Forward alone (without autograd), and forward with backward."""
WHOLE = "whole"
"""Layout of methods of one GPU: rank 0 has the whole sequence, and computes alone."""
BLOCK = 128
"""Queries, and keys, of a block of FlexAttention."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q (B, H, S, D), k and v (B, Hkv, S, D or Dv) to out (B, H, S, Dv)."""


@dataclass(frozen=True)
class Heads:
    """Numbers of query heads and K/V heads, and their dims; `v_dim` 0 is `dim`."""

    q: int
    kv: int
    dim: int = 128
    v_dim: int = 0

    @classmethod
    def parse(cls, text: str) -> Heads:
        """Read "query:kv", "query:kv:dim" or "query:kv:dim/v_dim".

        >>> Heads.parse("16:16:192/128"), str(Heads.parse("32:8"))
        (Heads(q=16, kv=16, dim=192, v_dim=128), '32:8:128')

        Raises:
            ValueError: the text is none of them, or the query heads are no multiple of the kv heads.
        """
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*)(?::([1-9]\d*)(?:/([1-9]\d*))?)?", text)
        if found is None:
            raise ValueError(f"expected heads as query:kv, such as 32:8, or with dims, 16:16:192/128, got {text!r}")
        heads = cls(*(int(number) for number in found.groups() if number is not None))
        if heads.q % heads.kv:
            raise ValueError(f"expected the number of query heads to be a multiple of the kv heads, got {text!r}")
        return heads

    @property
    def dims(self) -> tuple[int, int]:
        """Head dims of q and k, and of v."""
        return self.dim, self.v_dim or self.dim

    def __str__(self) -> str:
        return f"{self.q}:{self.kv}:{self.dim}" + (f"/{self.v_dim}" if self.v_dim else "")


@dataclass(frozen=True)
class Case:
    """One attention problem of all ranks together."""

    seq_len: int
    """Global number of tokens."""
    heads: Heads
    mask: str = "causal"
    """Name of a mask, as of `mask_by_name`."""
    batch: int = 1
    dtype: str = "bfloat16"
    """Name of a torch dtype."""
    backend: str = "auto"
    """Name of a `torch.nn.attention.SDPBackend`, or "auto"."""

    def columns(self) -> dict[str, object]:
        """Return the case as columns of a row, named as in docs/benchmarks/measured.csv."""
        return {
            "tokens": self.seq_len, "mask": self.mask, "q_heads": self.heads.q, "kv_heads": self.heads.kv,
            "head_dim": "/".join(map(str, dict.fromkeys(self.heads.dims))), "batch": self.batch, "dtype": self.dtype,
            "backend": self.backend,
        }  # fmt: skip

    @property
    def title(self) -> str:
        """The case in words."""
        words = [f"{self.seq_len:,} tokens", f"{self.heads} heads", self.mask, self.dtype]
        words += [f"batch {self.batch}"] * (self.batch > 1) + [self.backend] * (self.backend != "auto")
        return ", ".join(words)

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
        """(query, key) pairs that the mask allows, of one head and batch row; ValueError if it does not fit."""
        return self.mask_value.pairs(self.seq_len, self.seq_len)

    def layout(self, name: str, device: torch.device | str = "cpu") -> Layout:
        """Return the layout of a name, as of `layout_by_name`, or "BalancedBlocks" of the mask.

        Raises:
            NotImplementedError: the layout does not fit the mask.
        """
        try:
            if name == "BalancedBlocks":
                return BalancedBlocks(block_mask(self, torch.device(device)))
            return layout_by_name(name, self.mask_value, self.seq_len)
        except ValueError as error:
            raise NotImplementedError(str(error)) from None

    def flops(self, pass_name: str) -> float:
        """Return the floating point operations of a pass over the whole sequence; masked pairs do not count.

        >>> Case(1024, Heads(32, 8), "full").flops("fwd")
        17179869184.0
        """
        forward = 2.0 * self.batch * self.heads.q * self.pairs * sum(self.heads.dims)
        return forward * (1 + BACKWARD_FLOPS if pass_name == "fwdbwd" else 1)

    def seen_keys(self) -> torch.Tensor:
        """Return the first key that each query sees, and the key after the last one: (2, S); equal if it sees none.

        >>> Case(3, Heads(1, 1), "window:1,0").seen_keys().tolist()
        [[0, 0, 1], [1, 2, 3]]

        Raises:
            ValueError: a query sees several intervals of keys.
        """
        interval_sets = clipped_interval_sets(self.mask_value, self.seq_len, self.seq_len)
        if len(interval_sets) > 1:
            raise ValueError(f"expected a mask with one interval of keys for each query, got {self.mask}")
        spans = [(0, 0)] * self.seq_len
        for band in itertools.chain(*interval_sets):
            spans[band.first : band.last] = map(band.keys, range(band.first, band.last))
        return torch.tensor(spans).T.contiguous()


def grid(**options: Sequence[Any]) -> list[Case]:
    """Return all combinations of fields of a case, those with few keys first, so that memory never shrinks."""
    cases = [Case(**dict(zip(options, values, strict=True))) for values in itertools.product(*options.values())]
    return sorted(dict.fromkeys(cases), key=lambda case: case.seq_len * case.heads.kv)


# Masks of FlexAttention


def mask_mod(case: Case, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return the mask of a case as a function of positions."""
    if case.mask == "causal":
        return lambda b, h, q, kv: q >= kv
    first, last = case.seen_keys().to(device)
    return lambda b, h, q, kv: (kv >= first[q]) & (kv < last[q])


@lru_cache(maxsize=1)
def block_mask(case: Case, device: torch.device) -> BlockMask:
    """Return the block mask of a case; compiled on GPUs, where it would hold all pairs in memory."""
    return create_block_mask(
        mask_mod(case, device), None, None, case.seq_len, case.seq_len, device=device, BLOCK_SIZE=BLOCK,
        _compile=device.type == "cuda",
    )  # fmt: skip


# Inputs, which each rank draws by itself, head by head, so that no rank holds the whole sequence


class Inputs(NamedTuple):
    """(B, heads, S, D or Dv) each, views of (B, S, heads, D) memory as in models."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor


def head_of(case: Case, name: str, head: int, device: torch.device) -> torch.Tensor:
    """Draw all tokens of one head of "q", "k", "v" or "grad_out": (B, S, D or Dv), equal on every rank."""
    stream = Inputs._fields.index(name)
    generator = torch.Generator(device).manual_seed(stream * 100_003 + head)
    shape = (case.batch, case.seq_len, case.heads.dims[name in ("v", "grad_out")])
    return torch.randn(shape, device=device, generator=generator).to(getattr(torch, case.dtype))


def rows_of(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Select the rows of (B, S, D) tokens at (B, local tokens) positions."""
    return tokens.take_along_dim(positions[..., None], 1)


def inputs_of(case: Case, positions: torch.Tensor) -> Inputs:
    """Draw the tokens at (B, local tokens) positions of all heads."""
    counts = (case.heads.q, case.heads.kv, case.heads.kv, case.heads.q)
    drawn = (
        [rows_of(head_of(case, name, head, positions.device), positions) for head in range(heads)]
        for name, heads in zip(Inputs._fields, counts, strict=True)
    )
    return Inputs(*(torch.stack(by_head, 2).transpose(1, 2) for by_head in drawn))


def positions_by_layout(case: Case, layout: str, device: torch.device) -> torch.Tensor:
    """Return the positions of this rank's tokens, (B, local tokens), in a layout by name or in `WHOLE`."""
    if layout == WHOLE:
        return torch.arange(case.seq_len, device=device).expand(case.batch, -1)
    world = dist.group.WORLD
    assert world is not None
    return local_positions(world, case.seq_len, case.layout(layout, device), batch_size=case.batch, device=device)


def require(fits: bool, reason: str) -> None:
    """Refuse a case that a method does not support."""
    if not fits:
        raise NotImplementedError(reason)


@dataclass(frozen=True)
class Method:
    """One way of computing attention: this library's, torch's, or one GPU's.

    Its functions raise NotImplementedError for cases that it does not support, which become rows that are refused.
    """

    name: str
    attention: Callable[[Case, torch.device], Attention] | None = None
    """The attention of a case; None for torch's SDPA inside of `shards`."""
    layout: str = "HeadTail"
    """Tokens of each rank: methods of one layout share their inputs."""
    positions: Callable[[Case, str, torch.device], torch.Tensor] = positions_by_layout
    """Positions of this rank's tokens by case and layout."""
    context: Callable[[Case, torch.device], AbstractContextManager[object]] = lambda case, device: nullcontext()
    """The context of all calls."""
    shards: Callable[[Case, torch.device, list[torch.Tensor]], AbstractContextManager[object]] | None = None
    """The context of a training step, in which (B, S) tensors are this rank's shards, also after it."""
    by_default: bool = True
    """True if the method is measured when no methods are named."""
    captured: bool = False
    """True if the method is measured as a CUDA graph."""
    compiled: bool = False
    """True if the method's attention, or the layers of a model around it, are compiled."""
    contiguous: bool = False
    """True if attention gets inputs that are contiguous as (B, H, S, D)."""

    @property
    def layout_column(self) -> str:
        """The layout as the column of a row: HeadTail, beside which all stand, unless the method is named after it."""
        layout = self.layout.removeprefix("torch ")
        return layout if layout in self.name.split() else "HeadTail"
