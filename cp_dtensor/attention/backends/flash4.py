"""Backend on FlashAttention-4, the package flash-attn-4: full and causal tiles on Hopper and datacenter Blackwell.

Source: github.com/Dao-AILab/flash-attention, `flash_attn/cute`. The package's functions that write into given memory
are private and change between versions, so their parameters are checked at import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_dtensor._torch.cache import capturing
from cp_dtensor._torch.tensors import aligned, empty_in_order_of
from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.attention.backends.base import AttentionBackend, expand_kv_heads, reduce_kv_heads
from cp_dtensor.attention.backends.launches import Call, Launches, noting
from cp_dtensor.attention.backends.packages import SHORTEST, Package, check_parameters, quiet
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, TileMask
from cp_dtensor.spec.cache import LRUCache

PACKAGE = Package("flash-attn-4", "FlashAttention-4")
MOST_COPIED = 512 << 20
"""Bytes of the copies of K/V for the gradients of a tile, which take as many again."""
_ALIGNMENT = 16
_MATH = MathAttention()


@dataclass(frozen=True)
class Flash4Attention(AttentionBackend):
    """FlashAttention-4: bfloat16 and float16, GQA natively, head dims that are multiples of 8.

    Another backend, `instead`, computes tiles in `left`, tiles shorter than `SHORTEST`, tiles whose copies of K/V would
    be too large, tiles of kernels whose first results were wrong, and of kernels that would be new under CUDA graph
    capture.
    """

    instead: AttentionBackend
    deterministic: bool = False
    """True for gradients that are the same bits in every run."""
    left: frozenset[tuple[str, bool]] = frozenset()
    """Tiles for which the other backend is faster or these kernels do not compile: "forward" or "backward", and True
    for causal ones."""
    copies_kv: bool = False
    """True for gradients by a copy of K/V for each query head: these kernels do not compile for groups then."""

    name = "FLASH_ATTENTION_4"

    def refusal(self, spec: CallSpec) -> str | None:
        return PACKAGE.refusal(spec) or _dims_refusal(spec) or _functions().obstacle

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        if not self._serves("forward", q, k, v, mask):
            return self.instead.forward(q, k, v, mask, scale)
        return _forward(q, k, v, mask, scale)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._serves("backward", q, k, v, mask):
            return self.instead.backward(grad_out, q, k, v, out, lse, mask, scale)
        kv_heads = k.size(1)
        if self.copies_kv:
            k, v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
        dq, dk, dv = _backward(grad_out, q, k, v, out, lse, mask, scale, self.deterministic)
        return dq, reduce_kv_heads(dk, kv_heads), reduce_kv_heads(dv, kv_heads)

    def _serves(self, direction: str, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> bool:
        """Return whether these kernels compute a tile. Their first use compiles them and computes a small tile."""
        group, is_causal = q.size(1) // k.size(1), mask.is_causal
        if min(q.size(2), k.size(2)) < SHORTEST or (direction, is_causal) in self.left:
            return False
        if direction == "backward" and self.copies_kv and group > 1:
            if q.size(0) * q.size(1) * k.size(2) * (q.size(3) + v.size(3)) * k.itemsize > MOST_COPIED:
                return False
            group = 1
        deterministic = direction == "backward" and self.deterministic
        compute = _forward if direction == "forward" else partial(_backward, deterministic=deterministic)
        kind = *("deterministic",) * deterministic, "causal" if is_causal else "full"
        small = CAUSAL_TILE if is_causal else FULL_TILE
        return PACKAGE.passes_check(direction, kind, q, v, group, SHORTEST, small, _MATH, compute)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = empty_in_order_of(q, v.size(3)), q.new_empty(q.shape[:3], dtype=torch.float32)
    q, k, v, result = *(_rows_first(x) for x in (q, k, v)), out.transpose(1, 2)

    def wrapper() -> None:
        _functions().forward(q, k, v, softmax_scale=scale, causal=mask.is_causal, out=result, lse=lse)

    _launch(("forward", mask.is_causal, scale), (q, k, v, result, lse), wrapper)
    return out, lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = grads = tuple(empty_in_order_of(x, x.size(3)) for x in (q, k, v))
    q, k, v, out, grad_out = (_rows_first(x) for x in (q, k, v, out, grad_out))
    results = tuple(x.transpose(1, 2) for x in grads)
    if not lse.is_contiguous() or lse.data_ptr() % _ALIGNMENT:
        lse = lse.clone(memory_format=torch.contiguous_format)

    def wrapper() -> None:
        options = {"softmax_scale": scale, "causal": mask.is_causal, "deterministic": deterministic}
        into = dict(zip(("dq", "dk", "dv"), results, strict=True))
        _functions().backward(q, k, v, out, grad_out, lse, **options, **into)

    _launch(("backward", mask.is_causal, scale, deterministic), (q, k, v, out, grad_out, lse, *results), wrapper)
    return dq, dk, dv


def _rows_first(x: Tensor) -> Tensor:
    """Return (B, S, H, D), as the package takes tensors (B, H, S, D); a copy if these are not aligned."""
    return aligned(x, _ALIGNMENT).transpose(1, 2)


# Launches without the package's wrapper, which takes 0.2 and 0.3 ms of host time, forward and backward (one H200)

_launches = LRUCache[Launches](pins=capturing)
_recording = Lock()


def _launch(kind: tuple[Any, ...], tensors: tuple[Tensor, ...], wrapper: Callable[[], None]) -> None:
    """Launch a call by what was recorded for its shapes, in the first call by the wrapper.

    Args:
        kind: all that decides what is launched besides the tensors.
        tensors: inputs and outputs: q, k and v first, (B, S, H, D).
    """
    q, k, v = tensors[:3]
    key = (kind, q.shape, k.shape, v.size(3), q.dtype, q.device)
    launches = _launches.get(key)
    if launches is not None:
        launches.launch(tensors)
        return
    launches = Launches.of(_recorded(wrapper), tensors)
    if launches is not None:
        _launches.add(key, launches)


class _Recording:
    """A cache of compiled functions that records this thread's calls of them."""

    def __init__(self, cache: Any, calls: list[Call]) -> None:
        self.cache, self.calls, self.thread = cache, calls, get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self.cache

    def __setitem__(self, key: Any, function: Any) -> None:
        self.cache[key] = function

    def __getitem__(self, key: Any) -> Any:
        function = self.cache[key]
        return noting(function, self.calls) if get_ident() == self.thread else function


