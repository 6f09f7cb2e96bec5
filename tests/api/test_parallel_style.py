"""Modules with `ContextParallel`, and layouts and masks that calls take over from the context around them."""

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
from support.problems import assert_close, shard
from support.ranks import run_ranks
from support.shards import Shards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Layout,
    Mask,
    Striped,
    context_parallel,
    context_parallel_attention,
    context_parallel_shard,
    context_parallel_unshard,
    explain,
    local_positions,
    set_rotate_method,
    shift,
    ulysses_attention,
)
from cp_dtensor.api.extension import attention_of_shards
from cp_dtensor.comm.collective import AllGather
from cp_dtensor.engine.contexts import innermost

RANKS, LENGTH = 2, 12
EVEN = MaskedProblem(LENGTH, LENGTH, Full(), 2, 4, 2, is_causal=True)
WITH_SINKS = MaskedProblem(LENGTH + 1, LENGTH + 1, Full(), 2, 4, 2, is_causal=True, sinks=True)


class Attention(nn.Module):
    """Causal attention, which has a parameter."""

    def __init__(self, sinks: torch.Tensor | None = None) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4) if sinks is None else sinks.clone())

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def check(module: nn.Module, layout: Layout, rank: int, ranks: int = RANKS) -> None:
    Shards(rank, EVEN, layout, ranks).check(module)


def parallel(module: nn.Module | None = None, **options: Any) -> Any:
    return parallelize_module(module or Attention(), dist.group.WORLD, ContextParallel(**options))  # type: ignore[arg-type]


def is_patched() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


def test_meshes_styles_and_contexts_around() -> None:
    """On axes of a mesh, below a larger module, one style for several modules, in a context of other settings."""

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        model = nn.ModuleDict({"attention": Attention(), "mlp": nn.Linear(2, 2), "other": Attention()})
        parallelize_module(model, mesh["cols"], {"attention": ContextParallel(), "other": ContextParallel()})
        check(model["attention"], HeadTail(), rank % 2)
        check(model["other"], HeadTail(), rank % 2)
        style = ContextParallel(layout=Striped())
        rows, cols = (parallelize_module(Attention(), mesh[axis], style) for axis in ("rows", "cols"))
        check(rows, Striped(), rank // 2)
        check(cols, Striped(), rank % 2)
        with context_parallel(mesh["cols"], layout=Contiguous()):
            check(rows, Striped(), rank // 2)
            check(Attention(), Contiguous(), rank % 2)
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
def test_arguments_that_do_not_fit_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(1, lambda _: parallel(**options))
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
            check(plain, HeadTail(), 0, 1)
            check(module, HeadTail(), rank)
        with pytest.raises(TypeError, match="scaled_dot_product_attention"):
            module(None, None, None)
        dist.barrier()
        assert not is_patched()
        check(plain, HeadTail(), 0, 1)
        dist.barrier()
        check(module, HeadTail(), rank)

    run_ranks(RANKS, body)
    assert not is_patched()


def test_the_default_rotation_is_read_when_the_module_is_parallelized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AllGather, "start_kv", None)  # not callable

    def body(rank: int) -> None:
        set_rotate_method("alltoall")
        module = parallel()
        dist.barrier()
        set_rotate_method("auto")
        check(module, HeadTail(), rank)

    run_ranks(RANKS, body)


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
        check(module, HeadTail(), rank)
        assert seen == ["before", "after"]

    run_ranks(RANKS, body)


# Sinks and determinism


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

        by_name, of_tensor = parallel(Attention(drawn), sinks="sinks", **options), Attention(drawn)
        by_tensor = parallel(of_tensor, sinks=of_tensor.sinks, **options)
        copied = copy.deepcopy(by_name)  # computes with parameters of its own
        for each in (by_name, by_tensor, copy.deepcopy(by_tensor)):
            check(each, each.sinks)
        with torch.no_grad():
            by_name.sinks.zero_()
        check(copied, copied.sinks)
        by_name.sinks = nn.Parameter(drawn.clone())  # read at each call
        check(by_name, by_name.sinks)
        plain, leaf = parallel(Attention(drawn), **options), drawn.clone().requires_grad_()

        def inside(*qkv: torch.Tensor) -> torch.Tensor:
            with context_parallel(dist.group.WORLD, sinks=leaf):
                return plain(*qkv)

        check(inside, leaf)

    run_ranks(3, body)


def test_bad_sinks_are_refused_at_a_call() -> None:
    q = torch.zeros(1, 4, 2, 4)

    def body(_rank: int) -> None:
        module = Attention(torch.zeros(4))
        with pytest.raises(ValueError, match="sinks to name an attribute of Attention, got 'sink'"):
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


RANKS, LENGTH = 2, 12
MASK = Documents([0, 5, 12], within=Causal())
LAYOUTS = (Striped(1), Balanced(MASK, LENGTH))
Function = Callable[..., torch.Tensor]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: type(layout).__name__)


