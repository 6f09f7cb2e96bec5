"""Exchanged tensors that compiled Ulysses saves for backward: freed when autograd frees its saved tensors."""

import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch
from support.compile_checks import Function, Shards, compiled, run_fresh
from support.processes import Processes
from support.saved_activations_checks import AGAIN, BACKWARD, FORWARD, FORWARD_WITHOUT_GRAD, alive, watched
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cp_dtensor import ATTENTION_OPS, HeadTail, context_parallel, context_parallel_attention, ulysses_attention
from cp_dtensor.engine import attend

COPIES = partial(saved_tensors_hooks, torch.clone, torch.clone)


def ulysses(mesh: Any = None, method: str = "ulysses") -> Function:
    mesh = mesh or init_device_mesh("cpu", (2,))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options = {"mesh": mesh, "method": method, "is_causal": True, "enable_gqa": True}
        return context_parallel_attention(q * 2.0, k, v, layout=HeadTail(), **options) * 3.0

    return attention


def check(
    function: Function, shards: Shards, expected: list[int], *more: Any, keeps: bool | None = None,
    forward: AbstractContextManager[Any] | None = None, backward: AbstractContextManager[Any] | None = None,
) -> None:  # fmt: skip
    """Checks results and exchanges of a step; `keeps`: True if something is saved for backward, None for either."""
    with watched() as (exchanges, rows):
        inputs = shards.inputs()
        with forward or nullcontext():
            out = function(*inputs, *more)
        assert keeps is None or bool(alive(rows)) == keeps
        with backward or nullcontext():
            shards.check_results(out, *torch.autograd.grad(out, inputs, shards.grad))
        assert exchanges == expected
        assert alive(rows) == 0, "freed by backward, though out is alive"


def backward_again(rank: int, backend: str) -> None:
    """What is kept is not used up."""
    shards, function = Shards(rank), compiled(ulysses(), backend=backend)
    for _ in range(2):
        with watched() as (exchanges, rows):
            inputs = shards.inputs()
            out = function(*inputs)
            assert alive(rows) == len(rows) > 0
            for left in (2, 1, 0):
                grads = torch.autograd.grad(out, inputs, shards.grad, retain_graph=left > 0)
                shards.check_results(out, *grads)
                assert alive(rows) == (len(rows) if left else 0)
            assert exchanges == [*FORWARD, *BACKWARD * 3]


def no_backward(rank: int) -> None:
    shards, function = Shards(rank), compiled(ulysses())
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


def checkpoints(rank: int) -> None:
    """Only what is not computed again is kept. The policy around compiled code keeps aliases."""
    keeping = partial(create_selective_checkpoint_contexts, list(ATTENTION_OPS))
    for options, expected in (({}, [*FORWARD, *FORWARD, *BACKWARD]), ({"context_fn": keeping}, [*FORWARD, *BACKWARD])):
        attention, again = ulysses(), {"use_reentrant": False, **options}
        in_graph = compiled(attention)
        inside = compiled(lambda *qkv, attention=attention, again=again: checkpoint(attention, *qkv, **again))
        around = partial(checkpoint, in_graph, **again)
        for function in (inside, around):
            for _ in range(2):
                check(function, Shards(rank), expected, keeps=bool(options))


def saved_tensor_hooks(rank: int) -> None:
    """What hooks have packed and unpacked: on copies nothing is kept, on aliases everything."""
    function, numbers = compiled(ulysses()), iter(range(1000))
    function(*Shards(rank).inputs())
    with TemporaryDirectory() as folder:

        def to_disk(tensor: torch.Tensor) -> Path:
            path = Path(folder, f"{next(numbers)}.pt")
            torch.save(tensor, path)
            return path

        for pack, unpack in (torch.clone, torch.clone), (copy.deepcopy, copy.deepcopy), (to_disk, torch.load):
            hooks = saved_tensors_hooks(pack, unpack)
            check(function, Shards(rank), [*FORWARD, *AGAIN, *BACKWARD], forward=hooks, keeps=False)
        aliases = saved_tensors_hooks(torch.detach, torch.detach)
        check(function, Shards(rank), [*FORWARD, *BACKWARD], forward=aliases, keeps=True)


