"""Tensors and values of a call, the interface of plans, and what a forward leaves for its backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from cp_dtensor._torch.autograd import Tensors as Saved
from cp_dtensor._torch.tensors import wide_dtype
from cp_dtensor.attention.modifiers import NO_MODIFIERS, Modifiers
from cp_dtensor.comm.calls import Calls, Signature
from cp_dtensor.comm.faults import PeerError
from cp_dtensor.comm.groups import SequenceRanks
from cp_dtensor.comm.symm_mem_workspace import abandon
from cp_dtensor.engine.call import Call

Result = tuple[Tensor, Tensor, Saved]
"""out, lse, and the tensors that backward needs."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""dq, dk and dv."""


class Tensors(NamedTuple):
    """The tensors of a call: shards of this rank. Code that hands them on names none of `t[3:-1]`, all optional."""

    q: Tensor
    """(B, H, S, D)."""
    k: Tensor
    """(B, Hkv, T, D); latents (B, 1, T, R) if there is `up`."""
    v: Tensor
    """(B, Hkv, T, Dv); rotary keys (B, 1, T, Dr) if there is `up`."""
    bias: Tensor | None = None
    """(B or 1, H or 1, S or 1, keys of the whole sequence or 1), added to the logits; boolean: False masks."""
    sinks: Tensor | None = None
    """(H,), logits in the softmax denominator."""
    seed: Tensor | None = None
    """() int64, of dropout."""
    up: Tensor | None = None
    """(H, Dn + Dv, R), which expands latents."""
    mask: Tensor | None = None
    """A handle of one more mask (`handles`), which may be new in every step."""


OF_HEADS = ("sinks",)
"""Names of the logits of query heads, (H,), which functions and contexts take as options."""
READS_LSE = Tensors._fields.index("sinks")
"""Place in `Tensors` of the one whose gradient is made of the lse of this rank's rows."""


def modifiers_of(call: Call, t: Tensors) -> Modifiers:
    """Return the modifiers of a pass of `call` with these tensors."""
    if t.bias is None and t.sinks is None and t.up is None and not call.changes_weights:
        return NO_MODIFIERS
    return Modifiers(t.bias, seed=t.seed, sinks=t.sinks, up=t.up, **call.of_modifiers)


class Values(NamedTuple):
    """Values of one pass besides the tensors that travel."""

    modifiers: Modifiers
    """Those of this rank's queries."""
    ranks: SequenceRanks
    """The ranks of the plan's partition; not used for a rank alone."""
    scale: float
    """Factor of the logits, positive."""


class Plan(ABC):
    """Attention on one rank: steps, transports and backends, without process groups and scale. Frozen, so cached."""

    saves_rows_of_others: bool = False
    """True if `forward` saves tensors that other ranks have sent; otherwise `remake_saved` does not communicate."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, values: Values, needs_lse: bool) -> Result:
        """Compute attention of this rank's queries to the keys of all ranks.

        Args:
            q: (B, H, S, D), this rank's shard.
            k: (B, Hkv, T, D), this rank's shard.
            v: (B, Hkv, T, Dv), this rank's shard.
            values: of this pass.
            needs_lse: False if lse may be empty.

        Returns:
            out: (B, H, S, Dv) in q's dtype.
            lse: (B, H, S), natural log of the softmax denominator over all keys, float32 (float64 for float64); with
                an additive bias in two floats, (B, H, S, 2).
            saved: the tensors that `backward` needs.
        """

    @abstractmethod
    def backward(self, grad_out: Tensor, saved: Saved, values: Values, grad_bias: Tensor | None) -> Gradients:
        """Return gradients of this rank's q, k and v; add that of the bias to `grad_bias`, unless it is None."""

    def remake_saved(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, values: Values) -> Saved:
        """Make the tensors that `forward` saved again, from this rank's arguments and results. May communicate.

        Compiled code saves only tensors whose shapes it can compute, which excludes those of exchanged heads.
        """
        return q, k, v, out, lse


class Done(NamedTuple):
    """What a forward leaves for its backward besides tensors. A context manager around each pass."""

    call: Call
    """With all that was known only when it ran, such as the mask of the open context."""
    plan: Plan
    pair: tuple[int, int]
    """The global (queries, keys)."""
    scale: float
    signature: Signature
    calls: tuple[Calls, ...]
    """Those that count the passes; none for a rank that has all rows."""
    rows: int
    """Batch rows that make up the one row of packed tensors."""
    ranks: SequenceRanks
    """Those of the plan, maybe along two axes where those of the call are along one."""

    def begin(self, x: Tensor, *, backward: bool = False) -> None:
        """Count a pass before it exchanges anything (see `Calls.begin`); `x` is a tensor of the pass."""
        for calls in self.calls:
            calls.begin(self.signature, backward=backward, on_cpu=not x.is_cuda, debug=self.call.debug)

    def __enter__(self) -> None:
        return

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for group in () if error is None else self.ranks.groups:  # a pass that raises leaves nothing in flight
            abandon(group)
        if error is not None and issubclass(error, PeerError):
            for calls in self.calls:
                calls.compare()  # this rank may have waited for another that is at another call, which this names


def zeros_for_sums(like: Tensor) -> Tensor:
    """Return zeros to which tiles add their shares of the gradient of a bias or an up-projection."""
    return torch.zeros_like(like, dtype=wide_dtype(like))
