"""Steps of compiled fronts: new masks, layouts and lengths, checkpoints and other backends, with few compilations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from matrix.features import FULL, HEAD_TAIL, Case, Tensors
from matrix.fronts import FRONTS, Front
from matrix.worlds import WORLDS, check_in_turns, mesh_of
from support.compile_checks import fresh, outstanding
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import (
    ATTENTION_OPS,
    Balanced,
    BalancedBlocks,
    Batched,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Mask,
    MirroredBatch,
    PerDocument,
    PrefixLM,
    SlidingWindow,
    Striped,
    context_parallel,
    context_parallel_attention,
)
from cp_dtensor.api.extension import attention_of_shards
from cp_dtensor.engine.ring import RingPlan

FIRST, SECOND = Documents([0, 10, 24], within=Causal()), Documents([0, 4, 18, 24])
MASKS: tuple[Mask, ...] = (
    FIRST, Documents([0, 2, 10, 20]), SlidingWindow(3, 1) & SECOND, PrefixLM(9) | SlidingWindow(None, 2),
)  # fmt: skip


# Fronts with masks and layouts of their context


def _context(case: Case, mesh: DeviceMesh, _x: Tensors) -> AbstractContextManager[Any]:
    """The context that has what the call inherits; none where a call does the same by default."""
    mask = None if case.mask == FULL else case.mask
    is_default = mask is None and case.layout == HEAD_TAIL
    return nullcontext() if is_default else context_parallel(mesh, mask=mask, layout=case.layout)


def _other_mask(case: Case, mesh: DeviceMesh, _x: Tensors) -> AbstractContextManager[Any]:
    """A context whose mask the call replaces by its own."""
    return context_parallel(mesh, mask=SECOND if case.seed else FIRST, layout=case.layout)


def _causal_context(case: Case, mesh: DeviceMesh, _x: Tensors) -> AbstractContextManager[Any]:
    """None, a context and one with a mask; a module replaces its mask and layout by its own."""
    return context_parallel(mesh, mask=Causal() if case.seed > 1 else None) if case.seed else nullcontext()


def _call(_case: Case, mesh: DeviceMesh, x: Tensors, **options: Any) -> Any:
    return context_parallel_attention(x["q"] * 1.0, x["k"], x["v"], mesh=mesh, **options)  # type: ignore[operator]


class _Provider(nn.Module):
    """Attention by the function that models of transformers call with attn_implementation="cp_dtensor"."""

    def forward(self, _case: Case, _mesh: DeviceMesh, x: Tensors) -> Any:
        return attention_of_shards(x["q"] * 1.0, x["k"], x["v"])


class _Sdpa(nn.Module):
    def forward(self, *args: Any) -> Any:
        return FRONTS["context"].call(*args) * 1.0


class _Packed(nn.Module):
    def forward(self, *args: Any) -> Any:
        return FRONTS["varlen_attn"].call(*args)


@cache
def _made(kind: type[nn.Module], mesh: DeviceMesh, **options: Any) -> nn.Module:
    return parallelize_module(kind(), mesh, ContextParallel(**options))


def _module(kind: type[nn.Module], around: Any, **options: Any) -> Front:
    """A module with `ContextParallel`, the same one in each step."""

    def context(case: Case, mesh: DeviceMesh, x: Tensors) -> Any:
        x["module"] = _made(kind, mesh, **options)
        return around(case, mesh, x)

    return Front(FRONTS["module"].call, context)


def _edges(case: Case, mesh: DeviceMesh, x: Tensors) -> AbstractContextManager[Any]:
    FRONTS["varlen_attn"].around(case, mesh, x)
    return nullcontext()


@contextmanager
def _edges_for_a_while(case: Case, mesh: DeviceMesh, x: Tensors) -> Iterator[None]:
    """A context of documents whose edges are written to before backward, as data loaders do."""
    with FRONTS["varlen_attn"].around(case, mesh, x):
        yield
    x["edges q"].zero_()


OWN = {
    "function in a context": Front(_call, _context),
    "function with a mask in a context": Front(partial(_call, mask=FULL), _other_mask),
    "module in a context": _module(_Sdpa, _context),
    "module with a mask in a context": _module(_Sdpa, _other_mask, mask=FULL),
    "provider in a module": _module(_Provider, _context),
    "provider in a module with a mask": _module(_Provider, _causal_context, mask=FIRST, layout=Contiguous()),
    "documents for a while": Front(FRONTS["varlen_attn"].call, _edges_for_a_while),
    "packed module": _module(_Packed, _edges, seq_len=24),
}


# Programs


def _keep_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "all": {},
    "policy": {"context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)},
    "list": {"context_fn": partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS))},
}


@dataclass(frozen=True)
class Program:
    """Steps of one compiled function; backward of each comes after its context."""

    front: str
    cases: list[Case]
    compiles: tuple[int, ...] = (0,)
    """Steps that may compile."""
    inside: str = ""
    """The checkpoint inside of the compiled function, a name of `CHECKPOINTS`."""
    around: bool = False
    """True for a checkpoint around it."""
    backend: str = "aot_eager"
    dynamic: bool | None = None

    def body(self, front: Front) -> Callable[[Case, DeviceMesh, Tensors], Any]:
        if not self.inside:
            return front.call
        options = CHECKPOINTS[self.inside]

        def checkpointed(case: Case, mesh: DeviceMesh, x: Tensors) -> Any:
            names = [name for name, value in x.items() if isinstance(value, torch.Tensor)]

            def call(*tensors: torch.Tensor) -> Any:
                return front.call(case, mesh, {**x, **dict(zip(names, tensors, strict=True))})

            return checkpoint(call, *(x[name] for name in names), use_reentrant=False, **options) * 1.0

        return checkpointed


def _of_lengths(*lengths: int, **fields: Any) -> list[Case]:
    return [Case(lengths=(each, each), is_causal=True, **fields) for each in lengths]


def _causal(count: int = 2, **fields: Any) -> list[Case]:
    return [Case(is_causal=True, heads=(4, 2), enable_gqa=True, seed=seed, **fields) for seed in range(count)]


EDGES = [0, 3, 9, 24], [0, 5, 24], [0, 12, 24]
AT_END = Causal("bottom_right")
BALANCED = [Documents(each, within=AT_END) for each in EDGES]


def _packed(**fields: Any) -> list[Case]:
    """Cases of documents whose queries and keys have different edges, and so have the two batch rows."""
    other = [0, 5, 5, 24], [0, 1, 24], [0, 20, 24]
    masks = (
        Batched([Documents(queries, keys, within=AT_END), Documents(keys, within=AT_END)])
        for queries, keys in zip(other, EDGES, strict=True)
    )
    return [Case(mask=mask, **fields) for mask in masks]


LAYOUTS = (
    PerDocument([0, 13, 26, 64]), PerDocument([0, 40, 64]), Balanced(SlidingWindow(9, 0), 64),
    BalancedBlocks((1, 2, 3, 4, 5, 6, 7, 8), 8, 64), BalancedBlocks((9, 1, 1, 9, 1, 1, 1, 1), 8, 64), HEAD_TAIL,
)  # fmt: skip
FLEX = [Case(lengths=(64, 64), mask=Documents([0, 13, 40, 64]), layout=each) for each in LAYOUTS]
INHERITED = [
    Case(), Case(layout=Striped(1)), Case(layout=Contiguous()), Case(mask=FIRST, layout=Striped(1)), Case(),
    Case(mask=SECOND, layout=Striped(1)),
]  # fmt: skip
ONE_LENGTH = [Case(mask=mask, layout=Balanced(each, 24)) for each in (FIRST, SECOND) for mask in (each, FULL)]
PROGRAMS = {
    **{f"masks of a context, {method}": Program("context", [Case(mask=mask, method=method) for mask in MASKS])
       for method in ("ring", "ulysses")},
    "layouts of a context": Program("context", [Case(mask=mask, layout=Balanced(mask, 24)) for mask in MASKS[:3]]),
    "lengths of a context": Program("context", _of_lengths(11, 9, 10, 12, 13, 16), dynamic=True),
    "masks of a function": Program(
        "function", [Case(mask=mask, method="ulysses", seed=seed) for mask in MASKS[2:] for seed in range(2)], (0, 2)
    ),
    "layouts of a ring": Program("ring", [*_causal(layout=Striped(3)), *_causal(layout=MirroredBatch())], (0, 2)),
    "DTensors": Program("dtensor_sdpa", _of_lengths(8, 12, 12, 20, placed=True, layout=Contiguous()), (0, 1)),
    "DTensors of unequal shards": Program(
        "dtensor_sdpa", _of_lengths(9, placed=True, layout=Contiguous()), dynamic=False
    ),
    # Dynamo takes the number of documents for a constant until it has changed
    "documents, ring": Program("varlen_attn", _packed(method="ring"), (0, 1)),
    "documents, ulysses": Program("documents for a while", _packed(method="ulysses"), (0, 1)),
    "documents, balanced": Program(
        "varlen_attn", [Case(mask=mask, layout=Balanced(mask, 24), batch=1) for mask in BALANCED], (0, 1)
    ),
    "documents, Inductor": Program("varlen_attn", _packed(), (0, 1), backend="inductor"),
    "documents, recomputed": Program("varlen_attn", _packed(), (0, 1), "all"),
    "documents, kept": Program("documents for a while", _packed(), (0, 1), "list"),
    "documents, module": Program("packed module", _packed(), (0, 1)),
    "documents, module in a checkpoint": Program("packed module", _packed(), (0, 1), around=True),
    # Layouts of one length are no part of the code, but for blocks that stay whole
    "FlexAttention, layouts": Program("flex_context", FLEX, (0, 3, 5)),
    "FlexAttention, recomputed": Program("flex_context", FLEX[:3], (0,), "all"),
    "FlexAttention, unequal shards": Program("flex", _of_lengths(13, 1, layout=MirroredBatch()), (0, 1)),
    **{f"{way}, inherited": Program(f"{way} in a context", INHERITED, (0, 1, 2, 3)) for way in ("function", "module")},
    **{f"{way}, inherited layouts of one length": Program(f"{way} in a context", ONE_LENGTH, (0, 1))
       for way in ("function", "module")},
    **{f"{way} with a mask": Program(
        f"{way} with a mask in a context", [Case(layout=Striped(1), seed=seed) for seed in (0, 1)])
       for way in ("function", "module")},
    "provider in a module": Program("provider in a module", INHERITED, (0, 1, 2, 3)),
    "provider in a module with a mask": Program(
        "provider in a module with a mask", [Case(mask=FIRST, layout=Contiguous(), seed=seed) for seed in range(3)],
        (0, 1, 2),
    ),
    **{f"{way}, checkpoint of {kind}": Program(way, _causal(method="ring"), (0,), kind)
       for way in ("context", "function", "module in a context") for kind in CHECKPOINTS},
    "checkpoint around": Program("context", _causal(method="ring"), around=True),
}  # fmt: skip


def _counted(name: str) -> Any:
    """Context in which calls of a ring's method are counted."""
    return mock.patch.object(RingPlan, name, autospec=True, side_effect=getattr(RingPlan, name))