class Plain(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *qkv: torch.Tensor) -> torch.Tensor:
        return self.inner(*qkv)


def function(attention: Function, *qkv: torch.Tensor, mesh: Any = None, **options: Any) -> torch.Tensor:
    return attention(*qkv, mesh=mesh or dist.group.WORLD, enable_gqa=True, **options)


def module(*qkv: torch.Tensor, mesh: Any = None, **options: Any) -> torch.Tensor:
    return parallelize_module(Plain(), mesh or dist.group.WORLD, ContextParallel(**options))(*qkv)


FORMS: dict[str, Function] = {
    "context_parallel_attention": partial(function, context_parallel_attention),
    "ulysses_attention": partial(function, ulysses_attention), "ContextParallel": module,
}  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS)


def context(layout: Layout | None = None, mask: Mask | None = MASK) -> context_parallel:
    return context_parallel(dist.group.WORLD, layout=layout, mask=mask)


def shards(rank: int, mask: Mask, layout: Layout) -> Shards:
    return Shards(rank, MaskedProblem(LENGTH, LENGTH, mask, 2, 4, 2), layout, RANKS)


@each_layout
@each_form
def test_attention(form: str, layout: Layout) -> None:
    def body(rank: int) -> None:
        calls: list[tuple[Mask, Layout, dict[str, Any]]] = [
            (MASK, layout, {}), (MASK, layout, {"mesh": init_device_mesh("cpu", (RANKS,))}),
            (Full(), layout, {"mask": Full()}),
            (Causal(), layout, {"mask": Causal()}),  # alone, without that of the context
            (MASK, HeadTail(), {"layout": HeadTail()}), (Full(), HeadTail(), {"layout": HeadTail(), "mask": Full()}),
        ]  # fmt: skip
        if form != "ContextParallel":
            calls.append((MASK & Causal(), layout, {"is_causal": True}))
        for mask, of_call, options in calls:
            shards(rank, mask, of_call).check(partial(FORMS[form], **options), partial(context, layout))
        shards(rank, Full(), HeadTail()).check(FORMS[form])

    run_ranks(RANKS, body)


@each_form
def test_contexts_over_other_ranks_give_nothing(form: str) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "rows"))["cp"]
        call = partial(FORMS[form], mesh=mesh)
        shards(mesh.get_local_rank(), Full(), HeadTail()).check(call, partial(context, Contiguous()))

    run_ranks(4, body)


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    def predicted(**options: Any) -> str:
        return str(explain(dist.group.WORLD, seq_len=LENGTH, q_heads=4, **options))

    def body(rank: int) -> None:
        layout = Balanced(MASK, LENGTH)
        outside, given = predicted(), predicted(layout=layout, mask=MASK)
        with context(layout):
            assert predicted() == given != outside
            assert predicted(layout=HeadTail(), mask=Causal()) == outside
        with context_parallel(dist.new_group([rank], use_local_synchronization=True), mask=MASK):
            assert predicted() == outside

    run_ranks(RANKS, body)
    capsys.readouterr()


