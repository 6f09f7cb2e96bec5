"""Worlds: the ranks of a cell, and the body that runs a case on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from support.compile_checks import fresh
from support.problems import shard
from support.processes import GPU_RANKS
from support.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cp_dtensor import Documents
from matrix.features import SEQ_DIMS, Case, Tensors, differentiate, documents, expected, same_seeds
from matrix.fronts import FRONTS, Front

REFUSALS = TypeError, ValueError, NotImplementedError, RuntimeError
Features = tuple[str, ...]
NAMES = {1: ("cp",), 2: ("ring", "ulysses"), 3: ("ring_pod", "ring", "ulysses")}


@dataclass(frozen=True)
class World:
    """Ranks of one kind."""

    shape: tuple[int, ...]
    """Of the mesh."""
    fixture: str = ""
    """Of the processes; none for threads."""
    device: str = "cpu"
    compiles: bool = False
    dynamic: bool | None = None

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()


WORLDS = {
    "threads(2)": World((2,)),
    "threads(3)": World((3,)),
    "threads(2x2)": World((2, 2)),
    "gloo(2)": World((2,), "two_processes"),
    "compiled(2)": World((2,), "two_processes", compiles=True),
    "compiled_dynamic(2)": World((2,), "two_processes", compiles=True, dynamic=True),
    "gpu(2)": World((GPU_RANKS,), "gpus", "cuda"),
    "gpu_shared(2)": World((2,), "shared_gpu", "cuda"),
}


def mesh_of(world: World) -> DeviceMesh:
    """Returns a mesh; processes keep theirs, whose groups take time and memory."""
    return _kept_mesh(world) if world.fixture else _new_mesh(world)


def _new_mesh(world: World) -> DeviceMesh:
    return init_device_mesh(world.device, world.shape, mesh_dim_names=NAMES[len(world.shape)])


_kept_mesh = lru_cache(_new_mesh)


def run_threads(name: str, case: Case, world: World) -> None:
    """Runs a case on ranks that are threads, with dense attention computed once."""
    if case.around != "twice":
        expected(case)
    with FRONTS[name].patch(False), same_seeds() if case.dropout_p else nullcontext():
        run_ranks(world.size, check, name, case, world)


def local_part(case: Case, mesh: DeviceMesh, name: str, whole: torch.Tensor) -> torch.Tensor:
    """Returns this rank's shard, or the whole of what is not sharded."""
    if name not in SEQ_DIMS:
        return whole
    if case.placed:
        return distribute_tensor(whole, mesh, [Shard(2)] * mesh.ndim, src_data_rank=None).to_local()
    return shard(whole, case.layout, dist.get_rank(), mesh.size(), SEQ_DIMS[name])


def leaves_of(case: Case, mesh: DeviceMesh) -> tuple[Tensors, torch.Tensor]:
    """Returns this rank's tensors, new leaves, and the gradient of out."""
    drawn = {name: local_part(case, mesh, name, x) for name, x in case.draw().items()}
    grad_out = drawn.pop("grad_out")
    return {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in drawn.items()}, grad_out


def call(front: Front, case: Case, mesh: DeviceMesh, x: Tensors, function: Any = None) -> Any:
    """Calls a front, in a checkpoint if the case says so."""
    function = function or front.call
    if case.around not in ("checkpoint", "reentrant"):
        return function(case, mesh, x)
    names = [*x]
    return checkpoint(
        lambda *tensors: function(case, mesh, dict(zip(names, tensors, strict=True))), *x.values(),
        use_reentrant=case.around == "reentrant",
    )  # fmt: skip


def check(_rank: int, name: str, case: Case, world: World) -> None:
    """Runs a case on this rank and compares out and all gradients."""
    mesh, front = mesh_of(world), FRONTS[name]
    results = results_of(front, case, mesh)
    compare(case, mesh, results, front)
    if case.deterministic:
        again = results_of(front, case, mesh)
        assert all(torch.equal(results[name], again[name]) for name in results)


def check_all(rank: int, name: str, cases: dict[Features, Case], world: World) -> dict[Features, str]:
    """Runs the cases of a front on this rank, which is a process; returns the messages of refusals by features."""
    messages = {}
    with FRONTS[name].patch(world.compiles):
        for features, case in cases.items():
            try:
                (check_compiled if world.compiles else check)(rank, name, case, world)
            except REFUSALS as error:
                messages[features] = "\n".join(map(str, chain_of(error)))
    return messages


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Returns an error and those that led to it: Dynamo raises its own, and leaves the refusal behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_compiled(_rank: int, name: str, case: Case, world: World) -> None:
    """Runs a case in compiled code: a new mask each step, two contexts in turns, backward after both.

    Where masks are found when the code runs, the second step may not compile; dynamic lengths differ there.
    """
    fresh()
    mesh, front = mesh_of(world), FRONTS[name]
    function = torch.compile(front.call, fullgraph=front.is_whole_graph, dynamic=world.dynamic, backend="aot_eager")
    for step in range(1 + front.is_live):
        lengths = (32, 32) if step and world.dynamic else case.lengths
        cases = [
            front.settle(other_mask(replace(case, lengths=lengths), 2 * step + number), mesh.size())
            for number in range(2)
        ]
        # Symbolic floats, of which dynamic lengths have no need, make Dynamo begin again.
        constants = torch._dynamo.config.patch(specialize_float=True)
        with constants, torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            check_in_turns(front, cases, mesh, function)


