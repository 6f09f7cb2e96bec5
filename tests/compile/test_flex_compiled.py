"""FlexAttention of shards in compiled code and modules, on two processes; it has no gradients on CPUs.

`test_steps`, the modules here and the matrix show gradients, by a stand-in that torch.compile differentiates.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.compile_checks import compiled, fresh, no_compilation
from support.flex_checks import SCALE, block_mask, context, distance, documents, draw, one_device, traceable, window
from support.problems import assert_close, shard
from support.processes import Processes
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import AuxRequest, flex_attention
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Causal, ContextParallel, HeadTail, Layout, PerDocument, _torch, context_parallel_flex_attention
from cp_dtensor.engine.call import Call
from cp_dtensor.integrations.unified import RingAttnMode

Code = Callable[..., Any]


def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> Any:
    """FlexAttention between other operations."""
    return flex_attention(q * 2.0, k, v, score, mask, SCALE, True) * 3.0


def results_of(whole: list[torch.Tensor], mask: Any, score: Any = None) -> list[torch.Tensor]:
    """Out, dq, dk and dv of `model`."""
    out, dq, *grads, _ = one_device([whole[0] * 2.0, *whole[1:3], whole[3] * 3.0], mask, score)
    return [out * 3.0, dq * 2.0, *grads]


def local(whole: list[torch.Tensor], rank: int, layout: Layout | None = None) -> list[torch.Tensor]:
    return [shard(tensor, layout or HeadTail(), rank, 2) for tensor in whole[:3]]


def mask_of(mask_mod: Any, length: int) -> Any:
    return None if mask_mod is None else block_mask(mask_mod, length)


def may_compile(step: int) -> Any:
    return no_compilation() if step else warnings.catch_warnings()


CASES = ((documents, distance), (None, None))
"""`uncompiled` has others."""


def forward(rank: int, length: int, options: dict[str, Any], number: int) -> None:
    """Compiled once for all contexts, with `fullgraph=True`. Of one token, one rank has none."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, score: Any) -> Any:
        return context_parallel_flex_attention(
            q * 2.0, k, v, mesh=dist.group.WORLD, block_mask=mask, score_mod=score, scale=SCALE, enable_gqa=True,
            layout=HeadTail(), seq_len=length,
        ) * 3.0  # fmt: skip

    codes = [compiled(code, **options) for code in (model, flex_attention, function)]
    whole = draw(length)
    q, k, v = local(whole, rank)
    for index, (mask_mod, score) in enumerate(CASES[:number]):
        mask, expected = mask_of(mask_mod, length), shard(results_of(whole, mask_mod, score)[0], HeadTail(), rank, 2)
        for again in range(2):
            with may_compile(again):
                with context(seq_len=length):
                    assert_close(codes[0](q, k, v, mask, score), expected, "model")
                    if length > 1 and index == 0:
                        out = codes[1](q * 2.0, k, v, score, mask, SCALE, True)
                        assert_close(out * 3.0, expected, "flex_attention")
                if length > 1 and index == 0:
                    assert_close(codes[2](q, k, v, mask, score), expected, "function")


