"""Shards of a problem with expected results, and counts of compilations and calls, for tests of torch.compile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from unittest import mock

import torch
import torch._dynamo
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from cp_dtensor import Full, Layout
from cp_dtensor.engine.contexts import _pending
from support import shards
from support.masked_problems import MaskedProblem
from support.problems import assert_close

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]
T = TypeVar("T")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Function to compile: SDPA with other operations before and after it."""
    return F.scaled_dot_product_attention(q * 2.0, k, v, is_causal=True, enable_gqa=True) * 3.0


class Shards(shards.Shards):
    """A rank's shards of a problem, and the out, dq, dk and dv of `causal` on one device."""

    def __init__(self, rank: int, length: int = 8, layout: Layout | None = None, ranks: int = 2) -> None:
        problem = MaskedProblem(length, length, Full(), 2, 4, 2, 8, is_causal=True, scale=2.0 * 8**-0.5)
        super().__init__(rank, problem, layout, ranks, length)
        out, *grads = self.expected[:4]
        self.expected = (out * 3.0, *(grad * 3.0 for grad in grads))

    def check(self, function: Function, *more: Any) -> None:
        """Check forward and backward of `function(q, k, v, *more)`."""
        inputs = self.inputs()
        out = function(*inputs, *more)
        self.check_results(out, *torch.autograd.grad(out, inputs, self.grad))


def compiled(function: Function, **options: Any) -> Function:
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager", **options})


def check_equals_eager(function: Function, in_graph: Function, args: Sequence[Any], grad_out: Any = None) -> Tensors:
    """Compares out and gradients of a compiled function with those of the function; returns the compiled ones."""
    leaves = [each for each in args if isinstance(each, torch.Tensor) and each.requires_grad]
    results = []
    for each in (function, in_graph):
        out = each(*args)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out) if grad_out is None else grad_out)
        results.append([x.full_tensor() if isinstance(x, DTensor) else x for x in (out.detach(), *grads)])
    for expected, got in zip(*results, strict=True):
        assert_close(got, expected, function)
    return tuple(results[1])


def no_compilation() -> Any:
    """Returns a context in which a compilation is an error."""
    return torch.compiler.set_stance("fail_on_recompile")


def outstanding() -> dict[Any, Any]:
    """Returns the forward passes of compiled code that wait for a backward that recomputes."""
    return dict(_pending)


def nothing_outstanding() -> Any:
    """Returns a context that begins without them: processes are shared, and refused passes stay pending."""
    return mock.patch.dict(_pending, clear=True)


def fresh() -> None:
    """Resets Dynamo as in a new process, and silences warnings that torch's own code causes."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # read by Dynamo
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    torch._dynamo.reset()


def run_fresh(rank: int, body: Callable[..., T], *args: Any) -> T:
    """Runs a test body on a rank whose Dynamo has compiled nothing yet."""
    fresh()
    return body(rank, *args)
