"""Cases, the features that change them, and dense attention in float64 to compare a case with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import shown
from support.problems import dense, normals
from support.ranks import run_ranks

from cp_dtensor import (
    Batched,
    Causal,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    PrefixLM,
    SlidingWindow,
    context_parallel_attention,
)

Tensors = dict[str, Any]
FULL, HEAD_TAIL = Full(), HeadTail()
SEQ_DIMS = {"q": 2, "k": 2, "v": 2, "bias": 2, "latent": 1, "k_rope": 1, "out": 2, "lse": 2, "grad_out": 2}
"""Sequence dims of tensors that are sharded; others are whole, and their gradients are sums over the ranks."""


@dataclass(frozen=True)
class Case:
    """An attention call, forward and backward, in global terms."""

    lengths: tuple[int, int] = (24, 24)
    """Of queries and of keys."""
    batch: int = 2
    heads: tuple[int, int] = (4, 4)
    """Of queries and of keys."""
    enable_gqa: bool = False
    head_dim: int = 8
    mask: Mask = FULL
    is_causal: bool = False
    alignment: str | None = None
    """That of the masks that the front makes; None for those of the case."""
    bias: str = ""
    """"bool" or "float"."""
    sinks: bool = False
    softcap: float = 0.0
    dropout_p: float = 0.0
    scale: float | None = None
    dtype: str = "float64"
    deterministic: bool = False
    around: str = ""
    """"checkpoint", "reentrant", "backward after exit", "no_grad" or "twice" (a second derivative)."""
    needs_lse: bool = False
    declared: Any = True
    """True if the call or its context is given the global lengths; other values than a bool are given instead."""
    method: str = "auto"
    transport: str = "auto"
    layout: Layout = HEAD_TAIL
    placed: bool = False
    """True for shards as DTensor makes them."""
    latent: bool = False
    """True for latents in place of keys and values."""
    device: str = "cpu"
    seed: int = 0

    @property
    def latent_dims(self) -> tuple[int, int, int]:
        """Dims of rotary keys, of values and of latents."""
        return self.head_dim // 2, self.head_dim * 3 // 4, self.head_dim * 5 // 8

    @property
    def seq_len(self) -> tuple[int, int] | None:
        """Global lengths as functions take them."""
        return self._declared(self.lengths)

    @property
    def context_lengths(self) -> tuple[int, ...] | None:
        """Global lengths as contexts take them."""
        return self._declared(tuple(dict.fromkeys(self.lengths)))

    def _declared(self, lengths: tuple[int, ...]) -> Any:
        if not isinstance(self.declared, bool):
            return self.declared
        return lengths if self.declared else None

    @property
    def whole_mask(self) -> Mask:
        """The mask and the causal one, as the front aligns them."""
        causal: Any = Causal() if self.alignment is None else Causal(self.alignment)  # type: ignore[arg-type]
        mask: Any = self.mask
        if self.alignment is not None and hasattr(mask, "alignment"):
            mask = replace(mask, alignment=self.alignment)
        return mask & causal if self.is_causal else mask

    def draw(self) -> Tensors:
        """Draws the whole tensors, equal on every rank: inputs, and the gradient of out."""
        exact = normals(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return exact(*shape).to(self.device, getattr(torch, self.dtype))

        (q_len, kv_len), (q_heads, kv_heads) = self.lengths, self.heads
        rope_dim, value_dim, latent_dim = self.latent_dims
        if self.latent:
            drawn = {
                "q": normal(self.batch, q_heads, q_len, self.head_dim + rope_dim),
                "latent": normal(self.batch, kv_len, latent_dim),
                "k_rope": normal(self.batch, kv_len, rope_dim),
                "up": normal(q_heads * (self.head_dim + value_dim), latent_dim),
            }
        else:
            drawn = {"q": normal(self.batch, q_heads, q_len, self.head_dim)}
            drawn |= {name: normal(self.batch, kv_heads, kv_len, self.head_dim) for name in "kv"}
        if self.bias:
            bias = normal(self.batch, q_heads, q_len, kv_len)
            drawn["bias"] = bias if self.bias == "float" else bias > -0.7
        if self.sinks:
            drawn["sinks"] = normal(q_heads)
        drawn["grad_out"] = normal(self.batch, q_heads, q_len, value_dim if self.latent else self.head_dim)
        return drawn


# Features. Those of lengths come first: masks are made for the lengths of the case.


def documents(case: Case, *parts: int, within: Mask | None = None, covers: bool = True) -> Documents:
    """Documents that end at these twelfths of the queries and of the keys, and at the end if they cover all."""
    q_edges, k_edges = ([0, *(length * part // 12 for part in (*parts, *[12] * covers))] for length in case.lengths)
    return Documents(q_edges, None if q_edges == k_edges else k_edges, within=within or Full())


Feature = Callable[[Case], Case]
FEATURES: dict[str, Feature] = {
    "plain": lambda case: case,
    "cross": lambda case: replace(case, lengths=(24, 12)),
    "uneven": lambda case: replace(case, lengths=(13, 13)),
    "short": lambda case: replace(case, lengths=(1, 1)),
    "undeclared": lambda case: replace(case, declared=False),
    "causal": lambda case: replace(case, is_causal=True),
    "window": lambda case: replace(case, mask=SlidingWindow(5, 2)),
    "documents": lambda case: replace(case, mask=documents(case, 2, 2, 7, within=Causal())),
    "padding": lambda case: replace(case, mask=documents(case, 4, 9, covers=False)),
    "batched": lambda case: replace(case, mask=Batched([documents(case, 2 * row + 1, 9) for row in range(case.batch)])),
    "union": lambda case: replace(case, mask=PrefixLM(6) | SlidingWindow(3, 0)),
    "bool_bias": lambda case: replace(case, bias="bool"),
    "float_bias": lambda case: replace(case, bias="float"),
    "sinks": lambda case: replace(case, sinks=True),
    "softcap": lambda case: replace(case, softcap=0.7),
    "dropout": lambda case: replace(case, dropout_p=0.3),
    "scale<0": lambda case: replace(case, scale=-0.4),
    "scale=0": lambda case: replace(case, scale=0.0),
    "gqa": lambda case: replace(case, heads=(4, 2), enable_gqa=True),
    "mqa": lambda case: replace(case, heads=(4, 1), enable_gqa=True),
    "bf16": lambda case: replace(case, dtype="bfloat16"),
    "deterministic": lambda case: replace(case, deterministic=True),
    "lse": lambda case: replace(case, needs_lse=True),
    "checkpoint": lambda case: replace(case, around="checkpoint"),
    "reentrant": lambda case: replace(case, around="reentrant"),
    "backward_after_exit": lambda case: replace(case, around="backward after exit"),
    "no_grad": lambda case: replace(case, around="no_grad"),
    "second_derivative": lambda case: replace(case, around="twice"),
}


def with_features(case: Case, names: tuple[str, ...]) -> Case | None:
    """Returns the case with features, in the order of `FEATURES`; None if two of them change the same field."""
    changed: set[str] = set()
    for name in sorted(names, key=[*FEATURES].index):
        after = FEATURES[name](case)
        fields = {field for field in vars(case) if getattr(case, field) != getattr(after, field)}
        if fields & changed:
            return None
        changed |= fields
        case = after
    return case


# Dense attention


def _seen(case: Case) -> torch.Tensor:
    """Returns the allowed pairs, boolean (B, 1, queries, keys)."""
    return shown(case.whole_mask, *case.lengths, case.batch).to(case.device)


@lru_cache(None)
def _dropped(case: Case) -> torch.Tensor:
    """Returns the factor of each weight on one rank: weights of equal keys, by values of the identity."""

    def weights(_rank: int) -> torch.Tensor:
        rows, keys = (case.batch, case.heads[0]), case.lengths[1]
        q, eye = torch.ones(*rows, case.lengths[0], 8, dtype=torch.float64), torch.eye(keys, dtype=torch.float64)
        k, v = torch.ones(*rows, keys, 8, dtype=torch.float64), eye.expand(*rows, -1, -1)
        with torch.no_grad():
            out = context_parallel_attention(q, k, v, mesh=dist.group.WORLD, dropout_p=case.dropout_p)
        assert isinstance(out, torch.Tensor)
        return out * keys

    with same_seeds():
        (factors,) = run_ranks(1, weights)
    return factors


def same_seeds() -> Any:
    """Context in which ranks that are threads draw one seed: they share a generator, so each would have another."""
    return mock.patch.object(torch, "randint", return_value=torch.tensor(1234567))


def _qkv(case: Case, x: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns q, and k and v for each query head."""
    if case.latent:
        expanded = torch.einsum("btr,hdr->bhtd", x["latent"], x["up"].unflatten(0, (case.heads[0], -1)))
        rope = x["k_rope"].unsqueeze(1).expand(-1, case.heads[0], -1, -1)
        return x["q"], torch.cat([expanded[..., : case.head_dim], rope], -1), expanded[..., case.head_dim :]
    group = case.heads[0] // case.heads[1]
    return x["q"], x["k"].repeat_interleave(group, 1), x["v"].repeat_interleave(group, 1)