def masks_of_many_steps(rank: int) -> None:
    """Masks that the compiled function makes or gets, outside and inside of contexts; their shapes stay."""
    whole = draw(40)
    qkv = local(whole, rank)

    def reaching(limit: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda b, h, q, kv: (q >= kv) & (q - kv < limit)

    making = compiled(lambda q, k, v, limit: model(q, k, v, block_mask(reaching(limit), 40), None))
    given = compiled(model)
    for again, limit in enumerate(map(torch.tensor, (3, 9, 20))):
        expected, mask = results_of(whole, reaching(limit))[0], block_mask(reaching(limit), 40)
        with may_compile(again):
            assert_close(given(*whole[:3], mask, None), expected, "outside")
            with context():
                for code, argument in ((making, (limit,)), (given, (mask, None))):
                    assert_close(code(*qkv, *argument), shard(expected, HeadTail(), rank, 2), "inside")


def uncompiled(rank: int) -> None:
    """Uncompiled, torch's FlexAttention compiles itself with the backend "eager"."""
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    whole = draw(60)
    q, k, v = local(whole, rank)
    for mask_mod, score in ((window, None), (documents, distance), (None, distance), (None, None)):
        mask, expected = mask_of(mask_mod, 60), shard(results_of(whole, mask_mod, score)[0], HeadTail(), rank, 2)
        for again in range(3):
            with may_compile(again), context():
                out, aux = flex_attention(q * 2.0, k, v, score, mask, SCALE, True, return_aux=AuxRequest(lse=True))
                assert aux.lse.shape == out.shape[:3]
                assert_close(out * 3.0, expected, "uncompiled")


def promises(rank: int) -> None:
    """What is promised of the whole mask is not promised of rows."""
    whole, mask, taken = draw(32), block_mask(window, 32), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        taken.extend(node.args[6] for node in graph.graph.nodes if "flex_attention" in str(node.target))
        return graph

    options = {"BLOCKS_ARE_CONTIGUOUS": True, "bwd_ROWS_GUARANTEED_SAFE": True, "BLOCK_M": 64}
    with context():
        out = compiled(flex_attention, backend=backend)(*local(whole, rank), None, mask, SCALE, True, False, options)
    assert_close(out, shard(one_device(whole, window, None)[0], HeadTail(), rank, 2), "out")
    (of_graph,) = taken
    assert of_graph["BLOCK_M"] == 64
    assert not any(of_graph.get(name) for name in options if name != "BLOCK_M")


def refusals(rank: int) -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64) + rank

    def attend(q: torch.Tensor, mask: Any) -> Any:
        return flex_attention(q, q, q, block_mask=mask)

    masked, of_one_length = compiled(attend, backend="eager"), compiled(lambda *args: attend(*args), backend="eager")
    with context():
        with pytest.raises(Exception, match=r"block mask .*, got one of \(8, 8\)"):
            masked(q, block_mask(window, 8))
        # Of 17 tokens rank 1 would have fewer, so it finds out by comparing.
        message = "disagree about global" if rank else r"block mask .*, got one of \(17, 17\)"
        with pytest.raises(Exception, match=message):
            masked(q, block_mask(window, 17))
    layout = PerDocument([0, 16])
    with context(layout=layout):
        of_one_length(q, block_mask(window, 16))
    for option, value in (("mask", Causal()), ("deterministic", True)):  # the first is of an equal key
        refused = pytest.raises(Exception, match=f"does not take the option {option} of its context")
        with context(layout=layout, **{option: value}), refused:
            of_one_length(q, block_mask(window, 16))
    alone = compiled(lambda q: flex_attention(q, q, q), backend="eager")
    with RingAttnMode(dist.group.WORLD):
        alone(q)
        with RingAttnMode.disable(), pytest.raises(Exception, match="left to each rank alone"):
            alone(q)


def operators(rank: int) -> None:
    """Real and fake implementations agree."""
    arguments = *local(draw(61), rank), Call.of(dist.group.WORLD, layout=HeadTail()).key, 61, 61, True, 0.5, True
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.cp_dtensor.flex_keys.default, arguments, test_utils=tests)


def run(rank: int, body: Callable[..., None], *args: Any) -> None:
    fresh()
    with torch.no_grad():
        body(rank, *args)


