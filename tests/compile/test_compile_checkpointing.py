"""torch.compile and activation checkpointing: attention is recomputed or saved, by policy."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compile_checks import Function, Shards, causal, compiled, counted_forwards, fresh, no_compilation
from support.processes import Processes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import ATTENTION_OPS, ContextParallel, context_parallel, ring_attention


def keep_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "a policy": {"context_fn": partial(create_selective_checkpoint_contexts, keep_attention)},
    "a list": {"context_fn": partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS))},
}


def checkpointed(function: Function, kind: str) -> Function:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, q, k, v, use_reentrant=False, **KINDS[kind])

    return run


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal(q, k, v)


def ways(mesh: DeviceMesh) -> Iterator[tuple[str, Function, Callable[[], Any]]]:
    """Names of ways to call attention, what is to be compiled, and the context around the call."""

    def by_name(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring_attention(q * 2.0, k, v, mesh=mesh, is_causal=True, enable_gqa=True) * 3.0

    yield "context", causal, lambda: context_parallel(mesh)
    yield "function", by_name, torch.enable_grad
    yield "module", parallelize_module(Attention(), mesh, ContextParallel()), torch.enable_grad


def inside_of_compiled_code(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(rank)
    for name, attention, context in ways(mesh):
        for kind in KINDS:
            fresh()
            function = compiled(checkpointed(attention, kind))
            for _ in range(2):
                with counted_forwards() as calls:
                    inputs = shards.inputs()
                    with context():
                        out = function(*inputs)
                    grads = torch.autograd.grad(out, inputs, shards.grad)  # recomputes after the context
                shards.check_results(out, *grads)
                again = ["forward"] if kind == "full" else []
                assert calls == ["forward", *again, "backward"], (name, kind, calls)


def around_compiled_code(rank: int) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(rank)
    function = compiled(causal)

    def step() -> None:
        inputs = shards.inputs()
        with context_parallel(mesh):
            out = checkpointed(function, "full")(*inputs)
        shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))

    step()
    with no_compilation():
        step()


def uncompiled(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(rank)
    kept: list[object] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept.extend([op] if not ctx.is_recompute and op in ATTENTION_OPS else [])
        return keep_attention(ctx, op)

    with context_parallel(mesh):
        inputs = shards.inputs()
        context_fn = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(causal, *inputs, use_reentrant=False, context_fn=context_fn)
        shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
    assert len(kept) > 1  # its tiles


def autocast_in_bfloat16(rank: int) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))
    inputs = [each.detach().float().requires_grad_() for each in Shards(rank).inputs()]

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = ring_attention(q, k, v, mesh=mesh, enable_gqa=True)
        return named, F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with context_parallel(mesh), torch.autocast("cpu", torch.bfloat16):
        expected = both(*inputs)
        got = compiled(both)(*inputs)
    for ours, eager in zip(got, expected, strict=True):
        assert ours.dtype == eager.dtype == torch.bfloat16
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
        of_ours, of_eager = (torch.autograd.grad(out.float().sum(), inputs, retain_graph=True) for out in (ours, eager))
        for one, other in zip(of_ours, of_eager, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("body", [inside_of_compiled_code, around_compiled_code, uncompiled, autocast_in_bfloat16])
def test_on_two_processes(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
