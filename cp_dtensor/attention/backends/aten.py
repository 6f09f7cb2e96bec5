"""Backends on torch's own attention operators: flash, cuDNN, memory-efficient, flash on CPUs, and plain math."""

from __future__ import annotations

import torch
from torch import Tensor

from cp_dtensor._torch.tensors import aligned, empty_in_order_of, laid_out_after, wide_dtype
from cp_dtensor.attention.backends.base import AttentionBackend, expand_kv_heads, reduce_kv_heads
from cp_dtensor.attention.backends.first_use import SmallTile, first_use
from cp_dtensor.attention.masked import attention_backward_reference, attention_forward_reference
from cp_dtensor.attention.triton.row_mask import CAUSAL_ROWS, FULL_ROWS
from cp_dtensor.plan.partition import CallSpec
from cp_dtensor.plan.tiles import CAUSAL_TILE, FULL_TILE, TileMask

aten = torch.ops.aten

_ALIGNMENT = 16
"""Bytes that kernels read at once: at other addresses the device would raise, and the process lose it."""
# The memory-efficient kernels read LSE and bias rows in groups of this many elements.
_LSE_ALIGNMENT = 32


class FlashAttention(AttentionBackend):
    """FlashAttention-2 on CUDA: bfloat16 and float16, head dims that are multiples of 8 up to 256, GQA natively.

    Causal tiles are square, so the kernel's bottom-right alignment is also top-left.
    """

    name = "FLASH_ATTENTION"

    def refusal(self, spec: CallSpec) -> str | None:
        return _half_precision_refusal(spec)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _aligned(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, mask.is_causal, False, scale=scale)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q, k, v, out = _aligned(grad_out, q, k, v, out)
        rng_state, unused = _random_state(q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, out, lse.contiguous(), None, None, q.size(2), k.size(2),
            0.0, mask.is_causal, rng_state, unused, scale=scale,
        )  # fmt: skip


class CudnnAttention(AttentionBackend):
    """cuDNN on CUDA: bfloat16 and float16, GQA natively, head dims that are multiples of 8.

    Equal head dims up to 128 always. Others up to 256, such as 256 and 192/128, where a small tile has been right.
    Other kernels compute tiles of one query or one key: cuDNN crashes on them, and uneven shards may have them.
    """

    name = "CUDNN_ATTENTION"

    def refusal(self, spec: CallSpec) -> str | None:
        dims = spec.head_dim, spec.v_head_dim
        if any(dim % 8 or dim > 256 for dim in dims) or (dims[0] == dims[1] <= 128):
            return _half_precision_refusal(spec)
        if refusal := _half_precision_refusal(spec, of_dims=False):
            return refusal
        device, dtype, heads = torch.device(spec.device), getattr(torch, spec.dtype), (spec.q_heads, spec.kv_heads)

        def problem() -> str:
            tiles = (
                SmallTile.drawn(device, dtype, heads, dims, 256, mask, MathAttention())
                for mask in (CAUSAL_TILE, FULL_TILE)
            )
            errors = (tile.error("forward", self.forward) or tile.error("backward", self.backward) for tile in tiles)
            return next(filter(None, errors), "")

        found = first_use((self.name, dtype, *heads, *dims), device, problem)
        if found == "":
            return None
        reason = "was not tried before CUDA graph capture" if found is None else f"failed: {found}"
        return f"head dims {spec.head_dim} and {spec.v_head_dim}: a small tile {reason}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        if _has_single_row(q, k):
            return _for_single_rows(q, v).forward(q, k, v, mask, scale)
        q, k, v = _aligned(q, k, v)
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, mask.is_causal, False, scale=scale
        )
        return out, lse.view(out.shape[:3])

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _has_single_row(q, k):
            return _for_single_rows(q, v).backward(grad_out, q, k, v, out, lse, mask, scale)
        grad_out, q, k, v, out = _aligned(grad_out, q, k, v, out)
        # torch 2.13 and older look up cuDNN's plans by the strides of q, k and v alone, and would run a plan made for
        # other strides of out. The strides of out must therefore follow from q's. (grad_out must have those of out.)
        grad_out, out = laid_out_after(q, grad_out), laid_out_after(q, out)
        state = torch.empty((), dtype=torch.int64, device=q.device)  # random state, not read without dropout
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad_out, q, k, v, out, lse.contiguous().unsqueeze(-1), state, state, None, None, None,
            q.size(2), k.size(2), 0.0, mask.is_causal, scale=scale,
        )  # fmt: skip


