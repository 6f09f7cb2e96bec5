"""One pass of one baseline over this rank's inputs, ready to be repeated."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cp_dtensor.tools.bench.inputs import Inputs

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q (B, H, S, D), k and v (B, Hkv or H, S, D) to out (B, H, S, D)."""


class Work:
    """Call it as often as needed; the last call's results are kept.

    Args:
        attention: what is measured.
        inputs: of this rank, as the attention wants them.
        pass_name: "fwd" or "fwdbwd".
        kv_heads: of the problem; `inputs` may have more, repeated for those who cannot share them.
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
        """Copies of out, or of (out, dq, dk, dv), of the last call; dK/dV of expanded heads are summed in float64."""
        assert self._out is not None, "nothing has run yet"
        results = [self._out]
        if self._backward:
            dq, dk, dv = (leaf.grad for leaf in self._leaves)
            assert dq is not None
            assert dk is not None
            assert dv is not None
            results += [dq, self._of_kv_heads(dk), self._of_kv_heads(dv)]
        return tuple(result.clone() for result in results)

    def _of_kv_heads(self, grad: torch.Tensor) -> torch.Tensor:
        if grad.size(1) == self._kv_heads:
            return grad
        return grad.unflatten(1, (self._kv_heads, -1)).double().sum(2)
