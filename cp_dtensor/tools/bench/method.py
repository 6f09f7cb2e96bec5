"""Methods of computing attention that the benchmark compares, and their repeatable passes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from cp_dtensor.tools.bench.cases import Case
from cp_dtensor.tools.bench.inputs import AllTokens, ByLayout, Inputs, Shards

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q (B, H, S, D), k and v (B, Hkv or H, S, D) to out (B, H, S, D)."""


@dataclass(frozen=True)
class Method:
    """One way of computing attention: this library's, torch's, or one GPU's."""

    name: str
    attention: Callable[[Case, torch.device], AbstractContextManager[Attention]]
    """Returns a context manager of the attention of a case; forward and backward both run inside."""
    refusal: Callable[[Case, int], str | None] = lambda case, world_size: None
    """Returns the reason why a case on so many ranks is not measured; None if it is."""
    workspace_bytes: Callable[[torch.device], int] = lambda device: 0
    """Returns the bytes that the method holds outside of torch's allocator."""
    shards: Shards = field(default_factory=ByLayout)
    """Tokens of each rank. With `AllTokens`, rank 0 works alone."""
    suits: Callable[[Case], bool] = lambda case: True
    """Returns False for cases that get no row."""
    by_default: bool = True
    """True if the method is measured when no methods are named."""
    captured: bool = False
    """True if the method is measured as a CUDA graph."""
    contiguous: bool = False
    """True if the inputs are contiguous as (B, H, S, D)."""
    may_expand_kv: bool = False
    """True if the method is retried with repeated K/V heads where it fails with shared ones."""
    predicted_ms: Callable[[Case, str, torch.device], float | None] = lambda case, pass_name, device: None
    """Returns the time of a case and pass that the library's cost model predicts, on the slowest rank."""

    @property
    def alone(self) -> bool:
        """True if rank 0 computes the whole while the others wait."""
        return isinstance(self.shards, AllTokens)


class Work:
    """One pass of a method over this rank's inputs; keeps the results of the last call.

    Args:
        attention: the function to measure.
        inputs: inputs of this rank.
        pass_name: "fwd" or "fwdbwd".
        kv_heads: K/V heads of the case; `inputs` may have more, repeated for methods that cannot share them.
    """

    def __init__(self, attention: Attention, inputs: Inputs, pass_name: str, kv_heads: int) -> None:
        self._attention = attention
        self._backward = pass_name == "fwdbwd"
        self._leaves = [tensor.detach().requires_grad_(self._backward) for tensor in (inputs.q, inputs.k, inputs.v)]
        self._grad_out = inputs.grad_out
        self._kv_heads = kv_heads
        self._out: torch.Tensor | None = None

    def __call__(self) -> None:
        self.release()
        with torch.set_grad_enabled(self._backward):
            out = self._attention(*self._leaves)
            if self._backward:
                out.backward(self._grad_out)
        self._out = out.detach()

    def release(self) -> None:
        """Frees the results."""
        self._out = None
        for leaf in self._leaves:
            leaf.grad = None

    def results(self) -> tuple[torch.Tensor, ...]:
        """Returns copies of out, or of (out, dq, dk, dv); dK and dV of repeated heads are summed in float64."""
        assert self._out is not None, "no call has run yet"
        results = [self._out]
        for leaf, heads in zip(self._leaves, (self._leaves[0].size(1), self._kv_heads, self._kv_heads), strict=True):
            if self._backward:
                assert leaf.grad is not None
                grad = leaf.grad
                results.append(grad if grad.size(1) == heads else grad.unflatten(1, (heads, -1)).double().sum(2))
        return tuple(result.clone() for result in results)
