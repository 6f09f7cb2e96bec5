"""Backend on FlashAttention-4, the package flash-attn-4: full and causal tiles on Hopper and datacenter Blackwell.

Source: github.com/Dao-AILab/flash-attention, `flash_attn/cute`. The package's functions that write into given memory
are private and change between versions, so their parameters are checked at import.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cp_dtensor._torch.tensors import aligned, empty_in_order_of
from cp_dtensor.attention.backends.aten import MathAttention
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.attention.backends.first_use import SmallTile
from cp_dtensor.attention.backends.packages import Package, check_parameters, quiet
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import ShapedMask, TileMask

PACKAGE = Package("flash-attn-4", "FlashAttention-4")
SHORTEST = 256
"""Fewest rows and keys of a tile. Shorter ones would be compiled again, and other kernels are as fast there."""
_ALIGNMENT = 16


@dataclass(frozen=True)
class Flash4Attention(AttentionBackend):
    """FlashAttention-4: bfloat16 and float16, GQA natively, head dims that are multiples of 8.

    Another backend computes what these kernels do not: tiles shorter than `SHORTEST`, gradients of grouped heads with
    two head dims, kernels whose first results were wrong, and kernels that would be new under CUDA graph capture.
    """

    instead: AttentionBackend
    """That other backend."""
    deterministic: bool = False
    """True for gradients that are the same bits in every run."""

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
        return _backward(grad_out, q, k, v, out, lse, mask, scale, self.deterministic)

    def _serves(self, direction: str, q: Tensor, k: Tensor, v: Tensor, mask: TileMask) -> bool:
        """True if these kernels compute a tile. At their first use they are compiled and compute a small tile."""
        group, dims = q.size(1) // k.size(1), (q.size(3), v.size(3))
        if min(q.size(2), k.size(2)) < SHORTEST or (direction == "backward" and group > 1 and dims[0] != dims[1]):
            return False
        deterministic = direction == "backward" and self.deterministic

        def problem() -> str:
            shape = ShapedMask(is_causal=mask.is_causal)
            tile = SmallTile.drawn(q.device, q.dtype, (2 * group, 2), dims, SHORTEST, shape, MathAttention())
            if direction == "forward":
                return tile.forward_error(_forward)
            return tile.backward_error(partial(_backward, deterministic=deterministic))

        kinds = f"causal={mask.is_causal}", f"deterministic={deterministic}"
        return PACKAGE.is_right((direction, q.dtype, dims, f"group={group}", *kinds), q.device, problem)


def _forward(q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = empty_in_order_of(q, v.size(3)), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch_forward(out, lse, q, k, v, mask.is_causal, scale)
    return out, lse


def _backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (empty_in_order_of(x, x.size(3)) for x in (q, k, v))
    launch_backward(dq, dk, dv, grad_out, q, k, v, out, lse, mask.is_causal, scale, deterministic)
    return dq, dk, dv


def launch_forward(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> None:
    """Writes the partial result of a tile to `out` (B, H, S, Dv) and `lse` (B, H, S), float32.

    Inputs that are not aligned are copied (`aligned`, 16 bytes); `out` must be aligned.
    """
    q, k, v = (aligned(x, _ALIGNMENT) for x in (q, k, v))
    _functions().forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        softmax_scale=scale, causal=is_causal, out=out.transpose(1, 2), lse=lse,
    )  # fmt: skip


def launch_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    is_causal: bool, scale: float, deterministic: bool,
) -> None:  # fmt: skip
    """Writes a tile's share of the gradients, from the final out and lse of its rows. Alignment as in forward."""
    inputs = (aligned(x, _ALIGNMENT).transpose(1, 2) for x in (q, k, v, out, grad_out))
    _functions().backward(
        *inputs, lse, softmax_scale=scale, causal=is_causal, deterministic=deterministic,
        dq=dq.transpose(1, 2), dk=dk.transpose(1, 2), dv=dv.transpose(1, 2),
    )  # fmt: skip


def _dims_refusal(spec: CallSpec) -> str | None:
    """The reason why the kernels do not compile for head dims, None if they do."""
    dim, v_dim = spec.head_dim, spec.v_head_dim
    assert spec.capability is not None
    if dim % 8 or v_dim % 8 or max(dim, v_dim) > 256:
        return f"it needs head dims that are multiples of 8 up to 256, got {dim} and {v_dim}"
    if spec.capability[0] == 9:
        compiles = dim > 96 or v_dim <= 192  # more does not fit shared memory
    else:
        compiles = max(dim, v_dim) <= 128 or (dim, v_dim) in ((192, 128), (256, 256))
    return None if compiles else f"it does not compile for head dims {dim} and {v_dim}"


class _Functions(NamedTuple):
    obstacle: str | None
    forward: Any = None
    backward: Any = None


@lru_cache(maxsize=1)
def _functions() -> _Functions:
    """Imports the package, which takes seconds, and checks that its functions take what this file passes."""
    try:
        with quiet():
            module = importlib.import_module("flash_attn.cute.interface")
        forward, backward = module._flash_attn_fwd, module._flash_attn_bwd
        common = ("q", "k", "v", "softmax_scale", "causal")
        check_parameters(forward, *common, "out", "lse")
        check_parameters(backward, *common, "out", "dout", "lse", "deterministic", "dq", "dk", "dv")
    except Exception as error:  # of any package that it imports
        return _Functions(PACKAGE.unusable(error))
    return _Functions(None, forward, backward)
