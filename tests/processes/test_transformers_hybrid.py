"""Hybrid models of transformers on 2 ranks: layouts, documents of a context, caches, and patches that are removed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.model_cells import recurrences_in_float64
from support.models import LENGTH, ROWS, tiny_model
from support.processes import Processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    HeadTail,
    MirroredBatch,
    Striped,
    context_parallel,
    context_parallel_shard,
)
from cp_dtensor.integrations.transformers import check_model, register

pytest.importorskip("transformers", reason="needs the extra: pip install -c constraints.txt -e '.[transformers]'")
EDGES = (0, 20, 21, LENGTH)


def tokens() -> torch.Tensor:
    return torch.randint(3, 53, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def alone(family: str, edges: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sum of squared logits and its gradients in one process, document by document."""
    model, ids = tiny_model(family, "sdpa"), tokens()
    with recurrences_in_float64(model):
        parts = [
            model(input_ids=ids[:, start:stop], position_ids=torch.arange(stop - start)[None], use_cache=False).logits
            for start, stop in pairwise(edges)
        ]
    loss = torch.cat(parts, 1).double().square().sum()
    loss.backward()
    return loss.detach(), [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]


def functions_of(module: Any) -> dict[str, Any]:
    """The functions and classes of a module, by name."""
    return {name: value for name, value in vars(module).items() if callable(value)}


def check_sums(loss: torch.Tensor, model: Any, expected: torch.Tensor, grads: list[torch.Tensor]) -> None:
    """Checks the loss and the gradients of a model, summed over the ranks."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected, rtol=1e-8, atol=1e-8)
    for parameter, wanted in zip(model.parameters(), grads, strict=True):
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def without_provider() -> Iterator[Processes]:
    """Two processes in which `register()` is never called: it keeps the functions of models replaced."""
    two = Processes(2, timeout=250)
    yield two
    two.stop()


def trained(rank: int, family: str) -> None:
    world: Any = dist.group.WORLD
    for edges in ((0, LENGTH), EDGES):
        expected, grads = alone(family, edges)
        for layout in (Contiguous(), HeadTail(), Striped(4), MirroredBatch()):
            model = tiny_model(family, "sdpa")
            assert check_model(model) == []
            modeling = sys.modules[type(model).__module__]
            before = functions_of(modeling)
            ids = tokens()
            positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
            positions = positions.expand(ROWS, -1).clone()
            mask = Documents(edges, within=Causal()) if len(edges) > 2 else None
            with context_parallel(world, buffers=[ids, positions], buffer_seq_dims=[1, 1], layout=layout, mask=mask):
                loss = model(input_ids=ids, position_ids=positions, use_cache=False).logits.double().square().sum()
                loss.backward()
            after = functions_of(modeling)
            assert after == before, [name for name in {**before, **after} if after.get(name) is not before.get(name)]
            check_sums(loss, model, expected, grads)


@pytest.mark.parametrize("family", ["Qwen3-Next", "Nemotron-H"])
def test_layouts_and_documents_of_the_context(without_provider: Processes, family: str) -> None:
    without_provider.run(trained, family)


def modules(rank: int) -> None:
    """Attention and gated delta nets with `ContextParallel`, and no context."""
    mesh = init_device_mesh("cpu", (2,))
    expected, grads = alone("Qwen3-Next", (0, LENGTH))
    model: Any = tiny_model("Qwen3-Next", register())
    for layer in model.model.layers:
        mixer = layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn
        parallelize_module(mixer, mesh, ContextParallel())
    positions = torch.arange(LENGTH)[None].expand(ROWS, -1)
    ids, positions = context_parallel_shard(mesh, [tokens(), positions], [1, 1])
    loss = model(input_ids=ids, position_ids=positions, use_cache=False).logits.double().square().sum()
    loss.backward()
    check_sums(loss, model, expected, grads)
    torch.compiler.reset()
    with pytest.raises(Exception, match="compile it inside of context_parallel"):
        torch.compile(mixer_of(model), backend="aot_eager", fullgraph=True)(torch.zeros(1, 4, 32).double())


def mixer_of(model: Any) -> Any:
    return model.model.layers[0].linear_attn


def test_modules_with_context_parallel(two_processes: Processes) -> None:
    two_processes.run(modules)


def refused(rank: int) -> None:
    world: Any = dist.group.WORLD
    model, ids, positions = tiny_model("Qwen3-Next", "sdpa"), tokens(), torch.arange(LENGTH)[None].repeat(ROWS, 1)
    edges = torch.tensor([0, LENGTH], dtype=torch.int32)
    with context_parallel(world, buffers=[ids, positions], buffer_seq_dims=[1, 1]):
        with pytest.raises(NotImplementedError, match="use_cache=False"):
            model(input_ids=ids, position_ids=positions, use_cache=True)
        with pytest.raises(NotImplementedError, match=r"mask=Documents\(...\)"):
            model(input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=edges, cu_seq_lens_k=edges)


def test_caches_and_documents_of_a_call_are_refused(two_processes: Processes) -> None:
    two_processes.run(refused)
