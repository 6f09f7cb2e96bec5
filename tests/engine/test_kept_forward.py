"""Selective checkpoints keep the results of attention of eager code: a recompute does not compute it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.masked_problems import MaskedProblem
from support.ranks import run_ranks
from support.shards import CAUSAL, Shards
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from cp_dtensor import ATTENTION_OPS, Causal, Documents, Full, context_parallel, context_parallel_mla
from cp_dtensor.engine.ring import RingPlan

PROBLEMS = {
    "causal": CAUSAL,
    "documents": MaskedProblem(11, 11, Documents((0, 4, 11), within=Causal()), 2, 4, 2),
    "bias": MaskedProblem(11, 11, Full(), 2, 4, 4, bias="additive hs"),
    "sinks": MaskedProblem(11, 11, Causal(), 2, 4, 2, sinks=True),
    "cross": MaskedProblem(5, 24, Full(), 1, 2, 2),
}
KEPT = partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS))


@contextmanager
def forwards_counted() -> Iterator[list[int]]:
    """Count the forwards of rings, of which Ulysses has one or some on each rank."""
    counted, forward = [0], RingPlan.forward

    def count(*args: Any) -> Any:
        counted[0] += 1
        return forward(*args)

    with mock.patch.object(RingPlan, "forward", count):
        yield counted


def forwards(body: Callable[[int], None], ranks: int = 2) -> int:
    with forwards_counted() as counted:
        run_ranks(ranks, body)
    return counted[0]


@pytest.mark.parametrize("method", ["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_attention_is_computed_once(name: str, method: str) -> None:
    problem, sizes = PROBLEMS[name], (2, 2) if method == "hybrid" else (2,)

    def body(context_fn: Any, rank: int) -> None:
        shards = Shards(rank, problem, ranks=len(sizes) * 2)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("ring", "ulysses")[: len(sizes)])
        options = {"attn_mask": shards.bias[0]} if shards.bias else {}
        sinks = None if shards.sinks is None else shards.sinks.detach().clone().requires_grad_()

        def twice(*qkv: torch.Tensor) -> torch.Tensor:
            # q, k and v of attention are made again; the second call must not get the results of the first.
            scaled = (x * 2.0 for x in qkv)
            return shards.sdpa(*(x * 0.5 for x in scaled), **options) * 3.0 - shards.sdpa(*qkv, **options) * 2.0

        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            again: dict[str, Any] = {"use_reentrant": False, "context_fn": context_fn}
            return twice(*qkv) if context_fn is None else checkpoint(twice, *qkv, **again)

        mask = None if problem.mask == Full() else problem.mask
        lengths = problem.q_len, problem.kv_len
        shards.check(
            attend,
            around=lambda: context_parallel(mesh, method=method, mask=mask, seq_len=lengths, sinks=sinks),
        )
        if sinks is not None:
            dist.all_reduce(sinks.grad)
            torch.testing.assert_close(sinks.grad, shards.expected[-1].sum((0, 2)), rtol=1e-10, atol=1e-10)

    once, again, kept = (forwards(partial(body, each), len(sizes) * 2) for each in (None, noop_context_fn, KEPT))
    assert kept == once
    assert again == 2 * once


def test_latents() -> None:
    def body(context_fn: Any, rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        shapes = (1, 2, 5, 6), (1, 5, 8), (1, 5, 2), (2 * (4 + 4), 8)
        inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        inputs = [x.requires_grad_() for x in inputs]

        def attend(q: torch.Tensor, latent: torch.Tensor, k_rope: torch.Tensor, up: torch.Tensor) -> Any:
            return context_parallel_mla(q, latent, k_rope, up=up, mesh=dist.group.WORLD)

        again: dict[str, Any] = {"use_reentrant": False, "context_fn": context_fn}
        out = attend(*inputs) if context_fn is None else checkpoint(attend, *inputs, **again)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    for alone, kept in zip(run_ranks(2, partial(body, None)), run_ranks(2, partial(body, KEPT)), strict=True):
        torch.testing.assert_close(kept, alone, rtol=1e-12, atol=1e-12)
    assert forwards(partial(body, KEPT)) == forwards(partial(body, None))  # type: ignore[arg-type]


def test_policies_without_the_operator_keep_what_they_name() -> None:
    """A list of torch's operators keeps tiles, and a policy that keeps nothing computes all again."""
    fused = [op for op in ATTENTION_OPS if op.namespace == "aten"]

    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.PREFER_RECOMPUTE

    def body(keep: Any, rank: int) -> None:
        context_fn = partial(create_selective_checkpoint_contexts, keep)
        shards = Shards(rank)
        again: dict[str, Any] = {"use_reentrant": False, "context_fn": context_fn}
        shards.check(
            lambda *qkv: checkpoint(shards.sdpa, *qkv, **again),
            around=lambda: context_parallel(init_device_mesh("cpu", (2,)), seq_len=11),
        )

    assert forwards(partial(body, fused)) == forwards(partial(body, policy)) == 4


