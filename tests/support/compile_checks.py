"""Shards of a problem with expected results, and counts of compilations and calls, for tests of torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F

from cp_dtensor import HeadTail, Layout
from cp_dtensor.engine.ring import RingPlan
from support.problems import Problem, assert_close, reference, shard

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Function to compile: SDPA with other operations before and after it."""
    return F.scaled_dot_product_attention(q * 2.0, k, v, is_causal=True, enable_gqa=True) * 3.0


class Shards:
    """A rank's shards of a problem, and the out, dq, dk and dv of `causal` on one device."""

    def __init__(self, rank: int, length: int = 8, layout: Layout | None = None, ranks: int = 2) -> None:
        problem = Problem(length, length, batch=2, q_heads=4, kv_heads=2, is_causal=True, scale=2.0 * 8**-0.5)
        q, k, v, grad = self.whole = problem.draw(length)
        out, dq, dk, dv = reference(problem, q, k, v, grad * 3.0)
        self.expected = (out * 3.0, dq, dk, dv)
        self._shard = lambda tensor: shard(tensor, layout or HeadTail(), rank, ranks)
        self.grad = self._shard(grad)

    def inputs(self) -> Tensors:
        """Returns new leaves."""
        return tuple(self._shard(tensor).requires_grad_() for tensor in self.whole[:3])

    def check(self, function: Function, *more: Any, leave: Callable[[], object] | None = None) -> None:
        """Checks forward and backward of `function(q, k, v, *more)`; calls `leave` between them."""
        inputs = self.inputs()
        out = function(*inputs, *more)
        if leave is not None:
            leave()
        grads = torch.autograd.grad(out, inputs, self.grad)
        self.check_results(out, *grads)

    def check_results(self, *results: torch.Tensor) -> None:
        for name, got, whole in zip(("out", "dq", "dk", "dv"), results, self.expected, strict=False):
            assert_close(got, self._shard(whole), name)


def compiled(function: Function, **options: Any) -> Function:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


@contextmanager
def no_compilation() -> Iterator[None]:
    """Context in which a compilation is an error."""
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


@contextmanager
def counted_forwards() -> Iterator[list[str]]:
    """Yields a list of the forwards and backwards of rings that run in the context."""
    calls: list[str] = []
    originals = RingPlan.forward, RingPlan.backward

    def forward(self: RingPlan, *args: Any) -> Any:
        calls.append("forward")
        return originals[0](self, *args)

    def backward(self: RingPlan, *args: Any) -> Any:
        calls.append("backward")
        return originals[1](self, *args)

    RingPlan.forward, RingPlan.backward = forward, backward  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        RingPlan.forward, RingPlan.backward = originals  # type: ignore[method-assign]


def fresh() -> None:
    """Resets Dynamo as in a new process, and silences torch's own deprecations."""
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    torch._dynamo.reset()
