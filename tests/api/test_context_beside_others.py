"""Contexts beside other programs: hooks, DistributedDataParallel, and torch's own context parallelism."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.problems import shard
from support.processes import Processes
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel as torchs_context
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn.parallel import DistributedDataParallel

from cp_dtensor import (
    ContextParallel,
    Contiguous,
    HeadTail,
    Layout,
    context_parallel,
    enable_context_parallel_dispatcher,
)
from cp_dtensor.api.extension import register_context_hook

# DistributedDataParallel broadcasts module buffers, with buffers of a context among them.


class Model(nn.Module):
    """A layer of attention with a table of positions, and a count that is the same for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(16, 3 * 16, dtype=torch.float64)
        self.register_buffer("table", torch.randn(11, 16, dtype=torch.float64), persistent=False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.project(x + self.table).unflatten(-1, (6, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(*qkv.chunk(3, 1), is_causal=True).square()


def train(rank: int) -> None:
    model, alone = Model(), Model()
    whole = torch.randn(2, 11, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wrapped = DistributedDataParallel(model)
    for step in range(2):
        model.calls.fill_(10 * step + rank)
        x = whole.clone()
        with context_parallel(dist.group.WORLD, buffers=[x, model.table], buffer_seq_dims=[1, 0]):
            loss = wrapped(x).sum() * dist.get_world_size()  # gradients are averaged
            loss.backward()
        dist.all_reduce(loss)
        expected = alone(whole).sum()
        expected.backward()
        torch.testing.assert_close(loss / dist.get_world_size(), expected)
        assert model.calls == 10 * step  # which is no shard, and is rank 0's
        assert torch.equal(model.table, alone.table)
    for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-10, atol=1e-10)


def wrap_inside(rank: int) -> None:
    model, alone = Model(), Model()
    with torch.no_grad():
        model.calls.fill_(rank)
        model.project.bias.fill_(rank)
    with context_parallel(dist.group.WORLD, buffers=[model.table], buffer_seq_dims=[0]):
        of_rank = model.table.clone()
        DistributedDataParallel(model)
        assert torch.equal(model.table, of_rank)
    assert torch.equal(model.table, alone.table)
    assert model.calls == 0
    assert not model.project.bias.any()


@pytest.mark.parametrize("body", [train, wrap_inside])
def test_shards_are_not_overwritten_by_those_of_rank_0(two_processes: Processes, body: Callable[[int], None]) -> None:
    two_processes.run(body)


# Torch's own context parallelism

REFUSED = r"^torch's own context parallelism \(.*\) is in use together with cp_dtensor's.*redirect_imports"
LENGTH = 16


def drawn() -> torch.Tensor:
    return torch.randn(1, 2, LENGTH, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def causal(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def state_of_torch() -> list[Any]:
    """What torch's context parallelism and this package change."""
    table = DTensor._op_dispatcher._custom_op_handlers
    return [F.scaled_dot_product_attention, id(table), dict(table), "seq_dim" in vars(torchs._ContextParallel)]


def open_together(rank: int, orders: tuple[str, ...]) -> None:
    mesh, x, y, z = init_device_mesh("cpu", (2,)), drawn(), drawn(), drawn()
    kept, reference, before = x.clone(), causal(x), state_of_torch()
    for order in orders:
        for _ in range(2):  # a refusal leaves nothing behind
            with pytest.raises(RuntimeError, match=REFUSED):
                open_and_attend(mesh, order, x, y)
            assert torch.equal(x, kept)
            assert torch.equal(y, kept)
            assert state_of_torch() == before
    with context_parallel(mesh, buffers=[z, reference], buffer_seq_dims=[2, 2]):
        torch.testing.assert_close(causal(z), reference, rtol=1e-10, atol=1e-10)


def open_and_attend(mesh: DeviceMesh, order: str, x: torch.Tensor, y: torch.Tensor) -> None:
    with ExitStack() as stack:
        for name in order.split():
            if name == "torch":
                stack.enter_context(torchs_context(mesh, buffers=[x], buffer_seq_dims=[2]))
            elif name == "torch's_dispatcher":
                torchs._enable_context_parallel_dispatcher()
                stack.callback(torchs._disable_context_parallel_dispatcher)
            elif name == "context":
                buffers = [y] if y.size(2) == LENGTH else []
                stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)))
            elif name == "dispatcher":
                stack.enter_context(enable_context_parallel_dispatcher())
        causal(DTensor.from_local(x[:, :, : LENGTH // 2], mesh, [Shard(2)], run_check=False) if "'s" in order else x)


def test_in_either_order_they_are_refused(two_processes: Processes) -> None:
    orders = (
        "torch context", "context torch", "context torch context", "torch dispatcher", "dispatcher torch",
        "torch's_dispatcher context", "context torch's_dispatcher", "torch's_dispatcher dispatcher",
        "dispatcher torch's_dispatcher",
    )  # fmt: skip
    if "finally:" not in inspect.getsource(torchs_context):  # of torch 2.11: it stays open after an error in it
        orders = tuple(order for order in orders if "torch" not in order.split())
    two_processes.run(open_together, orders)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return causal(q)


@pytest.mark.parametrize("layout", [HeadTail(), Contiguous()], ids=repr)
def test_modules_with_torchs_style_are_refused_where_shards_are_not_contiguous(layout: Layout) -> None:
    """Torch's hooks make DTensors of shards, which are contiguous. The style may be older than the context."""
    whole, before = drawn(), state_of_torch()
    expected = causal(whole)

    def styled(mesh: DeviceMesh) -> nn.Module:
        style: Any = torchs._ContextParallel
        return style(2, style.AttentionType.SDPA)._apply(Attention(), mesh)

    def body(rank: int) -> None:
        mesh, x = init_device_mesh("cpu", (2,)), whole.clone()
        outside = styled(mesh)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[2], layout=layout):
            for module in (outside, styled(mesh)):
                if layout == HeadTail():
                    with pytest.raises(RuntimeError, match=REFUSED):
                        module(x)
                else:
                    torch.testing.assert_close(module(x), shard(expected, layout, rank, 2), rtol=1e-10, atol=1e-10)

    run_ranks(2, body)
    assert state_of_torch() == before


# Hooks


class Hook:
    """Keeps its calls; its patches are entered and left."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails = False

    @contextmanager
    def _patch(self) -> Iterator[None]:
        self.calls.append("entered")
        try:
            yield
        finally:
            self.calls.append("left")

    def patches(self) -> Iterator[AbstractContextManager[object]]:
        yield self._patch()
        if self.fails:
            raise OSError("a patch that fails")

    def check_compiled(self, arguments: dict[str, Any]) -> None:
        if "refused" in arguments:
            raise NotImplementedError("a function of `refused` is compiled")

    def module(self, module: nn.Module) -> bool:
        self.calls.append("module")
        return isinstance(module, nn.Linear)


hook = Hook()
NAME = f"{__name__}:hook"


@pytest.fixture
def other_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    """Imports another program."""
    (tmp_path / "other_program.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    hook.calls.clear()
    hook.fails = False
    yield lambda: importlib.import_module("other_program")
    sys.modules.pop("other_program", None)


def in_context() -> None:
    def body(rank: int) -> None:
        with context_parallel(dist.group.WORLD, seq_len=8):
            if rank == 0:
                hook.calls.append("inside")
            dist.barrier()

    run_ranks(2, body)


def test_patches_hold_in_contexts_once_the_program_is_loaded(other_program: Callable[[], object]) -> None:
    with register_context_hook("other_program", NAME):
        in_context()
        assert hook.calls == ["inside"]
        other_program()
        in_context()
        assert hook.calls == ["inside", "entered", "inside", "left"]
        # One that is added again, as by `importlib.reload(cp_dtensor)`, is the same one until its last lease ends.
        register_context_hook("other_program", NAME).close()
        with register_context_hook("other_program", NAME):
            in_context()
        assert hook.calls[4:] == ["entered", "inside", "left"]
        hook.fails = True  # patches before one that fails are left
        with pytest.raises(OSError, match="a patch that fails"):
            run_ranks(1, lambda _: context_parallel(dist.group.WORLD, seq_len=8).__enter__())
        assert hook.calls[7:] == ["entered", "left"]
    in_context()
    assert hook.calls[9:] == ["inside"], "the lease has ended"


def test_modules_and_compiled_functions_are_brought_to_hooks(other_program: Callable[[], object]) -> None:
    def body(_rank: int) -> None:
        layer = ContextParallel()._apply(nn.Linear(2, 2), dist.group.WORLD)
        assert hook.calls == ["module", "entered"], "the patches hold as long as the layer"
        del layer
        code = torch.compile(lambda refused: refused + 1, backend="eager")
        refused = pytest.raises(NotImplementedError, match="a function of `refused` is compiled")
        with context_parallel(dist.group.WORLD, seq_len=8), refused:
            code(torch.ones(1, 2))

    other_program()
    with register_context_hook("other_program", NAME):
        run_ranks(1, body)
    assert hook.calls == ["module", "entered", "left", "entered", "left"]


@pytest.mark.parametrize("name", ["module", "module:", ":hook", "a:b:c"])
def test_names_of_hooks_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f'expected hook to be "module:name", got {name!r}'):
        register_context_hook("other_program", name)