def _dense(case: Case, x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse by the formula."""
    q, k, v = _qkv(case, x)
    sinks = x["sinks"][None, :, None].expand(q.shape[:3]) if case.sinks else None
    kept = _dropped(_shape_of(case)).to(q.dtype) if case.dropout_p else None
    return dense(
        q, k, v, _seen(case), case.scale, softcap=case.softcap, bias=x.get("bias"), sinks=sinks, kept=kept
    )  # fmt: skip


def _shape_of(case: Case) -> Case:
    """Returns a case with what the pattern of dropout depends on, so that cases share it."""
    return Case(lengths=case.lengths, batch=case.batch, heads=case.heads, dropout_p=case.dropout_p)


def _torchs(case: Case, x: Tensors) -> torch.Tensor:
    """Returns out of torch's own attention on one device; sinks are one more key of zeros."""
    q, k, v = _qkv(case, x)
    bias = torch.zeros(case.batch, case.heads[0], *case.lengths, dtype=q.dtype, device=q.device)
    if case.bias == "float":
        bias = bias + x["bias"]
    seen = _seen(case) & x["bias"] if case.bias == "bool" else _seen(case)
    bias = bias.masked_fill(~seen, float("-inf"))
    if case.sinks:
        bias = torch.cat([bias, x["sinks"][None, :, None, None].expand(*bias.shape[:-1], 1)], -1)
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    nothing = (bias == float("-inf")).all(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(nothing, 0.0), scale=case.scale)
    return out.masked_fill(nothing, 0.0)


def expected(case: Case, one_device: bool = False) -> Tensors:
    """Returns the whole out, lse, and gradients by name, in float64; in the dtype of the case for `one_device`."""
    return _expected(replace(case, **IRRELEVANT), one_device)


def differentiate(out: torch.Tensor, lse: torch.Tensor | None, grad_out: torch.Tensor) -> None:
    """Runs backward of out, and of lse with the first column of the gradient of out; rows without keys have no lse."""
    if lse is None:
        out.backward(grad_out)
    else:
        of_lse = grad_out[..., 0].to(lse.dtype).masked_fill(lse.isinf(), 0)
        torch.autograd.backward((out, lse), (grad_out, of_lse))


IRRELEVANT: dict[str, Any] = {
    "layout": HEAD_TAIL, "method": "auto", "transport": "auto", "placed": False, "deterministic": False,
    "around": "", "declared": True,
}  # fmt: skip
"""Fields of cases that change no result, so that cases share what is expected."""


@lru_cache(None)
def _expected(case: Case, one_device: bool) -> Tensors:
    drawn = case.draw()
    dtype = getattr(torch, case.dtype) if one_device else torch.float64
    exact = {name: x.to(dtype, copy=True) if x.is_floating_point() else x for name, x in drawn.items()}
    grad_out = exact.pop("grad_out")
    leaves = {name: x.requires_grad_() for name, x in exact.items() if x.is_floating_point()}
    with torch.enable_grad():
        # The formula of softcap and dropout is not in torch's attention.
        by_torch = one_device and not (case.softcap or case.dropout_p)
        out, lse = (_torchs(case, exact), None) if by_torch else _dense(case, exact)
        differentiate(out, lse if case.needs_lse else None, grad_out)
    results = {"out": out.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}
    return results if lse is None else {**results, "lse": lse.detach()}