def _aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, copied where rows do not begin at multiples of 16 bytes, as of slices; expanded ones stay."""
    return tuple([aligned(x, _ALIGNMENT, keeps_expanded=True) for x in tensors])


def _has_single_row(q: Tensor, k: Tensor) -> bool:
    return q.size(2) == 1 or k.size(2) == 1


def _for_single_rows(q: Tensor, v: Tensor) -> AttentionBackend:
    """Return the backend of tiles of one query or one key, where cuDNN crashes. torch's flash needs equal head dims."""
    return FlashAttention() if q.size(3) == v.size(3) else EfficientAttention()


class EfficientAttention(AttentionBackend):
    """Memory-efficient attention on CUDA: float32, bfloat16 and float16. Expands K/V for GQA, on the receiving rank."""

    name = "EFFICIENT_ATTENTION"

    def refusal(self, spec: CallSpec) -> str | None:
        if spec.device_type != "cuda":
            return _wrong_device(spec, "cuda")
        if spec.dtype == "float64":
            return "it does not compute in float64"
        alignment = 4 if spec.dtype == "float32" else 8
        if spec.head_dim % alignment or spec.v_head_dim % alignment:
            dims = f"{spec.head_dim} and {spec.v_head_dim}"
            return f"it needs head dims that are multiples of {alignment}, got {dims}"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _aligned(q, k, v)
        k, v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, mask.is_causal, scale=scale
        )
        return out, lse[:, :, : q.size(2)]

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k.size(1)
        grad_out, q, k, v, out = _aligned(grad_out, q, k, v, out)
        k, v = expand_kv_heads(k, q.size(1)), expand_kv_heads(v, q.size(1))
        padding = -lse.size(2) % _LSE_ALIGNMENT
        lse = torch.nn.functional.pad(lse, (0, padding), value=float("inf")) if padding else lse.contiguous()
        if out.stride()[1:] != (out.size(3), out.size(1) * out.size(3), 1):  # the kernel assumes this row pitch of out
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        seed, offset = _random_state(q.device)
        grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad_out, q, k, v, None, out, lse, seed, offset, 0.0,
            [True, True, True, False], mask.is_causal, scale=scale,
        )  # fmt: skip
        return grad_q, reduce_kv_heads(grad_k, kv_heads), reduce_kv_heads(grad_v, kv_heads)


class CpuFlashAttention(AttentionBackend):
    """Blocked attention on CPUs (`SDPBackend.FLASH_ATTENTION` there): any floating dtype, GQA natively."""

    name = "FLASH_ATTENTION"

    def refusal(self, spec: CallSpec) -> str | None:
        return _wrong_device(spec, "cpu") or _unequal_head_dims(spec)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, mask.is_causal, scale=scale)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return compute(grad_out, q, k, v, out, lse, 0.0, mask.is_causal, scale=scale)


class MathAttention(AttentionBackend):
    """Plain torch operations in float32 (float64 for float64): any device, dtype and head dim."""

    name = "MATH"

    def refusal(self, spec: CallSpec) -> str | None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: TileMask, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(wide_dtype(x)) for x in (q, k, v))
        out, lse = empty_in_order_of(q, v.size(3)), q.new_empty(q.shape[:3])
        attention_forward_reference(out, lse, q, k, v, CAUSAL_ROWS if mask.is_causal else FULL_ROWS, scale)
        return out, lse

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: TileMask, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_out, q, k, v, out = (x.to(wide_dtype(x)) for x in (grad_out, q, k, v, out))
        delta, rows = (grad_out * out).sum(-1), CAUSAL_ROWS if mask.is_causal else FULL_ROWS
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        attention_backward_reference(dq, dk, dv, grad_out, q, k, v, lse, delta, rows, scale)
        return dq, dk, dv


def _half_precision_refusal(spec: CallSpec, *, of_dims: bool = True) -> str | None:
    """Return the reason why flash and cuDNN kernels on CUDA cannot compute a call, None if they can."""
    if spec.device_type != "cuda":
        return _wrong_device(spec, "cuda")
    if spec.capability is not None and spec.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, this device has {spec.capability}"
    if spec.dtype not in ("bfloat16", "float16"):
        return f"it needs bfloat16 or float16, got {spec.dtype}"
    if of_dims and spec.head_dim == spec.v_head_dim and (spec.head_dim % 8 or spec.head_dim > 256):
        return f"it needs a head dim that is a multiple of 8 up to 256, got {spec.head_dim}"
    return _unequal_head_dims(spec) if of_dims else None


def _wrong_device(spec: CallSpec, needed: str) -> str | None:
    return None if spec.device_type == needed else f"the tensors are on {spec.device_type}, not {needed}"


def _unequal_head_dims(spec: CallSpec) -> str | None:
    if spec.head_dim == spec.v_head_dim:
        return None
    return f"head dims of q and v differ ({spec.head_dim} and {spec.v_head_dim})"


def _random_state(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two random-state arguments of fused backward kernels, not read without dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.zeros((), dtype=torch.uint64, device=device)