@pytest.mark.parametrize(
    ("body", "args"),
    [
        (forward, (64, {}, 2)), (forward, (61, {"dynamic": True, "backend": "eager"}, 1)), (forward, (1, {}, 1)),
        *((body, ()) for body in (masks_of_many_steps, uncompiled, promises, refusals, operators)),
    ],
)  # fmt: skip
def test_flex_attention(two_processes: Processes, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    two_processes.run(run, body, *args)


# Modules

LENGTH = 62


class Attention(nn.Module):
    def forward(self, *args: Any) -> Any:
        return model(*args)


class Breaking(nn.Module):
    """One that Dynamo captures in two graphs."""

    def forward(self, q: torch.Tensor, *others: Any) -> Any:
        q = q + 0.0
        torch._dynamo.graph_break()
        return model(q, *others)


class Between(nn.Module):
    """Context-parallel attention, with FlexAttention of local tensors before and after it."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: torch.Tensor, *others: Any) -> Any:
        before = flex_attention(q, q, q)
        out = self.attention(q, *others)
        after = flex_attention(q, q, q)
        assert q.size(2) == before.size(2)
        return out + (before - after)


def parallel(module: nn.Module | None = None, **options: Any) -> nn.Module:
    return parallelize_module(module or Attention(), dist.group.WORLD, ContextParallel(**options))


def compiled_before(layout: Layout, backend: str) -> Code:
    module = Attention()
    module.compile(backend=backend, fullgraph=True)
    return parallel(module, layout=layout)


def checkpointed(layout: Layout, backend: str) -> Code:
    module = parallel(layout=layout)
    return compiled(lambda *args: checkpoint(module, *args, use_reentrant=False), backend=backend)


FORMS: dict[str, Callable[[Layout, str], Code]] = {
    "module": lambda layout, backend: compiled(parallel(layout=layout), backend=backend),
    "compiled before": compiled_before,
    "between": lambda layout, backend: compiled(Between(parallel(layout=layout)), backend=backend),
    "checkpoint": checkpointed,
    "graph break": lambda layout, backend: torch.compile(parallel(Breaking(), layout=layout), backend=backend),
}


def without_scale(*args: Any, scale: float | None = None, **others: Any) -> torch.Tensor:
    """`traceable`, with FlexAttention's default of the scale."""
    return traceable(*args, scale=args[0].size(3) ** -0.5 if scale is None else scale, **others)


def modules(rank: int, form: str, layout: Layout, backend: str, in_context: bool, passes: tuple[bool, ...]) -> None:
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # between graphs
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace")  # torch 2.11, at a graph break
    whole, mask = draw(LENGTH), block_mask(documents, LENGTH)
    grad = shard(whole[3], layout, rank, 2)
    for gradients in passes:
        fresh()
        stand_in = mock.patch.object(_torch, "original_flex_attention", without_scale)
        with torch.set_grad_enabled(gradients), stand_in if gradients else nullcontext():
            code = FORMS[form](layout, backend)
            for again in range(2):
                inputs = [tensor.clone().requires_grad_(gradients) for tensor in local(whole, rank, layout)]
                around = context(layout=layout) if in_context else nullcontext()
                with no_compilation() if again and form != "graph break" else nullcontext(), around:
                    found = [code(*inputs, mask, distance)]
                found += torch.autograd.grad(found[0], inputs, grad) if gradients else []
                for got, expected in zip(found, results_of(whole, documents, distance), strict=False):
                    assert_close(got, shard(expected, layout, rank, 2), (form, gradients))


WITHOUT_AND_WITH = (False, True)
"""Gradients: torch's FlexAttention has none on CPUs, so a stand-in has them."""


@pytest.mark.parametrize(
    ("form", "layout", "backend", "in_context", "passes"),
    [
        ("module", HeadTail(), "aot_eager", False, (True,)),
        ("between", HeadTail(), "aot_eager", False, WITHOUT_AND_WITH),
        *((form, HeadTail(), "aot_eager", False, (True,)) for form in ("compiled before", "checkpoint", "graph break")),
        ("module", PerDocument([0, 13, 40, LENGTH]), "aot_eager", False, (True,)),
        ("module", HeadTail(), "aot_eager", True, (True,)),
    ],
)
def test_compiled_modules_attend_to_the_whole_sequence(
    two_processes: Processes, form: str, layout: Layout, backend: str, in_context: bool, passes: tuple[bool, ...]
) -> None:
    two_processes.run(modules, form, layout, backend, in_context, passes)


def redirection(rank: int) -> None:
    """Refused where it is not; it lasts as long as there are modules."""
    fresh()
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(Exception, match="does not take the option mask of its context"):
        compiled(parallel(mask=Causal()), backend="eager")(q, q, q, None, None)
    fresh()
    gc.collect()
    code = flex_attention.__code__
    first, second = parallel(), parallel()
    redirected = flex_attention.__code__
    assert redirected is not code
    flex_attention.__code__ = _torch.original_flex_attention.__code__
    for backend in ("eager", "aot_eager"):
        with torch.no_grad(), pytest.raises(Exception, match="whose code another package has replaced"):
            compiled(first, backend=backend)(q, q, q, None, None)
    flex_attention.__code__ = redirected
    fresh()
    with context():
        del first
        gc.collect()
    assert flex_attention.__code__ is redirected
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    assert flex_attention(q, q, q).shape == q.shape
    del second
    gc.collect()
    assert flex_attention.__code__ is code


def test_redirection(two_processes: Processes) -> None:
    two_processes.run(redirection)