def test_checkpoints_in_checkpoints_and_a_second_backward() -> None:
    """What the outer one keeps is one operator to the inner one, too, which computes it again."""
    nothing = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def body(policies: list[Any], rank: int) -> None:
        shards = Shards(rank)

        def nested(*qkv: torch.Tensor) -> torch.Tensor:
            attend = shards.sdpa
            for each in policies:
                attend = partial(checkpoint, attend, use_reentrant=False, context_fn=each)
            return attend(*qkv)

        def around() -> context_parallel:
            return context_parallel(init_device_mesh("cpu", (2,)), seq_len=11)

        shards.check(nested, around=around)
        with around():
            out = nested(*shards.inputs()).sum()
        out.backward(retain_graph=True)
        refusal = pytest.raises(RuntimeError, match="backward an extra time") if policies == [KEPT] else nullcontext()
        with refusal:  # torch's own
            out.backward()

    assert forwards(partial(body, [KEPT])) == 4
    assert forwards(partial(body, [nothing])) == forwards(partial(body, [nothing, KEPT])) == 10


_OPS = torch.ops.cp_dtensor.kept_forward.default, torch.ops.aten.mul.Tensor


def every_second_call(_ctx: Any, op: Any, calls: Counter[Any]) -> bool:
    return op in _OPS and sum(calls.values()) % 2 == 1


def every_second_of_each(_ctx: Any, op: Any, calls: Counter[Any]) -> bool:
    return op in _OPS and calls[op] % 2 == 1


def large(ctx: Any, op: Any, _calls: Counter[Any]) -> bool:
    """Keep results of some size, which torch 2.13 and later tell policies."""
    result = getattr(ctx, "op_output", None)
    return op in _OPS and (result[0] if isinstance(result, tuple) else result).numel() > 1


@pytest.mark.parametrize("keeps", [every_second_call, every_second_of_each, large])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_policies_are_asked_once_a_call(method: str, keeps: Callable[[Any, Any, Counter[Any]], bool]) -> None:
    """So policies that count their calls, as TorchTitan's of every second product, answer as for other operators."""
    if keeps is large and not hasattr(SelectiveCheckpointContext(is_recompute=False), "op_output"):
        pytest.skip("policies learn of results from torch 2.13 on")

    def body(rank: int) -> tuple[int, int]:
        forward, again = Counter[Any](), Counter[Any]()

        def policy(ctx: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            calls = again if ctx.is_recompute else forward
            calls[op] += 1
            return CheckpointPolicy.MUST_SAVE if keeps(ctx, op, calls) else CheckpointPolicy.PREFER_RECOMPUTE

        shards, counting = Shards(rank), partial(create_selective_checkpoint_contexts, policy)

        def thrice(*qkv: torch.Tensor) -> torch.Tensor:
            a, b, c = (shards.sdpa(qkv[0] * x, *qkv[1:], scale=0.5 / x) * x for x in (1.0, 2.0, 3.0))
            return 2 * a + c - 2 * b

        shards.check(
            lambda *qkv: checkpoint(thrice, *qkv, use_reentrant=False, context_fn=counting),
            around=lambda: context_parallel(init_device_mesh("cpu", (2,)), method=method, seq_len=11),
        )
        return forward[_OPS[0]], again[_OPS[0]]

    for forward, again in run_ranks(2, body):
        assert forward == 3
        assert again in (0, 3)  # from torch 2.13 on, recomputes ask no policy
