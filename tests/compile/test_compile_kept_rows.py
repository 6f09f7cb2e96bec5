"""Exchanged tensors that compiled Ulysses saves for backward: freed when autograd frees its saved tensors."""

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from support.compile_checks import Function, Shards, compiled, fresh
from support.processes import Processes
from support.saved_activations_checks import AGAIN, BACKWARD, FORWARD, FORWARD_WITHOUT_GRAD, alive, watched
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import ATTENTION_OPS, HeadTail, context_parallel, context_parallel_attention, ulysses_attention
from cp_dtensor.engine import compiled as compiled_op


def ulysses(mesh: Any, method: str = "ulysses") -> Function:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = {"mesh": mesh, "method": method, "is_causal": True, "enable_gqa": True}
        return context_parallel_attention(q * 2.0, k, v, layout=HeadTail(), **options) * 3.0

    return attention


def backward_exchanges_once(rank: int, backend: str) -> None:
    fresh()
    mesh = init_device_mesh("cpu", (2,))
    shards = Shards(rank)
    function = compiled(ulysses(mesh), backend=backend)
    for _ in range(2):
        with watched() as (exchanges, rows):
            inputs = shards.inputs()
            out = function(*inputs)
            assert alive(rows) == len(rows) > 0
            for _ in range(2):  # what is kept is not used up
                shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad, retain_graph=True))
            assert alive(rows) == len(rows)
            shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
            assert alive(rows) == 0, "freed by backward, though out is alive"
            assert exchanges == [*FORWARD, *BACKWARD * 3]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_backward_exchanges_once(two_processes: Processes, backend: str) -> None:
    two_processes.run(backward_exchanges_once, backend)


def no_backward(rank: int) -> None:
    fresh()
    function = compiled(ulysses(init_device_mesh("cpu", (2,))))
    shards = Shards(rank)
    with watched() as (_, rows):
        for _ in range(3):
            out = function(*shards.inputs())
        assert 3 * alive(rows) == len(rows), "only those of the last call"
        del out
        assert alive(rows) == 0
        rows.clear()
        with torch.no_grad():
            shards.check_results(function(*shards.inputs()))
        assert not rows


def in_contexts(rank: int) -> None:
    """Lengths are found by the operator here, so its third result is on the host."""
    fresh()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    function = compiled(ulysses(mesh, "hybrid"), dynamic=True)
    for length in (12, 16, 20):
        with watched() as (exchanges, rows):
            Shards(rank, length, ranks=4).check(function)
            assert exchanges == [*FORWARD, *BACKWARD]
            assert alive(rows) == 0 < len(rows)
    function = compiled(lambda q, k, v: ulysses(mesh["ulysses"], "ring")(q, k, v))
    with watched() as (exchanges, rows):
        Shards(rank % 2).check(function)
        assert not exchanges
        assert not rows, "a ring has nothing to keep"


def test_hybrids_and_rings(four_processes: Processes) -> None:
    four_processes.run(in_contexts)


