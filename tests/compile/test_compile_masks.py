"""torch.compile(fullgraph=True) with masks, biases and dropout: as eager, without a compilation for each mask."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.compile_checks import compiled, fresh, no_compilation
from support.masked_problems import MaskedProblem, Tensors
from support.problems import assert_close, shard
from support.processes import Processes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Balanced, HeadTail, context_parallel
from cp_dtensor.engine import contexts as engine_contexts
from cp_dtensor.spec.documents import Documents
from cp_dtensor.spec.masks import Causal, Full, Mask, PrefixLM, SlidingWindow

RANKS = 2
LENGTH = 14
MASKS: tuple[Mask, ...] = (
    Documents([0, 4, 9, 14], within=Causal()),
    Documents([0, 1, 6, 12]),
    SlidingWindow(3, 1) & Documents([0, 7, 13]),
    PrefixLM(5) | SlidingWindow(None, 2),
)


def world() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))


def problem(mask: Mask, bias: str = "") -> MaskedProblem:
    return MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2, bias=bias)


def leaves_of(case: MaskedProblem, rank: int, seed: int) -> tuple[Tensors, torch.Tensor, Tensors]:
    """(leaves, gradient of out, what must come out) of a rank."""
    whole = case.draw(seed)
    q, k, v, grad_out, *bias = case.shard(whole, HeadTail(), rank, RANKS)
    leaves = tuple(tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in (q, k, v, *bias))
    out, dq, dk, dv, _, *dbias = case.reference(*whole)
    expected = tuple(shard(tensor, HeadTail(), rank, RANKS) for tensor in (out, dq, dk, dv, *dbias))
    return leaves, grad_out, expected


def check(out: torch.Tensor, leaves: Tensors, grad_out: torch.Tensor, expected: Tensors, what: object) -> None:
    grads = torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], grad_out)
    names = ("out", "dq", "dk", "dv", "dbias")[: len(expected)]
    for name, got, wanted in zip(names, (out, *grads), expected, strict=True):
        assert_close(got, wanted, f"{name}, {what}")


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def sdpa_with_bias(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def contexts(rank: int) -> None:
    fresh()
    mesh = world()
    function = compiled(sdpa)
    for number, mask in enumerate(MASKS):  # each step has documents of its own
        leaves, grad_out, expected = leaves_of(problem(mask), rank, number)
        steps = torch.compiler.set_stance("default") if number == 0 else no_compilation()
        with steps:
            with context_parallel(mesh, mask=mask, buffers=[torch.arange(LENGTH)], buffer_seq_dims=[0]):
                out = function(*leaves)
            check(out, leaves, grad_out, expected, mask)  # backward comes after it
    leaves, grad_out, expected = leaves_of(problem(Full()), rank, 9)
    with context_parallel(mesh, buffers=[torch.arange(LENGTH)], buffer_seq_dims=[0]):
        check(function(*leaves), leaves, grad_out, expected, "a context without a mask")
    for bias in ("boolean bhs", "additive s"):
        leaves, grad_out, expected = leaves_of(problem(MASKS[0], bias), rank, 3)
        with context_parallel(mesh, mask=MASKS[0], buffers=[torch.arange(LENGTH)], buffer_seq_dims=[0]):
            check(compiled(sdpa_with_bias)(*leaves), leaves, grad_out, expected, bias)


def test_masks_of_contexts_do_not_compile_again(two_processes: Processes) -> None:
    two_processes.run(contexts)


def layouts(rank: int) -> None:
    fresh()
    mesh = world()
    function = compiled(sdpa)
    for number, mask in enumerate(MASKS[:3]):
        layout = Balanced(mask, LENGTH)  # made for each step's documents
        case = problem(mask)
        whole = case.draw(number)
        q, k, v, grad_out = case.shard(whole, layout, rank, RANKS)
        leaves = tuple(tensor.clone().requires_grad_() for tensor in (q, k, v))
        expected = tuple(shard(tensor, layout, rank, RANKS) for tensor in case.reference(*whole)[:4])
        with torch.compiler.set_stance("default") if number == 0 else no_compilation():
            with context_parallel(mesh, mask=mask, layout=layout):
                out = function(*leaves)
            check(out, leaves, grad_out, expected, layout)


def test_layouts_of_contexts_do_not_compile_again(two_processes: Processes) -> None:
    two_processes.run(layouts)


def recomputed(rank: int) -> None:
    """Compiled code that recomputes is not told for which forward pass: refused where that could be several."""
    fresh()
    mesh = world()

    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(sdpa, q, k, v, use_reentrant=False)

    leaves, grad_out, expected = leaves_of(problem(MASKS[0]), rank, 5)
    function = compiled(inside)
    with context_parallel(mesh, mask=MASKS[0]):
        check(function(*leaves), leaves, grad_out, expected, "backward in its context")
        out = function(*leaves)
    check(out, leaves, grad_out, expected, "backward after its context")
    with context_parallel(mesh, mask=MASKS[0]):
        out = function(*leaves)
    with context_parallel(mesh, mask=MASKS[1]):
        check(out, leaves, grad_out, expected, "backward in another context")
    around = compiled(sdpa)
    with context_parallel(mesh, mask=MASKS[0]):
        out = checkpoint(around, *leaves, use_reentrant=False)
    with context_parallel(mesh, mask=MASKS[1]):
        check(out, leaves, grad_out, expected, "checkpoint around compiled code")
    with context_parallel(mesh, mask=MASKS[0]):
        out = function(*leaves)
    for grad in torch.autograd.grad(out, leaves, torch.zeros_like(grad_out), retain_graph=True):
        assert not grad.any()
    with context_parallel(mesh, mask=MASKS[1]):
        function(*leaves)
        with pytest.raises(
            RuntimeError, match="there have been 2 contexts with the same options whose backward has not come"
        ):
            torch.autograd.grad(out, leaves, grad_out)


def reentrant(rank: int) -> None:
    """Reentrant checkpoints run forward without gradients: their backward is of no pass that others wait for."""
    fresh()
    mesh = world()

    def inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return checkpoint(sdpa, q, k, v, use_reentrant=False)

    leaves, grad_out, _ = leaves_of(problem(MASKS[0]), rank, 5)
    function, around = compiled(inside), compiled(sdpa)
    with context_parallel(mesh, mask=MASKS[0]):
        out = function(*leaves)
        checkpoint(around, *leaves, use_reentrant=True).backward(grad_out)
    with context_parallel(mesh, mask=MASKS[1]):
        function(*leaves)
        with pytest.raises(
            RuntimeError, match="there have been 2 contexts with the same options whose backward has not come"
        ):
            torch.autograd.grad(out, leaves, grad_out)


def with_nothing_outstanding(rank: int, body: Callable[[int], None]) -> None:
    """Processes are shared, and passes whose backward is refused stay pending."""
    with mock.patch.dict(engine_contexts._pending, clear=True):
        body(rank)


@pytest.mark.parametrize("body", [recomputed, reentrant])
def test_masks_of_recomputed_attention(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(with_nothing_outstanding, body)
