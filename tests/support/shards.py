"""A rank's shards of a masked problem, and what attention of them must give: that of one device in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from cp_dtensor import Full, HeadTail, Layout
from support.masked_problems import MaskedProblem, Tensors
from support.problems import assert_close, shard

Around = Callable[[], AbstractContextManager[Any]]
CAUSAL = MaskedProblem(11, 11, Full(), 2, 4, 2, is_causal=True)
"""An uneven problem with shared key heads."""
NAMES = ("out", "dq", "dk", "dv")


@cache
def _whole(problem: MaskedProblem, seed: int) -> tuple[Tensors, Tensors, torch.Tensor | None]:
    tensors, sinks = problem.draw(seed), problem.draw_sinks(seed)
    return tensors, problem.reference(*tensors, sinks=sinks), sinks


class Shards:
    """Shards of q, k, v, the gradient of out, and the bias if there is one, on one rank."""

    def __init__(
        self, rank: int, problem: MaskedProblem = CAUSAL, layout: Layout | None = None, ranks: int = 2, seed: int = 0
    ) -> None:
        self.problem, self._place = problem, (layout or HeadTail(), rank, ranks)
        self.whole, self.expected, self.sinks = _whole(problem, seed)
        self.q, self.k, self.v, self.grad, *self.bias = problem.shard(self.whole, *self._place)

    def shard(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of dim 2."""
        return shard(whole, *self._place)

    def inputs(self) -> Tensors:
        """Return new leaves of q, k and v."""
        return tuple(each.detach().clone().requires_grad_() for each in (self.q, self.k, self.v))

    def sdpa(self, *qkv: torch.Tensor, **options: Any) -> torch.Tensor:
        """Call SDPA as models do."""
        return F.scaled_dot_product_attention(
            *qkv, is_causal=self.problem.is_causal, enable_gqa=self.problem.q_heads != self.problem.kv_heads,
            **{"scale": self.problem.scale, **options},
        )  # fmt: skip

    def forward(self, attend: Callable[..., Any] | None = None) -> Callable[[], None]:
        """Check out of `attend(q, k, v)`, by default SDPA; return a function that checks its gradients."""
        inputs = self.inputs()
        out = (attend or self.sdpa)(*inputs)
        self.check_results(out)

        def backward() -> None:
            out.backward(self.grad)
            self.check_results(out, *(leaf.grad for leaf in inputs))

        return backward

    def check(self, attend: Callable[..., Any] | None = None, around: Around = nullcontext) -> None:
        """Check out in `around()`, and gradients after it."""
        with around():
            backward = self.forward(attend)
        backward()

    def check_results(self, *results: torch.Tensor | None) -> None:
        """Check out, dq, dk and dv, or the first of them."""
        for name, got, whole in zip(NAMES, results, self.expected, strict=False):
            assert_close(got, self.shard(whole), f"{name} of {self.problem}, {self._place}")