def keep_attention(_ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in ATTENTION_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def checkpointed_calls(rank: int) -> None:
    shards = Shards(rank)
    attention = ulysses(init_device_mesh("cpu", (2,)))
    selective = partial(create_selective_checkpoint_contexts, keep_attention)

    def inside(**options: Any) -> Function:
        return compiled(lambda *qkv: checkpoint(attention, *qkv, use_reentrant=False, **options))

    def around(**options: Any) -> Function:
        return lambda *qkv: checkpoint(compiled(attention), *qkv, use_reentrant=False, **options)

    cases: list[tuple[Callable[[], Function], list[int], bool]] = [
        (inside, [*FORWARD, *FORWARD, *BACKWARD], False),
        (lambda: inside(context_fn=selective), [*FORWARD, *BACKWARD], True),
        (around, [*FORWARD, *FORWARD, *BACKWARD], False),
        (lambda: around(context_fn=selective), [*FORWARD, *BACKWARD], True),  # which keeps aliases
    ]
    for make, expected, keeps in cases:
        fresh()
        function = make()
        for _ in range(2):
            with watched() as (exchanges, rows):
                inputs = shards.inputs()
                out = function(*inputs)
                assert bool(alive(rows)) == keeps, "only what is not computed again"
                shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
                assert exchanges == expected
                assert alive(rows) == 0


def other_tensors_arrive(rank: int) -> None:
    """What hooks have packed and unpacked: on copies nothing is kept, on aliases everything."""
    fresh()
    shards = Shards(rank)
    function = compiled(ulysses(init_device_mesh("cpu", (2,))))
    function(*shards.inputs())
    with TemporaryDirectory() as folder:
        names = iter(range(1000))

        def to_disk(tensor: torch.Tensor) -> Path:
            path = Path(folder, f"{next(names)}.pt")
            torch.save(tensor, path)
            return path

        cases = [
            (torch.clone, torch.clone, AGAIN),
            (copy.deepcopy, copy.deepcopy, AGAIN),
            (to_disk, torch.load, AGAIN),
            (torch.detach, torch.detach, []),  # aliases
        ]
        for pack, unpack, again in cases:
            with watched() as (exchanges, rows):
                inputs = shards.inputs()
                with saved_tensors_hooks(pack, unpack):
                    out = function(*inputs)
                assert bool(alive(rows)) == (not again)
                shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
                assert exchanges == [*FORWARD, *again, *BACKWARD]
                assert alive(rows) == 0


def lse_comes_home(rank: int) -> None:
    """Wherever backward may come, since it may find no rows; else if it is asked for."""
    fresh()
    shards = Shards(rank)
    options = {"mesh": init_device_mesh("cpu", (2,)), "is_causal": True, "enable_gqa": True}
    asking = compiled(lambda q, k, v: ulysses_attention(q * 2.0, k, v, return_lse=True, **options)[0] * 3.0)
    plain = compiled(lambda q, k, v, sinks: ulysses_attention(q * 2.0, k, v, sinks=sinks, **options) * 3.0)
    frozen, learned = (torch.full((4,), -torch.inf, dtype=torch.float64).requires_grad_(each) for each in (False, True))
    for function, sinks, without_grad in (
        (asking, (), FORWARD),
        (plain, (frozen,), FORWARD_WITHOUT_GRAD),
        (plain, (learned,), FORWARD_WITHOUT_GRAD),
    ):
        for hooks, again in ((nullcontext(), []), (saved_tensors_hooks(torch.clone, torch.clone), AGAIN)):
            with watched() as (exchanges, _):
                inputs = shards.inputs()
                with hooks:
                    out = function(*inputs, *sinks)
                shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
                assert exchanges == [*FORWARD, *again, *BACKWARD]
        with watched() as (exchanges, _), torch.no_grad():
            shards.check_results(function(*shards.inputs(), *sinks))
            assert exchanges == without_grad


def in_graphs_or_not(rank: int) -> None:
    """What a CUDA graph keeps from being kept, in forward, in backward or in both."""
    fresh()
    shards = Shards(rank)
    function = compiled(ulysses(init_device_mesh("cpu", (2,))))
    function(*shards.inputs())
    originals, copies = nullcontext(), saved_tensors_hooks(torch.clone, torch.clone)
    for hooks, in_forward, in_backward, again in (
        (originals, True, True, []), (originals, False, False, AGAIN), (originals, True, False, AGAIN),
        (originals, False, True, AGAIN), (copies, False, False, AGAIN), (copies, True, True, AGAIN),
        (copies, True, False, AGAIN),
    ):  # fmt: skip
        with watched() as (exchanges, _):
            inputs = shards.inputs()
            with hooks, mock.patch.object(compiled_op, "_keeps_rows", return_value=in_forward):
                out = function(*inputs)
            with mock.patch.object(compiled_op, "_keeps_rows", return_value=in_backward):
                shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
            assert exchanges == [*FORWARD, *again, *BACKWARD]


def graphs_of_one_rank(rank: int) -> None:
    """One rank alone has made CUDA graphs, of whatever: its forward sends what those of the others do."""
    fresh()
    shards = Shards(rank)
    function = compiled(ulysses(init_device_mesh("cpu", (2,))))
    with watched() as (exchanges, _), mock.patch.object(compiled_op, "_keeps_rows", return_value=rank == 0):
        out = function(*shards.inputs())
    shards.check_results(out)
    assert exchanges == FORWARD


def backward_in_another_thread(rank: int) -> None:
    fresh()
    shards, others = Shards(rank), Shards(rank, 12)
    with context_parallel(init_device_mesh("cpu", (2,)), method="ulysses"):
        function = compiled(ulysses(init_device_mesh("cpu", (2,))), dynamic=True)
        pairs = [(each, each.inputs()) for each in (shards, others)]
        outs = [function(*inputs) for _, inputs in pairs]
    results: list[Any] = []

    def backward() -> None:
        for out, (each, inputs) in zip(outs, pairs, strict=True):
            results.append((each, out, torch.autograd.grad(out, inputs, each.grad)))

    with watched() as (exchanges, _):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert exchanges == BACKWARD * 2
    for each, out, grads in results:
        each.check_results(out, *grads)
    assert len(results) == 2


@pytest.mark.parametrize(
    "body", [
        no_backward, checkpointed_calls, other_tensors_arrive, lse_comes_home, in_graphs_or_not, graphs_of_one_rank,
        backward_in_another_thread
    ]
)  # fmt: skip
def test_on_two_processes(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)
