"""`parallelize_module(attention, mesh, ContextParallel())`, and its sinks and determinism as of contexts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.masked_problems import MaskedProblem
from support.parallel_style_checks import LENGTH, WHOLE, WIDTH, WORLD, Attention, alone, check_forward
from support.problems import assert_close
from support.ranks import run_ranks
from support.shards import Shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Full,
    HeadTail,
    Striped,
    context_parallel,
    set_rotate_method,
)
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.engine.contexts import innermost


def parallel(module: nn.Module | None = None, **options: Any) -> Any:
    return parallelize_module(module or Attention(), dist.group.WORLD, ContextParallel(**options))  # type: ignore[arg-type]


def is_patched() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


def test_meshes_styles_and_contexts_around() -> None:
    """On axes of a mesh, below a larger module, one style for several modules, in a context of other settings."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        model = nn.ModuleDict({"attention": Attention(), "mlp": nn.Linear(WIDTH, WIDTH), "other": Attention()})
        parallelize_module(model, mesh["cols"], {"attention": ContextParallel(), "other": ContextParallel()})
        check_forward(model["attention"], HeadTail(), rank % 2)
        check_forward(model["other"], HeadTail(), rank % 2)
        style = ContextParallel(layout=Striped())
        rows, cols = (parallelize_module(Attention(), mesh[axis], style) for axis in ("rows", "cols"))
        check_forward(rows, Striped(), rank // 2)
        check_forward(cols, Striped(), rank % 2)
        with context_parallel(mesh["cols"], layout=Contiguous()):
            check_forward(rows, Striped(), rank // 2)
            check_forward(Attention(), Contiguous(), rank % 2)
        with pytest.raises(ValueError, match=r"one dim.*2 dims"):
            parallelize_module(Attention(), mesh, ContextParallel())
        with pytest.raises(ValueError, match="Attention is context parallel already"):
            parallelize_module(rows, mesh["rows"], ContextParallel(layout=Contiguous()))

    run_ranks(4, body)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rotate_method": "ring"}, ValueError, r"'ring'.*'allgather', 'alltoall'"),
    ({"method": "ring", "is_causal": True}, TypeError, "got an unexpected keyword argument 'is_causal'"),
    ({"deterministic": 1}, TypeError, "expected deterministic to be True or False, got 1"),
    ({"layout": HeadTail}, TypeError, "layout"),
    *(({"seq_len": length}, ValueError, "expected seq_len to be an integer >= 0") for length in (-1, (8, -1), 8.0)),
    ({"seq_len": (8, 5), "layout": Balanced(Causal(), 8)}, ValueError, "got 5 tokens, but this Balanced divides"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=str)
def test_arguments_that_do_not_fit_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ContextParallel(**options)
    if "is_causal" in options:
        with pytest.raises(error, match=message):
            context_parallel(None, **options)  # type: ignore[arg-type]


def test_sdpa_outside_of_the_module_is_untouched() -> None:
    """Also after an exception in its forward."""
    before = F.scaled_dot_product_attention

    def body(rank: int) -> None:
        module, plain = parallel(), Attention()
        for _ in range(2):
            assert F.scaled_dot_product_attention is before
            assert_close(plain(WHOLE).detach(), alone()[0])
            check_forward(module, HeadTail(), rank)
        with pytest.raises(RuntimeError, match="shapes"):
            module(torch.zeros(1, 2, WIDTH + 1, dtype=torch.float64))
        dist.barrier()
        assert not is_patched()
        assert_close(plain(WHOLE).detach(), alone()[0])
        dist.barrier()
        check_forward(module, HeadTail(), rank)

    run_ranks(WORLD, body)
    assert not is_patched()


def test_the_default_rotation_is_read_when_the_module_is_parallelized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllGather, "start_kv", None)  # not callable

    def body(rank: int) -> None:
        set_rotate_method("alltoall")
        module = parallel()
        dist.barrier()
        set_rotate_method("auto")
        check_forward(module, HeadTail(), rank)

    run_ranks(WORLD, body)


def test_state_and_training_of_the_module_are_as_before() -> None:
    def body(rank: int) -> None:
        module = parallel()
        assert module.state_dict().keys() == Attention().state_dict().keys()
        assert [name for name, _ in module.named_modules()] == [""]
        assert module.eval() is module
        for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(TypeError, match=r"Attention with ContextParallel cannot be pickled.*state_dict\(\)"):
                save(nn.Sequential(module))
        seen: list[str] = []
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        module.register_forward_hook(lambda *_: seen.append("after"))
        check_forward(module, HeadTail(), rank)
        assert seen == ["before", "after"]
        averaged = copy.deepcopy(module)  # has parameters of its own
        with torch.no_grad():
            module.weight.zero_()
        check_forward(averaged, HeadTail(), rank)

    run_ranks(WORLD, body)


# Sinks and determinism

WITH_SINKS = MaskedProblem(LENGTH + 1, LENGTH + 1, Full(), 2, 4, 2, is_causal=True, sinks=True)


class WithSinks(nn.Module):
    def __init__(self, sinks: torch.Tensor) -> None:
        super().__init__()
        self.sinks = nn.Parameter(sinks.clone())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_sinks_of_modules(method: str) -> None:
    """By name or as a tensor; None takes those of the context around the call."""

    def body(rank: int) -> None:
        shards = Shards(rank, WITH_SINKS, ranks=3)
        drawn, options = shards.sinks, {"method": method, "seq_len": LENGTH + 1}
        assert drawn is not None

        def check(attend: Callable[..., Any], sinks: torch.Tensor) -> None:
            """Out, dq, dk, dv and this rank's share of the gradient of sinks."""
            inputs = shards.inputs()
            out = attend(*inputs)
            *grads, found = torch.autograd.grad(out, (*inputs, sinks), shards.grad)
            shards.check_results(out, *grads)
            assert_close(found, shards.shard(shards.expected[-1]).sum((0, 2)), "dsinks")

        by_name, of_tensor = parallel(WithSinks(drawn), sinks="sinks", **options), WithSinks(drawn)
        by_tensor = parallel(of_tensor, sinks=of_tensor.sinks, **options)
        for each in (by_name, copy.deepcopy(by_name), by_tensor, copy.deepcopy(by_tensor)):
            check(each, each.sinks)
        by_name.sinks = nn.Parameter(drawn.clone())  # read at each call
        check(by_name, by_name.sinks)
        plain, leaf = parallel(WithSinks(drawn), **options), drawn.clone().requires_grad_()

        def inside(*qkv: torch.Tensor) -> torch.Tensor:
            with context_parallel(dist.group.WORLD, sinks=leaf):
                return plain(*qkv)

        check(inside, leaf)

    run_ranks(3, body)


def test_bad_sinks_are_refused_at_a_call() -> None:
    q = torch.zeros(1, 4, 2, 4)

    def body(_rank: int) -> None:
        module = WithSinks(torch.zeros(4))
        with pytest.raises(ValueError, match="sinks to name an attribute of WithSinks, got 'sink'"):
            parallel(module, sinks="sink")
        parallel(module, sinks="sinks")
        module.sinks = None
        with pytest.raises(TypeError, match=r"expected sinks to be a torch.Tensor .* got NoneType"):
            module(q, q, q)
        del module.sinks
        module.sinks = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(TypeError, match="expected sinks to be a plain tensor, this rank's own, got a DTensor"):
            module(q, q, q)

    run_ranks(2, body)


def test_deterministic_reaches_attention_and_compiled_code() -> None:
    found: list[tuple[bool, bool]] = []

    class Seen(nn.Module):
        def forward(self) -> None:
            context = innermost()
            assert context is not None
            found.append((context.call.deterministic, "deterministic" in context.key))

    def body(_rank: int) -> None:
        around = partial(context_parallel, dist.group.WORLD)
        with around(deterministic=True):
            Seen()()
        with around(layout=Contiguous()):
            Seen()()
            parallel(Seen(), deterministic=True)()

    run_ranks(1, body)
    assert found == [(True, True), (False, False), (True, True)]
