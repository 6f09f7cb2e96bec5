"""`parallelize_module(attention, mesh, ContextParallel())`."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.parallel_style_checks import LENGTH, WHOLE, WIDTH, WORLD, Attention, alone, check_forward
from support.problems import assert_close
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from cp_dtensor import (
    Balanced,
    Causal,
    ContextParallel,
    Contiguous,
    HeadTail,
    Striped,
    context_parallel,
    set_rotate_method,
)
from cp_dtensor.comm.collective import AllGather


def test_on_one_axis_of_a_mesh_and_below_a_larger_module() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model = nn.ModuleDict({"attention": Attention(), "mlp": nn.Linear(WIDTH, WIDTH), "other": Attention()})
        parallelize_module(model, mesh["cp"], {"attention": ContextParallel(), "other": ContextParallel()})
        check_forward(model["attention"], HeadTail(), rank % 2)
        check_forward(model["other"], HeadTail(), rank % 2)
        with pytest.raises(ValueError, match=r"one dim.*2 dims"):
            parallelize_module(Attention(), mesh, ContextParallel())

    run_ranks(4, body)


def test_one_style_for_several_modules_and_meshes() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        style = ContextParallel(layout=Striped())
        rows, cols = (parallelize_module(Attention(), mesh[axis], style) for axis in ("rows", "cols"))
        check_forward(rows, Striped(), rank // 2)
        check_forward(cols, Striped(), rank % 2)

    run_ranks(4, body)


def test_applying_it_twice_is_refused() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (WORLD,))
        module = parallelize_module(Attention(), mesh, ContextParallel())
        with pytest.raises(ValueError, match="Attention is context parallel already"):
            parallelize_module(module, mesh, ContextParallel(layout=Contiguous()))
        check_forward(module, HeadTail(), rank)

    run_ranks(WORLD, body)


def test_arguments_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"'ring'.*'allgather', 'alltoall'"):
        ContextParallel(rotate_method="ring")
    for takes_options in (ContextParallel, partial(context_parallel, None)):
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'is_causal'"):
            takes_options(method="ring", is_causal=True)
    with pytest.raises(TypeError, match="expected deterministic to be True or False, got 1"):
        ContextParallel(deterministic=1)  # type: ignore[typeddict-item]
    with pytest.raises(TypeError, match="layout"):
        ContextParallel(layout=HeadTail)  # type: ignore[arg-type]
    for length in (-1, (LENGTH, -1), 8.0):
        with pytest.raises(ValueError, match="expected seq_len to be an integer >= 0"):
            ContextParallel(seq_len=length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seq_len: got 5 tokens, but this Balanced divides sequences of 8 tokens only"):
        ContextParallel(seq_len=(8, 5), layout=Balanced(Causal(), 8))


def test_sdpa_outside_of_the_module_is_untouched() -> None:
    before = F.scaled_dot_product_attention
    whole_out = alone()[0]

    def body(rank: int) -> None:
        module, plain = Attention(), Attention()
        parallelize_module(module, init_device_mesh("cpu", (WORLD,)), ContextParallel())
        for _ in range(2):
            assert F.scaled_dot_product_attention is before
            assert_close(plain(WHOLE).detach(), whole_out)
            check_forward(module, HeadTail(), rank)

    run_ranks(WORLD, body)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")


def test_an_exception_in_forward_leaves_nothing_behind() -> None:
    def body(rank: int) -> None:
        module = parallelize_module(Attention(), init_device_mesh("cpu", (WORLD,)), ContextParallel())
        with pytest.raises(RuntimeError, match="shapes"):
            module(torch.zeros(1, 2, WIDTH + 1, dtype=torch.float64))
        dist.barrier()
        assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::scaled_dot_product_attention", "AutogradCPU")
        assert_close(Attention()(WHOLE).detach(), alone()[0])
        dist.barrier()
        check_forward(module, HeadTail(), rank)

    run_ranks(WORLD, body)


def test_the_module_keeps_its_settings_inside_of_a_context_with_others() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
        module = parallelize_module(Attention(), mesh["rows"], ContextParallel(layout=Striped()))
        with context_parallel(mesh["cols"], layout=Contiguous()):
            check_forward(module, Striped(), rank // 2)
            check_forward(Attention(), Contiguous(), rank % 2)

    run_ranks(4, body)


def test_the_default_rotation_is_read_when_the_module_is_parallelized(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> Any:
        raise AssertionError("allgather")

    monkeypatch.setattr(AllGather, "start_kv", forbidden)

    def body(rank: int) -> None:
        set_rotate_method("alltoall")
        module = parallelize_module(Attention(), init_device_mesh("cpu", (WORLD,)), ContextParallel())
        dist.barrier()
        set_rotate_method("auto")
        check_forward(module, HeadTail(), rank)

    run_ranks(WORLD, body)


def test_state_and_training_of_the_module_are_as_before() -> None:
    def body(rank: int) -> None:
        module = parallelize_module(Attention(), init_device_mesh("cpu", (WORLD,)), ContextParallel())
        assert module.state_dict().keys() == Attention().state_dict().keys()
        assert [name for name, _ in module.named_modules()] == [""]
        assert module.eval() is module
        seen: list[str] = []
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        module.register_forward_hook(lambda *_: seen.append("after"))
        check_forward(module, HeadTail(), rank)
        assert seen == ["before", "after"]

    run_ranks(WORLD, body)


def test_a_deep_copy_computes_with_its_own_parameters() -> None:
    def body(rank: int) -> None:
        module = parallelize_module(Attention(), init_device_mesh("cpu", (WORLD,)), ContextParallel())
        averaged = copy.deepcopy(module)
        with torch.no_grad():
            module.weight.zero_()
        check_forward(averaged, HeadTail(), rank)

    run_ranks(WORLD, body)


def test_pickling_says_what_to_save_instead() -> None:
    def body(rank: int) -> None:
        module = nn.Sequential(parallelize_module(Attention(), init_device_mesh("cpu", (2,)), ContextParallel()))
        for save in (pickle.dumps, lambda module: torch.save(module, io.BytesIO())):
            with pytest.raises(TypeError, match=r"Attention with ContextParallel cannot be pickled.*state_dict\(\)"):
                save(module)

    run_ranks(2, body)
