"""One GPU over the whole sequence: what the work of all ranks would take if sharing it cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cp_dtensor.attention.masked import RowMask, attention_backward, attention_forward
from cp_dtensor.tools.bench.accuracy import seen_keys
from cp_dtensor.tools.bench.baseline import Baseline
from cp_dtensor.tools.bench.cases import Case
from cp_dtensor.tools.bench.inputs import Everything
from cp_dtensor.tools.bench.rows import IDEAL
from cp_dtensor.tools.bench.work import Attention


def single_devices() -> list[Baseline]:
    """torch's attention for plain masks, our kernels for others."""
    return [
        Baseline(IDEAL, _torchs, shards=Everything(), may_expand_kv=True, suits=lambda case: case.is_plain),
        Baseline(f"{IDEAL}-kernels", _kernels, shards=Everything(), suits=lambda case: not case.is_plain),
    ]


@contextmanager
def _torchs(case: Case, device: torch.device) -> Iterator[Attention]:
    with backend_of(case, device):
        yield partial(sdpa, case)


@contextmanager
def _kernels(case: Case, device: torch.device) -> Iterator[Attention]:
    lo, hi = seen_keys(case.mask_value, case.seq_len).to(device, torch.int32)
    mask = RowMask(lo=lo, hi=hi)
    yield lambda q, k, v: _Kernels.apply(q, k, v, mask, case.head_dim**-0.5)


class _Kernels(torch.autograd.Function):
    """Our attention kernels, and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: RowMask, scale: float
    ) -> torch.Tensor:
        out, lse = attention_forward(q, k, v, mask, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.scale = mask, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = attention_backward(grad_out, q, k, v, out, lse, ctx.mask, ctx.scale)
        return dq, dk, dv, None, None


def sdpa(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """torch's attention under a plain mask."""
    # Looked up at each call: torch's context parallel replaces the attribute.
    is_causal = case.mask == "causal"
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=q.size(1) != k.size(1))


def backend_of(case: Case, device: torch.device) -> AbstractContextManager[None]:
    """Allows the case's backend; "auto" is cuDNN where there is one, since that is the fastest."""
    if case.backend != "auto":
        return sdpa_kernel(SDPBackend.__members__[case.backend])
    half = case.dtype in ("bfloat16", "float16")
    if device.type == "cuda" and half and torch.cuda.get_device_capability(device) >= (8, 0):
        return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
    return nullcontext()
