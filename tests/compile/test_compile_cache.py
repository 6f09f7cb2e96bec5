"""Inductor's cache on disk: no process uses code inside a context that was compiled outside."""

import os
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from support.compile_checks import Shards, Tensors, check_equals_eager, compiled, fresh
from support.processes import Processes
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

from cp_dtensor import Contiguous, HeadTail, Layout, context_parallel


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention alone, for which Inductor needs no C++ compiler."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def check(rank: int, layout: Layout | None) -> Tensors:
    """Compiled attention, forward and backward, is what it is uncompiled."""
    shards = Shards(rank)
    # Inductor of torch 2.11 cannot differentiate torch's own attention in float64 on CPUs.
    inputs = [each.detach()[:, :2].float().requires_grad_() for each in shards.inputs()]
    around = nullcontext() if layout is None else context_parallel(init_device_mesh("cpu", (2,)), layout=layout)
    with around:
        in_graph = compiled(attention, backend="inductor")
        return check_equals_eager(attention, in_graph, inputs, shards.grad[:, :2].float())


def start(folder: str, rank: int) -> None:
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=f"{folder}/{rank}", TORCHINDUCTOR_COMPILE_THREADS="1")
    inductor_config.cpp.vec_isa_ok = False  # else Inductor compiles programs to find out
    fresh()


def hits() -> int:
    return counters["aot_autograd"]["autograd_cache_hit"]


def first_process(rank: int, folder: str) -> None:
    start(folder, rank)
    everything = [check(rank, layout) for layout in (None, HeadTail(), Contiguous())]
    assert hits() == 0
    for one, other in pairwise(everything):
        assert not torch.equal(one[0], other[0])


def second_process(rank: int, folder: str) -> None:
    start(folder, rank)
    for number, layout in enumerate((Contiguous(), HeadTail(), None), start=1):
        check(rank, layout)
        assert hits() == number  # each found what is its own


def test_code_on_disk_is_kept_apart(tmp_path: Path) -> None:
    for body in (first_process, second_process):
        two = Processes(2, timeout=200)
        try:
            two.run(body, str(tmp_path))
        finally:
            two.stop()
