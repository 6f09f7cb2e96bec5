"""First use of a kernel in a process: it computes a small tile, and its results are compared with float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cp_dtensor import _torch
from cp_dtensor._torch.cache import capturing
from cp_dtensor._torch.tensors import on_device
from cp_dtensor.attention.backends.base import AttentionBackend
from cp_dtensor.plan.tiles import TileMask
from cp_dtensor.spec.cache import LRUCache

LARGEST_ERROR = 2e-2
"""Relative to the largest element; rounding to bfloat16 explains a third of it."""

_verdicts = LRUCache[str]()


def _same(x: Tensor) -> Tensor:
    return x


def first_use(
    kernel: tuple[Any, ...], device: torch.device, check: Callable[[], str],
    failed: Callable[[str], None] = lambda reason: None,
) -> str | None:  # fmt: skip
    """Use a kernel on a device for the first time in a process: returns "" if it was right, else what was wrong.

    None under CUDA graph capture if the kernel was not used before: nothing may be compiled or compared there.

    Args:
        kernel: all that decides which kernel is compiled or found.
        check: runs the kernel on a small tile; returns "" or what is wrong, and may raise.
        failed: called with the reason, once for a kernel and a device.

    Raises:
        torch.OutOfMemoryError: there was no memory for the small tile, which says nothing of the kernel.
    """
    key = (*kernel, device)
    verdict = _verdicts.get(key)
    if verdict is None and not capturing():

        def found() -> str:
            try:
                # Hooks of a checkpoint around the call would count what the check saves, which is not saved again.
                with on_device(device), torch.autograd.graph.saved_tensors_hooks(_same, _same):
                    return check()
            except torch.OutOfMemoryError:
                raise  # it may pass
            except Exception as error:
                return f"{type(error).__name__}: {str(error).strip()[:300]}"

        verdict = _verdicts.add(key, _torch.prepared(found))
        if verdict:
            failed(verdict)
    return verdict


@dataclass(frozen=True)
class SmallTile:
    """A tile of random q (1, H, S, D), k (1, Hkv, S, D) and v (1, Hkv, S, Dv), and its results in float64."""

    inputs: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor
    result: tuple[Tensor, Tensor]
    grads: tuple[Tensor, Tensor, Tensor]
    mask: TileMask
    scale: float

    @staticmethod
    def drawn(
        device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dims: tuple[int, int], rows: int,
        mask: TileMask, reference: AttentionBackend,
    ) -> SmallTile:  # fmt: skip
        """Draw a tile; `heads` are those of q and of k and v, `head_dims` those of q and k and of v."""
        generator = torch.Generator().manual_seed(rows)

        def normal(heads: int, dim: int) -> Tensor:
            return torch.randn(1, rows, heads, dim, generator=generator).to(device, dtype).transpose(1, 2)

        q, k, v = normal(heads[0], head_dims[0]), normal(heads[1], head_dims[0]), normal(heads[1], head_dims[1])
        grad_out, scale = normal(heads[0], head_dims[1]), head_dims[0] ** -0.5
        wide_q, wide_k, wide_v = q.double(), k.double(), v.double()
        out, lse = reference.forward(wide_q, wide_k, wide_v, mask, scale)
        grads = reference.backward(grad_out.double(), wide_q, wide_k, wide_v, out, lse, mask, scale)
        return SmallTile((q, k, v), grad_out, (out, lse), grads, mask, scale)

    def error(self, direction: str, compute: Callable[..., tuple[Tensor, ...] | None]) -> str:
        """Compute the tile by `AttentionBackend.forward` or `backward` of a kernel; return "" or what is wrong."""
        if direction == "forward":
            return wrong_result(("out", "lse"), compute(*self.inputs, self.mask, self.scale), self.result)
        out, lse = self.result
        out = torch.empty_like(self.grad_out).copy_(out)
        grads = compute(self.grad_out, *self.inputs, out, lse.float(), self.mask, self.scale)
        return wrong_result(("dq", "dk", "dv"), grads, self.grads)


def wrong_result(
    names: Sequence[str], got: Sequence[Tensor] | None, expected: Sequence[Tensor], largest: float = LARGEST_ERROR
) -> str:
    """Say which result of a small problem differs from float64 by more than `largest` of its largest element, or ""."""
    if got is None:
        return "a small problem is not computed"
    for name, one, other in zip(names, got, expected, strict=True):
        if one.shape != other.shape:
            return f"{name} of a small problem has shape {tuple(one.shape)}, expected {tuple(other.shape)}"
        finite = other.isfinite()
        if not torch.equal(finite, one.isfinite()) or not torch.equal(one[~finite].double(), other[~finite].double()):
            return f"{name} of a small problem is infinite or NaN elsewhere than it should be"
        error = float((one.double() - other)[finite].abs().max() / other[finite].abs().max().clamp(min=1e-2))
        if error > largest:
            return f"{name} of a small problem is wrong by {error:.1e} of its largest element"
    return ""