def check_in_turns(front: Front, cases: Sequence[Case], mesh: DeviceMesh, function: Any) -> None:
    """Calls `function`, a compiled front, in the context of each case; then runs backward of all, and compares."""
    pending = []
    for case in cases:
        x, grad_out = leaves_of(case, mesh)
        leaves = {name: leaf for name, leaf in x.items() if leaf.requires_grad}
        with front.around(case, mesh, x):
            pending.append((case, leaves, grad_out, call(front, case, mesh, x, function)))
    for case, leaves, grad_out, result in pending:
        out, lse = result if case.needs_lse else (result, None)
        differentiate(out, lse, grad_out)
        results = {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}
        compare(case, mesh, results | ({} if lse is None else {"lse": lse.detach()}), front)


def other_mask(case: Case, number: int) -> Case:
    """Returns the case with other tensors and, if it has documents, with other documents."""
    mask = case.mask
    if isinstance(mask, Documents):
        mask = documents(case, number, number + 3, within=mask.within)
    return replace(case, mask=mask, seed=number)


def results_of(front: Front, case: Case, mesh: DeviceMesh) -> Tensors:
    """Returns out, lse, and the gradients of all leaves."""
    x, grad_out = leaves_of(case, mesh)
    leaves = {name: each for name, each in x.items() if each.requires_grad}
    with ExitStack() as stack:
        if case.around == "no_grad":
            stack.enter_context(torch.no_grad())
        stack.enter_context(front.around(case, mesh, x))
        result = call(front, case, mesh, x)
        out, lse = result if case.needs_lse else (result, None)
        if case.around == "twice":
            first = torch.autograd.grad(out.square().sum(), [*leaves.values()], create_graph=True)
            sum(each.sum() for each in first).backward()  # type: ignore[union-attr]
            raise AssertionError("a second derivative was computed")
        if case.around == "":
            differentiate(out, lse, grad_out)
    if case.around == "no_grad":
        assert not out.requires_grad
        return {"out": out}
    if case.around != "":
        differentiate(out, lse, grad_out)
    results = {"out": out.detach(), **{name: each.grad for name, each in leaves.items() if each.grad is not None}}
    return results if lse is None else {**results, "lse": lse.detach()}


def compare(case: Case, mesh: DeviceMesh, got: Tensors, front: Front) -> None:
    """Compares results of this rank with dense attention: within 1e-10, in bfloat16 by errors of one device."""
    wanted = dict(expected(case))
    if not case.needs_lse:
        wanted.pop("lse")
    if case.around == "no_grad":
        wanted = {"out": wanted["out"]}
    assert got.keys() == wanted.keys(), (sorted(got), sorted(wanted))
    for name, whole in wanted.items():
        ours = got[name].double()
        if name not in SEQ_DIMS and (front.sums_shares or name != "sinks"):
            ours = ours.clone()
            dist.all_reduce(ours)
        exact = local_part(case, mesh, name, whole)
        assert ours.shape == exact.shape, (name, ours.shape, exact.shape)
        if case.dtype == "float64" or name == "lse":  # of rounded inputs, which are exact here
            limit = 1e-10 if case.dtype == "float64" else 2e-2
            torch.testing.assert_close(ours, exact, rtol=limit, atol=limit, msg=partial("{}: {}".format, name))
            continue
        assert got[name].dtype == getattr(torch, case.dtype)
        one_device = expected(case, one_device=True)[name]
        # Shards are small, so errors of all of them are compared.
        squares = torch.stack(
            [(x.double() - exact).square().sum() for x in (ours, local_part(case, mesh, name, one_device))]
        )
        dist.all_reduce(squares)
        slack = front.slack if mesh.size() <= 2 else front.slack * 4 / 3  # more ranks add more partial results
        error, of_one_device = squares.sqrt().tolist()
        # Gradients are sums of terms of both signs: rounding errors stay where the sum cancels.
        rounding = max(whole.norm().item(), wanted["out"].norm().item()) * 2**-8
        assert error <= max(slack * of_one_device, rounding), (name, error, of_one_device)