def lse_comes_home(rank: int) -> None:
    """Wherever backward may come, since it may find no rows; else if it is asked for."""
    shards, options = Shards(rank), {"mesh": init_device_mesh("cpu", (2,)), "is_causal": True, "enable_gqa": True}
    asking = compiled(lambda q, k, v: ulysses_attention(q * 2.0, k, v, return_lse=True, **options)[0] * 3.0)
    plain = compiled(lambda q, k, v, sinks: ulysses_attention(q * 2.0, k, v, sinks=sinks, **options) * 3.0)
    cases: list[tuple[Any, Any, list[int]]] = [(asking, (), FORWARD)]
    for learned in (False, True):
        sinks = torch.full((4,), -torch.inf, dtype=torch.float64).requires_grad_(learned)
        cases.append((plain, (sinks,), FORWARD_WITHOUT_GRAD))
    for function, sinks, without_grad in cases:
        check(function, shards, [*FORWARD, *BACKWARD], *sinks)
        check(function, shards, [*FORWARD, *AGAIN, *BACKWARD], *sinks, forward=COPIES())
        with watched() as (exchanges, _), torch.no_grad():
            shards.check_results(function(*shards.inputs(), *sinks))
            assert exchanges == without_grad


def in_graphs(rank: int) -> None:
    """What a CUDA graph keeps from being kept, in forward, in backward or in both; or in forward of one rank alone."""
    shards, function = Shards(rank), compiled(ulysses())
    function(*shards.inputs())

    def keeps_rows(answer: bool) -> AbstractContextManager[Any]:
        return mock.patch.object(attend, "_keeps_rows", return_value=answer)

    def in_copies(*inputs: torch.Tensor) -> torch.Tensor:
        with COPIES():
            return function(*inputs)

    for in_forward, in_backward, call in (*product((True, False), (True, False), (function, in_copies)),):
        again = [] if call is function and in_forward and in_backward else AGAIN
        expected = [*FORWARD, *again, *BACKWARD]
        check(call, shards, expected, forward=keeps_rows(in_forward), backward=keeps_rows(in_backward))
    with watched() as (exchanges, _), keeps_rows(rank == 0):
        shards.check_results(function(*shards.inputs()))
    assert exchanges == FORWARD


def backward_in_another_thread(rank: int) -> None:
    shards = Shards(rank), Shards(rank, 12)
    with context_parallel(init_device_mesh("cpu", (2,)), method="ulysses"):
        function = compiled(ulysses(), dynamic=True)
        calls = [(each, inputs, function(*inputs)) for each in shards for inputs in [each.inputs()]]
    results: list[Any] = []

    def backward() -> None:
        for each, inputs, out in calls:
            results.append((each, out, torch.autograd.grad(out, inputs, each.grad)))

    with watched() as (exchanges, _):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert exchanges == BACKWARD * 2
    for each, out, grads in results:
        each.check_results(out, *grads)
    assert len(results) == 2


def hybrids_and_rings(rank: int) -> None:
    """Lengths are found by the operator here, so its third result is on the host."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
    function = compiled(ulysses(mesh, "hybrid"), dynamic=True)
    for length in (12, 16):
        check(function, Shards(rank, length, ranks=4), [*FORWARD, *BACKWARD], keeps=True)
    check(compiled(ulysses(mesh["ulysses"], "ring")), Shards(rank % 2), [], keeps=False)


OTHERS = no_backward, checkpoints, saved_tensor_hooks, lse_comes_home, in_graphs, backward_in_another_thread
BODIES: dict[str, Any] = {each: partial(backward_again, backend=each) for each in ("aot_eager", "inductor")}
BODIES |= {body.__name__: body for body in OTHERS}


@pytest.mark.parametrize("name", BODIES)
def test_kept_rows(two_processes: Processes, name: str) -> None:
    two_processes.run(run_fresh, BODIES[name])


def test_hybrids_and_rings(four_processes: Processes) -> None:
    four_processes.run(run_fresh, hybrids_and_rings)