@each_layout
def test_sharding(layout: Layout) -> None:
    def body(rank: int) -> None:
        world, whole = dist.group.WORLD, torch.arange(LENGTH)
        with context(layout, None):
            (mine,) = context_parallel_shard(world, [whole], [0])
            positions = local_positions(world, LENGTH)
            (again,) = context_parallel_unshard(world, [mine], [0])
            (other,) = context_parallel_shard(world, [whole], [0], HeadTail())
        assert torch.equal(mine, shard(whole, layout, rank, RANKS, seq_dim=0))
        assert torch.equal(positions, mine)
        assert torch.equal(again, whole)
        assert torch.equal(other, shard(whole, HeadTail(), rank, RANKS, seq_dim=0))
        assert torch.equal(local_positions(world, LENGTH), other)

    run_ranks(RANKS, body)


def test_modules_inside_of_modules() -> None:
    def body(rank: int) -> None:
        world = dist.group.WORLD
        inner = parallelize_module(Plain(), world, ContextParallel())
        outer = parallelize_module(Outer(inner), world, ContextParallel(layout=Contiguous(), mask=MASK))
        for each in (outer, copy.deepcopy(outer)):
            shards(rank, MASK, Contiguous()).check(each)
        shards(rank, Full(), HeadTail()).check(inner)

    run_ranks(RANKS, body)


@pytest.mark.parametrize("use_reentrant", [False, True])
@each_form
def test_recomputation(form: str, use_reentrant: bool) -> None:
    """Of a checkpoint made in a context, after that; one made outside is refused in another, where it may belong."""
    again = partial(checkpoint, use_reentrant=use_reentrant)

    def body(rank: int) -> None:
        shards(rank, MASK, Contiguous()).check(partial(again, FORMS[form]), partial(context, Contiguous()))
        outside = shards(rank, Full(), HeadTail())
        for told in ({}, {"layout": HeadTail(), "mask": Full()}):
            backward = outside.forward(partial(again, partial(FORMS[form], **told)))
            with context(Contiguous()):
                if told:
                    backward()
                else:
                    with pytest.raises(RuntimeError, match=r"was called in a backward inside of a context .* pass"):
                        backward()

    run_ranks(RANKS, body)


def test_dtensors_over_two_axes() -> None:
    """The mask of the context, and the documents in it, for calls of DTensors sharded along both axes."""
    q = torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
        query, x = (
            distribute_tensor(each, mesh, [Shard(dim)] * 2, src_data_rank=None)
            for each, dim in ((q, 2), (torch.arange(12.0), 0))
        )
        with context_parallel(mesh, mask=MASK, layout=Contiguous(), seq_len=LENGTH):
            found: list[Any] = [context_parallel_attention(*[query] * 3, mask=mask) for mask in (None, Full())]
            shifted: Any = shift(x, 1, dim=0)
        for out, allowed in zip(found, (seen, None), strict=True):
            expected = F.scaled_dot_product_attention(q, q, q, attn_mask=allowed)
            torch.testing.assert_close(out.full_tensor(), expected, rtol=0, atol=1e-12)
        assert shifted.full_tensor().tolist() == [0, 0, 1, 2, 3, 0, 5, 6, 7, 8, 9, 10]

    run_ranks(4, body)


def test_the_ranks_of_the_context_in_another_order_are_refused() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ulysses", "ring"))
        with context_parallel(mesh, layout=Contiguous()):
            assert local_positions(mesh, 4).tolist() == [[0, 2, 1, 3][rank]]
            with pytest.raises(ValueError, match=r"another order, \[0, 1, 2, 3\] \(the context's: \[0, 2, 1, 3\]\)"):
                local_positions(dist.group.WORLD, 4)
            assert local_positions(dist.group.WORLD, 4, Contiguous()).tolist() == [rank]

    run_ranks(4, body)


def test_the_mask_of_a_provider_in_traced_code() -> None:
    def attend(q: torch.Tensor) -> Any:
        return attention_of_shards(q, q, q, mask=Documents([0, 1, 2, 3, 4]))

    def body(rank: int) -> None:
        q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
        with context_parallel(dist.group.WORLD, layout=Contiguous(), seq_len=4):  # type: ignore[arg-type]
            torch.testing.assert_close(attend(q), q)
            torch.testing.assert_close(make_fx(attend)(q)(q), q)

    run_ranks(1, body)