def run(_rank: int, name: str) -> None:
    program = PROGRAMS[name]
    fresh()
    before, front = outstanding(), OWN.get(program.front) or FRONTS[program.front]
    options: dict[str, Any] = {"backend": program.backend, "dynamic": program.dynamic}
    function = torch.compile(program.body(front), fullgraph=True, **options)
    forwards = 1 + (program.around or program.inside == "all")
    # Dynamo of torch 2.11 guards every field of a dataclass that a module is called with, here the seed of a case.
    guards_seeds = torch.__version__ < "2.12" and "module" in name
    with front.patch(True):
        for step, case in enumerate(program.cases):
            if program.around:
                case = replace(case, around="checkpoint")
            stance = "default" if guards_seeds or step in program.compiles else "fail_on_recompile"
            with torch.compiler.set_stance(stance), _counted("forward") as forward, _counted("backward") as backward:
                check_in_turns(front, [case], mesh_of(WORLDS["compiled(2)"]), function)
            if case.method == "ring":
                assert (forward.call_count, backward.call_count) == (forwards, 1)
    assert outstanding() == before


RARELY = (
    "documents, Inductor", "documents, module in a checkpoint", "FlexAttention, recomputed",
    "function, checkpoint of list", "module in a context, checkpoint of list", "module in a context, checkpoint of all",
)  # fmt: skip
"""Programs of which each part is in another one."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.sweep) if each in RARELY else each for each in PROGRAMS]
)
def test_steps(two_processes: Processes, name: str) -> None:
    two_processes.run(run, name)