def _recorded(wrapper: Callable[[], None]) -> list[Call]:
    """Call the wrapper; return the compiled functions that this thread has called, with their arguments."""
    calls: list[Call] = []
    with _recording:
        owners = _functions().cached
        caches = [owner.compile_cache for owner in owners]
        try:
            for owner, cache in zip(owners, caches, strict=True):
                owner.compile_cache = _Recording(cache, calls)
            wrapper()
        finally:
            for owner, cache in zip(owners, caches, strict=True):
                owner.compile_cache = cache
    return calls


def _dims_refusal(spec: CallSpec) -> str | None:
    """Return the reason why the kernels do not compile for head dims, None if they do."""
    dim, v_dim = spec.head_dim, spec.v_head_dim
    assert spec.capability is not None
    if dim % 8 or v_dim % 8 or max(dim, v_dim) > 256:
        return f"it needs head dims that are multiples of 8 up to 256, got {dim} and {v_dim}"
    if spec.capability[0] == 9:
        compiles = dim > 96 or v_dim <= 192  # more does not fit shared memory
    else:
        compiles = max(dim, v_dim) <= 128 or (dim, v_dim) in ((192, 128), (256, 256))
    return None if compiles else f"it does not compile for head dims {dim} and {v_dim}"


def tiles_that_do_not_compile(spec: CallSpec) -> frozenset[tuple[str, bool]]:
    """Return `Flash4Attention.left` of a call that is not refused: on Hopper some of backward, up to head dim 128.

    Source: tried on CPUs, as tests/attention/test_flash4_compiles.py does, with 4.0.0b36.
    """
    dim, v_dim = (-(-x // 16) * 16 for x in (spec.head_dim, spec.v_head_dim))
    if spec.capability is None or spec.capability[0] != 9 or dim > 128:
        return frozenset()
    if gcd(dim, 64) > gcd(v_dim, 64):  # V has blocks of fewer columns than Q in shared memory
        return frozenset({("backward", True), ("backward", False)})
    return frozenset({("backward", False)} if 96 < dim < 128 else ())


def has_no_groups_in_backward(spec: CallSpec) -> bool:
    """Return `Flash4Attention.copies_kv`: gradients do not compile for grouped heads of two head dims on Hopper."""
    return spec.capability is not None and spec.capability[0] == 9 and spec.head_dim != spec.v_head_dim


class _Functions(NamedTuple):
    obstacle: str | None
    forward: Any = None
    backward: Any = None
    cached: tuple[Any, ...] = ()
    """Functions with a `compile_cache`, of compiled functions by key."""


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    """Import the package, which takes seconds, and check that its functions take what this file passes."""
    try:
        with quiet():
            module = importlib.import_module("flash_attn.cute.interface")
        forward, backward = module._flash_attn_fwd, module._flash_attn_bwd
        cached = forward, backward, module._bwd_preprocess, module._bwd_postprocess_convert
        common = ("q", "k", "v", "softmax_scale", "causal")
        check_parameters(forward, *common, "out", "lse")
        check_parameters(backward, *common, "out", "dout", "lse", "deterministic", "dq", "dk", "dv")
        if missing := [each.__name__ for each in cached if not hasattr(each, "compile_cache")]:
            raise TypeError(f"{', '.join(missing)} have no compile_cache")
    except Exception as error:  # of any package that it imports
        return _Functions(PACKAGE.unusable(error))
    return _Functions(None, forward, backward, cached)
